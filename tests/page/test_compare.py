"""A comparison: one prompt, one thing that changes, eight labelled pictures at once."""

import dataclasses
import re
from unittest.mock import Mock

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe
from PIL import Image

from sd_tpu.gallery.files import captions
from sd_tpu.page.compare import COMPARABLE, comparable, comparison, read_comparison, suggested
from sd_tpu.page.form import read, show
from sd_tpu.pictures.images import BLANK, read_png
from sd_tpu.request import AnyModelCatalog, Request
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.settings import Picture, RequestError
from tests.support.asking import make_request
from tests.support.pages import made_from
from tests.support.visitor import (
    PATIENCE,
    PROMPTS,
    alts,
    box,
    choose,
    expect,
    figures,
    fill,
    make,
    newcomer,
    press,
    prompts,
    says,
    seed_box,
    setting,
    tool,
    unfold,
)

EIGHT = [
    "PNDM (PLMS)",
    "DPM++ 2M",
    "DPM++ 2M SDE",
    "Euler",
    "Euler ancestral",
    "Heun",
    "DDIM",
    "UniPC",
]


# --- what is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4, 6,8 10;15\n20", [4, 6, 8, 10, 15, 20]),
        ("1.5، 2，3、3 1.5", [1.5, 2, 3]),
        ("4, lots", [4, "lots"]),
        (" , ", []),
    ],
)
def test_values_are_read_as_people_write_lists(text, values):
    if values:
        assert read_comparison({"what": "guidance", "values": text}) == ("guidance", values)
    else:
        with pytest.raises(RequestError, match="There is nothing to compare yet"):
            read_comparison({"what": "guidance", "values": text})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([], "There is nothing to compare yet: give up to 8 values."),
        (list(range(9)), "There are 9 values to compare; at most 8 fit."),
    ],
)
def test_no_value_and_too_many_are_answered_in_a_sentence(values, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)):
        read_comparison({"what": "steps", "values": values})


@pytest.mark.parametrize(
    "defaults",
    [Picture(), Picture(steps=4, guidance=1.0, sampler="lcm"), Picture(steps=200, guidance=50.0)],
)
@pytest.mark.parametrize(
    "what", ["sampler", "steps", "guidance", "guidance_stop", "cache_interval"]
)
def test_what_is_suggested_can_be_made_and_has_the_models_own_among_it(what, defaults):
    values = suggested(what, defaults)
    made = comparison(Request.check({"prompts": ["a"], "seed": 5}, defaults), what, values)
    assert 5 <= len(values) == len(set(values)) == len(made.indices()) <= 8
    assert getattr(defaults, what) in values


def test_a_lora_is_compared_by_the_strength_that_the_prompt_gives_it():
    asked = make_request(prompts=("a <lora:ink wash> cat <lora:x:0.5>",), seed=7)
    made = comparison(asked, "lora", [0, 0.5, -1])
    assert made.prompts == tuple(
        f"a <lora:ink wash:{x}> cat <lora:x:{x}>" for x in ("0", "0.5", "-1")
    )
    assert {picture.seed for picture in made.pictures} == {7}
    with pytest.raises(RequestError, match="Strength of the LoRA should be a number, not 'x'"):
        comparison(asked, "lora", ["x"])
    with pytest.raises(RequestError, match="names no LoRA"):
        comparison(make_request(prompts=("a",)), "lora", [1])


@pytest.mark.parametrize("loras", [False, True])
def test_the_strength_of_loras_is_offered_where_there_may_be_some(loras):
    choices = dict.fromkeys(COMPARABLE)
    names = [each.name for each in comparable(Picture(), choices, [], loras)]
    assert names[-1] == ("lora" if loras else "size")


@pytest.mark.parametrize(
    "strength, picture",
    [
        ("strength", "Start picture"),
        ("control_scale", "Control picture"),
        ("reference_scale", "Reference picture"),
    ],
)
def test_without_a_picture_the_strength_of_one_is_not_compared(strength, picture):
    with pytest.raises(RequestError, match=f"^{picture}: the first prompt has none"):
        comparison(make_request(prompts=("a",)), strength, [0.5, 1])


def test_a_comparison_has_the_first_picture_in_all_places_but_for_one_thing():
    asked = Request.check(
        {
            "prompts": ["", "a", "b"],
            "seed": 7,
            "sampler": "heun",
            "spacing": "karras",
            "negative_prompt": "no",
            "overrides": [None, {"guidance": 2, "negative_prompt": ""}],
        },
        Picture(),
    )
    made = comparison(asked, "steps", [5, 20, 9])
    assert made.pictures == tuple(
        dataclasses.replace(asked.pictures[1], steps=steps) for steps in (5, 20, 9)
    )
    assert [*captions(made).values()] == ["5 steps", "20 steps", "9 steps"]


