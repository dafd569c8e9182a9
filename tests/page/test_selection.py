"""Several cards at once: they are selected, changed, varied, kept, downloaded, drawn again."""

import io
import re
import zipfile
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page

from tests.support.pages import made_from, served
from tests.support.visitor import (
    DESKTOP,
    PATIENCE,
    PHONE,
    PROMPTS,
    box,
    expect,
    figures,
    fill,
    generate,
    keeps_nobody_out,
    make,
    newcomer,
    press,
    prompts,
    says,
    seed_box,
    stop,
    tools,
    unfold,
    violations,
    visit,
)

SOURCES = "() => [...document.querySelectorAll('#cards img')].map((image) => image.src)"
THREE = ["a fox", "a hen", "an owl", *[""] * 5]


def number(tab: Page, place: int) -> Locator:
    return tab.get_by_role("button", name=f"Select picture {place}", exact=True)


def dock(tab: Page) -> Locator:
    return tab.get_by_role("form", name="Selected pictures")


def chosen(tab: Page) -> list[int]:
    """Return the numbers of the cards that look selected, and that say so."""
    pressed = tab.locator(".below .number[aria-pressed=true]").all_inner_texts()
    assert pressed == tab.locator(".card.selected .number span").all_inner_texts()
    return [*map(int, pressed)]


def do(tab: Page, name: str) -> None:
    """Press one of the dock's buttons; wait for what it draws."""
    press(tab, dock(tab).get_by_role("button", name=name))
    says(tab, "Done in")


def view(tab: Page, place: int) -> Locator:
    return tab.get_by_role("button", name=f"View picture {place}")


@pytest.fixture(scope="module")
def eight(chromium, address) -> Iterator[Page]:
    """A tab with eight pictures, of which tests leave none selected."""
    with chromium.new_context(viewport=DESKTOP) as context:
        tab = visit(context.new_page(), address)
        fill(tab, PROMPTS, seed=7)
        make(tab)
        tab.keyboard.press("Escape")
        yield tab


@pytest.fixture
def drawn(tab) -> Page:
    fill(tab, PROMPTS, seed=7)
    make(tab)
    tab.keyboard.press("Escape")
    return tab


def test_numbers_select_alone_with_control_and_by_ranges(eight):
    expect(dock(eight)).to_be_hidden()
    number(eight, 2).click()
    assert chosen(eight) == [2]
    number(eight, 5).click(modifiers=["Shift"])
    assert chosen(eight) == [2, 3, 4, 5]
    number(eight, 1).click(modifiers=["Shift"])
    assert chosen(eight) == [1, 2], "a range begins where the last one did"
    number(eight, 7).click(modifiers=["Control"])
    number(eight, 1).click(modifiers=["Control"])
    assert chosen(eight) == [2, 7]
    expect(eight.locator("#news")).to_have_text("Selected: 2, 7")
    expect(dock(eight).locator("bdi")).to_have_text("2, 7")
    expect(generate(eight)).to_be_hidden()
    number(eight, 3).click()
    assert chosen(eight) == [3]
    dock(eight).get_by_role("button", name="End the selection").click()
    assert chosen(eight) == []
    expect(eight.locator("#news")).to_have_text("Nothing is selected.")
    expect(generate(eight)).to_be_visible()


def test_keys_select_and_escape_ends_that_before_it_stops_anything(eight):
    view(eight, 2).focus()
    eight.keyboard.press("Space")
    eight.keyboard.press("4")
    eight.keyboard.press("Space")
    assert chosen(eight) == [2, 4]
    expect(eight.get_by_role("dialog")).to_have_count(0)
    eight.keyboard.press("Space")
    assert chosen(eight) == [2]
    eight.keyboard.press("Shift+ArrowLeft")
    eight.keyboard.press("Shift+ArrowLeft")
    eight.keyboard.press("Shift+ArrowDown")
    assert chosen(eight) == [4, 5, 6], "from the one that had the focus at first"
    eight.keyboard.press("Control+a")
    assert chosen(eight) == [*range(1, 9)]
    eight.keyboard.press("Escape")
    assert chosen(eight) == []
    expect(view(eight, 6)).to_be_focused()
    box(eight, 1).focus()
    eight.keyboard.press("Control+a")
    assert chosen(eight) == [], "what is written there is chosen"
    eight.keyboard.press("Escape")  # from the prompt to its picture
    expect(view(eight, 1)).to_be_focused()
    eight.keyboard.press("Space")
    eight.keyboard.press("c")
    words = dock(eight).get_by_role("textbox")
    expect(words).to_be_focused()
    eight.keyboard.type("red k 1")
    assert chosen(eight) == [1]
    eight.keyboard.press("Escape")
    expect(view(eight, 1)).to_be_focused()
    assert chosen(eight) == []


