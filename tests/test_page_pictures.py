"""The pictures: what is downloaded, the full-screen view, what is put back; and looks."""

import dataclasses
import re
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe
from gradio.route_utils import delete_files_created_by_app
from PIL import Image
from playwright.sync_api import expect
from visitor import (
    LONG,
    PATIENCE,
    PROMPTS,
    alts,
    corners,
    figures,
    fill,
    generate,
    make,
    newcomer,
    prompts,
    says,
    seed_box,
    setting,
    stop,
    unfold,
    visit,
)

from sd_tpu.images import read_png
from sd_tpu.page.files import Files
from sd_tpu.request import MAX_SEED, Request


@pytest.fixture(scope="module")
def made(visitor, address):
    """A tab with three pictures in places 1, 2 and 4; tests leave them as they are."""
    with visitor.new_page() as tab:
        visit(tab, address)
        fill(tab, ["first", "ein Café, größer", "", "fourth", *[""] * 4], seed=8, steps=3)
        make(tab)
        yield tab


def test_the_downloaded_file_carries_the_settings_of_its_picture(made, tmp_path):
    with made.expect_download() as download:
        made.get_by_role("link", name="Download picture 2").click()
    assert download.value.suggested_filename == "9-ein-café-größer.png"
    download.value.save_as(tmp_path / "picture.png")
    asked = read_png(tmp_path / "picture.png")
    assert (asked.prompts, asked.seed, asked.steps) == (("ein Café, größer",), 9, 3)
    assert asked.spacing == "leading", "the model's own is named"


def test_the_page_itself_shows_webp(made):
    source = figures(made).nth(1).locator("img").get_attribute("src")
    assert source.endswith("webp")


def test_a_small_picture_is_shown_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    page = SimpleNamespace(GRADIO_CACHE=str(tmp_path), temp_file_sets=[])
    shown = Files(page, lambda pixels, request: b"").add(Request(prompts=("a",)), 0, pixels).shown
    with Image.open(shown) as image:
        assert np.array_equal(np.asarray(image.convert("RGB")), pixels)


def test_a_file_that_gradio_prunes_takes_its_folder_with_it(tmp_path):
    page = SimpleNamespace(GRADIO_CACHE=str(tmp_path), temp_file_sets=[], blocks={})
    files = Files(page, lambda pixels, request: b"")
    files.add(Request(prompts=("a",)), 0, np.zeros((32, 32, 3), np.uint8))
    assert len(list(tmp_path.iterdir())) == 2
    delete_files_created_by_app(page, None)
    assert not list(tmp_path.iterdir()) and not page.temp_file_sets[0]


def test_all_pictures_come_in_one_archive(made, tmp_path):
    with made.expect_download() as download:
        made.get_by_role("button", name="Download all (ZIP)").click()
    download.value.save_as(tmp_path / "pictures.zip")
    with zipfile.ZipFile(tmp_path / "pictures.zip") as archive:
        assert archive.namelist() == ["1-8-first.png", "2-9-ein-café-größer.png",
                                      "4-11-fourth.png"]
        assert read_png(archive.read("4-11-fourth.png")).seed == 11


