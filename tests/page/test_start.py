"""Pictures that go in by the page: from a card, by a drop or the clipboard, and their masks."""

import re

import numpy as np
import pytest

from sd_tpu.gallery import uploads
from sd_tpu.gallery.uploads import MAX_KEPT, OVERHEAD, SIDE, Inputs, painted
from sd_tpu.pictures.inputs import Input
from tests.support.pages import PHOTO, hand_in, made_from, picture_file, png, slide
from tests.support.visitor import (
    PATIENCE,
    box,
    expect,
    figures,
    fill,
    make,
    more,
    of_all,
    says,
    setting,
    tool,
    tools,
    unfold,
)


def test_a_card_begins_with_its_own_picture_and_then_all_do(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=4)
    make(tab)
    more(tab, 1).get_by_role("button", name="Use picture 1").click()
    expect(tab.locator("#overrides-panel .handed")).to_have_attribute("open", "")
    expect(tab.locator("#overrides-panel .upload img").first).to_be_visible()
    slide(tab, "overrides", 0.5)
    expect(tab.locator(".below .overrides").first).to_contain_text("strength 0.5 · from a picture")
    make(tab)
    first, second = made_from(tab, 1), made_from(tab, 2)
    assert first.init_image and first.strength == 0.5 and not second.init_image
    tab.get_by_role("button", name="Use for all eight").click()
    make(tab)
    again = made_from(tab, 2)
    assert (again.init_image, again.strength) == (first.init_image, 0.5)
    tool(tab, "Copy link").click()
    says(tab, "Link copied. Uploaded pictures are not included.")
    assert "init" not in of_all(tab).get_attribute("data-link")
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    unfold(tab, "Settings")
    tab.locator("#settings-panel .handed").evaluate("start => { start.open = true }")
    expect(tab.locator("#settings-panel .upload img").first).to_be_visible()
    tab.locator("#settings-panel [data-do=take_away]").first.click()
    expect(tab.locator("#settings-panel .upload img").first).to_be_hidden()
    tab.get_by_role("button", name="Undo", exact=True).click()
    expect(tab.locator("#settings-panel .upload img").first).to_be_visible()


def test_again_leaves_what_a_picture_began_from_to_its_box(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=4)
    hand_in(tab, "drop", "#cards > .card:nth-child(2) figure", png())
    unfold(tab, "Settings for prompt 2")
    tab.locator("#overrides-panel .handed").first.evaluate("start => { start.open = true }")
    slide(tab, "overrides", 0.5)
    own = tab.locator(".below .overrides")
    expect(own.nth(1)).to_contain_text("strength 0.5 · from a picture")
    make(tab)
    first = made_from(tab, 2)
    setting(tab, "Steps").fill("2")
    more(tab, 2).get_by_role("button", name="Again:").click()
    says(tab, "are in the boxes.")
    expect(box(tab, 1)).to_have_value("a hen")
    expect(own.first).to_contain_text("strength 0.5 · from a picture")
    expect(setting(tab, "Steps")).to_have_value("4")
    expect(tab.locator("#settings-panel [name=init_image]")).to_have_value("")
    make(tab)
    assert made_from(tab, 1) == first
    tool(tab, "Clear").click()
    expect(own.first).to_be_empty()
    box(tab, 1).fill("a cow")
    make(tab)
    assert not made_from(tab, 1).init_image


def test_live_follows_the_strength_of_what_a_picture_begins_with(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=4)
    hand_in(tab, "drop", "#cards > .card figure", png())
    expect(tab.locator(".below .overrides").first).to_contain_text("from a picture")
    make(tab)
    other = figures(tab).nth(1).locator("img").get_attribute("src")
    tools(tab).get_by_label("Live", exact=True).check()
    unfold(tab, "Settings for prompt 1")
    tab.locator("#overrides-panel .handed").evaluate("start => { start.open = true }")
    for strength in (0.5, 1):
        slide(tab, "overrides", strength)
        expect(figures(tab).first).to_contain_text(f"strength {strength:g}", timeout=PATIENCE)
        expect(figures(tab).first).to_have_class(re.compile(r"\bdone\b"), timeout=PATIENCE)
        made = made_from(tab, 1)
        assert (made.init_image, made.strength) == (Input(png()).name, strength)
    assert figures(tab).nth(1).locator("img").get_attribute("src") == other


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_a_picture_dropped_on_a_card_or_pasted_in_its_box_is_what_it_begins_with(tab, how):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=2)
    where = "#cards > .card:nth-child(2) figure" if how == "drop" else "#prompt-2 textarea"
    hand_in(tab, how, where, png())
    expect(tab.locator(".below .overrides").nth(1)).to_contain_text("from a picture")
    make(tab)
    assert made_from(tab, 2).init_image == Input(png()).name and not made_from(tab, 1).init_image


def test_a_slow_picture_does_not_take_the_place_of_a_later_one_or_of_none(tab):
    slow = []  # the answers about the first two pictures, which are on their way

    def answer(route):
        if "early.png" in (route.request.post_data or ""):
            slow.append((route, route.fetch()))
        else:
            route.continue_()

    tab.route(re.compile("component_server"), answer)
    first, second = (f"#cards > .card:nth-child({number}) figure" for number in (1, 2))
    unfold(tab, "Settings for prompt 2")
    start, later = tab.locator("#overrides-panel [name=init_image]"), png(PHOTO[::-1])
    hand_in(tab, "drop", first, png(), "early.png")
    hand_in(tab, "drop", second, png(), "early.png")
    hand_in(tab, "drop", second, later)
    expect(start).to_have_value(Input(later).name, timeout=PATIENCE)
    tab.locator("#overrides-panel .handed").first.evaluate("start => { start.open = true }")
    tab.locator("#overrides-panel [data-do=take_away]").first.click()
    hand_in(tab, "drop", first, later)
    expect(tab.locator(".below .overrides").first).to_contain_text("from a picture")
    with tab.expect_response(re.compile("component_server")) as answered:
        for route, response in slow:
            route.fulfill(response=response)
    answered.value.finished()
    hand_in(tab, "drop", "#cards > .card:nth-child(3) figure", later)
    expect(tab.locator(".below .overrides").nth(2)).to_contain_text("from a picture")
    expect(start).to_have_value("")
    unfold(tab, "Settings for prompt 1")
    expect(start).to_have_value(Input(later).name)