def test_space_presses_what_stands_for_a_picture_that_is_not_there(tab):
    settings = tab.locator(".card").nth(7).locator(".below .fold")
    box(tab, 8).fill("")
    settings.focus()
    tab.keyboard.press("Space")
    expect(settings).to_have_attribute("aria-expanded", "true")
    assert chosen(tab) == []


def test_a_card_is_one_stop_of_tab_and_the_dock_comes_after_the_last(tab):
    box(tab, 8).focus()
    tab.keyboard.press("Tab")
    expect(generate(tab)).to_be_focused()
    number(tab, 8).click()
    box(tab, 8).focus()
    tab.keyboard.press("Tab")
    expect(dock(tab).get_by_role("button", name="End the selection")).to_be_focused()


def test_a_rectangle_selects_what_it_touches_and_a_bare_click_ends_it(drawn):
    first, sixth = (figures(drawn).nth(index).bounding_box() for index in (0, 5))
    mouse, outside = drawn.mouse, (first["x"] - 40, first["y"] + 60)
    mouse.move(*outside)
    mouse.down()
    mouse.move(sixth["x"] + 30, sixth["y"] + 30, steps=4)
    assert chosen(drawn) == [1, 2, 5, 6]
    expect(drawn.locator("#lasso")).to_be_visible()
    mouse.move(first["x"] + 30, first["y"] + 80)
    mouse.up()
    assert chosen(drawn) == [1]
    expect(drawn.locator("#lasso")).to_have_count(0)
    drawn.keyboard.down("Control")
    mouse.move(sixth["x"] + sixth["width"] + 8, sixth["y"] + 20)
    mouse.down()
    mouse.move(sixth["x"] + sixth["width"] + 60, sixth["y"] + 40, steps=3)
    mouse.up()
    drawn.keyboard.up("Control")
    assert chosen(drawn) == [1, 7]
    assert drawn.evaluate("String(getSelection())") == ""
    mouse.move(*outside)
    mouse.down()
    mouse.up()
    assert chosen(drawn) == []
    box(drawn, 1).click()
    mouse.down()
    mouse.move(sixth["x"], sixth["y"], steps=3)
    mouse.up()
    assert chosen(drawn) == [], "that chooses text"


def test_the_line_changes_all_selected_pictures_and_one_undo_takes_that_back(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    before = tab.evaluate(SOURCES)
    number(tab, 1).click()
    number(tab, 3).click(modifiers=["Control"])
    words = dock(tab).get_by_role("textbox")
    expect(dock(tab).get_by_role("slider")).to_be_hidden()
    words.fill(" ")
    words.press("Enter")
    says(tab, "Say what should change, in a few words.")
    expect(words).to_be_focused()
    words.fill("at night")
    dock(tab).get_by_role("slider", name="How much changes").fill("0.8")
    change = dock(tab).get_by_role("button", name="Change 2")
    expect(change).to_have_text(re.compile(r"Change 2\s+\d+ s"))
    do(tab, "Change 2")
    assert prompts(tab)[:3] == ["a fox, at night", "a hen", "an owl, at night"]
    after = tab.evaluate(SOURCES)
    assert [old != new for old, new in zip(before, after, strict=True)] == [True, False, True]
    for place, seed in ((1, 7), (3, 9)):
        made = made_from(tab, place)
        assert (made.prompt, made.strength, made.seed) == (prompts(tab)[place - 1], 0.8, seed)
    assert made_from(tab, 1).init_image != made_from(tab, 3).init_image, "each from itself"
    expect(words).to_have_value("")
    assert chosen(tab) == [1, 3], "so that the next change goes on from there"
    tab.locator("#undo").click()
    tab.wait_for_function(f"before => String(({SOURCES})()) === String(before)", arg=before)
    assert prompts(tab) == THREE


def test_a_selection_is_drawn_again_kept_and_downloaded(drawn):
    before = drawn.evaluate(SOURCES)
    number(drawn, 2).click()
    number(drawn, 6).click(modifiers=["Control"])
    keep = dock(drawn).get_by_role("button", name="Keep the selected pictures")
    keep.click()
    expect(keep).to_have_attribute("aria-pressed", "true")
    expect(drawn.locator(".card.kept")).to_have_count(2)
    keep.click()
    expect(drawn.locator(".card.kept")).to_have_count(0)
    view(drawn, 2).focus()
    drawn.keyboard.press("k")
    expect(drawn.locator(".card.kept")).to_have_count(2)
    drawn.keyboard.press("3")
    drawn.keyboard.press("k")  # which is not selected
    expect(drawn.locator(".card.kept")).to_have_count(3)
    with drawn.expect_download() as download:
        dock(drawn).get_by_role("button", name="Download the selected pictures").click()
    with zipfile.ZipFile(io.BytesIO(download.value.path().read_bytes())) as pack:
        assert [name[:2] for name in pack.namelist()] == ["2-", "6-"]
    drawn.evaluate("document.querySelector('[data-do=redraw_selected]').click()")
    changed = "([sources, before]) => before.filter((each) => !sources().includes(each)).length"
    drawn.wait_for_function(
        f"before => ({changed})([{SOURCES}, before]) === 2 && !document.querySelector('.busy')",
        arg=before,
    )
    after = drawn.evaluate(SOURCES)
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1] == [
        1,
        5,
    ]


