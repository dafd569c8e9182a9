"""Cards change places, with all that is theirs, and prompts are copied from card to card."""

import re

import pytest
from playwright.sync_api import Page

from sd_tpu.page import form
from tests.support.pages import hand_in, made_from, png
from tests.support.visitor import (
    PATIENCE,
    PROMPTS,
    box,
    expect,
    fill,
    generate,
    make,
    prompts,
    says,
    seed_box,
    stop,
    unfold,
)

SOURCES = """() => [...document.querySelectorAll("#cards figure")]
    .map((figure) => figure.querySelector("img")?.src ?? null)"""
THREE = ["a fox", "a hen", "an owl", *[""] * 5]


@pytest.fixture
def drawn(tab) -> Page:
    """A page with three pictures."""
    fill(tab, THREE, seed=7)
    make(tab)
    tab.keyboard.press("Escape")
    return tab


def number(tab: Page, place: int):
    return tab.get_by_role("button", name=f"Select picture {place}", exact=True)


def view(tab: Page, place: int):
    return tab.get_by_role("button", name=f"View picture {place}")


def carry(tab: Page, place: int, to) -> None:
    """Drag a card by its number to the middle of an element, without letting it go."""
    number(tab, place).hover()
    tab.mouse.down()
    at = to.bounding_box()
    tab.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2, steps=4)


def card(tab: Page, place: int):
    return tab.locator(f"#picture-{place} figure")


def pictures(tab: Page, sources: list) -> None:
    """Wait until these pictures are in their places."""
    tab.wait_for_function(
        f"sources => JSON.stringify(({SOURCES})()) === JSON.stringify(sources)",
        arg=sources,
        timeout=PATIENCE,
    )


def selected(tab: Page) -> list[int]:
    return [*map(int, tab.locator(".below .number[aria-pressed=true]").all_inner_texts())]


def test_a_card_is_dragged_to_another_place_with_all_that_is_its_own(drawn):
    unfold(drawn, "Settings for prompt 2")
    drawn.locator("#overrides-panel").get_by_label("Steps").fill("3")
    make(drawn)
    drawn.keyboard.press("Escape")
    drawn.get_by_role("button", name="Keep picture 2").click()
    number(drawn, 2).click()
    before = drawn.evaluate(SOURCES)
    carry(drawn, 2, card(drawn, 6))
    expect(drawn.locator("#carried img")).to_have_attribute("src", re.compile("."))
    expect(drawn.locator(".card[data-onto] #picture-6")).to_have_count(1)
    drawn.mouse.up()
    expect(drawn.locator("#news")).to_have_text("Moved to place 6.")
    expect(drawn.locator("#carried")).to_have_count(0)
    assert prompts(drawn) == ["a fox", "", "an owl", "", "", "a hen", "", ""]
    pictures(drawn, [before[0], None, before[2], None, None, before[1], None, None])
    assert selected(drawn) == [6], "and the click that ends the drag selects nothing"
    expect(drawn.locator(".card.kept #picture-6")).to_have_count(1)
    expect(drawn.locator(".card .overrides-summary")).to_have_text(re.compile("3 steps.*seed 8"))
    assert (made_from(drawn, 6).seed, made_from(drawn, 6).steps) == (8, 3)
    drawn.keyboard.press("Escape")
    generate(drawn).click()
    says(drawn, "These pictures are here already")
    carry(drawn, 6, card(drawn, 1))
    drawn.mouse.up()
    pictures(drawn, [before[1], None, before[2], None, None, before[0], None, None])
    for _ in range(2):
        drawn.locator("#undo").click()
    pictures(drawn, before)
    assert prompts(drawn) == THREE
    expect(drawn.locator(".card.kept #picture-2")).to_have_count(1)
    drawn.locator("#redo").click()
    pictures(drawn, [before[0], None, before[2], None, None, before[1], None, None])


def test_cards_that_are_dragged_one_right_after_the_other_both_move(drawn):
    before = drawn.evaluate(SOURCES)
    for place, to in ((1, 4), (2, 5)):
        carry(drawn, place, card(drawn, to))
        drawn.mouse.up()
    pictures(drawn, [None, None, before[2], before[0], before[1], None, None, None])
    assert prompts(drawn) == ["", "", "an owl", "a fox", "a hen", "", "", ""]


def test_pictures_of_one_prompt_have_their_own_words_once_one_has_moved(tab):
    fill(tab, ["{a red|a blue} heart", *[""] * 7], seed=7)
    make(tab)
    tab.keyboard.press("Escape")
    carry(tab, 2, card(tab, 5))
    tab.mouse.up()
    expect(tab.locator("#news")).to_have_text("Moved to place 5.")
    assert prompts(tab) == ["a red heart", "", "", "", "a blue heart", "", "", ""]
    generate(tab).click()
    says(tab, "These pictures are here already")


