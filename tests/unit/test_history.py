"""What a browser made: kept over restarts and kills, for its eyes only, within limits."""

import dataclasses
import json
import logging
import os
import re
import sqlite3
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sd_tpu.gallery import history as history_module
from sd_tpu.gallery.history import DRAFT_SECONDS, History, HistoryEntry, HistoryError
from sd_tpu.pictures.images import read_png, to_png
from sd_tpu.request import Request
from sd_tpu.settings import SETTINGS, Picture, RequestError
from tests.support.processes import told_by

ANNA, BEN = "anna" * 8, "ben " * 8
PICTURE = Picture(prompt="a cat, café 猫", seed=2**32 - 1, negative_prompt="fog")
PNG = to_png(np.zeros((8, 8, 3), np.uint8), Request((PICTURE,)))
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
    return [history.add(owner, PNG, PICTURE, **options).id for _ in range(count)]


# --- boards -------------------------------------------------------------------------------------


def test_a_picture_is_on_any_number_of_boards_also_after_a_restart(history):
    first, second, third = add(history, 3)
    assert history.make_board(ANNA, "  Cats,  cafe\u0301 ") == "Cats, café"
    history.make_board(ANNA, "b", [second, third])
    assert history.put_on_board(ANNA, "Cats, café", [third, third, first]) == 2
    history.take_off_board(ANNA, "Cats, café", [first])
    history.close()
    again = History(history.folder)
    assert again.boards(ANNA) == {"b": 2, "Cats, café": 1}
    assert again.boards_with(ANNA, third) == {"b", "Cats, café"}
    assert ids(again, board="b") == [third, second] and ids(again) == [third, second, first]
    assert again.rename_board(ANNA, "b", "c") == "c"
    assert again.boards(ANNA) == {"c": 2, "Cats, café": 1}
    assert sorted(again.delete_board(ANNA, "c")) == sorted((second, third))
    assert again.boards(ANNA) == {"Cats, café": 1} and len(ids(again)) == 3
    again.delete(ANNA, third)
    assert again.boards(ANNA) == {"Cats, café": 0}
    again.restore(ANNA)
    assert ids(again, board="Cats, café") == [third]
    again.delete(ANNA, third)
    again._delete_for_good(-1.0)
    assert again._rows("SELECT * FROM on_boards") == []
    again.close()


def test_anothers_boards_and_pictures_are_the_same_as_none(history):
    mine, theirs = add(history, 1), add(history, 1, BEN)
    history.make_board(ANNA, "a", mine)
    history.make_board(BEN, "a")
    assert history.put_on_board(BEN, "a", mine) == 0
    assert history.put_on_board(BEN, "a", mine + theirs) == 1
    history.take_off_board(BEN, "a", mine[:1])
    assert ids(history, board="a") == mine and ids(history, BEN, board="a") == theirs
    history.delete_board(BEN, "a")
    assert history.boards(ANNA) == {"a": 1} and history.boards_with(BEN, mine[0]) == set()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda history: history.make_board(ANNA, " \n"), "A board needs a name."),
        (lambda history: history.make_board(ANNA, "x" * 61), "at most 60 characters"),
        (lambda history: history.make_board(ANNA, "a\u202eb"), "none that cannot be seen"),
        (lambda history: history.make_board(ANNA, "a"), "There is a board “a” already."),
        (lambda history: history.rename_board(ANNA, "b", "a"), "There is a board “a” already."),
        (lambda history: history.rename_board(ANNA, "x", "y"), "There is no board “x” any more."),
        (lambda history: history.delete_board(ANNA, "x"), "There is no board “x” any more."),
        (lambda history: history.put_on_board(ANNA, "x", []), "There is no board “x” any more."),
        (lambda history: history.make_board(ANNA, "c"), "There are 2 boards"),
    ],
)
def test_a_board_that_cannot_be_is_refused_in_a_sentence(history, monkeypatch, act, said):
    monkeypatch.setattr(history_module, "MAX_BOARDS", 2)
    for name in "ab":
        history.make_board(ANNA, name)
    with pytest.raises(RequestError, match=re.escape(said)):
        act(history)
    assert history.boards(ANNA) == {"a": 0, "b": 0}