@pytest.mark.parametrize(("name", "strength"), [("subtly", 0.35), ("strongly", 0.7)])
def test_variations_come_into_free_cards_and_over_nobodys_prompt(tab, name, strength):
    fill(tab, [*THREE[:3], "", "a cat", "", "", ""], seed=7, steps=4)
    make(tab)
    box(tab, 4).fill("half a thought")  # never drawn
    start = made_from(tab, 1)
    number(tab, 1).click()
    number(tab, 3).click(modifiers=["Control"])
    do(tab, f"Vary {name}")
    assert prompts(tab) == [*THREE[:3], "half a thought", "a cat", "a fox", "an owl", "a fox"]
    made = [made_from(tab, place) for place in (6, 7, 8)]
    assert [each.prompt for each in made] == ["a fox", "an owl", "a fox"]
    assert {each.strength for each in made} == {strength}
    assert made[0].init_image == made[2].init_image != made[1].init_image
    assert len({start.seed, *(each.seed for each in made)}) == 4
    assert seed_box(tab).input_value() == "7"
    generate_is_idle(tab)


def generate_is_idle(tab: Page) -> None:
    """The boxes ask for what is there, but for what was never drawn."""
    box(tab, 4).fill("")
    tab.keyboard.press("Escape")
    tab.keyboard.press("Escape")
    dock(tab).get_by_role("button", name="End the selection").click()
    generate(tab).click()
    says(tab, "These pictures are here already")


def test_without_a_free_card_variants_come_under_it_and_one_is_taken(
    visitor, page_engine, tmp_path
):
    with served(page_engine, tmp_path) as address, newcomer(visitor, address) as tab:
        fill(tab, PROMPTS, seed=7)
        make(tab)
        before = tab.evaluate(SOURCES)
        strip = tab.get_by_role("group", name="Variants of picture 4")
        variants = strip.get_by_role("button", name="Take variant")
        number(tab, 4).click()
        do(tab, "Vary strongly")
        expect(variants).to_have_count(4)
        expect(variants.and_(tab.locator(":enabled"))).to_have_count(4)
        assert tab.evaluate(SOURCES) == before and prompts(tab) == PROMPTS
        assert violations(tab) == []
        taken = variants.nth(2).evaluate("""each => {
            each.click();
            return [each.disabled, getComputedStyle(each).animationName];
        }""")
        assert taken == [True, "none"]  # for a visitor who wants no motion
        expect(strip).to_have_count(0)
        expect(view(tab, 4)).to_be_focused()
        after = tab.evaluate(SOURCES)
        assert [
            i for i, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1
        ] == [3]
        assert made_from(tab, 4).strength == 0.7 and made_from(tab, 4).init_image
        dock(tab).get_by_role("button", name="End the selection").click()
        generate(tab).click()
        says(tab, "These pictures are here already")
        tab.locator("#undo").click()
        tab.wait_for_function(f"before => String(({SOURCES})()) === String(before)", arg=before)
        expect(variants).to_have_count(4)
        strip.get_by_role("button", name="Leave picture 4 as it is").click()
        expect(strip).to_have_count(0)
        assert tab.evaluate(SOURCES) == before
        unfold(tab, "History")
        kept = tab.locator("#history-panel").get_by_role("button", name=f"View “{PROMPTS[3]}”")
        expect(kept).to_have_count(5)


