"""What a single box asks for on its own: its panel, its link, its label."""

import re
import time

import numpy as np
import pytest

from sd_tpu.gallery.files import captions
from sd_tpu.links import read_link, write_link
from sd_tpu.page.actions import Actions
from sd_tpu.page.form import read, show
from sd_tpu.pictures.images import read_png, to_png
from sd_tpu.request import Request
from sd_tpu.settings import MAX_PROMPT_LENGTH, Picture, RequestError
from tests.support.asking import make_request
from tests.support.visitor import (
    PATIENCE,
    box,
    choose,
    expect,
    figures,
    fill,
    generate,
    keeps_nobody_out,
    make,
    more,
    newcomer,
    of_all,
    says,
    setting,
    tool,
    unfold,
    visit,
)

SIX = ["first", "second", "third", *[""] * 5]


def panel(tab, number):
    """The panel of a box, unfolded."""
    unfold(tab, f"Settings for prompt {number}")
    return tab.get_by_role("group", name=f"Settings for prompt {number}")


def summaries(tab):
    return tab.locator(".overrides-summary span")


# --- links and labels ---------------------------------------------------------------------------


REQUESTS = [
    make_request(
        prompts=("a", "", "c", "d"), overrides=(dict(steps=3), None, dict(seed=0, guidance=0.5))
    ),
    make_request(
        prompts=("a", "b"), negative_prompt="blur", overrides=(None, dict(negative_prompt=""))
    ),
    make_request(
        prompts=("a", "b"),
        sampler="heun",
        spacing="karras",
        overrides=(dict(sampler="euler", spacing=""), dict(spacing="linspace")),
    ),
    make_request(
        prompts=("é" * MAX_PROMPT_LENGTH,) * 8,
        overrides=tuple(
            dict(
                negative_prompt=f"{i}" + "é" * (MAX_PROMPT_LENGTH - 1),
                steps=i,
                guidance=1.5,
                seed=i,
                sampler="lms",
                spacing="karras",
                guidance_start=0.01 * i,
                guidance_stop=0.9,
                cache_interval=i + 1,
            )
            for i in range(1, 9)
        ),
    ),
    make_request(
        prompts=("a", "b"),
        guidance_stop=0.5,
        cache_interval=3,
        overrides=(None, dict(guidance_start=0.25, guidance_stop=1.0, cache_interval=1)),
    ),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_link_carries_what_single_boxes_have_on_their_own(request_):
    assert Request.check(read_link(write_link(request_)), Picture(model="m")) == request_


def test_a_link_names_the_box_behind_the_setting():
    assert write_link(REQUESTS[0]).endswith("&steps1=3&guidance3=0.5&seed3=0")


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        ("prompt=a&steps1=900", "Steps of prompt 1 should be from 1 to 200, not 900."),
        ("prompt=a&seed1=x", "Seed of prompt 1 should be a whole number, not 'x'."),
        ("prompt=a&sampler1=magic", "Sampler 'magic' of prompt 1 is unknown; there are"),
        ("prompt=a&steps9=3", "Unknown settings: steps9."),
        ("prompt=a&steps3=3", "There are 3 overrides for 1 prompts."),
        ("prompt=a&overrides=x", "The overrides should be a list, one for each prompt."),
    ],
)
def test_own_settings_in_a_link_that_are_none_are_refused_with_their_names(link, sentence):
    with pytest.raises(RequestError) as refused:
        Request.check(read_link(link), Picture())
    assert str(refused.value).startswith(sentence)


def labels(request):
    return [*captions(request).values()]


def test_a_label_names_what_a_picture_has_on_its_own_and_no_seed():
    own = (
        None,
        dict(sampler="euler", spacing="", steps=5, guidance=2.0, seed=3),
        dict(spacing="karras", negative_prompt="v 2.0"),
        dict(negative_prompt=""),
    )
    assert labels(make_request(prompts=tuple("abcd"), negative_prompt="no", overrides=own)) == [
        "a",
        "Euler · 5 steps · guidance 2",
        "karras · without “v 2.0”",
        "no negative prompt",
    ]