def test_what_is_on_a_board_stays_like_a_favourite(tmp_path):
    history = History(tmp_path, max_bytes=3 * len(PNG), max_age_days=10)
    old = add(history, 2, made_at=time.time() - 20 * DAY)
    history.make_board(ANNA, "kept", old[:1])
    new = add(history, 1)
    assert history.prune() == 1 and ids(history) == [*new, old[0]], "it does not grow old"
    more = add(history, 2)
    assert history.prune() == 1 and old[0] in ids(history), "nor does it go for room"
    history.drop(ANNA, old[0])
    assert old[0] in ids(history)
    history.delete(ANNA)
    assert ids(history) == [old[0]] and more


def test_a_history_of_before_there_were_boards_goes_on(history):
    (old,) = add(history, 1)
    for table in ("on_boards", "boards"):
        history._rows(f"DROP TABLE {table}")
    history._rows("PRAGMA user_version = 3")
    history.close()
    again = History(history.folder)
    again.make_board(ANNA, "a", [old])
    assert ids(again, board="a") == [old]
    again.close()


# --- keeping ------------------------------------------------------------------------------------


def test_what_was_added_is_there_after_a_restart(history):
    begun = time.time()
    entry = history.add(ANNA, PNG, PICTURE)
    assert begun <= entry.made_at <= time.time()
    assert entry == HistoryEntry(
        entry.id, 1, entry.made_at, False, PICTURE, entry.id, 0, history.picture(ANNA, entry.id)
    )
    history.close()
    again = History(history.folder)
    assert again.entries(ANNA) == [entry]
    file = again.picture(ANNA, entry.id)
    assert file.read_bytes() == PNG and read_png(file) == Request((PICTURE,))


def test_what_was_kept_before_a_setting_was_invented_has_its_default(history):
    entry = history.add(ANNA, PNG, dataclasses.replace(PICTURE, cache_interval=3))
    assert history.entries(ANNA)[0].picture.cache_interval == 3
    kept = vars(PICTURE)
    older = {name: kept[name] for name in kept if not SETTINGS[name].expert}
    values = dict(text=json.dumps(older), id=entry.id)
    history._rows("UPDATE pictures SET request = :text WHERE id = :id", **values)
    assert history.entries(ANNA)[0].picture == PICTURE


def test_what_was_kept_as_a_request_for_one_picture_is_read_as_that_picture(history):
    entry = history.add(ANNA, PNG, PICTURE)
    older = {
        "negative_prompt": "fog",
        "steps": 9,
        "guidance": 2.0,
        "sampler": "lcm",
        "spacing": None,
        "height": 64,
        "width": 96,
        "prompts": ["a hen"],
        "seed": 7,
        "own": [],
    }
    values = dict(text=json.dumps(older), id=entry.id)
    history._rows("UPDATE pictures SET request = :text WHERE id = :id", **values)
    assert history.entries(ANNA)[0].picture == Picture(
        prompt="a hen",
        negative_prompt="fog",
        steps=9,
        guidance=2.0,
        sampler="lcm",
        height=64,
        width=96,
        seed=7,
    )


def test_pictures_are_listed_by_run_the_newest_first_each_in_the_order_of_the_gallery(history):
    first = {index: add(history, 1, run="first", index=index)[0] for index in (2, 0, 1)}
    second = {index: add(history, 1, run="second", index=index)[0] for index in (5, 4)}
    (again,) = add(history, 1, run="second", index=4)  # a card drawn again
    assert ids(history) == [second[4], again, second[5], *(first[index] for index in range(3))]
    assert ids(history, runs=1) == [second[4], again, second[5]]
    (late,) = add(history, 1, run="first", index=1)
    assert ids(history, runs=1) == [first[0], first[1], late, first[2]]
    assert ids(history, run="second") == [second[4], again, second[5]]