def test_variants_of_two_cards_side_by_side_lie_apart_on_a_phone(tab):
    tab.set_viewport_size(PHONE)
    fill(tab, PROMPTS, seed=7, steps=4)
    make(tab)
    for chosen in (1, 2):
        number(tab, chosen).click(modifiers=["Control"])
    do(tab, "Vary strongly")
    strips = tab.locator("figure > .strip")
    expect(strips).to_have_count(2, timeout=PATIENCE)
    left, right = (strip.bounding_box() for strip in strips.all())
    assert left["x"] + left["width"] <= right["x"]
    for button in strips.get_by_role("button").all():
        assert button.bounding_box()["width"] >= 24


def test_a_card_alone_is_varied_from_its_menu(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=7, steps=4)
    make(tab)
    menu = figures(tab).nth(1)
    menu.locator("[popovertarget]").click()
    press(tab, menu.get_by_role("button", name="Vary picture 2 subtly"))
    says(tab, "Done in")
    assert prompts(tab) == ["a fox", *["a hen"] * 7]


def test_the_dock_of_a_selection_keeps_nobody_out(tab):
    fill(tab, THREE, seed=7, steps=2)
    tab.keyboard.press("Escape")
    make(tab)
    number(tab, 1).click()
    number(tab, 2).click(modifiers=["Control"])
    words = dock(tab).get_by_role("textbox")
    for phone in (False, True):
        if phone:
            tab.set_viewport_size(PHONE)
        for text in ("", "red"):
            words.fill(text)
            keeps_nobody_out(tab, None if text else "#selection")
            inside = tab.locator("#selection :visible").evaluate_all("""all => all.every((each) => {
                const { left, right, bottom } = each.getBoundingClientRect();
                return left >= 0 && right <= innerWidth && bottom <= innerHeight;
            })""")
            assert inside
            targets = dock(tab).locator("button:visible, input:visible")
            sides = targets.evaluate_all(
                "all => all.flatMap((each) => [each.offsetWidth, each.offsetHeight])"
            )
            assert min(sides) >= (44 if phone else 24)
        side = number(tab, 1).evaluate("button => [button.offsetWidth, button.offsetHeight]")
        assert min(side) >= (44 if phone else 24)


@pytest.mark.slow("draws eight pictures for a browser")
def test_two_pictures_lie_side_by_side_with_what_sets_them_apart(tab):
    fill(tab, [*THREE[:3], *[""] * 5], seed=7, steps=4)
    make(tab)
    unfold(tab, "Settings for prompt 3")
    tab.locator("#overrides-panel").get_by_label("Steps").fill("6")
    tab.keyboard.press("Escape")
    make(tab)
    shown = tab.evaluate(SOURCES)
    number(tab, 1).click()
    beside = dock(tab).get_by_role("button", name="Side by side")
    expect(beside).to_be_disabled()
    number(tab, 3).click(modifiers=["Control"])
    beside.click()
    dialog = tab.get_by_role("dialog", name="Side by side")
    rows = dialog.get_by_role("row")
    expect(rows).to_have_text(
        [
            re.compile(r"\s*".join(row))
            for row in (
                ("Picture 1", "Picture 3"),
                ("Prompt", "a fox", "an owl"),
                ("Steps", "4", "6"),
                ("Seed", "7", "9"),
            )
        ]
    )
    over, under = dialog.locator(".before"), dialog.locator("img").first
    assert [over.evaluate("image => image.src"), under.evaluate("image => image.src")] == [
        shown[0],
        shown[2],
    ]
    slider = dialog.get_by_role("slider")
    expect(slider).to_be_focused()
    edge = "pair => getComputedStyle(pair).getPropertyValue('--at')"
    tab.keyboard.press("ArrowLeft")
    assert dialog.locator(".pair").evaluate(edge) == "49%"
    room = dialog.locator(".pair").bounding_box()
    tab.mouse.move(room["x"] + room["width"] / 2, room["y"] + 100)
    tab.mouse.down()
    tab.mouse.move(room["x"] + room["width"] / 4, room["y"] + 100, steps=3)
    tab.mouse.up()
    assert 20 < int(dialog.locator(".pair").evaluate(edge).rstrip("%")) < 30
    expect(dialog.get_by_role("button")).to_have_text(["Close"])
    assert violations(tab, "dialog[open]") == []
    tab.keyboard.press("Escape")
    expect(beside).to_be_focused()
    assert chosen(tab) == [1, 3], "Escape has closed the dialog alone"
    number(tab, 2).click(modifiers=["Control"])
    beside.click()
    expect(rows.first).to_contain_text("Picture 2")
    dialog.get_by_role("button", name="Next picture").click()
    expect(rows.first).to_contain_text("Picture 3")
    dialog.get_by_role("button", name="Next picture").click()
    expect(rows.first).to_contain_text("Picture 2")
    expect(rows.first).to_contain_text("Picture 1")


