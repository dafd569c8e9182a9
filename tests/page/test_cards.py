"""What a card does on its own: it is kept, varied, drawn again where something has changed."""

import dataclasses
import itertools
import json
import re
from functools import partial

import pytest

from sd_tpu import BUNDLED_MODEL
from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.language import ENGLISH
from sd_tpu.page.layout import example
from sd_tpu.page.parts import part
from sd_tpu.pictures.images import read_png
from tests.support.pages import made_from, picture_file, settings_png
from tests.support.visitor import (
    LONG,
    PATIENCE,
    PHONE,
    PROMPTS,
    alts,
    box,
    expect,
    figures,
    fill,
    generate,
    make,
    more,
    press,
    prompts,
    says,
    seed_box,
    setting,
    stop,
    unfold,
    violations,
)

SOURCES = "() => [...document.querySelectorAll('#cards img')].map((image) => image.src)"


def sources(tab) -> list[str]:
    return tab.evaluate(SOURCES)


def new(before: list[str], after: list[str]) -> list[int]:
    """The places whose picture is another."""
    return [index for index, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1]


def done(tab) -> None:
    """Waits until eight pictures are there and nothing goes on."""
    expect(tab.locator("figure.done")).to_have_count(8, timeout=PATIENCE)
    expect(stop(tab)).to_be_disabled(timeout=PATIENCE)


def keep(tab, number: int) -> None:
    button = tab.get_by_role("button", name=f"Keep picture {number}")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")


def test_generate_leaves_kept_cards_alone_also_after_a_reload(tab):
    fill(tab, PROMPTS, seed=-1)
    make(tab)
    keep(tab, 2)
    keep(tab, 5)
    box(tab, 2).fill("something else")
    before = sources(tab)
    tab.reload()
    done(tab)
    expect(tab.get_by_role("button", name="Keep picture 5")).to_have_attribute(
        "aria-pressed", "true"
    )
    make(tab)
    assert new(before, sources(tab)) == [0, 2, 3, 5, 6, 7]
    assert alts(tab)[1] == PROMPTS[1], "the picture is that of its own prompt"


def test_only_what_has_changed_is_drawn_where_the_seed_is_fixed(tab, page_engine, monkeypatch):
    fill(tab, PROMPTS, seed=3)
    make(tab)
    before, drawn, submit = sources(tab), [], page_engine.submit
    monkeypatch.setattr(
        page_engine,
        "submit",
        lambda request, **options: (drawn.append(request.indices()), submit(request, **options))[1],
    )
    generate(tab).click()
    says(tab, "These pictures are here already: choose a new seed to draw others.")
    box(tab, 4).fill("another")
    make(tab)
    done(tab)
    assert new(before, sources(tab)) == [3] and drawn == [[3]]


def test_vary_draws_at_once_and_undo_brings_prompts_and_pictures_back(tab):
    fill(tab, PROMPTS, seed=40)
    make(tab)
    keep(tab, 8)
    before = sources(tab)
    tab.get_by_role("button", name="Vary picture 2").click()
    expect(box(tab, 1)).to_have_value(PROMPTS[1])
    says(tab, "Done in")
    done(tab)
    varied = sources(tab)
    assert new(before, varied) == [0, 2, 3, 4, 5, 6]
    assert prompts(tab) == [PROMPTS[1]] * 7 + [PROMPTS[7]]
    seeds = figures(tab).locator(".seed").all_inner_texts()
    assert len({*seeds}) == 8 and (seeds[1], seeds[7]) == ("Seed 41", "Seed 47")
    tab.locator("#undo").click()
    expect(box(tab, 1)).to_have_value(PROMPTS[0])
    tab.wait_for_function(f"before => String(({SOURCES})()) === String(before)", arg=before)
    assert alts(tab) == PROMPTS and prompts(tab) == PROMPTS
    tab.locator("#redo").click()
    tab.wait_for_function(f"varied => String(({SOURCES})()) === String(varied)", arg=varied)
    assert prompts(tab) == [PROMPTS[1]] * 7 + [PROMPTS[7]]