def test_pictures_are_found_by_words_of_their_prompts(history):
    night, day = (
        history.add(ANNA, PNG, dataclasses.replace(PICTURE, prompt=prompt)).id
        for prompt in ("Über the Night sea", "100% day_light, sea")
    )
    assert ids(history, words="SEA") == [day, night]
    assert ids(history, words=" über  sea") == ids(history, words="nigh") == [night]
    assert ids(history, words="100%") == ids(history, words="y_l") == [day]
    assert ids(history, words="sea hill") == ids(history, words="e%t") == []


def test_favourites_are_marked_and_listed_alone(history):
    a, b, c = add(history, 3)
    assert history.set_favourite(ANNA, a, True) and history.set_favourite(ANNA, c, True)
    assert ids(history, favourites_only=True) == [c, a]
    assert history.set_favourite(ANNA, a, False)
    assert ids(history, favourites_only=True) == [c] and ids(history) == [c, b, a]
    assert [entry.favourite for entry in history.entries(ANNA)] == [True, False, False]


def test_deleting_and_clearing_take_the_files_too_and_leave_favourites(history):
    a, b, c, starred = add(history, 4)
    history.set_favourite(ANNA, starred, True)
    (theirs,) = add(history, 1, BEN)
    assert history.delete(ANNA, b)
    running = threading.active_count()
    assert not history.delete(ANNA, b) and history.picture(ANNA, b) is None
    assert threading.active_count() == running, "nothing is to be deleted for good"
    history._delete_for_good(0.0)
    assert sorted(file.stem[-32:] for file in files(history)) == sorted([a, c, starred, theirs])
    assert len(history.delete(ANNA)) == 2 and ids(history) == [starred]
    history.close()
    assert sorted(file.stem[-32:] for file in files(history)) == sorted([starred, theirs])


def test_a_deletion_can_be_taken_back_until_it_is_for_good(history, monkeypatch):
    a, b = add(history, 2)
    (theirs,) = add(history, 1, BEN)
    history.set_favourite(ANNA, a, True)
    history.delete(ANNA, a)
    history.delete(BEN, theirs)
    assert ids(history) == [b] and not history.set_favourite(ANNA, a, False)
    assert history.favourites(ANNA, [a, b, theirs]) == {b: False}
    assert history.restore(ANNA) == 1 and history.entries(ANNA)[1].favourite
    assert history.restore(ANNA) == 0 and ids(history, BEN) == [], "only what is one's own"
    history.set_favourite(ANNA, a, False)
    history.delete(ANNA)
    assert history.restore(ANNA) == 2 and ids(history) == [b, a]
    monkeypatch.setattr(history_module, "UNDO_SECONDS", 0.01)
    (file,) = history.delete(ANNA, b)
    end = time.monotonic() + 10
    while file.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert history.restore(ANNA) == 0 and ids(history) == [a]


# --- privacy ------------------------------------------------------------------------------------


def test_anothers_picture_is_the_same_as_one_that_does_not_exist(history):
    (theirs,) = add(history, 1, BEN)
    for id in (theirs, "0" * 32, "../history", "", "%"):
        assert history.picture(ANNA, id) is None
        assert history.set_favourite(ANNA, id, True) is False
        assert history.delete(ANNA, id) == [] == history.delete(ANNA)
        history.drop(ANNA, id)
    assert history.entries(ANNA) == [] and history.restore(ANNA) == 0
    assert history.entries(BEN)[0].favourite is False and history.picture(BEN, theirs).exists()


def test_nobody_else_on_the_machine_can_read_the_folder(history):
    assert history.folder.stat().st_mode & 0o077 == 0


def test_numbers_tell_nothing_about_others(history):
    add(history, 3, BEN)
    assert history.add(ANNA, PNG, PICTURE).number == 1


def test_of_an_owner_only_a_hash_is_kept(history):
    owner = "0123456789abcdef" * 2
    add(history, 1, owner)
    history.close()
    kept = b"".join(file.read_bytes() for file in history.folder.rglob("*") if file.is_file())
    assert PICTURE.negative_prompt.encode() in kept and owner.encode() not in kept


