"""What a browser made: kept over restarts and kills, for its eyes only, within limits."""

import dataclasses
import json
import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sd_tpu import history as history_module
from sd_tpu.history import ORPHAN_SECONDS, Entry, History, HistoryError
from sd_tpu.images import read_png, to_png
from sd_tpu.request import ACCELERATIONS, Own, Request

ANNA, BEN = "anna" * 8, "ben " * 8
REQUEST = Request(prompts=("a cat, café 猫",), seed=2**32 - 1, negative_prompt="fog", spacing=None)
PNG = to_png(np.zeros((8, 8, 3), np.uint8), REQUEST, "m")
DAY = 24 * 3600


@pytest.fixture
def history(tmp_path):
    """An empty history."""
    history = History(tmp_path / "new" / "history")
    yield history
    history.close()


def files(history: History) -> list[Path]:
    return sorted((history.folder / "pictures").iterdir())


def ids(history: History, owner: str = ANNA, **options) -> list[str]:
    return [entry.id for entry in history.entries(owner, **options)]


def add(history: History, count: int, owner: str = ANNA, **options) -> list[str]:
    return [history.add(owner, PNG, REQUEST, **options).id for _ in range(count)]


# --- keeping ------------------------------------------------------------------------------------


def test_what_was_added_is_there_after_a_restart(history):
    begun = time.time()
    entry = history.add(ANNA, PNG, REQUEST)
    assert begun <= entry.made_at <= time.time()
    assert entry == Entry(entry.id, 1, entry.made_at, False, REQUEST)
    history.close()
    again = History(history.folder)
    assert again.entries(ANNA) == [entry]
    file = again.picture(ANNA, entry.id)
    assert file.read_bytes() == PNG and read_png(file) == REQUEST


def test_a_request_of_one_prompt_with_own_settings_is_kept_as_what_made_the_picture(history):
    own = Own(steps=9, sampler="lcm", spacing="")
    mixed = Request(prompts=("a",), own=(own,), spacing="karras")
    assert history.add(ANNA, PNG, mixed).request == mixed.only(0)
    assert history.entries(ANNA)[0].request == mixed.only(0)
    with pytest.raises(ValueError, match="one prompt"):
        history.add(ANNA, PNG, Request(prompts=("a", "b")))


def test_what_was_kept_before_a_setting_was_invented_has_its_default(history):
    entry = history.add(ANNA, PNG, dataclasses.replace(REQUEST, cache_interval=3))
    assert history.entries(ANNA)[0].request.cache_interval == 3
    older = {name: value for name, value in vars(REQUEST).items() if name not in ACCELERATIONS}
    history._ask("UPDATE pictures SET request = ? WHERE id = ?", (json.dumps(older), entry.id))
    assert history.entries(ANNA)[0].request == REQUEST


def test_pictures_are_listed_newest_first_and_page_by_page(history):
    made = add(history, 5)[::-1]
    assert ids(history) == made
    page = history.entries(ANNA, limit=2)
    assert [entry.id for entry in page] == made[:2]
    history.delete(ANNA, page[-1].id)
    assert ids(history, before=page[-1].number, limit=2) == made[2:4]
    assert ids(history, before=1) == []


def test_favourites_are_marked_and_listed_alone(history):
    a, b, c = add(history, 3)
    assert history.set_favourite(ANNA, a, True) and history.set_favourite(ANNA, c, True)
    assert ids(history, favourites_only=True) == [c, a]
    assert history.set_favourite(ANNA, a, False)
    assert ids(history, favourites_only=True) == [c] and ids(history) == [c, b, a]
    assert [entry.favourite for entry in history.entries(ANNA)] == [True, False, False]


def test_deleting_and_clearing_take_the_files_too(history):
    a, b, c = add(history, 3)
    theirs, = add(history, 1, BEN)
    assert history.delete(ANNA, b)
    assert not history.delete(ANNA, b) and history.picture(ANNA, b) is None
    assert [file.stem for file in files(history)] == sorted([a, c, theirs])
    assert history.clear(ANNA) == 2
    assert ids(history) == [] and [file.stem for file in files(history)] == [theirs]


# --- privacy ------------------------------------------------------------------------------------


def test_anothers_picture_is_the_same_as_one_that_does_not_exist(history):
    theirs, = add(history, 1, BEN)
    for id in (theirs, "0" * 32, "../history", "", "%"):
        assert history.picture(ANNA, id) is None
        assert history.set_favourite(ANNA, id, True) is False
        assert history.delete(ANNA, id) is False
    assert history.entries(ANNA) == [] and history.clear(ANNA) == 0
    assert history.entries(BEN)[0].favourite is False and history.picture(BEN, theirs).exists()


