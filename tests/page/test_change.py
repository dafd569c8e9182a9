"""Say the change: a card's picture is drawn anew, as somebody says, from itself."""

from playwright.sync_api import Locator, Page

from sd_tpu.pictures.inputs import Input
from tests.support.pages import made_from, picture_file, served
from tests.support.visitor import (
    PATIENCE,
    PHONE,
    box,
    expect,
    figures,
    fill,
    generate,
    keeps_nobody_out,
    make,
    more,
    newcomer,
    of_all,
    press,
    prompts,
    says,
    seed_box,
    setting,
    violations,
)

SOURCES = "() => [...document.querySelectorAll('#cards img')].map((image) => image.src)"
THREE = ["a fox", "a hen", "an owl", *[""] * 5]


def sources(tab: Page) -> list[str]:
    return tab.evaluate(SOURCES)


def line(tab: Page) -> Locator:
    return tab.get_by_role("form", name="Say the change")


def words(tab: Page) -> Locator:
    return line(tab).get_by_role("textbox", name="Say the change")


def say(tab: Page, number: int, text: str) -> None:
    """Open the line by its key, write, and press Enter; wait for the picture."""
    tab.get_by_role("button", name=f"View picture {number}").focus()
    tab.keyboard.press("c")
    expect(words(tab)).to_be_focused()
    tab.keyboard.type(text)
    tab.locator("#line p").evaluate("line => { line.textContent = '' }")
    tab.keyboard.press("Enter")
    says(tab, "Done in")


def drawn(tab: Page, number: int) -> str:
    """Return the name of a card's picture, once it is handed in."""
    return Input(picture_file(tab, number)).name


def test_one_card_is_drawn_anew_from_its_picture_and_undo_brings_all_of_it_back(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    before, start, asked = sources(tab), drawn(tab, 2), made_from(tab, 2)
    say(tab, 2, "at night r k 1 ?")
    expect(line(tab)).to_be_hidden()
    after, made = sources(tab), made_from(tab, 2)
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, True, False]
    assert (made.prompt, made.init_image) == ("a hen, at night r k 1 ?", start)
    assert (made.seed, made.strength, made.steps) == (asked.seed, 0.5, 4)
    assert (
        prompts(tab)[:3] == ["a fox", made.prompt, "an owl"] and seed_box(tab).input_value() == "7"
    )
    expect(tab.locator(".below .overrides").nth(1)).to_contain_text("strength 0.5")
    expect(tab.get_by_role("button", name="View picture 2")).to_be_focused()
    generate(tab).click()
    says(tab, "These pictures are here already")  # the box asks for what is there
    tab.get_by_role("button", name="View picture 2").press("Enter")
    expect(tab.get_by_role("slider", name="Before and after")).to_be_visible()
    tab.keyboard.press("Escape")
    tab.locator("#undo").click()
    tab.wait_for_function(f"before => String(({SOURCES})()) === String(before)", arg=before)
    assert prompts(tab) == THREE
    expect(tab.locator(".below .overrides").nth(1)).to_be_empty()
    tab.locator("#redo").click()
    tab.wait_for_function(f"after => String(({SOURCES})()) === String(after)", arg=after)
    assert prompts(tab)[1] == made.prompt
    say(tab, 2, "in snow")
    assert made_from(tab, 2).prompt == f"{made.prompt}, in snow"


