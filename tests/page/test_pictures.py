"""The pictures: what is downloaded, the full-screen view, what is put back; and looks."""

import dataclasses
import re
import zipfile
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from gradio.route_utils import delete_files_created_by_app
from PIL import Image

from benchmarks.page import STOPS
from sd_tpu.gallery.files import Files
from sd_tpu.pictures.images import read_png
from sd_tpu.settings import MAX_SEED
from tests.support.asking import make_request
from tests.support.visitor import (
    DESKTOP,
    LONG,
    PATIENCE,
    PHONE,
    PROMPTS,
    alts,
    box,
    corners,
    expect,
    figures,
    fill,
    generate,
    keeps_nobody_out,
    make,
    more,
    prompts,
    says,
    seed_box,
    setting,
    stop,
    tool,
    unfold,
    visit,
)


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
    assert (asked.prompts, asked.seed, asked.pictures[0].steps) == (("ein Café, größer",), 9, 3)
    assert asked.pictures[0].spacing == "leading", "the model's own is named"


def test_the_page_itself_shows_webp(made):
    image = figures(made).nth(1).locator("img")
    assert image.get_attribute("src").endswith("webp")
    assert image.get_attribute("decoding") == "sync", "or it is missing for a moment"


def test_a_small_picture_is_shown_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    files = Files(tmp_path, lambda pixels, request: b"")
    shown = files.add(make_request(prompts=("a",)), 0, pixels).shown
    with Image.open(shown) as image:
        assert np.array_equal(np.asarray(image.convert("RGB")), pixels)


def test_a_file_that_gradio_prunes_takes_its_folder_with_it(tmp_path):
    files = Files(tmp_path, lambda pixels, request: b"")
    page = SimpleNamespace(temp_file_sets=[files.names], blocks={})
    files.add(make_request(prompts=("a",)), 0, np.zeros((32, 32, 3), np.uint8))
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 2, "all of a picture lies together"
    delete_files_created_by_app(page, None)
    assert not list(tmp_path.iterdir()) and not files.names


def test_all_pictures_come_in_one_archive(made, tmp_path):
    with made.expect_download() as download:
        tool(made, "Download all (ZIP)").click()
    download.value.save_as(tmp_path / "pictures.zip")
    with zipfile.ZipFile(tmp_path / "pictures.zip") as archive:
        assert archive.namelist() == ["1-8-first.png", "2-9-ein-café-größer.png", "4-11-fourth.png"]
        assert read_png(archive.read("4-11-fourth.png")).seed == 11


def test_the_grid_comes_as_one_picture_with_all_its_prompts(made, tmp_path):
    with made.expect_download() as download:
        tool(made, "Download as one picture").click()
    assert download.value.suggested_filename == "8-grid.png"
    download.value.save_as(tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (4 * 256 + 3 * 8, 2 * (256 + 26) + 8), "large, with room for captions"
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
        "download", "11-fourth.png"
    )
    made.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("img")).to_have_attribute("alt", "first")
    made.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(view).to_be_focused()


def test_a_picture_is_downloaded_enlarged_with_its_settings(made, tmp_path):
    made.get_by_role("button", name="View picture 2").press("Enter")
    with made.expect_download() as download:
        made.get_by_role("dialog").get_by_role("button", name="Enlarged").click()
    made.keyboard.press("Escape")
    assert download.value.suggested_filename == "9-ein-café-größer-1024.png"
    download.value.save_as(tmp_path / "large.png")
    with Image.open(tmp_path / "large.png") as image:
        assert image.size == (1024, 1024)
    assert read_png(tmp_path / "large.png").seed == 9


def test_again_puts_prompt_seed_and_settings_of_a_picture_back(made):
    setting(made, "Steps").fill("40")
    more(made, 4).get_by_role("button", name="Again:").click()
    says(made, "Prompt, seed and settings of the picture are in the boxes.")
    assert prompts(made) == ["fourth", *[""] * 7]
    expect(seed_box(made)).to_have_value("11")
    expect(setting(made, "Steps")).to_have_value("3")
    made.get_by_role("button", name="Undo").click()
    expect(setting(made, "Steps")).to_have_value("40")
    assert prompts(made)[1] == "ein Café, größer"