def test_the_grid_comes_as_one_picture_with_all_its_prompts(made, tmp_path):
    with made.expect_download() as download:
        made.get_by_role("button", name="Download as one picture").click()
    assert download.value.suggested_filename == "8-grid.png"
    download.value.save_as(tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (4 * 32, 2 * 32)
    asked = read_png(tmp_path / "grid.png")
    assert asked.prompts[:4] == ("first", "ein Café, größer", "", "fourth") and asked.seed == 8


def test_the_full_screen_view_is_left_and_leafed_through_with_keys(made):
    view = made.get_by_role("button", name="View picture 1: first")
    view.press("Enter")
    dialog = made.get_by_role("dialog")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", "first")
    made.keyboard.press("ArrowRight")
    made.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", "fourth")
    expect(dialog).to_contain_text("Seed 11")
    expect(dialog.get_by_role("link", name="Download PNG")).to_have_attribute(
        "download", "11-fourth.png")
    made.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", "first")
    made.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(view).to_be_focused()


def test_again_puts_prompt_seed_and_settings_of_a_picture_back(made):
    setting(made, "Steps").fill("40")
    made.get_by_role("button", name="Again: put prompt, seed and settings of picture 4").click()
    says(made, "Prompt, seed and settings of picture 4 are in the boxes.")
    assert prompts(made) == ["fourth", *[""] * 7]
    expect(seed_box(made)).to_have_value("11")
    expect(setting(made, "Steps")).to_have_value("3")
    made.get_by_role("button", name="Undo").click()
    expect(setting(made, "Steps")).to_have_value("40")
    assert prompts(made)[1] == "ein Café, größer"


def test_variations_fill_all_boxes_with_one_picture(made):
    made.get_by_role("button", name="Vary picture 2").click()
    says(made, "The prompt of picture 2 is in all boxes")
    assert prompts(made) == ["ein Café, größer"] * 8
    expect(seed_box(made)).to_have_value("9")
    expect(made.get_by_role("button", name="Generate")).to_be_focused()


def test_minus_one_draws_a_seed_that_can_be_used_again(tab):
    fill(tab, ["first", *[""] * 7], seed=3)
    tab.get_by_role("button", name="Random").click()
    expect(seed_box(tab)).to_have_value("-1")
    make(tab)
    drawn = re.search(r"seed (\d+)", tab.locator("#line").inner_text())[1]
    expect(figures(tab).first).to_contain_text(f"Seed {drawn}")
    tab.get_by_role("button", name="Reuse last").click()
    expect(seed_box(tab)).to_have_value(drawn)


def test_before_there_are_pictures_nothing_can_be_done_with_them_and_it_says_why(tab):
    for name in ("Download all (ZIP)", "Download as one picture", "Copy link"):
        button = tab.get_by_role("button", name=name)
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", "There are no pictures yet.")
    tab.get_by_role("button", name="Reuse last").click()
    says(tab, "There is no seed to reuse yet")
    expect(seed_box(tab)).to_have_value("-1")


def test_of_a_run_that_was_stopped_the_link_can_still_be_copied(tab, slow_engine):
    fill(tab, ["a", *[""] * 7], seed=3, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    stop(tab).click()
    says(tab, "Stopped")
    expect(tab.get_by_role("button", name="Copy link")).to_be_enabled()
    expect(tab.get_by_role("button", name="Download all (ZIP)")).to_be_disabled()


def test_a_single_picture_is_not_leafed_through(tab):
    fill(tab, ["only", *[""] * 7])
    make(tab)
    tab.get_by_role("button", name="View picture 1: only").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog.get_by_role("link", name="Download PNG")).to_be_visible()
    expect(dialog.get_by_role("button")).to_have_text(["Close"])


def test_the_server_says_what_it_is(tab):
    expect(tab.get_by_text("Precision")).to_be_hidden()
    tab.get_by_text("About this server").click()
    about = tab.locator("details")
    for words in ("1 × CPU, no TPU here", "float32", "32×32, compiled", "gradio 6", "ready"):
        expect(about).to_contain_text(words)


def test_the_server_says_that_it_looks_at_fewer_tokens_where_it_does(tab, page_engine,
                                                                    monkeypatch):
    expect(tab.locator("details")).to_contain_text("Precision")
    expect(tab.get_by_text("Token downsampling")).to_have_count(0)
    fewer = dataclasses.replace(page_engine.pipeline.models, token_downsampling=2)
    monkeypatch.setattr(page_engine.pipeline, "models", fewer)
    tab.reload()
    expect(tab.locator("details")).to_contain_text("Token downsampling2")


def test_the_page_asks_no_other_host(visitor, address):
    asked = []
    with visitor.new_page() as tab:
        tab.on("request", lambda request: asked.append(request.url))
        visit(tab, address)
        fill(tab, ["first", *[""] * 7])
        make(tab)
    others = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert asked and not others


@pytest.fixture(scope="module")
def phone(chromium, address):
    """The page on a phone, with pictures."""
    with chromium.new_context(viewport={"width": 390, "height": 844}) as context:
        tab = visit(context.new_page(), address)
        fill(tab, ["w" * 300, *PROMPTS[1:]], seed=MAX_SEED)
        make(tab)
        yield tab


def test_a_phone_needs_no_sideways_scrolling(phone):
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    ends = phone.locator("textarea, input, button, figure, a").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().right)"
    )
    assert max(ends) <= 390, "something is cut off at the edge"
    left = {round(x) for x, *_ in corners(phone)}
    assert len(left) == 2, "the gallery should have two columns"
    cut_off = phone.locator("#seed input").evaluate("seed => seed.scrollWidth > seed.clientWidth")
    assert not cut_off, "the seed should show all of its ten digits"


TARGETS = """() => [...document.querySelectorAll("button, a, summary, input, textarea")]
    .filter(each => each.checkVisibility() && !each.closest("footer"))
    .map(each => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
    .filter(([_, box]) => box.width && Math.min(box.width, box.height) < 24)
    .map(([name]) => name)"""


def test_everything_to_be_touched_is_large_enough(phone):
    assert phone.evaluate(TARGETS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_keeps_people_out(visitor, address, scheme):
    with newcomer(visitor, address, scheme) as tab:
        fill(tab, ["word " * 90, *[""] * 7])
        make(tab)
        for name in ("Paste a list", "Read a picture"):
            unfold(tab, name)
        tab.get_by_text("About this server").click()
        assert Axe().run(tab)["violations"] == []
        setting(tab, "Steps").fill("0")
        tab.get_by_role("button", name="Generate").click()
        says(tab, "Steps should be")
        assert Axe().run(tab)["violations"] == []
        figures(tab).first.get_by_role("button", name="View picture").click()
        # Not what is behind it, which nobody can reach: Axe would see it against the wrong ground.
        assert Axe().run(tab, "#viewer")["violations"] == []


def test_everything_is_reached_by_keyboard_alone(tab):
    fill(tab, ["first", *[""] * 7])
    tab.get_by_role("button", name="Copy the first to all").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    expect(tab.get_by_role("button", name="Paste a list")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("One prompt a line")).to_be_visible()
    tab.get_by_role("button", name="Reuse last").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    says(tab, "Done in")
    reached = set()
    for _ in range(12):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert "View picture 1: first" in reached and "Download picture 1 as PNG" in reached
    assert alts(tab) == ["first"]
    expect(tab.locator("figure.done")).to_have_count(1, timeout=PATIENCE)