def test_seven_choices_by_arrow_keys_find_the_best_of_eight_and_keep_it(drawn):
    shown = drawn.evaluate(SOURCES)
    number(drawn, 3).click()  # one alone leaves no choice: it is from all
    press_tool = tools(drawn).get_by_role("button", name="Pick the best")
    press_tool.click()
    dialog = drawn.get_by_role("dialog", name="Pick the best")
    sources = "all => all.map((image) => image.src)"
    assert dialog.locator("img").evaluate_all(sources) == shown[:2]
    expect(dialog).to_contain_text("Choice 1 of 7")
    assert violations(drawn, "dialog[open]") == []
    drawn.keyboard.press("ArrowRight")
    assert dialog.locator("img").evaluate_all(sources) == [shown[2], shown[1]]
    for _ in range(4):
        drawn.keyboard.press("ArrowRight")
    expect(dialog).to_contain_text("Choice 6 of 7")
    dialog.get_by_role("button", name="7: ").click()
    expect(dialog).to_contain_text("Choice 7 of 7")
    assert dialog.locator("img").evaluate_all(sources) == [shown[6], shown[7]]
    drawn.keyboard.press("ArrowLeft")
    expect(dialog).to_be_hidden()
    says(drawn, "Picture 7 is kept.")
    expect(drawn.locator(".card.kept .number")).to_have_text(["7"])
    expect(view(drawn, 7)).to_be_focused()


def test_the_best_of_a_selection_takes_one_choice_less_and_may_be_left_open(drawn):
    for place in (2, 4, 6):
        number(drawn, place).click(modifiers=["Control"])
    best = dock(drawn).get_by_role("button", name="Pick the best")
    best.click()
    dialog = drawn.get_by_role("dialog", name="Pick the best")
    expect(dialog).to_contain_text("Choice 1 of 2")
    drawn.keyboard.press("Escape")
    expect(best).to_be_focused()
    expect(drawn.locator(".card.kept")).to_have_count(0)
    best.click()
    drawn.keyboard.press("ArrowLeft")
    drawn.keyboard.press("ArrowRight")
    expect(drawn.locator(".card.kept .number")).to_have_text(["6"])
    assert chosen(drawn) == []


@pytest.mark.slow("stops runs that were made slow")
def test_stop_takes_the_buttons_place_and_escape_ends_the_selection_first(tab, request):
    fill(tab, THREE, seed=7, steps=25)
    tab.keyboard.press("Escape")  # which closes the settings
    make(tab)
    request.getfixturevalue("slow_engine")
    number(tab, 2).click()
    words, change = dock(tab).get_by_role("textbox"), dock(tab).get_by_role("button", name="Change")
    words.fill("red")
    place = change.bounding_box()
    press(tab, change)
    expect(stop(tab)).to_be_enabled()
    expect(change).to_be_hidden()
    assert abs(stop(tab).bounding_box()["x"] - place["x"]) < 2
    expect(words).to_be_focused()
    tab.keyboard.press("Escape")
    assert chosen(tab) == []
    expect(stop(tab)).to_be_enabled()
    stop(tab).press("Escape")
    says(tab, "Stopped")
    assert prompts(tab)[1] == "a hen, red"
