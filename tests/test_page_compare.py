"""A comparison: one prompt, one thing that changes, eight labelled pictures at once."""

import dataclasses
import re

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import expect
from visitor import (
    PATIENCE,
    PROMPTS,
    alts,
    box,
    figures,
    fill,
    make,
    newcomer,
    press,
    prompts,
    says,
    seed_box,
    setting,
    unfold,
)

from sd_tpu.images import BLANK, read_png
from sd_tpu.page.compare import check_values, comparison, parse_values, suggested
from sd_tpu.page.labels import named, words
from sd_tpu.page.texts import ENGLISH
from sd_tpu.request import MAX_SEED, Own, Request, RequestError, Settings
from sd_tpu.samplers import SAMPLERS

EIGHT = ["PNDM (PLMS)", "DPM++ 2M", "DPM++ 2M SDE", "Euler", "Euler ancestral", "Heun", "DDIM",
         "UniPC"]


# --- what is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "values"), [
    ("4, 6,8 10;15\n20", [4, 6, 8, 10, 15, 20]),
    ("1.5، 2，3、3 1.5", [1.5, 2, 3]),
    ("4, lots", [4, "lots"]),
    (" , ", []),
])
def test_values_are_read_as_people_write_lists(text, values):
    assert parse_values(text) == values


@pytest.mark.parametrize(("values", "sentence"), [
    ([], "There is nothing to compare yet: give up to 8 values."),
    (list(range(9)), "There are 9 values to compare; at most 8 fit."),
])
def test_no_value_and_too_many_are_answered_in_a_sentence(values, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)):
        check_values(values)


@pytest.mark.parametrize("defaults", [
    Settings(), Settings(steps=4, guidance=1.0, sampler="lcm"), Settings(steps=200, guidance=50.0),
])
@pytest.mark.parametrize("what", ["sampler", "steps", "guidance", "guidance_stop",
                                  "cache_interval", "seed"])
def test_what_is_suggested_can_be_made_and_has_the_models_own_among_it(what, defaults):
    values = suggested(what, defaults, MAX_SEED - 3)
    made = comparison(Request.check({"prompts": ["a"], "seed": 5}, defaults), what, values,
                      defaults)
    assert 5 <= len(values) == len(set(values)) == len(made.places()) <= 8
    assert what == "seed" or getattr(defaults, what) in values


def test_suggested_steps_and_seeds():
    assert suggested("steps", Settings(), None) == [4, 6, 8, 10, 15, 20, 30, 50]
    assert suggested("seed", Settings(), MAX_SEED) == [MAX_SEED, *range(7)]
    assert suggested("seed", Settings(), -1) != suggested("seed", Settings(), None)


def test_a_comparison_has_the_first_picture_in_all_places_but_for_one_thing():
    asked = Request.check({
        "prompts": ["", "a", "b"], "seed": 7, "sampler": "heun", "spacing": "karras",
        "negative_prompt": "no", "own": [None, {"guidance": 2, "negative_prompt": ""}],
    }, Settings())
    made = comparison(asked, "steps", [5, 20, 9], Settings())
    first = asked.only(1)
    assert [made.only(place) for place in made.places()] == [
        dataclasses.replace(first, steps=steps) for steps in (5, 20, 9)]
    assert [words(named(made, place), ENGLISH) for place in made.places()] == [
        "5 steps", "20 steps", "9 steps"]


def test_a_comparison_of_seeds_has_no_other_seed_than_those():
    made = comparison(Request(prompts=("a",), seed=7), "seed", [3, 8, 100], Settings())
    assert [made.image_seed(place) for place in range(3)] == [3, 8, 100]
    assert made.own == (Own(seed=3), None, Own(seed=100))
    assert [words(named(made, place), ENGLISH) for place in range(3)] == [
        "seed 3", "seed 8", "seed 100"]


@pytest.mark.parametrize(("what", "values", "sentence"), [
    ("steps", [4, "lots"], "Steps should be a whole number, not 'lots'"),
    ("guidance_stop", [1, 0.5], "Guidance should start before it stops, not start at 0.6"),
    ("sampler", ["ddim", "dream"], "Sampler 'dream' is unknown"),
])
def test_a_value_that_cannot_be_served_is_named_without_a_box(what, values, sentence):
    asked = Request(prompts=("a",), sampler="dpmpp_2m", spacing="karras", guidance_start=0.6)
    with pytest.raises(RequestError, match=f"^{re.escape(sentence)}"):
        comparison(asked, what, values, Settings())


# --- on the page --------------------------------------------------------------------------------


def compare(tab, what=None, values=None):
    unfold(tab, "Compare")
    if what:
        tab.get_by_role("radio", name=what, exact=True).check()
        expect(tab.get_by_label("Values, up to eight")).to_be_visible(timeout=PATIENCE)
    if values is not None:
        tab.get_by_label("Values, up to eight").fill(values)
    press(tab, tab.get_by_role("button", name="Draw the comparison"))


def labels(tab):
    return figures(tab).locator("b")