@pytest.mark.parametrize("owner", ["", "a" * 15, None, 3])
def test_an_owner_that_could_be_guessed_is_refused(history, owner):
    with pytest.raises(HistoryError, match="at least 16 random characters"):
        history.entries(owner)
    with pytest.raises(HistoryError, match="at least 16 random characters"):
        history.add(owner, PNG, PICTURE)
    assert files(history) == []


# --- pruning ------------------------------------------------------------------------------------


def test_what_is_too_old_goes_unless_it_is_a_favourite(tmp_path):
    history = History(tmp_path, max_age_days=2)
    now = time.time()
    days = {age: history.add(ANNA, PNG, PICTURE, made_at=now - age * DAY).id for age in (4, 3, 1)}
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
    from sd_tpu.gallery import history as module
    from sd_tpu.gallery.history import History
    from sd_tpu.pictures.images import to_png
    from sd_tpu.request import Request
    from sd_tpu.settings import Picture

    PICTURE = Picture(prompt="a cat")
    PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    PNG = to_png(PIXELS, Request((PICTURE,)))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def stage(name, history):
        if name == "file begun":
            module.os.fsync = die
        if name == "file renamed":
            module._sync = die
        if name == "file deleted":
            module._sync = die
            history.drop("owner" * 8, history.entries("owner" * 8)[0].id)
        if name == "row written":
            run = history._run
            history._run = lambda *args: die(run(*args))

    def live(folder, name):
        history = History(folder)
        print(history.add("owner" * 8, PNG, PICTURE).id, flush=True)
        stage(name, history)
        if name.isdecimal():
            threading.Timer(int(name) / 1000, die).start()
            while True:
                print(history.add("owner" * 8, PNG, PICTURE).id, flush=True)
        history.add("owner" * 8, PNG, PICTURE)

    for name in sys.argv[2:]:
        child = os.fork()
        if not child:
            live(os.path.join(sys.argv[1], name), name)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        print(f"\\n-- {name}", flush=True)  # who died may not have ended his line
