"""A card's picture, or one of a visitor's own, as a control or a reference picture."""

import pytest

from sd_tpu.pictures.inputs import Input
from sd_tpu.serving.engine import Engine
from tests.support.networks import make_adapter, make_controlnet, make_encoder
from tests.support.pages import hand_in, made_from, picture_file, png, served, slide
from tests.support.visitor import expect, fill, make, more, newcomer, unfold


@pytest.fixture(scope="module")
def engine(checkpoints, torch_pipelines, tmp_path_factory):
    """An engine with two ControlNets and two IP-Adapters."""
    folder, unet = tmp_path_factory.mktemp("uses"), torch_pipelines["sd1"].unet
    lines, names = [folder / name for name in ("lines", "depth")], ["eyes", "faces"]
    for seed, name in enumerate(lines):
        make_controlnet(unet, seed).save_pretrained(name)
    make_encoder(folder / "image_encoder")
    for seed, name in enumerate(names):
        make_adapter(unet, folder / f"{name}.safetensors", seed=seed)
    engine = Engine.open(
        checkpoints["sd1"],
        devices=1,
        controlnets=lines,
        ip_adapters=[folder / f"{name}.safetensors" for name in names],
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def address(engine, tmp_path_factory):
    """Where a page with these is served."""
    with served(engine, tmp_path_factory.mktemp("history")) as address:
        yield address


@pytest.mark.slow("compiles with a ControlNet and an IP-Adapter")
def test_a_cards_picture_is_followed_by_itself_and_then_by_all(tab):
    fill(tab, ["a fox", "a hen", *[""] * 6], seed=3, steps=2)
    tab.get_by_role("button", name="Settings for prompt 1", exact=True).click()
    # There is no picture yet.
    expect(tab.locator("#overrides-panel .uses")).to_be_hidden()
    make(tab)
    expect(tab.locator("#overrides-panel .uses")).to_be_visible()
    unfold(tab, "Settings for prompt 3")
    expect(tab.locator("#overrides-panel .uses")).to_be_hidden()
    drawn = picture_file(tab, 1)
    more(tab, 1).get_by_role("button", name="Use picture 1").click()
    own = tab.locator("#overrides-panel")
    own.get_by_role("button", name="Use as control picture").click()
    expect(own.locator(".handed[open] [name=control_image] + img")).to_be_visible()
    own.get_by_label("Detector").select_option("canny")
    slide(tab, "overrides", 0.5, "control_scale")
    expect(tab.locator(".below .overrides").first).to_contain_text(
        "canny detected · control strength 0.5"
    )
    make(tab)
    first, second = made_from(tab, 1), made_from(tab, 2)
    assert (first.control_image, first.detector, first.control_scale, first.controlnet) == (
        Input(drawn).name,
        "canny",
        0.5,
        "lines",
    )
    assert not (first.init_image or first.reference or second.control_image)
    own.locator(".handed[open]").get_by_role("button", name="Use for all eight").click()
    unfold(tab, "Settings for prompt 2")
    own.get_by_label("ControlNet").select_option("depth")
    for name, value in (("scale", 0.7), ("start", 0.2), ("stop", 0.6)):
        slide(tab, "overrides", value, f"control_{name}")
    make(tab)
    first, second = made_from(tab, 1), made_from(tab, 2)
    assert second.control_image == first.control_image
    assert [
        (each.controlnet, each.control_scale, each.control_start, each.control_stop)
        for each in (first, second)
    ] == [("lines", 0.5, 0, 1), ("depth", 0.7, 0.2, 0.6)]


@pytest.mark.slow("compares in a browser")
def test_ones_own_picture_is_the_reference_of_all_and_its_strengths_are_compared(tab):
    fill(tab, ["a fox", *[""] * 7], seed=3, steps=2)
    unfold(tab, "Compare")
    strengths = tab.locator("#compare-panel label:has([value=reference_scale])")
    expect(strengths).to_be_hidden()
    unfold(tab, "Settings")
    settings = tab.locator("#settings-panel")
    settings.locator(".handed").evaluate_all("all => all.map((each) => { each.open = true })")
    settings.get_by_label("IP-Adapter").select_option("faces")
    hand_in(tab, "drop", "#settings-panel .upload:has([name=reference])", png())
    expect(settings.locator("[name=reference] + img")).to_be_visible()
    make(tab)
    made = made_from(tab, 1)
    assert (made.reference, made.ip_adapter) == (Input(png()).name, "faces")
    unfold(tab, "Compare")
    strengths.click()
    tab.locator("#compare-panel .values input").fill("0, 0.5, 1")
    tab.locator("#compare-panel [data-do=compare]").click()
    expect(tab.locator("#picture-3 figcaption b")).to_contain_text("reference strength 1")
    expect(tab.locator("#cards [data-do=view]")).to_have_count(3)
    assert [made_from(tab, number).reference_scale for number in (1, 2, 3)] == [0, 0.5, 1]


def test_where_nothing_is_followed_a_picture_is_started_from_at_once(
    visitor, page_engine, tmp_path
):
    with served(page_engine, tmp_path) as address, newcomer(visitor, address) as tab:
        fill(tab, ["a fox", *[""] * 7], seed=3, steps=2)
        make(tab)
        more(tab, 1).get_by_role("button", name="Use picture 1").click()
        expect(tab.locator("#overrides-panel [name=init_image] + img")).to_be_visible()
        expect(tab.locator(".uses")).to_have_count(0)
        assert not tab.locator("[name=control_image], [name=reference]").count()