def test_minus_one_draws_a_seed_that_can_be_used_again(tab):
    fill(tab, ["first", *[""] * 7], seed=-1)
    tab.get_by_role("button", name="Random").click()
    says(tab, "Each run draws a new seed.")
    seed_box(tab).fill("3")
    tab.get_by_role("button", name="Random").click()
    expect(seed_box(tab)).to_have_value("-1")
    make(tab)
    drawn = re.search(r"seed (\d+)", tab.locator("#line").inner_text())[1]
    expect(figures(tab).first).to_contain_text(f"Seed {drawn}")
    tab.get_by_role("button", name="Reuse last").click()
    expect(seed_box(tab)).to_have_value(drawn)


@pytest.fixture(scope="module")
def unused(chromium, address):
    """A tab in which nothing is drawn."""
    with chromium.new_context(viewport=DESKTOP) as context:
        yield visit(context.new_page(), address)


@pytest.fixture
def still(unused):
    """That tab, with nothing open."""
    unused.set_viewport_size(DESKTOP)
    unused.evaluate("scrollTo(0, 0)")
    unused.keyboard.press("Escape")
    return unused


def test_before_there_are_pictures_nothing_can_be_done_with_them_and_it_says_why(still):
    for name in ("Download all (ZIP)", "Download as one picture", "Copy link"):
        button = tool(still, name)
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", "There are no pictures yet.")
    still.get_by_role("button", name="Reuse last").click()
    says(still, "There is no seed to reuse yet")
    expect(seed_box(still)).to_have_value("-1")


def test_of_a_run_that_was_stopped_the_link_can_still_be_copied(tab, slow_engine):
    fill(tab, ["a", *[""] * 7], seed=3, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    stop(tab).click()
    says(tab, "Stopped")
    expect(tool(tab, "Copy link")).to_be_enabled()
    expect(tool(tab, "Download all (ZIP)")).to_be_disabled()


def test_a_single_picture_is_not_leafed_through(tab):
    fill(tab, ["only", *[""] * 7])
    make(tab)
    tab.get_by_role("button", name="View picture 1: only").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog.get_by_role("link", name="Download PNG")).to_be_visible()
    expect(dialog.locator(".bar").get_by_role("button")).to_have_text(
        ["Use", "Start from it", "Draw larger", "Enlarged", "Close"]
    )


def test_the_server_says_what_it_is(still):
    unfold(still, "About this server")
    about = still.locator("#about-panel")
    for words in ("1 × CPU, no TPU here", "float32", "32×32, compiled", "gradio 6", "ready"):
        expect(about).to_contain_text(words)


def test_the_server_says_that_it_looks_at_fewer_tokens_where_it_does(
    still, page_engine, monkeypatch
):
    fewer = dataclasses.replace(page_engine.checkpoint.model, token_downsampling=2)
    monkeypatch.setattr(page_engine.checkpoint, "model", fewer)
    unfold(still, "About this server")
    expect(still.locator("#about-panel")).to_contain_text("Token downsampling2")


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
    with chromium.new_context(viewport=PHONE) as context:
        tab = visit(context.new_page(), address)
        fill(tab, ["w" * 300, *PROMPTS[1:]], seed=MAX_SEED)
        make(tab)
        yield tab


def test_a_phone_needs_no_sideways_scrolling(phone):
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    ends = phone.locator("textarea, input, button, figure, a").evaluate_all(
        "all => all.filter(each => !each.closest('#tools'))"  # which are pushed along by a finger
        ".map(each => each.getBoundingClientRect().right)"
    )
    assert max(ends) <= 390, "something is cut off at the edge"
    left = {round(x) for x, *_ in corners(phone)}
    assert len(left) == 2, "the gallery should have two columns"
    cut_off = phone.locator("#seed input").evaluate("seed => seed.scrollWidth > seed.clientWidth")
    assert not cut_off, "the seed should show all of its ten digits"


