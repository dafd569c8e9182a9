"""Reference pictures on the page of a model that edits by several."""

import re

import pytest

from sd_tpu.pictures.inputs import Input
from sd_tpu.serving.engine import Engine
from tests.support.flux2 import make_pipeline
from tests.support.pages import PHOTO, hand_in, made_from, picture_file, png, served
from tests.support.visitor import PATIENCE, box, expect, fill, make, more, press, says, unfold

FILES = [png(PHOTO[:, ::turn].repeat(2, 0).repeat(2, 1)) for turn in (1, -1)]
FILES += [png(PHOTO[::-1].repeat(2, 0).repeat(2, 1))]
NAMES = [Input(file).name for file in FILES]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with a tiny FLUX.2 klein."""
    folder = tmp_path_factory.mktemp("klein")
    make_pipeline(folder / "words", distilled=True).save_pretrained(folder / "model")
    with Engine.open(folder / "model", devices=1, size=(64, 64)) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine, tmp_path_factory):
    """Where its page is served."""
    with served(engine, tmp_path_factory.mktemp("history")) as address:
        yield address


@pytest.mark.slow("compiles an editing model's programs")
def test_pictures_are_handed_in_one_behind_the_other_and_taken_away(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=2)
    unfold(tab, "Settings for prompt 1")
    own = tab.locator("#overrides-panel")
    own.locator(".handed:has([name=reference])").evaluate("each => { each.open = true }")
    files = [
        {"name": f"{number}.png", "mimeType": "image/png", "buffer": file}
        for number, file in enumerate(FILES)
    ]
    own.locator(".upload:has([name=reference]) [type=file]").set_input_files(files[:2])
    shown = own.locator(".upload:has([name=reference]) img:visible")
    expect(shown).to_have_count(2)
    hand_in(tab, "drop", "#overrides-panel .upload:has([name=reference])", FILES[2])
    expect(shown).to_have_count(3)
    assert not own.locator("[name=reference_scale]").count()
    make(tab)
    assert made_from(tab, 1).references == NAMES and not made_from(tab, 2).reference
    own.locator(".upload:has([name=reference])").get_by_role("button", name="Remove").click()
    expect(shown).to_have_count(0)
    drawn = picture_file(tab, 1)
    more(tab, 1).get_by_role("button", name="Use picture 1").click()
    own.get_by_role("button", name="Use as reference picture").click()
    expect(shown).to_have_count(1)
    make(tab)
    assert made_from(tab, 1).references == [Input(drawn).name]


@pytest.mark.slow("compiles an editing model's programs")
def test_what_is_on_its_way_stays_away_after_the_pictures_are_taken_away(tab):
    unfold(tab, "Settings")
    settings = tab.locator("#settings-panel")
    settings.locator(".handed").evaluate_all("all => all.map((each) => { each.open = true })")
    field = settings.locator(".upload:has([name=reference])")
    shown = field.locator("img:visible")
    hand_in(tab, "drop", "#settings-panel .upload:has([name=reference])", FILES[0])
    expect(shown).to_have_count(1)
    held = []
    tab.route("**/gradio_api/upload**", lambda route: held.append(route))
    hand_in(tab, "drop", "#settings-panel .upload:has([name=reference])", FILES[1])
    field.get_by_role("button", name="Remove").click()
    expect(shown).to_have_count(0)
    with tab.expect_response(re.compile("component_server"), timeout=PATIENCE):
        held[0].continue_()
    tab.unroute("**/gradio_api/upload**")
    hand_in(tab, "drop", "#settings-panel .upload:has([name=reference])", FILES[2])
    expect(shown).to_have_count(1)
    assert settings.locator("[name=reference]").input_value() == NAMES[2]


@pytest.mark.slow("compiles an editing model's programs")
def test_a_reference_picture_that_is_too_small_is_refused_in_a_sentence(tab):
    fill(tab, ["a fox", *[""] * 7], seed=3, steps=2)
    unfold(tab, "Settings")
    settings = tab.locator("#settings-panel")
    settings.locator(".handed").evaluate_all("all => all.map((each) => { each.open = true })")
    hand_in(tab, "drop", "#settings-panel .upload:has([name=reference])", png())
    expect(settings.locator("[name=reference] + img")).to_be_visible()
    tab.locator("#generate").click()
    expect(tab.locator("#line")).to_contain_text("32x48 pixels; this model takes those with 64")


@pytest.mark.slow("compiles an editing model's programs")
def test_words_say_what_becomes_of_a_picture_which_is_its_reference_then(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=2)
    make(tab)
    before = Input(picture_file(tab, 1)).name
    tab.get_by_role("button", name="View picture 1").focus()
    tab.keyboard.press("c")
    line = tab.get_by_role("form", name="Say the change")
    expect(line.get_by_role("slider")).to_be_hidden()
    tab.keyboard.type("make it red")
    press(tab, line.get_by_role("button", name="Change"))
    says(tab, "Done in")
    made = made_from(tab, 1)
    assert (made.prompt, made.references, made.init_image) == ("make it red", [before], "")
    assert (made.seed, box(tab, 1).input_value(), box(tab, 2).input_value()) == (
        3,
        "make it red",
        "a hen",
    )
    tab.get_by_role("button", name="View picture 1").press("Enter")
    expect(tab.get_by_role("slider", name="Before and after")).to_be_visible()
    tab.keyboard.press("Escape")
    tab.locator("#undo").click()
    expect(box(tab, 1)).to_have_value("a fox")
    expect(tab.get_by_role("button", name="View picture 1: a fox")).to_be_visible()
    assert Input(picture_file(tab, 1)).name == before
