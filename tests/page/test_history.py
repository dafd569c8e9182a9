"""The history on the page: what a browser made stays, for that browser alone."""

import asyncio
import dataclasses
import re
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gradio_client
import httpx
import numpy as np
import pytest

from sd_tpu.gallery import history as history_module
from sd_tpu.gallery.files import Files
from sd_tpu.gallery.history import History, HistoryError
from sd_tpu.gallery.run import Backend
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.page import events
from sd_tpu.page import history as history_actions
from sd_tpu.page.actions import Actions
from sd_tpu.page.events import ActionRequest
from sd_tpu.pictures.images import read_png, to_png
from sd_tpu.serving.job import Done, ImageReady
from tests.support.asking import following, make_request
from tests.support.jobs import FakeJob
from tests.support.pages import file_of, served
from tests.support.visitor import (
    DESKTOP,
    PATIENCE,
    box,
    expect,
    figures,
    fill,
    generate,
    make,
    newcomer,
    prompts,
    says,
    seed_box,
    setting,
    unfold,
    visit,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the history is."""
    return tmp_path_factory.mktemp("history")


@pytest.fixture(scope="module")
def keeping(page_engine, folder):
    """Where a page with a history is served."""
    with served(page_engine, folder) as address:
        yield address


@pytest.fixture
def somebody(visitor, keeping):
    """A browser that was never there, with three pictures."""
    with newcomer(visitor, keeping) as tab:
        fill(tab, ["first", "", "<b>third</b>", "fourth"] + [""] * 4, seed=20, steps=3)
        make(tab)
        yield tab


@pytest.fixture(scope="module")
def three(chromium, keeping):
    """A browser of its own with the same pictures, which stay as they are."""
    with chromium.new_context(viewport=DESKTOP) as context:
        tab = visit(context.new_page(), keeping)
        fill(tab, ["first", "", "<b>third</b>", "fourth"] + [""] * 4, seed=20, steps=3)
        make(tab)
        yield tab


@pytest.fixture
def looker(three):
    """That browser, with nothing open."""
    three.evaluate("document.activeElement.blur()")
    for _ in range(2):
        three.keyboard.press("Escape")
    return three


def kept(tab):
    return tab.locator("#history-panel img")


def shows(tab, names: list[str]) -> None:
    """Waits for exactly these pictures in the history, by their prompts."""
    expect(kept(tab)).to_have_count(len(names), timeout=PATIENCE)
    tab.wait_for_function(
        "names => String([...document.querySelectorAll('#history-panel img')]"
        ".map(image => image.alt)) === String(names)",
        arg=names,
    )


def act(tab, name: str) -> None:
    tab.locator("#history-panel").get_by_role("button", name=name).click()


def names(tab) -> list[str]:
    return kept(tab).evaluate_all("all => all.map(image => image.alt)")


def test_pictures_appear_by_run_newest_first_also_while_the_history_is_open(somebody):
    fill(somebody, ["newest"] + [""] * 7)
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    assert names(somebody) == ["first", "<b>third</b>", "fourth"], "in the gallery's order"
    assert somebody.locator("#history-panel .run").inner_text().count("seed 20") == 1
    heights = somebody.locator("#history-panel .words").evaluate_all(
        "all => all.map(words => words.getBoundingClientRect().height)"
    )
    assert len(heights) == 3 and min(heights) > 10, "each with its prompt in sight"
    width = kept(somebody).first.evaluate("image => image.decode().then(() => image.naturalWidth)")
    assert width == 32
    make(somebody)
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    assert names(somebody)[0] == "newest"


def test_a_run_that_is_over_before_the_page_hears_of_it_is_shown_too(somebody, monkeypatch):
    follow = events.RunStream.stream

    async def late(watch, asked, session):
        run = watch.runs.find(asked.data.get("run"))
        while run and not run.over:
            await asyncio.sleep(0.01)
        async for told in follow(watch, asked, session):
            yield told

    monkeypatch.setattr(events.RunStream, "stream", late)
    fill(somebody, ["in no time"] + [""] * 7)
    unfold(somebody, "History")
    expect(kept(somebody).first).to_be_visible(timeout=PATIENCE)
    make(somebody)
    expect(somebody.locator("#history-panel")).to_contain_text("in no time", timeout=PATIENCE)


def test_no_click_hits_what_moves_when_the_history_is_opened_again(somebody, monkeypatch):
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    at = kept(somebody).first.bounding_box()
    aim = (at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    somebody.keyboard.press("Escape")
    fill(somebody, ["newest"] + [""] * 7)
    make(somebody)
    contents, may_answer = history_actions.contents, threading.Event()

    def late(*args):
        may_answer.wait(PATIENCE / 1000)
        return contents(*args)

    monkeypatch.setattr(history_actions, "contents", late)
    found = somebody.locator("#history-panel .found")
    # What lies under the pointer as soon as others are there.
    found.evaluate(
        """(found, aim) => new MutationObserver(() => {
            window.hit = document.elementFromPoint(...aim).closest("li");
        }).observe(found, { childList: true })""",
        aim,
    )
    unfold(somebody, "History")
    expect(found).to_have_attribute("aria-busy", "true")
    expect(kept(somebody)).to_have_count(3)  # which are seen meanwhile
    somebody.mouse.click(*aim)
    may_answer.set()
    shows(somebody, ["newest", "first", "<b>third</b>", "fourth"])
    expect(somebody.get_by_role("dialog")).to_have_count(0)
    assert somebody.evaluate("window.hit") is None, "nor one that has come there just now"
    expect(found).to_have_attribute("aria-busy", "false")
    somebody.mouse.click(*aim)
    expect(somebody.get_by_role("dialog").get_by_role("img")).to_have_attribute("alt", "newest")


def test_an_empty_history_says_so(visitor, keeping):
    with newcomer(visitor, keeping) as tab:
        unfold(tab, "History")
        expect(tab.locator("#history-panel")).to_contain_text("There is nothing yet")


def test_a_page_without_a_history_has_no_such_fold(tab):
    expect(tab.get_by_role("button", name="History", exact=True)).to_have_count(0)


def test_the_downloaded_file_is_the_one_that_was_kept(looker, folder):
    unfold(looker, "History")
    with looker.expect_download() as download:
        act(looker, "Download “fourth”")
    assert download.value.suggested_filename == "23-fourth.png"
    data = download.value.path().read_bytes()
    assert data in [file.read_bytes() for file in (folder / "pictures").iterdir()]
    looker.keyboard.press("Escape")  # or the history would lie over it
    with looker.expect_download() as original:
        looker.get_by_role("link", name="Download picture 4").click()
    assert original.value.path().read_bytes() == data


def test_a_picture_is_seen_full_screen_with_its_settings_and_leafed_from(looker, folder):
    before = prompts(looker)
    unfold(looker, "History")
    looker.get_by_role("button", name="View “<b>third</b>” full screen").click()
    dialog = looker.get_by_role("dialog")
    picture = dialog.get_by_role("img")
    expect(picture).to_have_attribute("alt", "<b>third</b>")
    expect(dialog).to_contain_text("PNDM (PLMS) · 3 steps · guidance 7.5 · seed 22")
    year = looker.evaluate("new Date().getFullYear()")
    expect(dialog.locator(".facts")).to_contain_text(f"{year}, ")  # as people write it
    kept = [file.read_bytes() for file in (folder / "pictures").iterdir()]
    files = {"<b>third</b>": "22-b-third-b.png", "first": "20-first.png", "fourth": "23-fourth.png"}
    seen = set()
    while len(seen) < 3:
        prompt = picture.get_attribute("alt")
        expect(picture).to_have_attribute("src", re.compile(f"/{files[prompt]}$"), timeout=PATIENCE)
        with looker.expect_download() as download:
            dialog.get_by_role("link", name="Download PNG").click()
        assert download.value.suggested_filename == files[prompt]
        assert download.value.path().read_bytes() in kept and prompt not in seen
        seen.add(prompt)
        looker.keyboard.press("ArrowRight")
    expect(picture).to_have_attribute("alt", "<b>third</b>")
    looker.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert prompts(looker) == before, "looking changes nothing"


def test_the_full_screen_view_keeps_its_place_and_its_keys_while_the_history_grows(
    somebody, may_draw
):
    fill(somebody, ["later", *[""] * 7])
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    before = names(somebody)
    generate(somebody).click()
    somebody.get_by_role("button", name=f"View “{before[0]}” full screen").click()
    dialog = somebody.get_by_role("dialog")
    link = dialog.get_by_role("link", name="Download PNG")
    link.focus(timeout=PATIENCE)
    expect(kept(somebody)).to_have_count(3)
    may_draw.set()
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    somebody.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", before[1])
    expect(link).to_be_visible(timeout=PATIENCE)
    assert somebody.evaluate("document.querySelector('#viewer').contains(document.activeElement)")


def test_a_picture_that_another_tab_has_deleted_is_not_left_on_the_screen(somebody):
    unfold(somebody, "History")
    with somebody.context.new_page() as other:
        visit(other, somebody.url)
        unfold(other, "History")
        act(other, "Delete “fourth”")
        expect(kept(other)).to_have_count(2, timeout=PATIENCE)
    somebody.get_by_role("button", name="View “fourth” full screen").click()
    says(somebody, "This picture is no longer in your history.")
    expect(somebody.get_by_role("dialog")).to_be_hidden()


def test_a_pictures_prompt_seed_and_settings_are_used_again(looker):
    fill(looker, ["x"] * 8, seed=1, steps=9)
    unfold(looker, "History")
    act(looker, "Use: put prompt, seed and settings of “fourth”")
    says(looker, "are in the boxes")
    assert prompts(looker) == ["fourth"] + [""] * 7
    expect(seed_box(looker)).to_have_value("23")
    expect(looker.locator("#generate")).to_be_focused()
    expect(looker.locator("#sheet")).to_be_hidden()
    expect(setting(looker, "Steps")).to_have_value("3")


def test_favourites_are_marked_and_can_be_shown_alone_by_keyboard(somebody):
    unfold(somebody, "History")
    star = somebody.get_by_role("button", name="Favourite: “first”")
    expect(star).to_have_attribute("aria-pressed", "false", timeout=PATIENCE)
    star.press("Enter")
    expect(star).to_have_attribute("aria-pressed", "true")
    expect(star).to_be_focused()
    act(somebody, "Favourites only")
    shows(somebody, ["first"])
    star.press("Enter")
    expect(somebody.locator("#history-panel")).to_contain_text("There are no favourites yet")
    expect(somebody.get_by_role("button", name="Favourites only")).to_be_focused()


def test_what_is_deleted_is_served_no_more_and_comes_back_when_that_is_undone(somebody, keeping):
    addresses = [
        keeping + somebody.locator(f"#picture-4 {part}").get_attribute(name)
        for part, name in (("a.icon", "href"), ("img", "src"))
    ]
    assert [httpx.get(address).status_code for address in addresses] == [200, 200]
    unfold(somebody, "History")
    act(somebody, "Delete “fourth”")
    shows(somebody, ["first", "<b>third</b>"])
    assert {httpx.get(address).status_code for address in addresses} <= {403, 404}
    undo = somebody.locator("#history-panel").get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    undo.press("Enter")
    shows(somebody, ["first", "<b>third</b>", "fourth"])
    expect(undo).to_be_hidden()
    act(somebody, "Favourite: “fourth”")
    act(somebody, "Delete all but favourites")
    shows(somebody, ["fourth"])
    expect(somebody.locator("#history-panel .undo")).to_contain_text(
        "All but the favourites and what is on boards are deleted."
    )
    act(somebody, "Delete “fourth”")
    shows(somebody, [])
    somebody.reload()
    expect(somebody.locator("#collection [data-run]")).not_to_have_attribute(
        "data-run", "", timeout=PATIENCE
    )
    assert somebody.locator("figure.done").count() == 0, "nor are they in the gallery"
    unfold(somebody, "History")
    expect(somebody.locator("#history-panel")).to_contain_text("There is nothing yet")


def test_a_deletion_leaves_equal_pictures_alone_and_the_card_has_its_own_again(tmp_path):
    def submit(request, **_):
        job = FakeJob(ImageReady(0, np.zeros((32, 32, 3), np.uint8)), Done(1.0))
        job.request = request
        return job

    history, me = History(tmp_path / "history"), "0" * 32
    runs = Runs(
        Backend(
            SimpleNamespace(submit=submit), Files(tmp_path / "served", to_png), Inputs(), history
        )
    )
    older, newer = [runs.start(make_request(prompts=("a",), seed=3), browser=me) for _ in range(2)]
    for run in (older, newer):
        list(following(run, "a tab"))

    def act(name, run=None):
        told = Actions(runs).answer(
            ActionRequest(
                {"do": "history", "act": name, "id": run and run.cards[0].kept, "browser": me}, ""
            )
        )
        assert "kind" not in told

    (card, *_), picture = newer.cards, newer.cards[0].picture
    assert picture == older.cards[0].picture, "equal pictures share their files"
    before = [Path(file).read_bytes() for file in (picture.png, picture.shown)]
    act("delete", older)
    assert card.picture.there
    act("delete", newer)
    assert not list((tmp_path / "served").iterdir()) and not runs.backend.files.names
    act("restore")
    assert [Path(file).read_bytes() for file in (picture.png, picture.shown)] == before
    assert runs.backend.files.names == {picture.png, picture.shown}, "or they are not served"
    history.close()


def test_a_run_is_used_again_and_found_by_words(somebody):
    fill(somebody, ["a Night sea", *[""] * 7], seed=5)
    make(somebody)
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    search = somebody.get_by_role("searchbox")
    search.fill("night")
    shows(somebody, ["a Night sea"])
    expect(search).to_be_focused()
    search.fill("nowhere")
    expect(somebody.locator("#history-panel")).to_contain_text("No prompt has these words.")
    search.fill("")
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    somebody.get_by_role("button", name="Use this run").last.click()
    says(somebody, "of the run are in the boxes.")
    assert prompts(somebody) == ["first", "", "<b>third</b>", "fourth", *[""] * 4]
    expect(seed_box(somebody)).to_have_value("20")
    expect(setting(somebody, "Steps")).to_have_value("3")
    expect(somebody.locator("figure.done")).to_have_count(3)
    expect(somebody.locator("figure.other")).to_have_count(0)  # nor of another prompt
    somebody.locator("#undo").click()
    expect(box(somebody, 1)).to_have_value("a Night sea")
    expect(somebody.locator("figure.done")).to_have_count(1)


def test_a_run_of_an_earlier_server_is_shown_with_its_pictures(page_engine, tmp_path):
    history, me = History(tmp_path / "history"), "b" * 32

    def served_anew(name):
        files = Files(tmp_path / name, page_engine.to_png)
        return Runs(Backend(page_engine, files, Inputs(), history))

    request = make_request(["one", "", "three"], height=32, width=32, model="", steps=2)
    run = served_anew("before").start(request, browser=me)
    [*_] = following(run, "tab")
    runs, kept = served_anew("now"), history.entries(me)
    form = {"prompts": [""] * 8, "seed": "", "overrides": [], "settings": {}}
    asked = {"do": "history", "act": "run", "id": kept[0].run, "browser": me, "form": form}
    told = Actions(runs).answer(ActionRequest(asked, ""))
    shown = runs.find(told["run"])
    assert shown.over and told["form"]["prompts"][:3] == ["one", "", "three"]
    there = {index: Path(each.png).read_bytes() for index, each in shown.pictures().items()}
    assert there == {index: Path(each.png).read_bytes() for index, each in run.pictures().items()}
    assert {card.kept for card in shown.cards if card.picture} == {each.id for each in kept}
    kept[0].file.unlink()
    told = Actions(runs).answer(ActionRequest(asked, ""))
    assert [*runs.find(told["run"]).pictures()] == [2], "those that are left"
    kept[1].file.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    told = Actions(runs).answer(ActionRequest(asked, ""))
    assert told["form"]["prompts"][:3] == ["one", "", "three"] and "run" not in told
    history.close()


def test_of_a_card_that_was_drawn_again_the_last_picture_is_shown(page_engine, tmp_path):
    history, me = History(tmp_path / "history"), "b" * 32
    files = Files(tmp_path / "files", page_engine.to_png)
    runs = Runs(Backend(page_engine, files, Inputs(), history))
    run = runs.start(
        make_request(["one"], height=32, width=32, model="", steps=2, seed=3), browser=me
    )
    [*_] = following(run, "tab")
    run.redraw(0, dataclasses.replace(run.request.picture(0), seed=9))
    [*_] = following(run, "tab")
    entries = history.entries(me, run=history.entries(me)[0].run)
    gone = dataclasses.replace(entries[1].picture, model="a model that is gone")
    entries = [entries[0], dataclasses.replace(entries[1], picture=gone)]
    assert [each.picture.seed for each in entries] == [3, 9]
    card = runs.bring_out(entries, me, "").cards[0]
    assert (card.asked, card.kept) == (gone, entries[1].id), "with the model that drew it"
    entries[1].file.unlink()
    assert runs.bring_out(entries, me, "") is None, "and no other under its settings"
    history.close()


def chips(tab):
    return tab.locator("#history-panel .boards [data-drop]")


def test_boards_are_made_filled_shown_renamed_and_deleted(somebody):
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    act(somebody, "+ New board")
    dialog = somebody.get_by_role("dialog", name="Boards")
    dialog.get_by_label("Name of the board").fill("Cats")
    somebody.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(chips(somebody)).to_have_text(["Cats 0"], timeout=PATIENCE)
    # By drag, from the history and from a card, which takes no picture in.
    kept(somebody).nth(1).drag_to(chips(somebody).first)
    expect(chips(somebody)).to_have_text(["Cats 1"], timeout=PATIENCE)
    figures(somebody).first.locator("img").drag_to(chips(somebody).first)
    expect(chips(somebody)).to_have_text(["Cats 2"], timeout=PATIENCE)
    assert somebody.evaluate("document.querySelectorAll('.dropping').length") == 0
    # By B, on a picture there and on a card.
    somebody.locator("#history-panel .view").nth(2).focus()
    somebody.keyboard.press("b")
    expect(dialog.get_by_role("checkbox", name="Cats")).not_to_be_checked(timeout=PATIENCE)
    expect(dialog.get_by_label("Name of the board")).to_have_value("")
    dialog.get_by_label("Name of the board").fill("Cats")
    dialog.get_by_role("button", name="Make a board").click()
    expect(dialog.get_by_role("alert")).to_have_text("There is a board “Cats” already.")
    dialog.get_by_label("Name of the board").fill("Dogs")
    dialog.get_by_role("button", name="Make a board").click()
    expect(dialog.get_by_role("checkbox", name="Dogs")).to_be_checked(timeout=PATIENCE)
    somebody.keyboard.press("Escape")
    expect(chips(somebody)).to_have_text(["Cats 2", "Dogs 1"])
    somebody.keyboard.press("Escape")
    figures(somebody).first.locator(".view").focus()
    somebody.keyboard.press("b")
    on = dialog.get_by_role("checkbox", name="Cats")
    expect(on).to_be_checked(timeout=PATIENCE)
    on.uncheck()
    expect(dialog.locator("label", has_text="Cats")).to_have_text("Cats 1", timeout=PATIENCE)
    somebody.keyboard.press("Escape")
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    chips(somebody).first.click()
    shows(somebody, ["<b>third</b>"])
    act(somebody, "Rename")
    dialog.get_by_label("Name of the board").fill("Tigers")
    somebody.keyboard.press("Enter")
    expect(chips(somebody)).to_have_text(["Dogs 1", "Tigers 1"], timeout=PATIENCE)
    shows(somebody, ["<b>third</b>"])
    act(somebody, "Delete board")
    expect(chips(somebody)).to_have_text(["Dogs 1"], timeout=PATIENCE)
    expect(kept(somebody)).to_have_count(3)
    act(somebody, "Undo")
    expect(chips(somebody)).to_have_text(["Dogs 1", "Tigers 1"], timeout=PATIENCE)
    chips(somebody).nth(1).click()
    shows(somebody, ["<b>third</b>"])


def test_a_star_on_a_card_is_that_of_the_history(looker):
    star = looker.get_by_role("button", name="Favourite: picture 3")
    expect(star).to_have_attribute("aria-pressed", "false")
    star.click()
    expect(star).to_have_attribute("aria-pressed", "true")
    unfold(looker, "History")
    there = looker.get_by_role("button", name="Favourite: “<b>third</b>”")
    expect(there).to_have_attribute("aria-pressed", "true", timeout=PATIENCE)
    looker.reload()
    expect(star).to_have_attribute("aria-pressed", "true", timeout=PATIENCE)
    unfold(looker, "History")
    there.click()
    expect(star).to_have_attribute("aria-pressed", "false")


def test_older_pictures_are_shown_when_asked_for(somebody, monkeypatch):
    monkeypatch.setattr(history_actions, "RUNS", 1)
    fill(somebody, ["newest", *[""] * 7])
    make(somebody)
    unfold(somebody, "History")
    more = somebody.get_by_role("button", name="Show more")
    for count in (1, 4):
        expect(kept(somebody)).to_have_count(count, timeout=PATIENCE)
        if count < 4:
            more.click()
    expect(more).to_have_count(0)


def test_nobody_else_sees_a_picture_or_gets_it_by_its_id(looker, chromium, keeping):
    unfold(looker, "History")
    button = looker.get_by_role("button", name="Download “first”")
    id = button.get_attribute("data-id", timeout=PATIENCE)
    with chromium.new_context() as context:
        tab = visit(context.new_page(), keeping)
        unfold(tab, "History")
        expect(tab.locator("#history-panel")).to_contain_text("There is nothing yet")
        for deed in ("save", "view", "again", "favourite", "delete"):
            tab.locator("#line p").evaluate("line => { line.textContent = '' }")
            with tab.expect_response(lambda answer: answer.request.method == "POST"):
                tab.evaluate(
                    """([deed, id]) => {
                    const button = document.createElement("button");
                    Object.assign(button.dataset, { do: "history", act: deed, id, to: "true" });
                    document.querySelector("#history-panel").append(button);
                    button.click();
                }""",
                    [deed, id],
                )
            says(tab, "This picture is no longer in your history.")
        assert prompts(tab)[0] != "first"
    looker.reload()
    unfold(looker, "History")
    with looker.expect_download():
        button.click()
    expect(looker.get_by_role("button", name="Favourite: “first”")).to_have_attribute(
        "aria-pressed", "false"
    )


@pytest.mark.slow("opens a browser's page on two servers")
def test_the_history_outlives_the_server(chromium, page_engine, tmp_path):
    with chromium.new_context() as context:
        tab = context.new_page()
        with served(page_engine, tmp_path) as address:
            visit(tab, address)
            fill(tab, ["kept"] + [""] * 7)
            make(tab)
        with served(page_engine, tmp_path, int(address.strip("/").rpartition(":")[2])) as address:
            visit(tab, address)
            expect(figures(tab).first).to_have_class(re.compile("blank"))
            unfold(tab, "History")
            shows(tab, ["kept"])


def test_a_history_that_fails_costs_no_run_and_the_page_says_so(
    visitor, keeping, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise HistoryError("The picture could not be added to the history (disk full).")

    monkeypatch.setattr(History, "add", refuse)
    with newcomer(visitor, keeping) as tab:
        fill(tab, ["made all the same"] + [""] * 7)
        make(tab)
        says(tab, "The picture could not be added to the history (disk full).")
        expect(tab.locator("figure.done")).to_have_count(1)
        assert box(tab, 1).input_value() == "made all the same"
    assert "disk full" in caplog.text


def test_what_programs_make_is_not_kept(keeping, folder):
    before = list((folder / "pictures").iterdir())
    gradio_client.Client(keeping, verbose=False).predict(["a"], 1, "", 1, api_name="/generate")
    assert list((folder / "pictures").iterdir()) == before


def test_a_picture_of_the_history_begins_others_and_is_seen_beside_them(somebody):
    unfold(somebody, "History")
    somebody.locator("#history-panel .view").last.click()
    viewer = somebody.locator("#viewer")
    expect(viewer.get_by_role("slider")).to_be_hidden()
    viewer.get_by_role("button", name="Start from it").click()
    started = somebody.locator("#settings-panel [name=init_image]")
    expect(started).to_have_value(re.compile("[0-9a-f]{64}"), timeout=PATIENCE)
    expect(somebody.locator("#settings-panel .upload img").first).to_be_visible()
    fill(somebody, ["first", *[""] * 7], seed=3)
    make(somebody)
    somebody.keyboard.press("Escape")
    somebody.locator("#cards .view").first.click()
    slider, pair = viewer.get_by_role("slider", name="Before and after"), viewer.locator(".pair")
    expect(slider).to_be_visible(timeout=PATIENCE)
    expect(pair).to_have_attribute("style", re.compile("--at: 50%"))
    slider.press("End")
    expect(pair).to_have_attribute("style", re.compile("--at: 100%"))
    made = read_png(file_of(viewer.locator("a"))).pictures[0]
    assert made.init_image == started.input_value()
    somebody.keyboard.press("Escape")
    unfold(somebody, "Settings")
    somebody.locator("#settings-panel [data-do=take_away]").first.click()
    expect(started).to_have_value("")
    unfold(somebody, "History")  # which shows what it knew until the server answers
    newest = somebody.locator("#history-panel .run").filter(has_text="seed 3")
    newest.get_by_role("button", name="Use this run").click()
    says(somebody, "of the run are in the boxes.")
    expect(somebody.locator(".below .overrides").first).to_contain_text("from a picture")
    expect(started).to_have_value("")


def test_a_database_that_another_holds_delays_no_picture(page_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "BUSY_SECONDS", 3)
    kept = History(tmp_path / "history")
    runs = Runs(Backend(page_engine, Files(tmp_path / "files", page_engine.to_png), Inputs(), kept))
    run = runs.start(
        make_request(["one", "two", "three"], height=32, width=32, model="", steps=2),
        browser="b" * 32,
    )
    [*_] = following(run, "tab")
    other = sqlite3.connect(tmp_path / "history" / "history.db")
    other.execute("BEGIN IMMEDIATE")
    begun = time.monotonic()
    run = runs.start(
        make_request(["four", "five", "six"], height=32, width=32, model="", steps=2),
        browser="b" * 32,
    )
    seen = following(run, "tab")
    drawn = next(each for each in seen if each.line.kind == "over")
    assert time.monotonic() - begun < 2 and len(run.pictures()) == 3
    assert drawn.news and "history" not in drawn.line.text
    last = [*seen][-1]
    assert "could not be added to the history" in last.line.text and run.over
    assert [card.kept for card in run.cards[:3]] == [None] * 3
    other.close()
    kept.close()
