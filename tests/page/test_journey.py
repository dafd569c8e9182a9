"""Journeys on the page: from a card's picture to another's, drawn, looked at and downloaded."""

import re
import zipfile

import pytest
from axe_core_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Locator, Page

from sd_tpu.gallery.files import Files
from sd_tpu.gallery.run import Backend
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.links import write_link
from sd_tpu.page.actions import Actions
from sd_tpu.page.events import ActionRequest
from sd_tpu.pictures import movie
from sd_tpu.pictures.images import read_png
from sd_tpu.request import Request
from sd_tpu.settings import Picture
from sd_tpu.styles import Styles
from tests.support.asking import following
from tests.support.visitor import PATIENCE, expect, fill, generate, make, more, says


def plan(tab: Page, number: int) -> Locator:
    """Opens what a journey from this picture is asked for by."""
    more(tab, number).get_by_role("button", name="Journey").click()
    dialog = tab.get_by_role("dialog", name="Journey")
    expect(dialog).to_be_visible()
    return dialog


@pytest.mark.slow("draws a journey of eight pictures and packs it")
def test_a_journey_from_one_card_to_another_is_drawn_shown_and_downloaded(tab, tmp_path):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3)
    make(tab)
    shown = tab.locator("#cards img").evaluate_all("all => all.map(image => image.src)")
    dialog = plan(tab, 1)
    expect(dialog.get_by_role("img")).to_be_hidden()
    expect(dialog.get_by_label("From")).to_have_value("0")
    assert dialog.get_by_label("To").locator("option").all_inner_texts() == [
        "Another seed",
        "Picture 1: a fox",
        "Picture 2: a hen",
    ]
    dialog.get_by_label("To").select_option(label="Picture 2: a hen")
    dialog.get_by_label("Pictures").select_option("8")
    dialog.get_by_role("button", name="Draw the journey").click()
    expect(dialog.get_by_role("img")).to_be_visible(timeout=PATIENCE)
    says(tab, re.compile(r"Done in [\d.]+ s\s*$"))  # a seed gives no journey again
    expect(dialog.get_by_role("button", name="Download WEBP")).to_be_visible(timeout=PATIENCE)
    strip = dialog.get_by_role("slider", name="Picture of the journey")
    slots = dialog.locator(".strip span")
    expect(slots).to_have_count(8)
    shown_in = "all => all.map(each => each.style.backgroundImage.slice(5, -2))"
    frames = slots.evaluate_all(shown_in)
    assert all(frames) and len(set(frames)) == 8
    image, moving = dialog.get_by_role("img"), dialog.get_by_role("img").get_attribute("src")
    bar = strip.bounding_box()
    tab.mouse.move(bar["x"] + bar["width"] * 0.3, bar["y"] + 5)
    expect(image).to_have_attribute("src", frames[2])
    tab.mouse.move(bar["x"] + bar["width"] * 0.3, bar["y"] - 40)
    expect(image).to_have_attribute("src", moving)
    strip.press("ArrowRight")
    expect(image).to_have_attribute("src", frames[3])
    assert Axe().run(tab)["violations"] == []
    assert (
        dialog.get_by_role("img").evaluate("image => image.decode().then(() => image.naturalWidth)")
        == 32
    )
    for name, kind in (("WEBP", "webp"), ("GIF", "gif"), ("ZIP", "zip")):
        with tab.expect_download() as download:
            dialog.get_by_role("button", name=f"Download {name}").click()
        download.value.save_as(tmp_path / f"way.{kind}")
    for kind in ("webp", "gif"):
        with Image.open(tmp_path / f"way.{kind}") as image:
            image.load()
            assert image.n_frames == 8 and image.info["duration"] == movie.MILLISECONDS
    with zipfile.ZipFile(tmp_path / "way.zip") as archive:
        way = [read_png(archive.read(name)).pictures[0] for name in archive.namelist()]
    assert [(each.prompt, each.to_prompt, each.seed, each.to_seed) for each in way] == [
        ("a fox", "", 3, -1),
        *[("a fox", "a hen", 3, 4)] * 6,
        ("a hen", "", 4, -1),
    ]
    tab.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert shown == tab.locator("#cards img").evaluate_all("all => all.map(image => image.src)")
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    expect(plan(tab, 2).get_by_role("img")).to_be_visible(timeout=PATIENCE)