def test_a_picture_dropped_beside_the_cards_is_read_if_it_has_settings_and_else_begins_all(tab):
    fill(tab, ["a fox", *[""] * 7], seed=3, steps=2)
    make(tab)
    hand_in(tab, "drop", "header", picture_file(tab, 1))
    says(tab, "are in the boxes")
    hand_in(tab, "drop", "header", png())
    expect(tab.locator("#settings-panel [name=init_image]")).to_have_value(Input(png()).name)
    hand_in(tab, "drop", "header", b"<svg/>")
    says(tab, "is a drawing of lines (SVG)")
    tab.route(re.compile("/upload"), lambda route: route.abort())
    hand_in(tab, "drop", "header", png())
    says(tab, "The server failed; please try again.")


def test_a_mask_is_painted_undone_and_inverted(tab):
    fill(tab, ["a fox", *[""] * 7], seed=3, steps=2)
    hand_in(tab, "drop", "#cards > .card figure", png())
    expect(tab.locator(".below .overrides").first).to_contain_text("from a picture")
    tab.locator(".below .fold").first.click()
    tab.locator("#overrides-panel .handed").evaluate("start => { start.open = true }")
    tab.locator("#overrides-panel [data-do=paint]").click()
    canvas = tab.locator("#painter canvas")
    tab.get_by_label("Brush size").fill("30")  # a third of the longer side, 14 of these 48 pixels
    expect(tab.get_by_role("button", name="Done", exact=True)).to_be_disabled()
    spot = canvas.bounding_box()
    for share in (0.25, 0.75):
        tab.mouse.move(spot["x"] + spot["width"] * share, spot["y"] + spot["height"] * 0.2)
        tab.mouse.down()
        tab.mouse.move(spot["x"] + spot["width"] * share, spot["y"] + spot["height"] * 0.4)
        tab.mouse.up()
    painter = tab.locator("#painter")
    painter.get_by_role("button", name="Undo").click()
    covered = """canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const at = (x, y) => data[4 * (Math.round(y * canvas.height) * canvas.width
            + Math.round(x * canvas.width)) + 3];
        return [at(0.25, 0.3), at(0.4, 0.3), at(0.75, 0.3)];
    }"""
    assert canvas.evaluate(covered) == [255, 255, 0]
    painter.get_by_role("button", name="Invert").click()
    assert canvas.evaluate(covered) == [0, 0, 255]
    painter.get_by_role("button", name="Invert").click()
    painter.get_by_role("button", name="Done").click()
    expect(tab.locator(".below .overrides").first).to_contain_text("with a mask")
    make(tab)
    made = made_from(tab, 1)
    assert made.mask and made.init_image == Input(png()).name


def test_a_boxs_own_mask_goes_with_the_picture_for_all_that_it_was_painted_on(tab):
    fill(tab, ["a fox", *[""] * 7], steps=2)
    hand_in(tab, "drop", "header", png())
    field = tab.locator("#settings-panel [name=init_image]")
    expect(field).to_have_value(Input(png()).name, timeout=PATIENCE)
    tab.locator(".below .fold").first.click()
    tab.locator("#overrides-panel .handed").evaluate("start => { start.open = true }")
    tab.locator("#overrides-panel [data-do=paint]").click()
    tab.get_by_label("Brush size").fill("30")
    spot = tab.locator("#painter canvas").bounding_box()
    tab.mouse.click(spot["x"] + spot["width"] / 2, spot["y"] + spot["height"] / 2)
    tab.locator("#painter").get_by_role("button", name="Done").click()
    told = tab.locator(".below .overrides").first
    expect(told).to_contain_text("with a mask")
    hand_in(tab, "drop", "header", png(PHOTO + np.uint8(1)))
    expect(told).not_to_contain_text("with a mask")


def test_what_a_browser_has_handed_in_is_bounded_and_nobody_elses(monkeypatch):
    kept = Inputs()
    names = [kept.add("a", Input(png(PHOTO + np.uint8(i)))) for i in range(MAX_KEPT + 1)]
    assert list(kept.of("a")) == names[1:] and not kept.of("b")
    assert kept.shown("a", {names[1], names[0]}).keys() == {names[1]}
    kept.of("a", {names[2]})
    newer = kept.add("a", Input(png(PHOTO - np.uint8(1)))), kept.add("a", Input(png(PHOTO // 2)))
    assert [*kept.of("a")] == [*names[5:], names[1], names[2], *newer], "what is used stays"
    monkeypatch.setattr(uploads, "MAX_BYTES", 3 * OVERHEAD)
    large = Input(png(np.zeros((10, SIDE + 100, 3), np.uint8)))
    name = kept.add("b", large)
    assert kept.of("b")[name].size[0] == SIDE and len(kept.of("a")) <= 1, "all have a bound"
    mask = painted(Input(png(np.full((12, 8, 3), 255, np.uint8))), Input(png()))
    assert mask.size == (32, 48)