def test_nobody_else_on_the_machine_can_read_the_folder(history):
    assert history.folder.stat().st_mode & 0o077 == 0


def test_numbers_tell_nothing_about_others(history):
    add(history, 3, BEN)
    assert history.add(ANNA, PNG, REQUEST).number == 1


def test_of_an_owner_only_a_hash_is_kept(history):
    owner = "0123456789abcdef" * 2
    add(history, 1, owner)
    history.close()
    kept = b"".join(file.read_bytes() for file in history.folder.rglob("*") if file.is_file())
    assert REQUEST.negative_prompt.encode() in kept and owner.encode() not in kept


@pytest.mark.parametrize("owner", ["", "a" * 15, None, 3])
def test_an_owner_that_could_be_guessed_is_refused(history, owner):
    with pytest.raises(HistoryError, match="at least 16 random characters"):
        history.entries(owner)
    with pytest.raises(HistoryError, match="at least 16 random characters"):
        history.add(owner, PNG, REQUEST)
    assert files(history) == []


# --- pruning ------------------------------------------------------------------------------------


def test_what_is_too_old_goes_unless_it_is_a_favourite(tmp_path):
    history = History(tmp_path, max_age_days=2)
    now = time.time()
    days = {age: history.add(ANNA, PNG, REQUEST, made_at=now - age * DAY).id for age in (4, 3, 1)}
    history.set_favourite(ANNA, days[4], True)
    assert history.prune() == 1
    assert ids(history) == [days[1], days[4]] and len(files(history)) == 2


def test_the_oldest_of_anybody_goes_while_all_are_too_large_and_favourites_go_last(tmp_path):
    history = History(tmp_path, max_bytes=3 * len(PNG))
    mine = add(history, 3)
    theirs = add(history, 2, BEN)
    history.set_favourite(ANNA, mine[0], True)
    assert history.prune() == 2
    assert ids(history) == [mine[0]] and ids(history, BEN) == theirs[::-1]
    for id in theirs:
        history.set_favourite(BEN, id, True)
    add(history, 1)
    assert history.prune() == 1  # the new one: all others are favourites
    assert len(files(history)) == 3
    history.close()
    again = History(tmp_path, max_bytes=2 * len(PNG))
    assert (len(ids(again)), len(ids(again, BEN))) == (0, 2)


def test_adding_prunes_from_time_to_time(tmp_path, monkeypatch):
    history = History(tmp_path, max_bytes=len(PNG))
    add(history, 3)
    assert len(files(history)) == 3
    monkeypatch.setattr(history_module, "PRUNE_SECONDS", 0)
    assert history.prune() == 2
    add(history, 3)
    assert len(files(history)) == 2  # before each came, one was left


# --- when things break --------------------------------------------------------------------------

DYING = textwrap.dedent("""
    import os, signal, sqlite3, sys, threading, time
    import numpy as np
    from sd_tpu import history as module
    from sd_tpu.history import History
    from sd_tpu.images import to_png
    from sd_tpu.request import Request

    REQUEST = Request(prompts=("a cat",))
    PNG = to_png(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), REQUEST, "m")

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def stage(name, history):
        if name == "file begun":
            module.os.fsync = die
        if name == "file renamed":
            module._sync = die
        if name == "row written":
            run = history._run
            history._run = lambda *args: die(run(*args))

    def live(folder, name):
        history = History(folder)
        print(history.add("owner" * 8, PNG, REQUEST).id, flush=True)
        stage(name, history)
        if name.isdecimal():
            threading.Timer(int(name) / 1000, die).start()
            while True:
                print(history.add("owner" * 8, PNG, REQUEST).id, flush=True)
        history.add("owner" * 8, PNG, REQUEST)

    for name in sys.argv[2:]:
        child = os.fork()
        if not child:
            live(os.path.join(sys.argv[1], name), name)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        print(f"\\n-- {name}", flush=True)  # who died may not have ended his line
""")


def test_a_killed_server_loses_no_picture_and_leaves_a_history_that_opens(tmp_path):
    stages = {"file begun": 1, "file renamed": 1, "row written": 2}
    moments = [str(milliseconds) for milliseconds in (5, 20, 50, 90, 150)]
    told = subprocess.run([sys.executable, "-c", DYING, tmp_path, *stages, *moments],
                          capture_output=True, text=True, check=True).stdout
    lives = [block.split() for block in told.split("\n-- ")]
    added = [[word for word in block if len(word) == 32] for block in lives]
    for name, told_ids in zip([*stages, *moments], added, strict=False):
        history = History(tmp_path / name)
        entries = history.entries("owner" * 8, limit=10_000)
        assert {entry.id for entry in entries} >= set(told_ids) and told_ids
        assert len(entries) <= stages.get(name, len(told_ids) + 1)
        assert len(entries) >= stages.get(name, 1)
        for entry in entries:
            assert read_png(history.picture("owner" * 8, entry.id)) == entry.request
        old = time.time() - 2 * ORPHAN_SECONDS
        for file in files(history):
            os.utime(file, (old, old))
        history.close()
        assert len(files(History(tmp_path / name))) == len(entries)