def test_in_a_comparison_every_picture_is_labelled_by_what_differs():
    own = (None, dict(steps=5, seed=0), dict(guidance=1.5, seed=0))
    assert labels(make_request(prompts=("a",) * 3, overrides=own)) == [
        "20 steps · guidance 7.5",
        "5 steps · guidance 7.5",
        "20 steps · guidance 1.5",
    ]
    assert labels(make_request(prompts=("a", "", "a"), seed=7)) == ["seed 7", "seed 9"]
    assert labels(make_request(prompts=("a", "b"), seed=7)) == ["a", "b"]
    assert labels(make_request(prompts=("고양이",), seed=7)) == [""]  # no letters of the font


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_is_shown_in_a_panel_is_what_is_read_from_it(request_, page_engine):
    here = {"model": page_engine.catalog.first, "height": 32, "width": 32}
    asked = Request.check({**request_.values(), **here}, page_engine.catalog)
    shown = Request.check(read(show(asked.values(), page_engine.catalog)), page_engine.catalog)
    assert shown.indices() == asked.indices()
    assert [*filter(None, shown.pictures)] == [*filter(None, asked.pictures)]


# --- on the page --------------------------------------------------------------------------------


def test_own_settings_are_made_kept_linked_and_cleared(tab, visitor, tmp_path):
    fill(tab, SIX, seed=5, steps=3)
    second = panel(tab, 2)
    expect(second.get_by_label("Steps")).to_have_attribute("placeholder", "3")
    expect(second.get_by_label("Seed")).to_have_attribute("placeholder", "6")
    second.get_by_label("Steps").fill("2")
    choose(second.get_by_label("Sampler"), "Euler")
    tab.get_by_role("button", name="Settings for prompt 2", exact=True).click()
    expect(second).to_be_hidden()
    expect(summaries(tab)).to_have_text(["Euler · 2 steps"])
    make(tab)
    expect(figures(tab).nth(1).locator("b")).to_have_text("Euler · 2 steps")
    expect(figures(tab).nth(1).get_by_role("img")).to_have_attribute(
        "alt", "Euler · 2 steps: second"
    )
    expect(figures(tab).nth(0).get_by_role("img")).to_have_attribute("alt", "first")
    made = []
    for number in (1, 2):
        with tab.expect_download() as download:
            tab.get_by_role("link", name=f"Download picture {number}").click()
        download.value.save_as(tmp_path / "picture.png")
        made += read_png(tmp_path / "picture.png").pictures
    assert [request.steps for request in made] == [3, 2]
    assert made[1].sampler == "euler" != made[0].sampler

    tab.reload()
    expect(summaries(tab)).to_have_text(["Euler · 2 steps"], timeout=PATIENCE)
    expect(panel(tab, 2).get_by_label("Sampler")).to_have_value("euler")

    tool(tab, "Copy link").click()
    says(tab, "Link copied")
    with visitor.new_page() as other:
        visit(other, tab.evaluate("navigator.clipboard.readText()"))
        says(other, "The link's prompts")
        expect(summaries(other)).to_have_text(["Euler · 2 steps"])
        expect(panel(other, 2).get_by_label("Steps")).to_have_value("2")

    tab.get_by_role("button", name="Clear prompt 2's own settings").click()
    expect(summaries(tab)).to_have_count(0)
    expect(tab.get_by_role("button", name="Settings for prompt 2", exact=True)).to_be_focused()
    expect(panel(tab, 2).get_by_label("Steps")).to_have_value("")
    expect(panel(tab, 2).get_by_label("Sampler")).to_have_value("")


def test_accelerations_are_made_kept_and_put_back(tab, tmp_path):
    fill(tab, SIX, seed=5, steps=6)
    setting(tab, "Cache interval").fill("3")
    setting(tab, "Guidance stop").fill("0.5")
    setting(tab, "Guidance stop").blur()
    second = panel(tab, 2)
    expect(second.get_by_label("Cache interval")).to_have_attribute("placeholder", "3")
    second.get_by_label("Cache interval").fill("1")
    make(tab)
    made = []
    for number in (1, 2):
        with tab.expect_download() as download:
            tab.get_by_role("link", name=f"Download picture {number}").click()
        download.value.save_as(tmp_path / f"{number}.png")
        (asked,) = read_png(tmp_path / f"{number}.png").pictures
        made.append((asked.guidance_start, asked.guidance_stop, asked.cache_interval))
    assert made == [(0, 0.5, 3), (0, 0.5, 1)]
    expect(figures(tab).nth(1).locator("b")).to_have_text("cache interval 1")
    tab.reload()
    common = "guidance until 0.5 · cache interval 3"
    expect(summaries(tab)).to_have_text(["cache interval 1", common], timeout=PATIENCE)
    expect(setting(tab, "Cache interval")).to_have_value("3")
    tab.get_by_role("button", name="Back to exact pictures").click()
    expect(summaries(tab)).to_have_text(["cache interval 1"])
    expect(tab.get_by_role("button", name="Settings", exact=True)).to_be_focused()
    expect(setting(tab, "Cache interval")).to_have_value("1")
    expect(setting(tab, "Guidance stop")).to_have_value("1")
    unfold(tab, "Settings")
    setting(tab, "Cache interval").fill("11")
    setting(tab, "Cache interval").blur()
    generate(tab).click()
    says(tab, "Cache interval should be from 1 to 10, not 11.")
    unfold(tab, "Read a picture")
    tab.locator("#read-panel input[type=file]").set_input_files(tmp_path / "2.png")
    says(tab, "are in the boxes")
    expect(setting(tab, "Cache interval")).to_have_value("1")
    expect(setting(tab, "Guidance stop")).to_have_value("0.5")