def test_two_changes_one_upon_the_other_both_stay(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    tab.evaluate("""() => {
        for (const place of [0, 1]) {
            document.querySelectorAll(".actions > [data-do=change]")[place].click();
            document.querySelector("#change [name=words]").value = `red ${place}`;
            document.querySelector("#change").requestSubmit();
        }
    }""")
    expect(box(tab, 2)).to_have_value("a hen, red 1")
    says(tab, "Done in")
    assert prompts(tab)[:3] == ["a fox, red 0", "a hen, red 1", "an owl"]
    assert [made_from(tab, number).prompt for number in (1, 2, 3)] == prompts(tab)[:3]


def test_the_slider_says_how_much_and_a_random_seed_stays_so(tab):
    fill(tab, THREE, seed=-1, steps=4)
    make(tab)
    press(tab, figures(tab).first.locator(".actions > [data-do=redraw]"))
    says(tab, "Done in")  # with a seed that is no other box's
    seed = made_from(tab, 1).seed
    figures(tab).first.hover()
    figures(tab).first.locator(".actions").get_by_role("button", name="Change picture 1").click()
    line(tab).get_by_role("slider", name="How much changes").fill("0.8")
    words(tab).fill("red")
    line(tab).get_by_role("button", name="Change").click()
    says(tab, "Done in")
    made = made_from(tab, 1)
    assert (made.prompt, made.strength, made.seed) == ("a fox, red", 0.8, seed)
    assert seed_box(tab).input_value() == "-1"
    form = tab.evaluate(
        "Object.values(localStorage).map(JSON.parse).find((each) => each.form).form"
    )
    assert "seed" not in form["overrides"][0] and form["overrides"][1:] == [{}] * 7


def test_a_picture_is_changed_full_screen_and_the_new_one_takes_its_place(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    viewer, shown = tab.locator("#viewer"), tab.locator("#viewer img").first
    tab.get_by_role("button", name="View picture 2").press("Enter")
    before = shown.get_attribute("src")
    tab.keyboard.press("c")
    said = viewer.get_by_role("textbox", name="Say the change")
    expect(said).to_be_focused()
    tab.keyboard.type("big b c")
    tab.keyboard.press("ArrowLeft")  # within the words
    assert shown.get_attribute("src") == before
    viewer.get_by_role("slider", name="How much changes").fill("0.7")
    said.press("Enter")
    expect(shown).not_to_have_attribute("src", before, timeout=PATIENCE)
    expect(viewer.locator(".words")).to_contain_text("a hen, big b c")
    expect(viewer.get_by_role("slider", name="Before and after")).to_be_visible()
    assert violations(tab, "#viewer") == []
    tab.keyboard.press("Escape")
    says(tab, "Done in")
    made = made_from(tab, 2)
    assert (made.prompt, made.strength) == ("a hen, big b c", 0.7)


def test_escape_loses_nothing_and_neither_does_what_is_refused(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    before = sources(tab)
    tab.get_by_role("button", name="View picture 3").focus()
    tab.keyboard.press("c")
    tab.keyboard.type("half a though")
    tab.keyboard.press("Escape")
    expect(line(tab)).to_be_hidden()
    expect(tab.get_by_role("button", name="View picture 3")).to_be_focused()
    assert (sources(tab), prompts(tab)) == (before, THREE)
    tab.keyboard.press("c")
    expect(words(tab)).to_have_value("half a though")
    tab.keyboard.type(" ")  # in place of what was written
    tab.keyboard.press("Control+Enter")
    says(tab, "Say what should change, in a few words.")
    expect(words(tab)).to_be_focused()
    words(tab).fill("x" * 4001)
    tab.keyboard.press("Enter")
    says(tab, "at most 4000 are accepted")
    expect(words(tab)).to_have_value("x" * 4001)
    line(tab).get_by_role("button", name="Close").click()
    assert (sources(tab), prompts(tab)) == (before, THREE)


def test_settings_that_have_changed_since_are_those_of_the_picture_in_its_box(tab):
    fill(tab, THREE, seed=7, steps=4)
    make(tab)
    box(tab, 1).fill("something else")
    setting(tab, "Steps").fill("6")
    seed_box(tab).fill("50")
    tab.keyboard.press("Escape")
    say(tab, 2, "red")
    made = made_from(tab, 2)
    assert (made.prompt, made.steps, made.seed) == ("a hen, red", 4, 8)
    assert prompts(tab)[:2] == ["something else", "a hen, red"]
    make(tab)
    assert made_from(tab, 2) == made, "its box asks for just that"
    assert (made_from(tab, 1).steps, made_from(tab, 3).seed) == (6, 52)


def test_what_one_prompt_has_filled_stays_when_that_is_changed(tab):
    fill(tab, ["a {red|blue|green} fox", *[""] * 7], seed=7, steps=4)
    make(tab)
    before = sources(tab)
    say(tab, 1, "at {night|night}")
    assert prompts(tab) == ["a red fox, at night", "a blue fox", "a green fox", *[""] * 5]
    assert sources(tab)[1:] == before[1:]


def test_history_and_link_carry_what_was_drawn(visitor, page_engine, tmp_path):
    with served(page_engine, tmp_path) as address, newcomer(visitor, address) as tab:
        fill(tab, THREE, seed=7, steps=4)
        make(tab)
        say(tab, 2, "red")
        assert "a+hen%2C+red" in (of_all(tab).get_attribute("data-link") or "")
        tab.get_by_role("button", name="History", exact=True).click()
        found = tab.locator("#history-panel").get_by_role("button", name="View “a hen, red”")
        expect(found.first).to_be_visible(timeout=PATIENCE)


def test_the_line_keeps_nobody_out_and_lies_within_the_window(tab):
    fill(tab, THREE, seed=7, steps=2)
    tab.keyboard.press("Escape")
    make(tab)
    for phone in (False, True):
        if phone:
            tab.set_viewport_size(PHONE)
        for number in (1, 2):
            if phone:
                more(tab, number).get_by_role("button", name=f"Change picture {number}").click()
            else:
                figures(tab).nth(number - 1).locator(".actions > [data-do=change]").click()
            expect(words(tab)).to_be_focused()
            if number == 1:
                keeps_nobody_out(tab)
            within = line(tab).evaluate("""line => {
                const { left, right } = line.getBoundingClientRect();
                return left >= 0 && right <= document.documentElement.clientWidth;
            }""")
            assert within
            sides = (
                line(tab)
                .locator("> *, button")
                .evaluate_all("all => all.map(each => each.offsetHeight)")
            )
            assert min(sides) >= (44 if phone else 24)
            tab.keyboard.press("Escape")
            expect(line(tab)).to_be_hidden()