""")


@pytest.mark.slow("starts and kills a process again and again")
def test_a_killed_server_loses_no_picture_and_leaves_a_history_that_opens(tmp_path):
    stages = {"file begun": 1, "file renamed": 2, "row written": 2, "file deleted": 0}
    moments = [str(milliseconds) for milliseconds in (5, 20, 50, 90, 150)]
    told = told_by(DYING, tmp_path, *stages, *moments).stdout
    lives = [block.split() for block in told.split("\n-- ")]
    added = [[word for word in block if len(word) == 32] for block in lives]
    for name, told_ids in zip([*stages, *moments], added, strict=False):
        history = History(tmp_path / name)
        entries = history.entries("owner" * 8, runs=10_000)
        assert {entry.id for entry in entries} >= set(told_ids) or name == "file deleted"
        assert told_ids and len(entries) <= stages.get(name, len(told_ids) + 1)
        assert len(entries) >= stages.get(name, 1)
        for entry in entries:
            assert read_png(history.picture("owner" * 8, entry.id)) == Request((entry.picture,))
        old = time.time() - 2 * DRAFT_SECONDS
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


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [Path.unlink, empty, break_header, break_pages, cut_off, make_newer]
)
def test_pictures_are_their_owners_again_when_the_database_is_lost(history, damage, caplog):
    other = dataclasses.replace(PICTURE, prompt="a dog", seed=7)
    mine = [
        history.add(ANNA, to_png(np.zeros((8, 8, 3), np.uint8), Request((picture,))), picture)
        for picture in [PICTURE, other] * 10
    ]
    theirs = history.add(BEN, PNG, PICTURE)
    history.delete(ANNA, mine.pop(3).id)
    for entry in mine:
        os.utime(history.picture(ANNA, entry.id), (entry.made_at, entry.made_at))
    history.close()
    damage(history.folder / "history.db")
    with caplog.at_level(logging.WARNING):
        again = History(history.folder)
    assert "did not know 20 pictures, which were read back" in caplog.messages[-1]
    back = sorted(again.entries(ANNA), key=lambda entry: entry.number)
    assert [(entry.id, entry.picture) for entry in back] == [
        (entry.id, entry.picture) for entry in mine
    ]
    assert [entry.made_at for entry in back] == pytest.approx(
        [entry.made_at for entry in mine], abs=1e-3
    )
    assert again.picture(ANNA, mine[0].id).read_bytes() == PNG
    assert ids(again, BEN) == [theirs.id] and len(files(again)) == 20
    again.close()
    caplog.clear()
    assert sorted(ids(History(history.folder))) == sorted(entry.id for entry in back)
    assert not caplog.messages


@pytest.mark.parametrize("damage", [break_header, break_pages, cut_off, make_newer])
def test_a_broken_database_is_set_aside(history, damage, caplog):
    add(history, 20)
    history.close()
    damage(history.folder / "history.db")
    broken = (history.folder / "history.db").read_bytes()
    with caplog.at_level(logging.WARNING):
        History(history.folder)
    (aside,) = history.folder.glob("broken-*")
    assert (
        caplog.messages[0].startswith(
            f"The database of the history in {history.folder} is broken ("
        )
        and str(aside) in caplog.messages[0]
    )
    assert damage is make_newer or (aside / "history.db").read_bytes() == broken


def test_old_favourites_are_favourites_again_when_the_database_is_lost(history):
    old, young = add(history, 2)
    history.set_favourite(ANNA, old, True)
    long_ago = time.time() - 100 * DAY
    os.utime(history.picture(ANNA, old), (long_ago, long_ago))
    history.close()
    (history.folder / "history.db").unlink()
    again = History(history.folder)
    assert ids(again) == [young, old] and ids(again, favourites_only=True) == [old]


def test_a_picture_without_owner_or_settings_is_set_aside_and_other_files_are_left_alone(
    history, caplog
):
    pictures = history.folder / "pictures"
    torn = history.picture(ANNA, *add(history, 1))
    torn.write_bytes(PNG[:-20])
    nobodys = pictures / f"{'0' * 32}.png"
    nobodys.write_bytes(PNG)
    (pictures / "notes.txt").touch()
    history.close()
    (history.folder / "history.db").unlink()
    with caplog.at_level(logging.WARNING):
        again = History(history.folder)
    aside = history.folder / "set-aside"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == {
        torn.name: PNG[:-20],
        nobodys.name: PNG,
    }
    assert ids(again) == [] and [file.name for file in files(again)] == ["notes.txt"]
    (line,) = caplog.messages
    assert line.startswith("Of 2 pictures in the history in ") and str(aside) in line


def test_a_history_of_before_files_were_named_by_owners_goes_on(history, monkeypatch):
    old = add(history, 3, made_at=90.0) + add(history, 1, made_at=130.0)
    history.set_favourite(ANNA, old[0], True)
    for id in old:
        history.picture(ANNA, id).rename(history.folder / "pictures" / f"{id}.png")
    for column in ("run", "place", "deleted_at"):
        history._rows(f"ALTER TABLE pictures DROP COLUMN {column}")
    for table in ("on_boards", "boards"):
        history._rows(f"DROP TABLE {table}")
    history._rows("PRAGMA user_version = 1")
    monkeypatch.setattr(History, "prune", lambda _: None)
    history.close()
    again = History(history.folder)
    assert ids(again) == [old[3], *old[:3]], "by the minute, as nothing else is known of runs"
    assert [entry.index for entry in again.entries(ANNA)] == [0, 0, 1, 2]
    assert ids(again, favourites_only=True) == old[:1]
    assert again.picture(ANNA, old[1]).read_bytes() == PNG and len(files(again)) == 4
    again.close()
    assert ids(History(history.folder)) == [old[3], *old[:3]]


def test_two_servers_may_read_a_picture_back_while_a_third_adds_it(history, monkeypatch):
    run = history._run

    def late(statement, values):
        History(history.folder).close()
        return run(statement, values)

    monkeypatch.setattr(history, "_run", late)
    entry = history.add(ANNA, PNG, PICTURE)
    monkeypatch.undo()
    assert history.entries(ANNA) == [entry]


def test_what_another_server_adds_while_one_starts_stays_as_it_was_added(history, monkeypatch):
    run, added = History._run, []

    def then_add(starting, statement, values):
        rows = run(starting, statement, values)
        if not added:  # its look at what it knows
            monkeypatch.undo()
            added.append(history.add(ANNA, PNG, PICTURE, run="a run", index=3))
        return rows

    monkeypatch.setattr(History, "_run", then_add)
    History(history.folder).close()
    assert history.entries(ANNA) == added


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
        history.add(ANNA, PNG, PICTURE)
    monkeypatch.undo()
    assert files(history) == [] and ids(history) == []
    add(history, 1)


def test_a_database_that_refuses_a_row_leaves_no_file(history):
    history.close()
    with pytest.raises(HistoryError, match="closed database"):
        history.add(ANNA, PNG, PICTURE)
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
            place.drop(owner, id)
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


# --- clocks that are wrong, and a database that another holds -----------------------------------


def shift_clock(monkeypatch, days: float) -> None:
    """Sets the clock ahead by so many days."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + days * DAY)