def test_a_comparison_of_sizes_says_them_and_changes_nothing_else():
    asked = make_request(["a"], seed=3, height=64, width=64)
    made = comparison(asked, *read_comparison({"what": "size", "values": ["64×64", "96×64"]}))
    assert [(each.width, each.height, each.seed) for each in made.pictures] == [
        (64, 64, 3),
        (96, 64, 3),
    ]
    assert [*captions(made).values()] == ["64x64", "96x64"]
    filled = show(made.values(), Mock(first="m", sizes=lambda model: [(64, 64), (64, 96)]))
    assert filled["settings"]["size"] == "64×64"
    assert filled["overrides"][1] == {"seed": "3", "size": "96×64"}
    assert Request.check(read(filled), AnyModelCatalog()).pictures[:2] == made.pictures


def test_a_comparison_of_seeds_has_no_other_seed_than_those():
    made = comparison(make_request(prompts=("a",), seed=7), "seed", [3, 8, 100])
    assert [picture.seed for picture in made.pictures] == [3, 8, 100]
    assert [*captions(made).values()] == ["seed 3", "seed 8", "seed 100"]


@pytest.mark.parametrize(
    ("what", "values", "sentence"),
    [
        ("steps", [4, "lots"], "Steps should be a whole number, not 'lots'"),
        ("guidance_stop", [1, 0.5], "Guidance should start before it stops, not start at 0.6"),
        ("sampler", ["ddim", "dream"], "Sampler 'dream' is unknown"),
        ("size", [{"width": "wide"}], "Width should be a whole number, not 'wide'"),
    ],
)
def test_a_value_that_cannot_be_served_is_named_without_a_box(what, values, sentence):
    asked = make_request(prompts=("a",), sampler="dpmpp_2m", spacing="karras", guidance_start=0.6)
    with pytest.raises(RequestError, match=f"^{re.escape(sentence)}"):
        comparison(asked, what, values)


def test_only_what_a_comparison_has_put_into_a_box_is_taken_out_again():
    compared = Request((Picture(prompt="a", steps=2, width=64), Picture(prompt="a", steps=3)))
    assert compared.beside_compared(0, {"steps": 2, "guidance": 5.0}) == {"guidance": 5.0}
    assert compared.beside_compared(1, {"steps": 50}) == {"steps": 50}
    size = {"width": 64, "height": 8}
    assert compared.beside_compared(0, {"steps": 2, **size}) == size
    assert compared.beside_compared(5, {"steps": 2}) == {"steps": 2}


# --- on the page --------------------------------------------------------------------------------


def compare(tab, what=None, values=None):
    unfold(tab, "Compare")
    if what:
        tab.get_by_role("radio", name=what, exact=True).check()
    if values is not None:
        tab.get_by_label("Values, up to eight").fill(values)
    press(tab, tab.get_by_role("button", name="Run comparison"))


def labels(tab):
    return figures(tab).locator("b")


def test_samplers_are_compared_in_one_go_and_nothing_is_compiled(tab, page_engine, tmp_path):
    fill(tab, ["", *PROMPTS[1:]], seed=4294967000, steps=3)
    make(tab)
    before = dict(page_engine.programs.traces)
    compare(tab, "Sampler")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(EIGHT)
    says(tab, f"seed {seed_box(tab).input_value()}")
    assert page_engine.programs.traces == before == {"encode": 1, "advance": 1, "decode": 1}
    assert prompts(tab) == [PROMPTS[1]] * 8
    assert alts(tab) == [f"{label}: {PROMPTS[1]}" for label in EIGHT]
    for index in range(8):
        expect(figures(tab).nth(index)).to_contain_text("Seed 4294967001")
    tab.set_viewport_size({"width": 1366, "height": 650})
    assert labels(tab).evaluate_all(
        "labels => labels.every(label => label.scrollWidth <= label.clientWidth)"
    ), "cut off"
    tab.set_viewport_size({"width": 1440, "height": 900})
    with tab.expect_download() as download:
        tool(tab, "Download as one picture").click()
    download.value.save_as(tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        grid = np.asarray(image)
    assert grid.shape == (2 * (256 + 26) + 8, 4 * 256 + 3 * 8, 3), "narrow pictures are enlarged"
    for row in (256, 2 * 256 + 26 + 8):
        for column in range(0, 4 * 264, 264):
            band = grid[row : row + 26, column : column + 256]
            assert (band == BLANK).any() and (band < 128).any(), "a label is missing"
    asked = read_png(tmp_path / "grid.png")
    assert [SAMPLERS[picture.sampler].label for picture in asked.pictures] == EIGHT
    assert {picture.seed for picture in asked.pictures} == {4294967001}


def test_styles_are_compared_and_the_files_say_what_they_made_of_the_prompts(tab):
    fill(tab, ["a fox", *[""] * 7], seed=5)
    setting(tab, "Negative prompt").fill("fog")
    compare(tab, "Style")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["no style", "style Ink", "style Bright"])
    made = [made_from(tab, number) for number in (1, 2, 3)]
    assert [(picture.prompt, picture.negative_prompt, picture.style) for picture in made] == [
        ("a fox", "fog", ""),
        ("ink drawing of a fox", "fog, photo", ""),
        ("a fox, bright", "fog", ""),
    ]
    assert prompts(tab)[:3] == ["a fox"] * 3, "the boxes keep the prompt and the style apart"
    choose(setting(tab, "Style"), "Bright")
    unfold(tab, "Settings for prompt 1")
    own = tab.locator("#overrides-panel").get_by_label("Style")
    expect(own.locator("option")).to_have_text(["Same as for all", "no style", "Ink", "Bright"])
    choose(own, "Ink")
    expect(tab.locator(".overrides-summary").first).to_contain_text("style Ink")


