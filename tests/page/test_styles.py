"""The style board: styles as pictures, by keys and by fingers, for all boxes or for some."""

import re

import pytest
from playwright.sync_api import Locator, Page

from sd_tpu.folders import data_folder
from tests.support.visitor import PATIENCE, box, expect, newcomer, says, setting, tool, violations

LOADED = "() => [...document.querySelectorAll('#styles img')].every((image) => image.naturalWidth)"


def board(tab: Page) -> Locator:
    return tab.get_by_role("listbox", name="Styles")


def field(tab: Page) -> Locator:
    return tab.get_by_role("combobox", name="Search styles")


def chosen(tab: Page) -> Locator:
    return board(tab).get_by_role("option", selected=True)


def style(tab: Page) -> str:
    return tab.locator("#all-style").input_value()


def test_a_style_is_found_by_keys_and_taken_for_all(tab):
    tab.locator("#roll").focus()
    tab.keyboard.press("/")
    expect(field(tab)).to_be_focused()
    expect(board(tab).get_by_role("option")).to_have_text(["no style", "Ink", "Bright"])
    expect(chosen(tab)).to_have_text("no style")
    tab.keyboard.press("ArrowRight")
    expect(chosen(tab)).to_have_text("Ink")
    tab.keyboard.type("/BRI")
    expect(tab.get_by_text("No style has this name.")).to_be_visible()
    tab.keyboard.press("Home")
    tab.keyboard.press("Delete")
    expect(board(tab).get_by_role("option")).to_have_text(["Bright"])
    tab.keyboard.press("Enter")
    expect(board(tab)).to_be_hidden()
    expect(tab.locator("#roll")).to_be_focused()
    says(tab, "Style of all: Bright")
    assert style(tab) == "Bright"
    tab.keyboard.press("/")
    expect(chosen(tab)).to_have_text("Bright")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Escape")
    expect(board(tab)).to_be_hidden()
    assert style(tab) == "Bright"
    tab.locator("#undo").click()
    assert style(tab) == ""
    box(tab, 1).fill("")
    box(tab, 1).press_sequentially("and/or")
    expect(box(tab, 1)).to_have_value("and/or")


@pytest.mark.slow("has axe look through the page")
@pytest.mark.parametrize(("scheme", "phone"), [("light", False), ("dark", True)])
def test_pictures_are_drawn_once_and_the_board_keeps_nobody_out(visitor, address, scheme, phone):
    with newcomer(visitor, address, scheme, phone=phone) as tab:
        tool(tab, "Styles").click()
        images = board(tab).locator("img")
        expect(images.nth(2)).to_have_attribute("src", re.compile("^data:image"), timeout=PATIENCE)
        expect(images).to_have_count(3)
        tab.wait_for_function(LOADED)
        assert len([*(data_folder() / "styles").iterdir()]) == 3
        assert violations(tab, "#styles-panel") == []
        sides = (
            board(tab)
            .get_by_role("option")
            .evaluate_all("all => all.map(each => each.offsetWidth)")
        )
        assert min(sides) >= 44
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_docks_line_opens_it_for_the_selected(tab):
    setting(tab, "Style").select_option("Ink")
    tab.keyboard.press("Escape")
    for number in (2, 4):
        tab.get_by_role("button", name=f"Select picture {number}", exact=True).click(
            modifiers=["Control"]
        )
    words = tab.get_by_role("form", name="Selected pictures").get_by_role("textbox")
    words.press_sequentially("/")
    expect(field(tab)).to_be_focused()
    expect(words).to_have_value("")
    board(tab).get_by_role("option", name="no style").click()
    says(tab, "Style of the selected: no style")
    expect(words).to_be_focused()
    own = tab.locator(".overrides-summary")
    expect(own).to_have_text([re.compile("no style")] * 2)
    expect(tab.locator("#below-2, #below-4").locator(own)).to_have_count(2)
    assert style(tab) == "Ink"


def test_the_line_for_all_eight_takes_styles_lists_and_changes(tab):
    line = tab.get_by_role("textbox", name="For all eight")
    line.press_sequentially("/")
    expect(field(tab)).to_be_focused()
    tab.keyboard.press("Escape")
    expect(line).to_be_focused()
    tab.keyboard.type("red")
    tab.keyboard.press("Enter")
    says(tab, "There are no pictures that are not kept.")
    tab.evaluate("navigator.clipboard.writeText('1. a cat\\n2. a dog')")
    line.fill("")
    tab.keyboard.press("Control+V")
    says(tab, "2 prompts were pasted.")
    tab.locator("#line button").click()
    expect(box(tab, 1)).to_have_value("a cat")
    expect(box(tab, 2)).to_have_value("a dog")