@pytest.mark.parametrize(
    ("width", "height", "whole"), [(1440, 900, 8), (1366, 768, 8), (1280, 560, 4)]
)
def test_pictures_are_in_sight_with_their_prompts_before_anybody_scrolls(
    still, width, height, whole
):
    still.set_viewport_size({"width": width, "height": height})
    covered = still.locator("#bar").bounding_box()["y"]
    cards = still.locator(".card").evaluate_all("""cards => cards.map(card => {
        const { top, bottom } = card.getBoundingClientRect();
        return [top, bottom];
    })""")
    assert sum(bottom <= covered for _, bottom in cards) == whole
    assert all(covered - top > 90 for top, _ in cards), "the second row is begun"


def test_nothing_is_cut_off_or_overlaps_at_any_width_with_seeds_of_ten_digits(phone):
    for width in (390, 701, 820, 1000, 1240, 1920):
        phone.set_viewport_size({"width": width, "height": 900})
        phone.mouse.move(width / 4, 300)
        cut = phone.evaluate("""() => [...document.querySelectorAll("#cards .seed, #bar button, "
            + "#seed > span, #tools button")].filter((each) => each.checkVisibility()
            && each.scrollWidth > each.clientWidth + 1).map((each) => each.outerHTML)""")
        assert not cut, width
        over = phone.evaluate("""() => ["#bar", "#cards .card:nth-child(2)"].flatMap((where) => {
            const pressed = `${where} :is(button:not(.view), a, input)`;
            const parts = [...document.querySelectorAll(pressed)]
                .filter((each) => each.checkVisibility() && !each.closest("#sheet"));
            const boxes = parts.map((each) => each.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => a.left < b.right - 1
                && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
                .map(() => parts[i].outerHTML));
        })""")
        assert not over, width
    phone.set_viewport_size(PHONE)


def test_the_bar_covers_nothing_of_the_foot(still):
    for width, height in ((1440, 900), (1024, 768), (880, 800)):
        still.set_viewport_size({"width": width, "height": height})
        still.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert still.locator("footer .show-api").evaluate("""link => {
            const { x, y, width, height } = link.getBoundingClientRect();
            return link.contains(document.elementFromPoint(x + width / 2, y + height / 2));
        }"""), width


def test_a_long_prompt_is_seen_from_its_beginning_once_its_box_is_left(still):
    prompt = box(still, 1)
    prompt.fill("a very long prompt, " * 40)
    prompt.press("End")
    assert prompt.evaluate("box => { box.scrollTop = 1e6; return box.scrollTop }") > 0
    prompt.blur()
    assert prompt.evaluate("box => box.scrollTop") == 0


def test_a_box_grows_over_its_picture_while_somebody_writes(still):
    before, prompt = corners(still), box(still, 6)
    small = prompt.bounding_box()
    prompt.fill("a very long prompt, " * 9)
    grown = prompt.bounding_box()
    assert prompt.evaluate("box => box.scrollHeight <= box.clientHeight"), "all of it is seen"
    assert grown["height"] > 2 * small["height"]
    bottom = small["y"] + small["height"]
    assert grown["y"] + grown["height"] == pytest.approx(bottom, abs=2), "it grows upward"
    assert corners(still) == before
    prompt.blur()
    assert prompt.bounding_box() == small


@pytest.mark.parametrize("size", [(721, 900), (768, 1024), (900, 700), (1024, 768)])
def test_the_line_has_room_for_a_sentence(still, size):
    still.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    assert still.locator("#line").evaluate("line => line.clientWidth") >= 270
    assert still.locator("#bar").bounding_box()["height"] <= 96


def test_signs_are_seen_in_forced_colours(chromium, address):
    with chromium.new_context(viewport=DESKTOP, forced_colors="active") as context:
        tab = visit(context.new_page(), address)
        colours = tab.locator("header .icon, #seeds .icon").evaluate_all("""all => all.map(each =>
            [getComputedStyle(each, "::before"), getComputedStyle(each)].map(
                ({ backgroundColor }) => backgroundColor))""")
        assert len(colours) >= 6 and all(sign != ground for sign, ground in colours), colours


