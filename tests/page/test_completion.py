"""Complete my prompt: grey text behind the cursor, which Tab takes."""

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.support.visitor import box, expect, fill, make, newcomer


@pytest.fixture
def writer(tab) -> Page:
    """Somebody who has drawn two prompts."""
    fill(tab, ["a red fox", "a hen, evening light", *[""] * 6], seed=3)
    make(tab)
    tab.keyboard.press("Escape")
    return tab


def grey(tab: Page) -> str:
    """Return the grey text, if some is seen."""
    ghost = tab.locator("#ghost")
    return ghost.locator("span").last.inner_text() if ghost.is_visible() else ""


def test_tab_takes_the_grey_text_and_travels_where_there_is_none(writer):
    third = box(writer, 3)
    third.press_sequentially("a r")
    assert grey(writer) == "ed fox"
    expect(writer.locator("#news")).to_have_text("Tab completes: a red fox")
    writer.keyboard.press("Tab")
    expect(third).to_have_value("a red fox")
    expect(third).to_be_focused()
    assert grey(writer) == ""
    third.press_sequentially(", ev")
    assert grey(writer) == "ening light"
    writer.keyboard.press("Shift+Tab")
    expect(box(writer, 2)).to_be_focused()
    assert grey(writer) == ""
    writer.keyboard.press("Tab")
    expect(third).to_be_focused()
    writer.keyboard.press("Tab")
    expect(box(writer, 4)).to_be_focused()
    expect(third).to_have_value("a red fox, ev")


def test_escape_hides_the_grey_text_and_stays_in_the_box(writer):
    third = box(writer, 3)
    third.press_sequentially("a r")
    writer.keyboard.press("Escape")
    assert grey(writer) == ""
    expect(third).to_be_focused()
    writer.keyboard.press("Tab")
    expect(box(writer, 4)).to_be_focused()
    expect(third).to_have_value("a r")


def test_what_is_deleted_or_left_by_the_cursor_is_not_completed(writer):
    third = box(writer, 3)
    third.press_sequentially("a re")
    third.press("Backspace")
    assert grey(writer) == ""
    third.press("e")
    assert grey(writer) == "d fox"
    third.press("ArrowLeft")
    expect(writer.locator("#ghost")).to_be_hidden()
    writer.keyboard.press("Tab")
    expect(third).to_have_value("a re")


def test_styles_complete_a_prompt_and_undo_takes_that_back(writer, page_engine, monkeypatch):
    monkeypatch.setattr(
        page_engine.catalog.styles,
        "templates",
        lambda: {"Wet": ("{prompt}, watercolour on paper", ""), "None": ("", "")},
    )
    writer.reload()
    writer.wait_for_function("window.sdTpu?.arrived")
    with writer.expect_response(lambda answer: "known" in (answer.request.post_data or "")):
        box(writer, 4).focus()
    writer.wait_for_timeout(200)  # till the script has taken what came
    box(writer, 4).press_sequentially("an owl, wa")
    assert grey(writer) == "tercolour on paper"
    writer.keyboard.press("Tab")
    expect(box(writer, 4)).to_have_value("an owl, watercolour on paper")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_grey_text_lies_where_writing_goes_on_and_keeps_nobody_out(visitor, address, scheme):
    with newcomer(visitor, address, scheme) as tab:
        long = "a very long prompt about a fox " * 6
        fill(tab, [long.strip(), *[""] * 7], seed=3)
        make(tab)
        third = box(tab, 3)
        third.press_sequentially("a v")
        assert grey(tab).startswith("ery long prompt") and grey(tab).endswith("…")
        where = tab.evaluate("""() => {
            const box = document.querySelector("#prompt-3 textarea").getBoundingClientRect();
            const ghost = document.querySelector("#ghost").getBoundingClientRect();
            return [ghost.left >= box.left, ghost.right <= box.right, ghost.top >= box.top,
                ghost.bottom <= box.bottom];
        }""")
        assert all(where)
        assert Axe().run(tab)["violations"] == []
        assert tab.locator(".card", has=third).aria_snapshot().count("ery long") == 6, "in the list"