def test_a_file_that_may_be_on_its_way_in_is_left_alone(history):
    (history.folder / "pictures" / "young.tmp").touch()
    History(history.folder)
    assert [file.name for file in files(history)] == ["young.tmp"]


def test_a_picture_whose_file_somebody_removed_is_no_longer_listed(history):
    kept, lost = add(history, 2)
    history.picture(ANNA, lost).unlink()
    assert ids(History(history.folder)) == [kept]


def break_header(file: Path) -> None:
    file.write_bytes(b"This is no database." * 100)


def break_pages(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    file.write_bytes(data)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def make_newer(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize("damage", [break_header, break_pages, cut_off, make_newer])
def test_a_broken_database_is_set_aside_with_its_pictures_and_a_new_one_begun(history, damage,
                                                                             caplog):
    add(history, 20)
    history.close()
    damage(history.folder / "history.db")
    with caplog.at_level(logging.WARNING):
        again = History(history.folder)
    (line,) = caplog.messages
    assert line.startswith(f"The history in {history.folder} is broken (")
    (aside,) = history.folder.glob("broken-*")
    assert str(aside) in line and len(list((aside / "pictures").iterdir())) == 20
    assert ids(again) == [] and files(again) == []
    add(again, 1)
    again.close()
    caplog.clear()
    assert len(ids(History(history.folder))) == 1 and not caplog.messages


def test_whichever_page_of_the_database_is_lost_a_new_one_is_begun(history, tmp_path):
    add(history, 60)
    history.close()
    data = (history.folder / "history.db").read_bytes()
    for page in range(0, len(data), 4096):
        folder = tmp_path / str(page)
        folder.mkdir()
        (folder / "history.db").write_bytes(data[:page] + bytes(4096) + data[page + 4096 :])
        again = History(folder)
        assert len(list(folder.glob("broken-*"))) == 1
        assert len(add(again, 1)) == len(ids(again)) == 1


def test_a_folder_where_nothing_can_be_kept_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/sd_tpu")):
        with pytest.raises(HistoryError) as caught:
            History(folder)
        assert str(caught.value).startswith(f"The history cannot be kept in {folder} (")
        assert str(caught.value).endswith(").")


def test_a_folder_that_may_not_be_written_to_is_one_clear_sentence(history, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(HistoryError, match=r"cannot be kept in .* \(Permission denied\)\.$"):
        History(history.folder)


def test_a_disk_that_is_full_is_told_and_nothing_is_left_over(history, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history_module.os, "fsync", refuse)
    with pytest.raises(HistoryError, match=r"^The picture could not be added to the history \(No "):
        history.add(ANNA, PNG, REQUEST)
    monkeypatch.undo()
    assert files(history) == [] and ids(history) == []
    add(history, 1)


def test_a_database_that_refuses_a_row_leaves_no_file(history):
    history.close()
    with pytest.raises(HistoryError, match="closed database"):
        history.add(ANNA, PNG, REQUEST)
    assert files(history) == []
    with pytest.raises(HistoryError, match="cannot be read or changed"):
        history.entries(ANNA)


# --- many at once -------------------------------------------------------------------------------


def test_eight_threads_and_two_servers_lose_nothing(history):
    other = History(history.folder)

    def work(thread: int) -> str:
        owner, place = f"owner {thread} of eight", (history, other)[thread % 2]
        made = add(place, 12, owner)
        for id in made[::3]:
            assert place.set_favourite(owner, id, True)
        for id in made[1::3]:
            assert place.delete(owner, id)
        place.prune()
        assert [entry.number for entry in place.entries(owner)] == [12, 10, 9, 7, 6, 4, 3, 1]
        return owner

    with ThreadPoolExecutor(8) as pool:
        owners = list(pool.map(work, range(8)))
    assert {len(ids(other, owner)) for owner in owners} == {8}
    assert len(files(history)) == 64


def test_threads_of_one_owner_get_numbers_of_their_own(history):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: add(history, 5), range(8)))
    assert [entry.number for entry in history.entries(ANNA)] == list(range(40, 0, -1))
