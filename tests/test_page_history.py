"""The history on the page: what a browser made stays, for that browser alone."""

import re
from contextlib import contextmanager

import gradio_client
import pytest
from playwright.sync_api import expect
from visitor import (
    PATIENCE,
    box,
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

from sd_tpu.history import History, HistoryError
from sd_tpu.page import build, launch, past


@contextmanager
def served(engine, folder, port=None):
    """The address of a page with the history in this folder, until the server ends."""
    history = History(folder)
    page = build(engine, history)
    assert engine.ready.wait(300)
    try:
        yield launch(page, server_name="127.0.0.1", server_port=port)
    finally:
        page.close(verbose=False)
        history.close()


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
        tab.on("dialog", lambda dialog: dialog.accept())
        fill(tab, ["first", "", "<b>third</b>", "fourth"] + [""] * 4, seed=20, steps=3)
        make(tab)
        yield tab


def kept(tab):
    return tab.locator("#history img")


def shows(tab, names: list[str]) -> None:
    """Waits for exactly these pictures in the history, by their prompts."""
    expect(kept(tab)).to_have_count(len(names), timeout=PATIENCE)
    tab.wait_for_function("names => String([...document.querySelectorAll('#history img')]"
                          ".map(image => image.alt)) === String(names)", arg=names)


def act(tab, name: str) -> None:
    tab.locator("#history").get_by_role("button", name=name).click()


def names(tab) -> list[str]:
    return kept(tab).evaluate_all("all => all.map(image => image.alt)")


def test_pictures_appear_newest_first_also_while_the_history_is_open(somebody):
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    assert sorted(names(somebody)) == ["<b>third</b>", "first", "fourth"]
    width = kept(somebody).first.evaluate("image => image.decode().then(() => image.naturalWidth)")
    assert width == 32
    fill(somebody, ["newest"] + [""] * 7)
    make(somebody)
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    assert names(somebody)[0] == "newest"


def test_an_empty_history_says_so(visitor, keeping):
    with newcomer(visitor, keeping) as tab:
        unfold(tab, "History")
        expect(tab.locator("#history")).to_contain_text("There is nothing yet", timeout=PATIENCE)


def test_a_page_without_a_history_has_no_such_fold(tab):
    expect(tab.get_by_role("button", name="History", exact=True)).to_have_count(0)


def test_the_downloaded_file_is_the_one_that_was_kept(somebody, folder):
    unfold(somebody, "History")
    with somebody.expect_download() as download:
        act(somebody, "Download “fourth”")
    assert download.value.suggested_filename == "23-fourth.png"
    data = download.value.path().read_bytes()
    assert data in [file.read_bytes() for file in (folder / "pictures").iterdir()]
    with somebody.expect_download() as original:
        somebody.get_by_role("link", name="Download picture 4").click()
    assert original.value.path().read_bytes() == data


def test_a_picture_is_seen_full_screen_with_its_settings_and_leafed_from(somebody, folder):
    unfold(somebody, "History")
    somebody.get_by_role("button", name="View “<b>third</b>” full screen").click()
    dialog = somebody.get_by_role("dialog")
    picture = dialog.get_by_role("img")
    expect(picture).to_have_attribute("alt", "<b>third</b>")
    expect(dialog).to_contain_text("PNDM (PLMS) · 3 steps · guidance 7.5 · seed 22")
    year = somebody.evaluate("new Date().getFullYear()")
    expect(dialog.locator(".facts")).to_contain_text(f"{year}, ")  # as people write it
    kept = [file.read_bytes() for file in (folder / "pictures").iterdir()]
    files = {"<b>third</b>": "22-b-third-b.png", "first": "20-first.png", "fourth": "23-fourth.png"}
    seen = set()
    while len(seen) < 3:
        prompt = picture.get_attribute("alt")
        expect(picture).to_have_attribute("src", re.compile(f"/{files[prompt]}$"), timeout=PATIENCE)
        with somebody.expect_download() as download:
            dialog.get_by_role("link", name="Download PNG").click()
        assert download.value.suggested_filename == files[prompt]
        assert download.value.path().read_bytes() in kept and prompt not in seen
        seen.add(prompt)
        somebody.keyboard.press("ArrowRight")
    expect(picture).to_have_attribute("alt", "<b>third</b>")
    somebody.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert prompts(somebody)[0] == "first", "looking changes nothing"


def test_the_full_screen_view_keeps_its_place_and_its_keys_while_the_history_grows(
        somebody, slow_engine):
    unfold(somebody, "History")
    expect(kept(somebody)).to_have_count(3, timeout=PATIENCE)
    before = names(somebody)
    fill(somebody, ["later", *[""] * 7], steps=75)  # 15 s: until the picture is seen full screen
    generate(somebody).click()
    somebody.get_by_role("button", name=f"View “{before[0]}” full screen").click()
    dialog = somebody.get_by_role("dialog")
    link = dialog.get_by_role("link", name="Download PNG")
    link.focus(timeout=PATIENCE)
    expect(kept(somebody)).to_have_count(3)
    expect(kept(somebody)).to_have_count(4, timeout=PATIENCE)
    somebody.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", before[1])
    expect(link).to_be_visible(timeout=PATIENCE)
    assert somebody.evaluate("document.querySelector('#viewer').contains(document.activeElement)")


def test_a_picture_that_another_tab_has_deleted_is_not_left_on_the_screen(somebody):
    unfold(somebody, "History")
    with somebody.context.new_page() as other:
        visit(other, somebody.url)
        other.on("dialog", lambda dialog: dialog.accept())
        unfold(other, "History")
        act(other, "Delete “fourth”")
        expect(kept(other)).to_have_count(2, timeout=PATIENCE)
    somebody.get_by_role("button", name="View “fourth” full screen").click()
    says(somebody, "This picture is no longer in your history.")
    expect(somebody.get_by_role("dialog")).to_be_hidden()


def test_a_pictures_prompt_seed_and_settings_are_used_again(somebody):
    fill(somebody, ["x"] * 8, seed=1, steps=9)
    unfold(somebody, "History")
    act(somebody, "Use: put prompt, seed and settings of “fourth”")
    says(somebody, "are in the boxes")
    assert prompts(somebody) == ["fourth"] + [""] * 7
    expect(seed_box(somebody)).to_have_value("23")
    expect(setting(somebody, "Steps")).to_have_value("3")
    expect(somebody.get_by_role("button", name="Generate")).to_be_focused()


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
    expect(somebody.locator("#history")).to_contain_text("There are no favourites yet")
    expect(somebody.get_by_role("button", name="Favourites only")).to_be_focused()


def test_pictures_are_deleted_once_that_is_confirmed(somebody, folder):
    unfold(somebody, "History")
    before = len(list((folder / "pictures").iterdir()))
    act(somebody, "Delete “fourth”")
    expect(kept(somebody)).to_have_count(2, timeout=PATIENCE)
    assert "fourth" not in names(somebody)
    assert len(list((folder / "pictures").iterdir())) == before - 1
    act(somebody, "Delete all")
    shows(somebody, [])
    assert len(list((folder / "pictures").iterdir())) == before - 3


def test_nothing_is_deleted_that_is_not_confirmed(visitor, keeping):
    with newcomer(visitor, keeping) as tab:
        asked = []
        tab.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        fill(tab, ["dear"] + [""] * 7)
        make(tab)
        unfold(tab, "History")
        act(tab, "Delete “dear”")
        act(tab, "Delete all")
        assert len(asked) == 2
        tab.reload()
        unfold(tab, "History")
        shows(tab, ["dear"])


def test_older_pictures_are_shown_when_asked_for(somebody, monkeypatch):
    monkeypatch.setattr(past, "MORE", 1)
    unfold(somebody, "History")
    more = somebody.get_by_role("button", name="Show more")
    for count in (1, 2, 3):
        expect(kept(somebody)).to_have_count(count, timeout=PATIENCE)
        if count < 3:
            more.click()
    expect(more).to_have_count(0)


def test_nobody_else_sees_a_picture_or_gets_it_by_its_id(somebody, chromium, keeping):
    unfold(somebody, "History")
    button = somebody.get_by_role("button", name="Download “first”")
    id = button.get_attribute("data-id", timeout=PATIENCE)
    with chromium.new_context() as context:
        tab = visit(context.new_page(), keeping)
        tab.on("dialog", lambda dialog: dialog.accept())
        unfold(tab, "History")
        expect(tab.locator("#history")).to_contain_text("There is nothing yet", timeout=PATIENCE)
        for deed in ("save", "view", "again", "favourite", "delete"):
            with tab.expect_response(lambda answer: answer.request.method == "POST"):
                tab.evaluate("""([deed, id]) => {
                    const button = document.querySelector("#history button");
                    Object.assign(button.dataset, { do: deed, id, to: "true" });
                    button.click();
                }""", [deed, id])
            says(tab, "This picture is no longer in your history.")
        assert prompts(tab)[0] != "first"
    somebody.reload()
    unfold(somebody, "History")
    with somebody.expect_download():
        button.click()
    expect(somebody.get_by_role("button", name="Favourite: “first”")).to_have_attribute(
        "aria-pressed", "false")


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


def test_a_history_that_fails_costs_no_run(visitor, keeping, monkeypatch, caplog):
    def refuse(*_):
        raise HistoryError("The picture could not be added to the history (disk full).")

    monkeypatch.setattr(History, "add", refuse)
    with newcomer(visitor, keeping) as tab:
        fill(tab, ["made all the same"] + [""] * 7)
        make(tab)
        expect(tab.locator("figure.done")).to_have_count(1)
        assert box(tab, 1).input_value() == "made all the same"
    assert "disk full" in caplog.text


def test_what_programs_make_is_not_kept(keeping, folder):
    before = list((folder / "pictures").iterdir())
    gradio_client.Client(keeping, verbose=False).predict(["a"], 1, "", 1, api_name="/generate")
    assert list((folder / "pictures").iterdir()) == before
