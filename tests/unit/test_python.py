"""Arguments and results of `sd_tpu.Engine` for programs, and the names of the package."""

import inspect
import pickle
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

import sd_tpu
from sd_tpu import (
    DrawnImage,
    ModelOptions,
    Picture,
    PromptSettings,
    RequestError,
    Settings,
    read_png,
)
from sd_tpu.request import AnyModelCatalog
from sd_tpu.serving.arguments import as_input, read_arguments
from sd_tpu.serving.client import open_models
from sd_tpu.settings import SETTINGS
from tests.support.processes import told_by

PIXELS = np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)
LIGHT = """
import sys
import sd_tpu
assert "Engine" in sd_tpu.__all__ and "Engine" in dir(sd_tpu)
assert not {"jax", "flax", "numpy", "PIL", "transformers"} & {*sys.modules}
"""


def arguments(prompts, **settings):
    return read_arguments(prompts, settings, AnyModelCatalog(), limit=100)


# --- the package's names --------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_else():
    told_by(LIGHT)


def test_all_public_names_are_there():
    assert all(getattr(sd_tpu, name) is not None for name in sd_tpu.__all__)


def test_keyword_arguments_are_the_table_of_settings():
    assert {*Settings.__annotations__} == SETTINGS.keys() - {"prompt"}
    assert PromptSettings.__required_keys__ == {"prompt"}


def test_keyword_arguments_of_open_are_those_of_open_models():
    taken = inspect.signature(open_models).parameters
    assert ModelOptions.__annotations__ == {
        name: each.annotation
        for name, each in taken.items()
        if name not in ("model", "dtype", "tensor_parallel")
    }


# --- what programs pass ---------------------------------------------------------------------------


def test_settings_are_for_all_and_those_of_a_prompt_for_its_picture():
    request, inputs = arguments(["a", {"prompt": "b", "steps": 3}, "c"], steps=9, seed=5)
    assert [picture.steps for picture in request.pictures] == [9, 3, 9]
    assert [picture.seed for picture in request.pictures] == [5, 6, 7]
    assert inputs == {}


def test_a_picture_is_taken_as_it_is():
    picture = Picture(prompt="a", seed=3, steps=4, guidance=2.0, negative_prompt="b", model="m")
    request, _ = arguments(["x", picture], steps=9, guidance=3, sampler="euler", model="n")
    assert request.pictures[1] == picture
    assert request.pictures[0].model == "n"


def test_one_prompt_needs_no_list_and_a_blank_one_makes_no_picture():
    assert arguments("a")[0].prompts == ("a",)
    assert arguments(["a", "", "b"])[0].indices() == [0, 2]


def test_more_prompts_than_the_page_has_boxes_are_one_request():
    request, _ = arguments([f"prompt {i}" for i in range(20)], seed=1)
    assert [picture.seed for picture in request.pictures] == [*range(1, 21)]
    with pytest.raises(RequestError, match="at most 100 fit"):
        arguments(["a"] * 101)


def test_minus_one_draws_a_seed():
    assert len({arguments("a", seed=sd_tpu.RANDOM)[0].seed for _ in range(4)}) > 1


def as_file(image: Image.Image, kind: str) -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_start_pictures_come_in_many_forms(tmp_path):
    image = Image.fromarray(PIXELS)
    image.save(tmp_path / "start.png")
    forms = [image, PIXELS, as_file(image, "PNG"), tmp_path / "start.png"]
    forms.append(str(tmp_path / "start.png"))
    for form in forms:
        request, inputs = arguments("a", init_image=form)
        start = inputs[request.pictures[0].init_image]
        assert np.array_equal(np.asarray(start.on_white()), PIXELS)


def test_images_of_other_modes_and_turned_ones_are_handed_in_upright():
    grey = as_input(Image.fromarray(PIXELS[..., 0]))
    assert np.array_equal(np.asarray(grey.as_mask()), PIXELS[..., 0])
    clear = as_input(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))
    assert clear.as_mask().getextrema() == (0, 0)
    print_colours = as_input(Image.new("CMYK", (4, 4)))
    assert print_colours.size == (4, 4)
    turned = Image.fromarray(PIXELS)
    turned.getexif()[0x0112] = 6
    assert as_input(turned).size == (16, 24)


@pytest.mark.parametrize(
    "asked, sentence",
    [
        (dict(prompts="a", step=3), "Unknown settings: step"),
        (dict(prompts="a", steps=0), "Steps should be from 1 to 200, not 0"),
        (dict(prompts=["a", 7]), "A prompt should be text, a Picture, or settings.*not 7"),
        (dict(prompts=[{"steps": 3}]), "with a prompt among them"),
        (dict(prompts=[]), "There is no prompt yet"),
        (dict(prompts="a", init_image=3), "Start picture should be a path.*not int"),
        (dict(prompts="a", mask=np.zeros((4, 4))), "Mask should be an array of uint8.*float64"),
        (dict(prompts="a", init_image=b"no"), "Start picture is in no format that is read here"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(asked, sentence):
    with pytest.raises(RequestError, match=sentence):
        arguments(**asked)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.png"):
        arguments("a", init_image=tmp_path / "nothing.png")


# --- what programs get ----------------------------------------------------------------------------


def test_a_drawn_image_is_a_pil_image_whose_file_carries_its_settings(tmp_path):
    picture = Picture(prompt="猫", seed=3, height=16, width=24, model="m")
    text = "猫\nSteps: 20, Sampler: DPM++ 2M, CFG scale: 7.5, Seed: 3, Size: 24x16, Model: m"
    image = DrawnImage(PIXELS, picture, parameters=text, index=2, unsafe=True)
    assert isinstance(image, Image.Image)
    assert np.array_equal(np.asarray(image), PIXELS)
    image.save(tmp_path / "cat.png")
    assert read_png(tmp_path / "cat.png").pictures == (picture,)
    image.save(tmp_path / "cat.webp")
    again = pickle.loads(pickle.dumps(image))
    assert again == image
    assert (again.settings, again.index, again.unsafe) == (picture, 2, True)
    assert image.resize((3, 2)).info["parameters"] == text