def test_each_drawing_is_a_step_of_its_own(tab):
    undo = tab.locator("#undo")
    fill(tab, PROMPTS, seed=40)
    make(tab)
    first = sources(tab)
    expect(undo).to_be_disabled()  # the examples are no pictures of a run
    for seed in ("50", "60"):
        seed_box(tab).fill(seed)
        make(tab)
    last = sources(tab)
    undo.click()
    says(tab, "seed 50")  # of the run that is shown again, after what undo says of the boxes
    others = f"last => ({SOURCES})().every((source) => !last.includes(source))"
    tab.wait_for_function(others, arg=last)
    second = sources(tab)
    undo.click()
    tab.wait_for_function(f"first => String(({SOURCES})()) === String(first)", arg=first)
    assert not {*second} & {*first}
    for then in (second, last):
        tab.locator("#redo").click()
        tab.wait_for_function(f"then => String(({SOURCES})()) === String(then)", arg=then)


def test_a_step_forth_at_once_leads_back_to_where_the_step_back_began(tab):
    fill(tab, PROMPTS, seed=40)
    make(tab)
    tab.get_by_role("button", name="Vary picture 2").click()
    says(tab, "Done in")
    done(tab)
    varied, run = sources(tab), tab.locator("#line p").get_attribute("data-run")
    held = []  # the request to show the run before, which is not answered yet

    def shows(request, run=""):
        asked = request.post_data or ""
        return '"do":"show"' in asked and f'"shown":"{run}' in asked

    def hold(route):
        held.append(route) if not held and shows(route.request) else route.continue_()

    tab.route(re.compile("component_server"), hold)
    tab.locator("#undo").click()
    expect(box(tab, 1)).to_have_value(PROMPTS[0])
    tab.locator("#redo").click()
    expect(box(tab, 1)).to_have_value(PROMPTS[1])
    # It is asked for, though its pictures have never gone.
    with tab.expect_response(lambda answer: shows(answer.request, run)):
        held[0].continue_()
    tab.wait_for_function(f"varied => String(({SOURCES})()) === String(varied)", arg=varied)
    assert prompts(tab) == [PROMPTS[1]] * 8


@pytest.mark.slow("compiles another size")
def test_larger_draws_one_picture_again_at_twice_its_size_and_undo_brings_it_back(tab, tmp_path):
    fill(tab, PROMPTS, seed=3, steps=5)
    make(tab)
    small, undo = sources(tab), tab.get_by_role("button", name="Undo")
    press(tab, more(tab, 3).get_by_role("button", name="Larger: draw picture 3"))
    says(tab, "Done in")
    large = sources(tab)
    assert new(small, large) == [2] and prompts(tab) == PROMPTS
    expect(figures(tab).nth(2)).to_contain_text("64")
    label, head = (
        figures(tab)
        .nth(2)
        .evaluate("""figure => [
        figure.querySelector(".facts").getBoundingClientRect().bottom,
        figure.querySelector("img").getBoundingClientRect().top]""")
    )
    assert label <= head + 0.5, "the label lies over the picture"
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download picture 3").click()
    download.value.save_as(tmp_path / "large.png")
    made = read_png(tmp_path / "large.png").pictures[0]
    assert (made.width, made.height, made.seed, made.steps, made.strength) == (64, 64, 5, 5, 0.4)
    tab.get_by_role("button", name="View picture 3").press("Enter")
    dialog = tab.get_by_role("dialog")
    expect(dialog.get_by_role("slider", name="Before and after")).to_be_visible()
    dialog.get_by_role("button", name="Draw larger").click()
    expect(figures(tab).nth(2)).to_contain_text("128", timeout=PATIENCE)  # by tiles
    says(tab, "Done in")
    assert new(large, sources(tab)) == [2]
    undo.click()
    tab.wait_for_function(
        f"before => JSON.stringify(({SOURCES})()) === before",
        arg=json.dumps(large).replace(", ", ","),
        timeout=PATIENCE,
    )
    undo.click()
    tab.wait_for_function(
        f"before => JSON.stringify(({SOURCES})()) === before",
        arg=json.dumps(small).replace(", ", ","),
        timeout=PATIENCE,
    )
    tab.get_by_role("button", name="Redo").click()
    tab.wait_for_function(
        f"before => JSON.stringify(({SOURCES})()) === before",
        arg=json.dumps(large).replace(", ", ","),
        timeout=PATIENCE,
    )