def test_a_card_that_is_let_go_elsewhere_stays(drawn):
    before = drawn.evaluate(SOURCES)
    for to in (card(drawn, 2), drawn.locator("header")):
        carry(drawn, 2, to)
        drawn.mouse.up()
    carry(drawn, 2, card(drawn, 1))
    drawn.keyboard.press("Escape")
    expect(drawn.locator("#carried")).to_have_count(0)
    drawn.mouse.up()
    assert selected(drawn) == [] and drawn.evaluate(SOURCES) == before
    assert prompts(drawn) == THREE
    expect(drawn.locator("#undo")).to_be_disabled()
    number(drawn, 2).click()
    assert selected(drawn) == [2]
    hand_in(drawn, "drop", "#picture-3", png())
    expect(drawn.locator(".card .overrides-summary")).to_contain_text("from a picture")


def test_with_alt_the_prompt_alone_is_copied(drawn):
    before = drawn.evaluate(SOURCES)
    carry(drawn, 1, card(drawn, 2))
    drawn.keyboard.down("Alt")
    expect(drawn.locator("#carried[data-copies]")).to_have_count(1)
    drawn.mouse.up()
    drawn.keyboard.up("Alt")
    expect(drawn.locator("#news")).to_have_text("Prompt copied to place 2.")
    assert prompts(drawn)[:3] == ["a fox", "a fox", "an owl"]
    assert drawn.evaluate(SOURCES) == before
    drawn.locator("#undo").click()
    assert prompts(drawn) == THREE
    view(drawn, 3).focus()
    drawn.keyboard.press("Alt+Shift+ArrowRight")
    assert prompts(drawn) == [*THREE[:3], "an owl", *[""] * 4]
    expect(drawn.locator(".card:has(#picture-4) .below .fold")).to_be_focused()


def test_keys_move_a_card_and_go_with_it(drawn):
    before = drawn.evaluate(SOURCES)
    view(drawn, 1).focus()
    drawn.keyboard.press("Alt+ArrowRight")
    drawn.keyboard.press("Alt+ArrowRight")  # while the first is on its way
    drawn.keyboard.press("Alt+ArrowDown")
    drawn.keyboard.press("Alt+ArrowDown")  # where nothing is
    expect(drawn.locator("#news")).to_have_text("Moved to place 7.", timeout=PATIENCE)
    pictures(drawn, [before[1], before[2], None, None, None, None, before[0], None])
    expect(view(drawn, 7)).to_be_focused()
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        drawn.keyboard.press(f"Alt+{key}")
    expect(drawn.locator("#news")).to_have_text("Moved to place 1.", timeout=PATIENCE)
    pictures(drawn, before)
    expect(drawn.locator(".card .overrides-summary")).to_have_count(0)
    box(drawn, 1).focus()
    drawn.keyboard.press("Alt+ArrowRight")
    assert prompts(drawn) == THREE, "in a prompt it is the browser's"


def test_cards_stay_in_their_places_while_something_is_drawn(tab, slow_engine):
    fill(tab, PROMPTS, seed=7, steps=200)
    generate(tab).click()
    expect(stop(tab)).to_be_enabled()
    says(tab, "Step")
    tab.keyboard.press("Escape")  # of the settings alone
    carry(tab, 2, card(tab, 6))
    expect(tab.locator("html[data-carries=nothing]")).to_have_count(1)
    tab.mouse.up()
    expect(tab.locator("#news")).to_have_text("Cards change places when nothing is being drawn.")
    assert prompts(tab) == PROMPTS
    stop(tab).click()
    says(tab, "Stopped")
    expect(tab.locator("#undo")).to_be_disabled()


def test_boxes_change_places_where_nothing_is_drawn_yet(tab):
    fill(tab, THREE)
    seed_box(tab).fill("-1")
    tab.keyboard.press("Escape")
    tab.keyboard.press("Escape")
    carry(tab, 1, card(tab, 8))
    tab.mouse.up()
    expect(box(tab, 8)).to_have_value("a fox")
    assert prompts(tab) == ["", "a hen", "an owl", *[""] * 4, "a fox"]
    expect(tab.locator(".card .overrides-summary")).to_have_count(0)


@pytest.mark.parametrize(
    ("seed", "before", "after"),
    [
        ("7", [{}, {}], [{"seed": "8"}, {"seed": "7"}]),
        ("7", [{"seed": "8"}, {"seed": "3"}], [{"seed": "3"}, {}]),
        ("4294967295", [{}, {}], [{"seed": "0"}, {"seed": "4294967295"}]),
        ("-1", [{}, {"steps": "3"}], [{"steps": "3"}, {}]),
        ("-1", [{"seed": "5"}, {}], [{}, {"seed": "5"}]),
        ("none", [{}, {}], [{}, {}]),
    ],
)
def test_a_box_that_moves_keeps_its_seed(seed, before, after):
    filled = {"prompts": ["a", "b"], "seed": seed, "overrides": before, "keep": [True]}
    moved = form.swapped(filled, 0, 1)
    assert moved["prompts"] == ["b", "a", *[""] * 6]
    assert moved["overrides"] == [*after, *[{}] * 6]
    assert moved["keep"] == [False, True, *[False] * 6]
    assert filled["overrides"] == before, "the form itself stays"