def test_the_page_can_be_installed_and_is_sent_small(address):
    manifest = httpx.get(f"{address}manifest.json").json()
    assert (manifest["display"], manifest["start_url"]) == ("standalone", "./")
    icon = httpx.get(f"{address}{manifest['icons'][0]['src'].lstrip('/')}")
    assert icon.headers["content-type"] == "image/svg+xml" and "#1b1815" in icon.text
    page = httpx.get(address, headers={"accept-encoding": "gzip, br"})
    assert page.headers["content-encoding"] == "br" and "manifest.json" in page.text
    assert page.num_bytes_downloaded < len(page.content) / 5
    plain = httpx.get(address, headers={"accept-encoding": "identity"})
    assert len(plain.content) > 1e5 and "content-encoding" not in plain.headers
    module = re.search(r'modulepreload" crossorigin href="\./(assets/\S+)">', page.text)[1]
    for name in (module, "assets/nothing.js"):
        file = httpx.get(f"{address}{name}")
        assert ("immutable" in file.headers.get("cache-control", "")) is (name == module)


def test_what_gradio_would_load_piece_by_piece_comes_at_once(chromium, address):
    asked = []
    with chromium.new_page() as tab:
        tab.on("request", lambda request: asked.append(request.url))
        visit(tab, address)
        styled = "box => getComputedStyle(box.closest('.input-container')).display"
        assert tab.locator("#prompt-1 textarea").evaluate(styled) == "flex"
    styles = [url for url in asked if ".css" in url]
    # Gradio's own, all that its components have, and the theme.
    assert len(asked) <= 38 and len(styles) == 3, styles
    assert not any("iframeResizer" in url for url in asked)


def test_no_panel_moves_a_picture(still):
    before, folds = corners(still), still.locator(".fold")
    assert folds.count() == 15
    for fold in folds.all():
        fold.evaluate("fold => fold.click()")
        expect(still.locator("#sheet [data-open]")).to_have_count(1)
        assert corners(still) == before
    still.keyboard.press("Escape")
    expect(still.locator("#sheet")).to_be_hidden()
    expect(folds.last).to_be_focused()


TARGETS = """least => [...document.querySelectorAll("button, a, summary, input, textarea, select")]
    .filter(each => each.checkVisibility() && !each.closest("footer"))
    .filter(each => !each.matches("figure .view, [type=range], textarea, [type=checkbox]"))
    .map(each => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
    .filter(([_, box]) => box.width && Math.min(box.width, box.height) < least)
    .map(([name]) => name)"""


def test_everything_to_be_touched_is_large_enough(phone, still):
    assert phone.evaluate(TARGETS, 44) == []
    assert still.evaluate(TARGETS, 24) == []


@pytest.mark.slow("has axe look through the page with each panel")
def test_axe_finds_nothing_that_keeps_people_out(tab):
    fill(tab, ["word " * 70, *[""] * 7])  # whose tokens are counted
    make(tab)
    for name in ("Paste a list", "Read a picture"):
        unfold(tab, name)
    unfold(tab, "About this server")
    keeps_nobody_out(tab)
    setting(tab, "Steps").fill("0")
    tab.locator("#generate").click()
    says(tab, "Steps should be")
    keeps_nobody_out(tab)
    figures(tab).first.get_by_role("button", name="View picture").click()
    # Not what is behind it, which nobody can reach: Axe would see it against the wrong ground.
    keeps_nobody_out(tab, "#viewer")