@pytest.mark.parametrize("days", [95, 36500, -95])
def test_a_start_with_a_wrong_clock_deletes_nothing(history, monkeypatch, days):
    now = time.time()
    for age in (0, 1, 60, 89):
        history.add(ANNA, PNG, PICTURE, made_at=now - age * DAY)
    history.close()
    with monkeypatch.context() as wrong:
        shift_clock(wrong, days)
        again = History(history.folder)
        add(again, 1)
        again.close()
    assert len(ids(History(history.folder))) == 5


def test_starts_with_a_wrong_clock_delete_no_more_than_one_share_in_a_day(history, monkeypatch):
    old = add(history, 20)
    history.close()
    with monkeypatch.context() as wrong:
        shift_clock(wrong, 200)
        for _ in range(6):
            again = History(history.folder)
            add(again, 2)
            again.close()
    again = History(history.folder)
    assert len({*old} & {*ids(again, runs=100)}) >= 17
    again.close()


def test_pictures_of_a_few_days_ahead_make_no_others_old(history, monkeypatch):
    add(history, 30)
    with monkeypatch.context() as wrong:
        shift_clock(wrong, 200)
        add(history, 3)
        assert history.prune() == 0
    assert history.prune() == 0 and len(ids(history)) == 33


def test_by_age_a_tenth_goes_at_once_the_oldest_first_and_the_log_says_so(history, caplog):
    now = time.time()
    old = [history.add(ANNA, PNG, PICTURE, made_at=now - (200 - n) * DAY).id for n in range(30)]
    add(history, 10)
    assert history.prune() == 4
    assert not {*old[:4]} & {*ids(history)} and {*old[4:]} < {*ids(history)}
    assert "4 of 40 pictures" in caplog.text and "90 days or more before its newest" in caplog.text


def test_a_deletion_by_a_clock_that_was_ahead_is_for_good_all_the_same(history, monkeypatch):
    gone, _ = add(history, 2)
    with monkeypatch.context() as wrong:
        shift_clock(wrong, 95)
        history.delete(ANNA, gone)
    history.prune()
    assert len(files(history)) == 1


def test_adding_and_reading_wait_for_no_other_server_that_holds_the_database(history):
    (there,) = add(history, 1)
    shown = history.picture(ANNA, there)
    other = sqlite3.connect(history.folder / "history.db")
    other.execute("BEGIN IMMEDIATE")
    told, begun, name = threading.Event(), time.monotonic(), history_module.new_name()
    history.add_later(
        ANNA, shown, PICTURE, lambda failure: failure or told.set(), name=name, run="run", index=0
    )
    assert history.favourites(ANNA, [name, there]) == {name: False, there: False}
    assert ids(history) == [there]
    assert time.monotonic() - begun < history_module.BUSY_SECONDS / 4 and not told.is_set()
    other.rollback()
    assert told.wait(10) and {*ids(history)} == {there, name}


def test_a_picture_that_is_being_added_is_there_for_whoever_reads(history):
    (there,) = add(history, 1)
    name = history_module.new_name()
    history.add_later(
        ANNA, history.picture(ANNA, there), PICTURE, lambda _: None, name=name, run="run", index=0
    )
    assert history.set_favourite(ANNA, name, True)