def test_models_that_have_come_since_the_start_are_offered_to_all_boxes_to_one_and_to_compare(
    visitor, address, page_engine, monkeypatch
):
    first = page_engine.catalog.first
    with newcomer(visitor, address) as tab:
        setting(tab, "Steps")
        expect(tab.locator("#all-model")).to_be_hidden()  # one thing is no choice
        unfold(tab, "Compare")
        compared = tab.locator("#compare-panel").get_by_role("radio", name="Steps")
        expect(compared).to_be_visible()
        expect(tab.locator("#compare-panel [value=model]")).to_be_hidden()
    monkeypatch.setattr(page_engine.catalog, "models", lambda: [first, "later"])
    with newcomer(visitor, address) as tab:
        models = setting(tab, "Model")
        expect(models.locator("option")).to_have_text([first, "later"])
        expect(models).to_have_value(first)
        own = panel(tab, 2).get_by_label("Model", exact=True)
        expect(own.locator("option")).to_have_text(["Same as for all", first, "later"])
        expect(own).to_be_visible()
        choose(own, "later")
        unfold(tab, "Compare")
        tab.locator("#compare-panel").get_by_role("radio", name="Model").check()
        for name in (first, "later"):
            expect(tab.locator("#compare-panel").get_by_label(name, exact=True)).to_be_checked()
        fill(tab, SIX)
        generate(tab).click()
        says(tab, f"There is no model 'later'; there are {first}, later.")
        expect(own).to_have_attribute("aria-invalid", "true")
        choose(setting(tab, "Model"), "later")
        tab.reload()
        expect(setting(tab, "Model")).to_have_value("later")
        expect(setting(tab, "Model")).to_be_visible()
        unfold(tab, "Compare")
        expect(tab.locator("#compare-panel [data-what=model] label")).to_have_text([first, "later"])
        monkeypatch.setattr(page_engine.catalog, "models", lambda: [first])
        tab.reload()  # what has gone since is shown, not something else in its place
        expect(panel(tab, 2).get_by_label("Model", exact=True)).to_have_value("later")
        expect(setting(tab, "Model")).to_have_value("later")
        expect(setting(tab, "Model")).to_be_visible()


def test_what_is_set_while_a_model_is_asked_for_its_own_settings_stays(
    visitor, address, page_engine, monkeypatch
):
    models = [page_engine.catalog.first, "later"]
    monkeypatch.setattr(page_engine.catalog, "models", lambda: models)
    monkeypatch.setattr(
        Actions,
        "_do_model",
        lambda *_: (time.sleep(0.5), {"form": {"settings": {"steps": "30", "guidance": "3"}}})[1],
    )
    with newcomer(visitor, address) as tab:
        choose(setting(tab, "Model"), "later")
        setting(tab, "Steps").fill("9")
        expect(setting(tab, "Guidance")).to_have_value("3")
        expect(setting(tab, "Steps")).to_have_value("9")


def test_a_page_whose_first_question_was_not_answered_learns_of_the_models_later(
    visitor, address, page_engine, monkeypatch
):
    models, failing = [page_engine.catalog.first, "later"], [RuntimeError("cut off")]

    def told():
        if failing:
            raise failing.pop()
        return models

    monkeypatch.setattr(page_engine.catalog, "models", told)
    with newcomer(visitor, address) as tab:
        expect(setting(tab, "Model").locator("option")).to_have_text(models, timeout=PATIENCE)
    assert not failing