@pytest.mark.slow("compiles other sizes")
def test_sizes_are_compared_and_make_one_picture_together(tab, page_engine, tmp_path):
    height, width = page_engine.catalog.sizes("")[2]
    assert height > width
    asked = {"prompts": ["a"], "steps": 1, "height": height, "width": width}
    list(page_engine.submit(Request.check(asked, page_engine.catalog)).events())  # compiles
    fill(tab, PROMPTS[:1], seed=5, steps=3)
    unfold(tab, "Compare")
    tab.get_by_role("radio", name="Size", exact=True).check()
    ticks = tab.get_by_role("group", name="Choices, up to eight").get_by_role("checkbox")
    sizes = [f"{width}×{height}" for height, width in page_engine.catalog.sizes("")]
    assert [tick.input_value() for tick in ticks.all()] == sizes
    expect(ticks.nth(2)).to_be_checked()
    ticks.nth(1).uncheck()
    press(tab, tab.get_by_role("button", name="Run comparison"))
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(sizes[:3:2])
    expect(tab.locator(".overrides-summary").first).to_contain_text(sizes[2])
    tall, frame = figures(tab).nth(1).locator("img, div").all()[::-1]
    assert tall.bounding_box()["height"] <= frame.bounding_box()["height"]
    with tab.expect_download() as download:
        tool(tab, "Download as one picture").click()
    download.value.save_as(tmp_path / "grid.png")
    assert [(each.width, each.height) for each in read_png(tmp_path / "grid.png").pictures] == [
        tuple(map(int, size.split("×"))) for size in sizes[:3:2]
    ]


def test_accelerations_are_compared_with_the_exact_picture_first(tab, page_engine):
    fill(tab, PROMPTS, seed=5, steps=9)
    unfold(tab, "Compare")
    tab.get_by_role("radio", name="Cache interval").check()
    expect(tab.get_by_label("Values, up to eight")).to_have_value("1, 2, 3, 4, 5, 6, 8, 10")
    tab.get_by_label("Values, up to eight").fill("1, 3")
    tab.get_by_role("button", name="Run comparison").click()
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["cache interval 1", "cache interval 3"])
    exact, faster = tab.locator("#cards img").evaluate_all("all => all.map(image => image.src)")
    assert exact != faster
    assert page_engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}
    expect(tab.locator(".overrides-summary")).to_have_count(1)
    expect(tab.locator(".overrides-summary")).to_contain_text("cache interval 3")


def test_steps_are_compared_by_keyboard_alone_and_the_prompts_come_back(tab):
    fill(tab, PROMPTS, seed=5, steps=3)
    undo = tab.get_by_role("button", name="Undo")
    fold = tab.get_by_role("button", name="Compare", exact=True)
    fold.focus()
    tab.keyboard.press("Enter")
    for key in ("Tab", "ArrowRight"):
        tab.keyboard.press(key)
    values = tab.get_by_label("Values, up to eight")
    expect(values).to_have_value("4, 6, 8, 10, 15, 20, 30, 50", timeout=PATIENCE)
    expect(undo).to_be_disabled()
    for key in ("Tab", "Control+A"):
        tab.keyboard.press(key)
    tab.keyboard.type("2 4, 3")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["2 steps", "4 steps", "3 steps"])
    assert prompts(tab) == [PROMPTS[0]] * 3 + [""] * 5
    expect(tab.locator("#settings-panel [name=steps]")).to_have_value("3")
    expect(tab.locator("#line")).to_be_in_viewport()
    expect(tab.locator("#sheet")).to_be_hidden()
    unfold(tab, "Compare")
    press(tab, tab.get_by_role("button", name="Run comparison"))
    says(tab, "These pictures are here already")
    undo.click()  # the second comparison has changed nothing that could be taken back
    expect(box(tab, 2)).to_have_value(PROMPTS[1])
    assert prompts(tab) == PROMPTS
    expect(undo).to_be_disabled()
    expect(tab.locator(".overrides-summary")).to_have_count(0)
    expect(setting(tab, "Steps")).to_have_value("3")