def test_everything_is_reached_by_keyboard_alone(tab):
    fill(tab, ["first", *[""] * 7])
    tab.get_by_role("button", name="More tools").focus()
    tab.keyboard.press("Enter")
    tool(tab, "Paste a list").focus()
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("One prompt per line")).to_be_visible()
    tab.keyboard.press("Tab")
    expect(tab.get_by_label("One prompt per line")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("button", name="More tools")).to_be_focused()
    box(tab, 8).focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    says(tab, "Done in")
    expect(generate(tab)).to_be_focused()
    drawn = tab.locator("figure.done img")
    before = drawn.get_attribute("src")
    tab.locator(".actions > [data-do=redraw]").focus()
    tab.keyboard.press("Enter")
    expect(drawn).not_to_have_attribute("src", before, timeout=PATIENCE)
    expect(stop(tab)).to_be_disabled(timeout=PATIENCE)
    expect(tab.locator(".actions > [data-do=redraw]")).to_be_focused(timeout=PATIENCE)
    box(tab, 2).focus()
    tab.keyboard.press("Shift+Tab")
    expect(box(tab, 1)).to_be_focused()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("button", name="View picture 1: first")).to_be_focused()
    with tab.expect_download():
        tab.keyboard.press("d")
    assert alts(tab) == ["first"]
    expect(tab.locator("figure.done")).to_have_count(1, timeout=PATIENCE)


def test_draw_is_within_reach_and_letters_act_on_the_picture_that_has_the_focus(tab):
    fill(tab, ["first", "second", *[""] * 6], steps=2)
    tab.keyboard.press("Escape")
    make(tab)
    tab.locator(".card .actions > [data-do=redraw]").nth(1).wait_for()
    assert tab.evaluate(STOPS) <= 12
    box(tab, 2).focus()
    tab.keyboard.press("Escape")
    tab.keyboard.press("1")
    expect(tab.get_by_role("button", name="View picture 1: first")).to_be_focused()
    tab.keyboard.press("k")
    keep = tab.locator(".actions > [data-do=keep]")
    expect(keep.first).to_have_attribute("aria-pressed", "true")
    tab.keyboard.press("ArrowRight")
    expect(tab.get_by_role("button", name="View picture 2: second")).to_be_focused()
    tab.keyboard.press("m")
    expect(tab.get_by_role("button", name="Larger: draw picture 2")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(tab.locator("#more-2")).to_be_hidden()
    box(tab, 2).focus()
    tab.keyboard.press("End")
    tab.keyboard.type(" r k 1 ?")
    assert prompts(tab)[1] == "second r k 1 ?", "in a prompt they are letters"
    expect(keep.nth(1)).to_have_attribute("aria-pressed", "false")
    tab.keyboard.press("Escape")
    tab.keyboard.press("?")
    expect(tab.get_by_text("go from picture to picture")).to_be_visible()
    tab.keyboard.press("?")
    expect(tab.locator("#keys-panel")).to_be_hidden()
    expect(tab.get_by_role("button", name="View picture 2: second")).to_be_focused()


def test_a_card_without_a_picture_is_reached_by_keys_as_well(tab):
    box(tab, 3).focus()
    tab.keyboard.press("Escape")
    expect(tab.locator(".below .fold").nth(2)).to_be_focused()
    tab.keyboard.press("p")
    bookmark = tab.locator("[data-do=bookmark]").nth(2)
    expect(bookmark).to_have_attribute("aria-pressed", "true")
    tab.keyboard.press("o")
    steps = tab.locator("#overrides-panel").get_by_label("Steps")
    steps.fill("3")
    expect(tab.locator(".below .overrides").nth(2)).to_contain_text("3 steps")
    tab.keyboard.press("Escape")
    expect(tab.locator(".below .fold").nth(2)).to_be_focused()
    tab.keyboard.press("x")
    expect(tab.locator(".below .overrides").nth(2)).to_be_empty()


def test_a_browser_finds_nothing_on_the_page_that_it_was_told_not_to_load(visitor, address):
    with visitor.new_page() as tab:
        refused = []
        tab.on(
            "console",
            lambda message: (
                refused.append(message.text) if "Content Security Policy" in message.text else None
            ),
        )
        visit(tab, address)
        fill(tab, ["a fox"])
        make(tab)
        assert refused == []