def test_the_summary_of_own_settings_lies_below_the_words_of_a_prompt(tab):
    fill(tab, SIX)
    panel(tab, 1).get_by_label("Steps", exact=True).fill("4")
    tab.keyboard.press("Escape")
    expect(summaries(tab).first).to_contain_text("4 steps")
    words, chip = box(tab, 1).bounding_box(), summaries(tab).first.bounding_box()
    assert words["y"] + words["height"] <= chip["y"]


def test_a_bad_own_setting_is_answered_with_the_number_of_its_box(tab):
    fill(tab, SIX)
    panel(tab, 3).get_by_label("Guidance", exact=True).fill("lots")
    generate(tab).click()
    says(tab, "Guidance of prompt 3 should be a number, not 'lots'.")
    panel(tab, 3).get_by_label("Guidance", exact=True).fill("51")
    generate(tab).click()
    says(tab, "Guidance of prompt 3 should be from 0 to 50, not 51.")


def test_a_grid_brings_own_settings_back_and_new_prompts_begin_without(tab):
    asked = make_request(
        prompts=("a", "b", "c"),
        negative_prompt="blur",
        height=32,
        width=32,
        overrides=(dict(negative_prompt=""), dict(sampler="heun", spacing="karras")),
    )
    unfold(tab, "Read a picture")
    tab.locator("#read-panel input[type=file]").set_input_files(
        {
            "name": "grid.png",
            "mimeType": "image/png",
            "buffer": to_png(np.zeros((32, 64, 3), np.uint8), asked),
        }
    )
    expect(summaries(tab)).to_have_text(["no negative prompt", "Heun · karras"])
    make(tab)
    link = of_all(tab)
    expect(link).to_have_attribute("data-link", re.compile("&negative_prompt1=&"))
    more(tab, 2).get_by_role("button", name="Again:").click()
    expect(summaries(tab)).to_have_count(0)
    expect(setting(tab, "Sampler")).to_have_value("heun")
    for name in ("Clear", "Sample prompts"):
        panel(tab, 4).get_by_label("Steps").fill("4")
        expect(summaries(tab)).to_have_text(["4 steps"])
        tool(tab, name).click()
        expect(summaries(tab)).to_have_count(0)


def test_of_a_form_that_an_older_page_kept_the_prompts_and_the_seed_are_filled_in(tab, address):
    fill(tab, SIX, seed=9, steps=4)
    panel(tab, 1).get_by_label("Steps").fill("2")
    box(tab, 2).fill("changed")
    tab.evaluate("""() => Object.keys(localStorage).forEach((key) => {
        if (!key.startsWith("sd_tpu/")) return;
        const kept = JSON.parse(localStorage.getItem(key));
        const { prompts, seed } = kept.form;
        const settings = { sampler: "dream", colour: "red" };
        localStorage.setItem(key, JSON.stringify({ ...kept, form: { prompts, seed, settings } }));
    })""")
    visit(tab, address)
    expect(box(tab, 2)).to_have_value("changed")
    expect(box(tab, 1)).to_have_value(SIX[0])
    expect(tab.locator("#seed input")).to_have_value("9")
    expect(setting(tab, "Steps")).to_have_value("20")
    expect(setting(tab, "Sampler")).to_have_value("pndm")
    expect(summaries(tab)).to_have_count(0)


def test_own_settings_are_reached_and_made_by_keyboard_alone(tab):
    fill(tab, SIX)
    tab.keyboard.press("Escape")  # which closes the settings
    box(tab, 1).focus()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("button", name="Settings for prompt 1", exact=True)).to_be_focused()
    tab.keyboard.press("Enter")
    for _ in range(3):  # a negative prompt, a style, the steps
        tab.keyboard.press("Tab")
    tab.keyboard.type("7")
    expect(summaries(tab)).to_have_text(["7 steps"])
    tab.keyboard.press("Control+Enter")
    says(tab, "Done in")
    expect(figures(tab).first.locator("b")).to_have_text("7 steps")


def test_axe_finds_nothing_and_a_phone_scrolls_nowhere_with_panels_open(visitor, address):
    with newcomer(visitor, address, phone=True) as tab:
        fill(tab, SIX)
        panel(tab, 1).get_by_label("Negative prompt").fill("w" * 300)
        panel(tab, 2).get_by_label("Steps").fill("3")
        unfold(tab, "Compare")
        expect(summaries(tab)).to_have_count(2)
        make(tab)
        keeps_nobody_out(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        ends = tab.locator("textarea, input, button, figure, a").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().right)"
        )
        assert max(ends) <= 390