def test_a_comparison_that_is_taken_back_stays_so_after_a_reload_and_so_does_one_done_again(tab):
    def reload():
        tab.reload()
        tab.wait_for_function("window.sdTpu?.arrived")

    fill(tab, PROMPTS, seed=7)
    make(tab)
    compare(tab, "Guidance", "2 3")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["guidance 2", "guidance 3"])
    tab.get_by_role("button", name="Undo").click()
    expect(figures(tab).nth(7)).to_contain_text(PROMPTS[7])
    reload()
    expect(figures(tab).nth(7)).to_contain_text(PROMPTS[7])
    assert alts(tab) == prompts(tab) == PROMPTS
    expect(labels(tab)).to_have_count(0)
    tab.get_by_role("button", name="Redo").click()
    expect(labels(tab)).to_have_text(["guidance 2", "guidance 3"])
    reload()
    expect(labels(tab)).to_have_text(["guidance 2", "guidance 3"])
    assert prompts(tab) == [PROMPTS[0]] * 2 + [""] * 6


def test_seeds_that_are_compared_run_on_from_the_present_one(tab):
    fill(tab, PROMPTS, seed=41)
    unfold(tab, "Compare")
    tab.get_by_role("radio", name="Seed").check()
    expect(tab.get_by_label("Values, up to eight")).to_have_value(
        ", ".join(map(str, range(41, 49))), timeout=PATIENCE
    )
    compare(tab, "Seed", values="5")
    says(tab, "Done in")
    compare(tab, values="41, 9")
    says(tab, "Done in")
    expect(labels(tab)).to_have_text(["seed 41", "seed 9"])
    expect(seed_box(tab)).to_have_value("41")
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    assert prompts(tab) == [PROMPTS[0]] * 2 + [""] * 6
    undo = tab.get_by_role("button", name="Undo")
    press(tab, undo)
    expect(box(tab, 2)).to_have_value("", timeout=PATIENCE)
    press(tab, undo)
    expect(box(tab, 2)).to_have_value(PROMPTS[1], timeout=PATIENCE)
    assert prompts(tab) == PROMPTS


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("", "There is nothing to compare yet"),
        ("1 2 3 4 5 6 7 8 9", "There are 9 values to compare; at most 8 fit."),
        ("2, 51", "Guidance should be from 0 to 50, not 51."),
    ],
)
def test_a_comparison_that_cannot_be_made_costs_no_prompt(tab, values, sentence):
    fill(tab, PROMPTS)
    compare(tab, "Guidance", values)
    says(tab, sentence)
    assert prompts(tab) == PROMPTS
    fill(tab, [""] * 8)
    compare(tab, values="2")
    says(tab, "There is no prompt yet")


def test_what_is_kept_is_so_until_a_comparison_is_agreed_to(tab):
    fill(tab, ["a fox", *[""] * 7], steps=2)
    make(tab)
    keep = tab.get_by_role("button", name="Keep picture 1")
    keep.click()
    compare(tab, "Guidance", "")
    says(tab, "There is nothing to compare yet")
    expect(keep).to_have_attribute("aria-pressed", "true")
    compare(tab, values="2 3")
    says(tab, "Done in")
    expect(keep).to_have_attribute("aria-pressed", "false")


def test_what_is_typed_while_a_comparison_is_asked_for_comes_back(tab):
    fill(tab, ["a fox", *[""] * 7], steps=2)
    unfold(tab, "Compare")
    tab.get_by_role("button", name="Run comparison").evaluate("""button => {
        button.click();
        const box = document.querySelector("#prompt-2 textarea");
        box.value = "typed";
        box.dispatchEvent(new Event("input", { bubbles: true }));
    }""")
    expect(box(tab, 2)).to_have_value("a fox")
    tab.get_by_role("button", name="Undo").click()
    expect(box(tab, 2)).to_have_value("typed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow("has axe look through the page")
def test_axe_finds_nothing_in_a_comparison_and_a_phone_scrolls_nowhere(visitor, address, scheme):
    with newcomer(visitor, address, scheme, phone=True) as tab:
        fill(tab, ["first", *[""] * 7], steps=2)
        compare(tab, "Sampler")
        says(tab, "Done in")
        expect(box(tab, 8)).to_have_value("first")
        assert Axe().run(tab)["violations"] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        figures(tab).first.get_by_role("button", name="View picture 1: PNDM (PLMS): first").click()
        expect(tab.get_by_role("dialog")).to_contain_text("PNDM (PLMS): first")
