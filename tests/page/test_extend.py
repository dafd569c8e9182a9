"""A picture that is full screen: extended by its edges, zoomed and panned."""

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page

from sd_tpu.pictures.inputs import Input
from tests.support.pages import made_from, picture_file
from tests.support.visitor import PATIENCE, expect, figures, fill, make, says

SHEET = ["a fox", "a hen", *[""] * 6]


def opened(tab: Page, number: int) -> Locator:
    """Show a picture full screen, once its edges are there; return the view."""
    tab.get_by_role("button", name=f"View picture {number}").press("Enter")
    viewer = tab.locator("#viewer")
    expect(viewer.get_by_role("slider", name="Extend to the right")).to_be_visible(timeout=PATIENCE)
    return viewer


def pixels(tab: Page, number: int) -> np.ndarray:
    """Return a card's picture: uint8 [H, W, 3]."""
    return np.asarray(Input(picture_file(tab, number)).on_white())


@pytest.mark.slow("compiles another size")
def test_what_lies_beside_a_picture_is_drawn_and_the_picture_stays(tab):
    fill(tab, SHEET, seed=7, steps=2)
    make(tab)
    before, other, asked = pixels(tab, 2), pixels(tab, 1), made_from(tab, 2)
    viewer = opened(tab, 2)
    extend = viewer.locator("[data-do=extend]")
    expect(extend).to_be_hidden()
    edge = viewer.get_by_role("slider", name="Extend to the right").bounding_box()
    x, y = edge["x"] + edge["width"] / 2, edge["y"] + edge["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + viewer.locator(".pair").bounding_box()["width"] * 0.55, y, steps=3)
    tab.mouse.up()
    expect(extend).to_be_visible()
    above = viewer.get_by_role("slider", name="Extend above")
    above.focus()
    tab.keyboard.press("ArrowUp")
    unit, right = (
        int(each.get_attribute("aria-valuenow"))
        for each in (above, viewer.get_by_role("slider", name="Extend to the right"))
    )
    assert unit > 0 and right >= unit
    width, height = asked.width + right, asked.height + unit
    expect(extend).to_have_text(f"Extend to {width}×{height}")
    assert Axe().run(tab)["violations"] == []
    frame = viewer.locator(".extension").bounding_box()
    stage = viewer.locator(".stage").bounding_box()
    assert stage["y"] <= frame["y"] and frame["height"] <= stage["height"], "all of it is in sight"
    tab.locator("#line p").evaluate("line => { line.textContent = '' }")
    tab.keyboard.press("Enter")
    says(tab, "Done in")
    after, made = pixels(tab, 2), made_from(tab, 2)
    assert after.shape == (height, width, 3)
    np.testing.assert_array_equal(after[unit:, : asked.width], before)
    assert after[:unit].std() > 0
    assert (made.prompt, made.seed, made.strength) == ("a hen", asked.seed, 1.0)
    assert made.init_image and made.mask and made.mask != made.init_image
    np.testing.assert_array_equal(pixels(tab, 1), other)
    expect(tab.locator(".below .overrides").nth(1)).to_contain_text(f"{width}×{height}")
    tab.locator("#undo").click()
    expect(tab.locator(".below .overrides").nth(1)).to_be_empty()
    expect(figures(tab).nth(1).locator("img")).to_be_visible()
    np.testing.assert_array_equal(pixels(tab, 2), before)


def test_escape_takes_an_extension_back_and_the_wheel_zooms_at_the_pointer(tab):
    fill(tab, SHEET, seed=8, steps=2)
    make(tab)
    viewer = opened(tab, 1)
    below = viewer.get_by_role("slider", name="Extend below")
    below.focus()
    tab.keyboard.press("ArrowDown")
    expect(viewer.locator("[data-do=extend]")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(viewer.locator("[data-do=extend]")).to_be_hidden()
    expect(viewer).to_be_visible()
    pair, whole = viewer.locator(".pair"), viewer.locator(".pair").bounding_box()
    x, y = whole["x"] + whole["width"] / 4, whole["y"] + whole["height"] / 4
    tab.mouse.move(x, y)
    tab.mouse.wheel(0, -300)
    tab.wait_for_function(
        "width => document.querySelector('#viewer .pair').getBoundingClientRect().width > width",
        arg=1.5 * whole["width"],
    )
    large = pair.bounding_box()
    assert abs((x - large["x"]) / large["width"] - 0.25) < 0.01, "what is there stays there"
    tab.keyboard.down(" ")
    tab.mouse.down()
    tab.mouse.move(x + 40, y + 30, steps=3)
    tab.mouse.up()
    tab.keyboard.up(" ")
    moved = pair.bounding_box()
    assert (round(moved["x"] - large["x"]), round(moved["y"] - large["y"])) == (40, 30)
    expect(viewer).to_be_visible()
    tab.mouse.dblclick(x, y)
    assert pair.bounding_box() == whole
    tab.keyboard.press("+")
    assert pair.bounding_box()["width"] == pytest.approx(1.25 * whole["width"], rel=1e-3)
    below.blur()  # where Shift extends faster
    zoomed = pair.bounding_box()
    tab.keyboard.press("Shift+ArrowRight")
    assert pair.bounding_box() == {**zoomed, "x": zoomed["x"] - 60}, "and no other picture is shown"
    tab.keyboard.press("Shift+ArrowLeft")
    tab.mouse.click(x, y, button="right")
    tab.mouse.move(x + 40, y)
    assert pair.bounding_box()["x"] < whole["x"], "only the left button and the middle one pan"
    tab.keyboard.press("0")
    assert pair.bounding_box() == whole