def test_a_journey_tells_how_far_it_is_and_is_stopped_like_a_run(tab, slow_engine):
    fill(tab, ["a fox", *[""] * 7], seed=3, steps=20)
    make(tab)
    dialog = plan(tab, 1)
    expect(dialog.locator(".strip")).to_be_hidden()
    dialog.get_by_label("Pictures").select_option("32")
    dialog.get_by_role("button", name="Draw the journey").click()
    expect(dialog.locator(".status")).to_contain_text(
        re.compile(r"Step \d+ of 20"), timeout=PATIENCE
    )
    expect(dialog.locator(".strip span")).to_have_count(32)
    expect(dialog.locator(".strip")).to_have_css("position", "static")  # beside the other controls
    expect(generate(tab)).to_be_disabled()
    expect(dialog.get_by_role("button", name="Draw the journey")).to_be_hidden()
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog.locator(".status")).to_have_text("Stopped", timeout=PATIENCE)
    expect(dialog.get_by_role("button", name="Draw the journey")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(generate(tab)).to_be_enabled()
    expect(dialog).to_be_hidden()


# --- what the server takes ----------------------------------------------------------------------


@pytest.fixture
def ask(page_engine, runs):
    """What asks about a run of two pictures that are alike but for their prompts, and the first's
    seed once more."""
    actions = Actions(runs)
    run = runs.start(
        Request.check(
            {
                "prompts": ["a fox", "a hen", "a fox"],
                "steps": 2,
                "overrides": [None, None, {"seed": 0}],
            },
            page_engine.catalog,
        ),
        browser="0" * 32,
    )
    assert [*following(run, "a tab")][-1].line.text.startswith("Done")
    return run, lambda do, **more: actions.answer(
        ActionRequest({"do": do, "run": run.key, **more}, "")
    )


@pytest.fixture
def runs(page_engine, tmp_path):
    assert page_engine.ready.wait(300)
    return Runs(Backend(page_engine, Files(tmp_path, page_engine.to_png), Inputs()))


def test_what_is_filled_in_and_is_not_here_is_told(runs):
    request = Request((Picture(prompt="a fox", model="gone", to_prompt="a hen", share=0.5),))
    answer = Actions(runs).answer(ActionRequest({"do": "link", "link": write_link(request)}, ""))
    assert answer["form"]["prompts"][0] == "a fox"
    assert answer["message"].endswith(
        "in the boxes. It was drawn by gone, which is not here. It lies on the way to another "
        "prompt or seed, which has no box. It was made at 512×512; here pictures are 32×32."
    )


def test_a_style_that_is_gone_is_told_as_that_and_left_out(runs, page_engine, monkeypatch):
    request = Request.check(
        {
            "prompts": ["a fox", "a hen", "a cow"],
            "style": "Ink",
            "overrides": [None, {"style": ""}, {"style": "Bright"}],
        },
        page_engine.catalog,
    )
    monkeypatch.setattr(page_engine.catalog.styles, "templates", lambda: {"Bright": ("bright", "")})
    answer = Actions(runs).answer(ActionRequest({"do": "link", "link": write_link(request)}, ""))
    assert answer["message"].endswith(
        "in the boxes. It was drawn in the style Ink, which is not here."
    )
    assert answer["form"]["settings"]["style"] == ""
    assert answer["form"]["overrides"][:3] == [{}, {}, {"style": "Bright"}]


def test_what_a_browser_has_is_found_though_the_style_of_another_picture_is_gone(
    runs, page_engine, monkeypatch
):
    for style, prompt in (("Ink", "a fox"), ("", "a hen")):
        asked = Request.check(
            {"prompts": [prompt], "steps": 2, "style": style}, page_engine.catalog
        )
        run = runs.start(asked, browser="0" * 32)
        assert [*following(run, "a tab")][-1].line.text.startswith("Done")
    monkeypatch.setattr(page_engine.catalog, "styles", Styles())
    found = runs.gather(asked, "0" * 32, "")
    assert found.cards[0].picture == run.cards[0].finished.picture


@pytest.mark.parametrize(
    "values, told",
    [
        (dict(index=0, to=1, count=9), "A journey has 8, 16, 32 pictures, not 9."),
        (dict(index=0, to=1, count="8"), "A journey has 8, 16, 32 pictures, not '8'."),
        (dict(index=0, to=1), "A journey has 8, 16, 32 pictures, not None."),
        (dict(index=0, to=0, count=8), "A journey needs another prompt or another seed to go to."),
        (dict(index=0, to=2, count=8), "A journey needs another prompt or another seed to go to."),
        (dict(index=0, to=5, count=8), "The pictures are no longer on the server."),
        (dict(index=0, to="1", count=8), "The pictures are no longer on the server."),
        (dict(index=0, to=[1], count=8), "The pictures are no longer on the server."),
        (dict(index=7, to=None, count=8), "The pictures are no longer on the server."),
        (dict(index=-1, to=1, count=8), "cannot be read"),
        (dict(index=0, to=1, count=8, run="another"), "The pictures are no longer on the server."),
    ],
)
def test_a_journey_that_cannot_be_is_refused_in_a_sentence_and_nothing_drawn(
    ask, values, told, page_engine
):
    run, asking = ask
    answer = asking("journey", **values)
    assert told in answer["message"] and answer["kind"] == "wrong"
    assert run.over and not run.journey


def test_another_seed_is_drawn_and_a_file_is_of_a_kind_that_can_be_written(
    ask, monkeypatch, tmp_path
):
    run, asking = ask
    monkeypatch.setenv("PATH", str(tmp_path))  # without ffmpeg
    assert asking("movie") == {}
    assert asking("journey", index=0, to=None, count=8)["run"] == run.key
    assert [*following(run, "a tab")][-1].line.text.startswith("Done")
    ends = [read_png(run.journey[index].png).pictures[0] for index in (0, 1, 7)]
    assert {each.prompt for each in ends} == {"a fox"}
    assert ends[0].seed == ends[1].seed != ends[1].to_seed == ends[2].seed
    assert asking("movie")["view"].endswith("journey.webp")
    for kind in ("mp4", "../../a", ["webp"], 1):
        answer = asking("movie", kind=kind)
        assert answer["kind"] == "wrong" and "there are webp, gif." in answer["message"]
    assert asking("movie", kind="gif")["file"].endswith("journey.gif")
    (tmp_path / "ffmpeg").write_text('#!/bin/sh\nfor last; do :; done\necho moves > "$last"\n')
    (tmp_path / "ffmpeg").chmod(0o755)
    assert asking("movie", kind="mp4")["file"].endswith("journey.mp4")