def test_samplers_are_compared_in_one_go_and_nothing_is_compiled(tab, page_engine, tmp_path):
    fill(tab, ["", *PROMPTS[1:]], seed=5, steps=3)
    make(tab)
    before = dict(page_engine.programs.traces)
    compare(tab)
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(EIGHT)
    assert page_engine.programs.traces == before == {"encode": 1, "advance": 1, "decode": 1}
    assert prompts(tab) == [PROMPTS[1]] * 8
    assert alts(tab) == [f"{label}: {PROMPTS[1]}" for label in EIGHT]
    for place in range(8):
        expect(figures(tab).nth(place)).to_contain_text("Seed 6")
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Download as one picture").click()
    download.value.save_as(tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        grid = np.asarray(image)
    assert grid.shape == (2 * (256 + 26), 4 * 256, 3), "narrow pictures are enlarged"
    for row in (256, 2 * 256 + 26):
        for column in range(0, 1024, 256):
            band = grid[row:row + 26, column:column + 256]
            assert (band == BLANK).any() and (band < 128).any(), "a label is missing"
    asked = read_png(tmp_path / "grid.png")
    assert [SAMPLERS[asked.only(place).sampler].label for place in range(8)] == EIGHT
    assert {asked.image_seed(place) for place in range(8)} == {6}


def test_accelerations_are_compared_with_the_exact_picture_first(tab, page_engine):
    fill(tab, PROMPTS, seed=5, steps=9)
    unfold(tab, "Compare")
    tab.get_by_role("radio", name="Cache interval").check()
    expect(tab.get_by_label("Values, up to eight")).to_have_value("1, 2, 3, 4, 5, 6, 8, 10")
    tab.get_by_label("Values, up to eight").fill("1, 3")
    tab.get_by_role("button", name="Draw the comparison").click()
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["cache interval 1", "cache interval 3"])
    exact, faster = tab.locator("#gallery img").evaluate_all("all => all.map(image => image.src)")
    assert exact != faster
    assert page_engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}
    expect(tab.locator(".own-summary")).to_have_count(1)
    expect(tab.locator(".own-summary")).to_contain_text("cache interval 3")


def test_steps_are_compared_by_keyboard_alone_and_the_prompts_come_back(tab):
    fill(tab, PROMPTS, seed=5, steps=3)
    undo = tab.get_by_role("button", name="Undo")
    fold = tab.get_by_role("button", name="Compare", exact=True)
    fold.focus()
    tab.keyboard.press("Enter")
    for key in ("Tab", "Tab", "Space"):  # Gradio's radios are a stop each
        tab.keyboard.press(key)
    values = tab.get_by_label("Values, up to eight")
    expect(values).to_have_value("4, 6, 8, 10, 15, 20, 30, 50", timeout=PATIENCE)
    expect(undo).to_be_disabled()
    for key in (*["Tab"] * 5, "Control+A"):
        tab.keyboard.press(key)
    tab.keyboard.type("2 4, 3")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["2 steps", "4 steps", "3 steps"])
    assert prompts(tab) == [PROMPTS[0]] * 3 + [""] * 5
    expect(tab.locator("#line")).to_be_in_viewport()
    press(tab, tab.get_by_role("button", name="Draw the comparison"))
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["2 steps", "4 steps", "3 steps"])
    undo.click()
    says(tab, "The boxes are as they were.")
    assert prompts(tab) == [PROMPTS[0]] * 3 + [""] * 5
    undo.click()
    expect(box(tab, 2)).to_have_value(PROMPTS[1])
    assert prompts(tab) == PROMPTS
    expect(undo).to_be_disabled()
    expect(tab.locator(".own-summary")).to_have_count(0)
    expect(setting(tab, "Steps")).to_have_value("3")


def test_seeds_that_are_compared_run_on_from_the_present_one(tab):
    fill(tab, PROMPTS, seed=41)
    unfold(tab, "Compare")
    tab.get_by_role("radio", name="Seed").check()
    expect(tab.get_by_label("Values, up to eight")).to_have_value(
        ", ".join(map(str, range(41, 49))), timeout=PATIENCE)
    compare(tab, values="5")
    says(tab, "Done in")
    compare(tab, values="41, 9")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["seed 41", "seed 9"])
    expect(seed_box(tab)).to_have_value("5")
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    assert prompts(tab) == [PROMPTS[0]] * 2 + [""] * 6
    undo = tab.get_by_role("button", name="Undo")
    press(tab, undo)
    expect(box(tab, 2)).to_have_value("", timeout=PATIENCE)
    press(tab, undo)
    expect(box(tab, 2)).to_have_value(PROMPTS[1], timeout=PATIENCE)
    assert prompts(tab) == PROMPTS


@pytest.mark.parametrize(("values", "sentence"), [
    ("", "There is nothing to compare yet"),
    ("1 2 3 4 5 6 7 8 9", "There are 9 values to compare; at most 8 fit."),
    ("2, 51", "Guidance should be from 0 to 50, not 51."),
])
def test_a_comparison_that_cannot_be_made_costs_no_prompt(tab, values, sentence):
    fill(tab, PROMPTS)
    compare(tab, "Guidance", values)
    says(tab, sentence)
    assert prompts(tab) == PROMPTS
    fill(tab, [""] * 8)
    compare(tab, values="2")
    says(tab, "There is no prompt yet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_a_comparison_and_a_phone_scrolls_nowhere(visitor, address, scheme):
    with newcomer(visitor, address, scheme, phone=True) as tab:
        fill(tab, ["first", *[""] * 7], steps=2)
        compare(tab)
        says(tab, "Done in")
        expect(box(tab, 8)).to_have_value("first")
        assert Axe().run(tab)["violations"] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        figures(tab).first.get_by_role("button", name="View picture 1: PNDM (PLMS): first").click()
        expect(tab.get_by_role("dialog")).to_contain_text("PNDM (PLMS): first")