def test_nothing_lies_over_a_picture_that_nobody_points_at(tab):
    fill(tab, PROMPTS)
    make(tab)
    tab.mouse.move(0, 0)
    figure = figures(tab).nth(1)
    said = [figure.locator(".facts"), figure.locator(".actions")]
    for each in said:
        expect(each).to_have_css("opacity", "0")
    figure.hover()
    for each in said:
        expect(each).to_have_css("opacity", "1")
    tab.mouse.move(0, 0)
    figure.locator(".actions > [data-do=redraw]").focus()
    for each in said:
        expect(each).to_have_css("opacity", "1")


INSIDE = """menu => {
    const { left, right, top, bottom } = menu.getBoundingClientRect();
    return left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight;
}"""


def test_nothing_of_the_dock_is_cut_off_or_covered_on_a_phone(tab):
    for width in (320, 360, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        for time in ("38 s", "3 min 20 s"):
            tab.locator("#generate small").evaluate(
                "(small, time) => { small.innerText = time }", time
            )
            sides = tab.locator("#presets button, #generate").evaluate_all(
                "all => all.map(each => each.getBoundingClientRect())"
                ".map(({left, right, top}) => [left, right, top])"
            )
            assert len(sides) == 4 and max(sides)[1] <= width
            for (_, right, one), (left, _, other) in itertools.pairwise(sorted(sides)):
                assert right <= left and abs(one - other) < 4, "they stand in one row"
            assert tab.locator("#bar").bounding_box()["height"] <= 124  # --dock


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.slow("opens many menus in a browser")
def test_what_is_done_less_often_is_behind_one_button(tab, slow_engine, phone):
    fill(tab, PROMPTS, steps=2)
    make(tab)
    if phone:
        tab.set_viewport_size(PHONE)
    button = tab.get_by_role("button", name="More for picture 2", exact=True)
    least = button.evaluate("button => button.offsetHeight")
    assert least >= (44 if phone else 24)
    for number in (1, 2, 8):
        menu = more(tab, number)
        often = ("Redraw", "Change", "Vary", "Keep") if phone else ()
        seldom = ("Larger", "Journey", "Use", "Again", "Vary subtly", "Vary strongly")
        expect(menu.get_by_role("button")).to_have_text(
            [re.compile(f"^{word}") for word in (*often, *seldom)]
        )
        expect(menu.get_by_role("link")).to_have_count(1 if phone else 0)
        assert menu.evaluate(INSIDE)
        rows = menu.locator("> *:visible").evaluate_all("all => all.map(row => row.offsetHeight)")
        assert min(rows) >= (44 if phone else 40)
    assert violations(tab) == []
    tab.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    button.press("Enter")
    tab.keyboard.press("Tab")
    name = "Redraw picture 2" if phone else "Larger: draw picture 2"
    expect(tab.get_by_role("button", name=name)).to_be_focused()
    tab.keyboard.press("Escape")
    setting(tab, "Steps").fill(str(LONG))
    tab.keyboard.press("Escape")  # which closes the settings
    redraw = more(tab, 1) if phone else figures(tab).first
    redraw.get_by_role("button", name="Redraw picture 1").click()
    says(tab, "Step")
    button.press("Enter")
    tab.keyboard.press("Escape")  # which closes the menu and stops nothing
    expect(button).to_be_focused()
    expect(stop(tab)).to_be_enabled()
    tab.keyboard.press("Escape")
    says(tab, "Stopped")


def test_generate_answers_in_the_browser_and_stop_counts_before_the_server_does(tab, slow_engine):
    while slow_engine.jobs():  # of pages that have been closed before
        tab.wait_for_timeout(100)
    fill(tab, PROMPTS, steps=LONG)
    told = tab.evaluate("""() => {
        document.querySelector("#generate").click();
        const told = [document.querySelector("#line p").textContent,
            document.querySelectorAll("figure.asked").length];
        document.querySelector("#stop").disabled = false;
        document.querySelector("#stop").click();
        return told;
    }""")
    assert told == ["Starting…", 8], "not before the server was asked"
    says(tab, "Stopped")
    assert not slow_engine.jobs()


def test_a_wrong_field_is_shown_and_marked_until_it_is_right(tab):
    for label, value, sentence in (
        ("Steps", "x", "Steps should be a whole number, not 'x'."),
        ("Seed", "seven", "Seed should be a whole number, not 'seven'."),
        ("Cache interval", "30", "Cache interval should be from 1 to 10, not 30."),
    ):
        field = setting(tab, label)
        field.fill(value)
        tab.keyboard.press("Escape")
        tab.locator("#settings-panel .expert").evaluate("expert => { expert.open = false }")
        generate(tab).click()
        says(tab, sentence)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_be_focused()
        expect(field).to_be_in_viewport()
        field.fill("5")
        says(tab, "Ready")
        expect(tab.locator("[aria-invalid]")).to_have_count(0)
        field.fill(value)
        press(tab, generate(tab))
        says(tab, sentence)
        expect(tab.locator("#line p")).to_have_count(1)
        field.fill("5")
        says(tab, "Ready")


def test_a_wrong_field_of_a_single_box_is_shown_in_its_panel(tab):
    unfold(tab, "Settings for prompt 3")
    steps = tab.locator("#overrides-panel").get_by_label("Steps")
    steps.fill("900")
    tab.keyboard.press("Escape")
    unfold(tab, "Settings for prompt 1")
    tab.keyboard.press("Escape")
    generate(tab).click()
    says(tab, "Steps of prompt 3 should be from 1 to 200, not 900.")
    expect(tab.get_by_role("group", name="Settings for prompt 3")).to_be_visible()
    expect(steps).to_have_value("900")
    expect(steps).to_have_attribute("aria-invalid", "true")


def test_a_run_that_ends_during_a_reload_says_so(tab, page_engine, may_draw):
    fill(tab, ["first", *[""] * 7])
    generate(tab).click()
    says(tab, re.compile("Step|Starting"))
    run = tab.locator("#collection [data-run]")
    expect(run).not_to_have_attribute("data-run", "", timeout=PATIENCE)
    address = tab.url
    tab.goto("about:blank")
    may_draw.set()
    while page_engine.jobs():
        tab.wait_for_timeout(50)
    tab.goto(address)
    says(tab, "Done in")
    tab.reload()
    expect(tab.locator("figure.done")).to_have_count(1, timeout=PATIENCE)
    assert "Done" not in tab.locator("#line").inner_text(), "by now that is old news"


def test_a_file_that_is_dropped_beside_its_zone_is_read(tab):
    tab.evaluate(
        """(bytes) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "beside.png", { type: "image/png" }));
        const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
        window.taken = !document.querySelector("#cards").dispatchEvent(drop);
    }""",
        [*settings_png()],
    )
    assert tab.evaluate("window.taken"), "the browser would open it"
    says(tab, "of beside.png are in the boxes.")
    expect(seed_box(tab)).to_have_value("31")


def test_presets_set_the_steps_and_show_which_of_them_is_set(tab):
    presets = tab.locator("#presets")
    for name, steps in (("Draft", "10"), ("Balanced", "20"), ("Fine", "40")):
        presets.get_by_role("button", name=name).click()
        expect(setting(tab, "Steps")).to_have_value(steps)
        expect(presets.locator("[aria-pressed=true]")).to_have_text([name])
    setting(tab, "Steps").fill("7")
    expect(presets.locator("[aria-pressed=true]")).to_have_count(0)


def test_the_bundled_model_offers_examples_and_words_that_it_knows():
    card = ModelCard.read(BUNDLED_MODEL, "bundled")
    offered = [word for words in card.themes.values() for word in words]
    assert list(card.themes) == "animals food nature vehicles things colours styles".split()
    assert len(offered) > 200 and card.unknown_words(" ".join(offered)) == []
    shown = part("chips", ENGLISH, card.themes)
    assert all(f'data-do="word">{word}<' in shown for word in offered)
    folder = BUNDLED_MODEL / "examples"
    for index, prompt in enumerate(card.prompts):
        shown = part("figure", ENGLISH, example(folder, index, prompt), (256, 256))
        assert f'alt="{prompt}"' in shown and "data:image/webp" in shown
        assert ">Example<" in shown and "data-do" not in shown
    assert example(folder, 8, "none").state == "blank"


def test_a_prompt_that_stands_for_several_fills_the_empty_boxes_and_stays(tab):
    template = "a {red|green|blue} fox"
    fill(tab, [template, "", "", "", "a dog", "", "", ""], seed=3)
    expect(tab.locator(".remark").nth(1)).to_have_text("For example: “a green fox”")
    expect(tab.locator(".remark").nth(3)).to_be_empty()
    make(tab)
    assert alts(tab) == ["a red fox", "a green fox", "a blue fox", "a dog"]
    assert prompts(tab) == [template, "", "", "", "a dog", "", "", ""]
    words = tab.locator("figure .words")
    expect(words.nth(2)).to_have_text("a blue fox")  # which its box does not say
    assert [each.bounding_box()["width"] > 9 for each in words.all()] == [True] * 3 + [False]
    assert read_png(picture_file(tab, 2)).prompts == ("a green fox",)
    generate(tab).click()
    says(tab, "These pictures are here already: choose a new seed to draw others.")
    box(tab, 1).fill("{2$$a|b}")
    generate(tab).click()
    says(tab, "Prompt 1 has a sign that is not known here: 2$$")
    expect(box(tab, 1)).to_have_attribute("aria-invalid", "true")


def test_a_prompt_is_completed_by_keys_or_a_tap_and_favourites_are_offered(tab):
    fill(tab, ["a red fox", *[""] * 7], seed=3)
    make(tab)
    offered = tab.locator("#suggestions").get_by_role("option")
    second, third, last = (box(tab, number) for number in (2, 3, 8))
    second.press_sequentially("in __C")
    expect(offered).to_have_text(["__colour__"])
    expect(tab.locator("#news")).to_have_text("Suggestions: 1")
    assert violations(tab) == []
    second.press("ArrowDown")
    expect(second).to_have_attribute("aria-activedescendant", offered.get_attribute("id"))
    expect(offered).to_have_attribute("aria-selected", "true")
    second.press("Enter")
    expect(second).to_have_value("in __colour__")
    expect(second).to_be_focused()
    expect(offered).to_have_count(0)
    third.press_sequentially("a r")
    expect(offered).to_have_text(["a red fox"])
    third.press("Escape")
    expect(offered).to_have_count(0)
    third.press_sequentially("e")
    expect(offered).to_have_text(["a red fox"])
    third.press("Home")  # it goes on from elsewhere no longer
    expect(offered).to_have_count(0)
    third.press("ArrowDown")
    third.press("End")
    third.press("Backspace")
    third.press_sequentially("e")
    offered.click()
    expect(third).to_have_value("a red fox")
    expect(third).to_be_focused()
    tab.get_by_role("button", name="Bookmark prompt 2").click()
    tab.reload()
    mark = tab.get_by_role("button", name="Bookmark prompt 2")
    expect(mark).to_have_attribute("aria-pressed", "true")
    last.focus()
    expect(offered).to_have_text(["in __colour__"])
    last.press("Tab")
    expect(offered).to_have_count(0)
    mark.click()
    expect(mark).to_have_attribute("aria-pressed", "false")
    last.focus()
    expect(offered).to_have_count(0)


def test_a_draft_is_finished_with_its_seed_by_its_sign_by_a_key_or_with_all_that_are_kept(tab):
    fill(tab, ["a fox", "a hen", "an owl", *[""] * 5], seed=7, steps=2)
    make(tab)
    signs = tab.get_by_role("button", name="Finish picture")
    expect(signs).to_have_count(3)
    drafts = [made_from(tab, number) for number in (1, 2, 3)]

    def finish(press) -> None:
        tab.locator("#line p").evaluate("line => { line.textContent = '' }")
        press()
        says(tab, "Done in")

    finish(signs.first.click)
    expect(signs).to_have_count(2)
    finished = [made_from(tab, number) for number in (1, 2, 3)]
    assert finished == [dataclasses.replace(drafts[0], steps=40), *drafts[1:]]
    generate(tab).click()
    says(tab, "These pictures are here already")  # the box asks for what is there
    tab.get_by_role("button", name="View picture 2").focus()
    finish(partial(tab.keyboard.press, "f"))
    expect(signs).to_have_count(1)
    kept = tab.locator("#finish")
    expect(kept).to_be_hidden()
    for number in (2, 3):  # of which one is finished already
        tab.get_by_role("button", name=f"View picture {number}").focus()
        tab.keyboard.press("k")
    expect(kept).to_have_text("Finish 1")
    finish(kept.click)
    expect(signs).to_have_count(0)
    expect(kept).to_be_hidden()
    assert made_from(tab, 3) == dataclasses.replace(drafts[2], steps=40)
    tab.locator("#undo").click()
    expect(signs).to_have_count(1)
