"""Requests from what programs pass: prompts, settings by keyword, and pictures as PIL images,
arrays or files."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np
from PIL import Image, ImageOps

from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.pictures.inputs import Input
from sd_tpu.reading import expanded, read_bytes
from sd_tpu.request import ModelCatalog, Request
from sd_tpu.settings import (
    MAX_PROMPTS,
    SETTINGS,
    UPLOADS,
    Picture,
    RequestError,
    drawn_seed,
    shortened,
)

# A path, the content of a file, or pixels uint8 [H, W, 3] or [H, W].
ImageInput = str | PathLike[str] | bytes | np.ndarray | Image.Image


class Settings(TypedDict, total=False):
    """Settings of pictures, as keyword arguments or for a single picture.

    They are those of `Picture`, which says what each means, but with images in place of names. None
    is the default.
    """

    model: str | None
    negative_prompt: str | None
    style: str | None
    steps: int | None
    guidance: float | None
    sampler: str | None
    spacing: str | None
    seed: int | None
    height: int | None
    width: int | None
    guidance_start: float | None
    guidance_stop: float | None
    cache_interval: int | None
    guidance_rescale: float | None
    init_image: ImageInput | None
    strength: float | None
    mask: ImageInput | None
    mask_blur: int | None
    fit: str | None
    control_image: ImageInput | None
    controlnet: str | None
    detector: str | None
    control_scale: float | None
    control_start: float | None
    control_stop: float | None
    reference: ImageInput | Sequence[ImageInput] | None
    ip_adapter: str | None
    reference_scale: float | None
    to_prompt: str | None
    to_seed: int | None
    share: float | None
    clip_skip: int | None


class PromptSettings(Settings, total=False):
    """A prompt with settings that only its picture has."""

    prompt: Required[str]


Prompt = str | PromptSettings | Picture  # a Picture is complete: settings for all do not change it
Prompts = Prompt | Sequence[Prompt]


class ParameterError(RequestError):
    """An error that only programs can make; its message is English."""


def read_arguments(
    prompts: Prompts, settings: Settings, catalog: ModelCatalog, *, limit: int
) -> tuple[Request, dict[str, Input]]:
    """Make a request of a program's arguments.

    Args:
        prompts: one or several.
        settings: for all of them.
        catalog: the models that can be drawn with.
        limit: the most prompts that are taken.

    Returns:
        The checked request, and the pictures that its settings name, by name.

    Raises:
        RequestError: what is wrong with which value, and what it should be.
        OSError: the file of a picture cannot be read.
    """
    single = isinstance(prompts, str | Mapping | Picture)
    each: list[Any] = [prompts] if single else [*prompts]
    inputs: dict[str, Input] = {}
    overrides = [_overrides(prompt, inputs) for prompt in each]
    values = {
        **_with_names(settings, inputs),
        "seed": drawn_seed(settings.get("seed")),
        "prompts": [settings.pop("prompt", None) for settings in overrides],
        "overrides": overrides,
    }
    return fill(values, catalog, limit=limit), inputs


def fill(values: Mapping[str, Any], catalog: ModelCatalog, *, limit: int = MAX_PROMPTS) -> Request:
    """Check a request. If its last prompt has several values, they fill the boxes that are left.

    Arguments and errors are those of `Request.check`.
    """
    given = values["prompts"]
    blank = [""] * (MAX_PROMPTS - len(given))
    request = Request.check({**values, "prompts": [*given, *blank]}, catalog, limit=limit)
    return Request(request.pictures[: max(len(given), request.indices()[-1] + 1)])


def as_input(image: ImageInput, whose: str = "") -> Input:
    """Return a checked input picture.

    Args:
        image: a PIL image, an array or a file.
        whose: its description in error messages; by default its path.

    Raises:
        RequestError: it is no picture that can be drawn on.
        OSError: its file cannot be read.
    """
    match image:
        case bytes():
            return Input(image, whose)
        case np.ndarray():
            if image.dtype != np.uint8 or image.ndim not in (2, 3):
                raise ParameterError(
                    "{name} should be an array of uint8 [H, W, 3], not {kind} {shape}.",
                    name=whose,
                    kind=image.dtype,
                    shape=[*image.shape],
                )
            return _of_pil(Image.fromarray(image), whose)
        case Image.Image():
            return _of_pil(image, whose)
        case str() | PathLike():
            path = expanded(Path(image))
            return Input(read_bytes(path, MAX_FILE_BYTES), str(path))
    raise ParameterError(
        "{name} should be a path, bytes, an array or a PIL image, not {kind}.",
        name=whose,
        kind=type(image).__name__,
    )


def _of_pil(image: Image.Image, whose: str) -> Input:
    upright = ImageOps.exif_transpose(image)
    file = BytesIO()
    mode = "RGBA" if upright.has_transparency_data else "RGB"
    upright.convert(mode).save(file, "PNG", compress_level=1)
    return Input(file.getvalue(), whose)


def _overrides(prompt: Prompt, inputs: dict[str, Input]) -> dict[str, Any]:
    """Return a prompt's text and overrides, by name."""
    match prompt:
        case str():
            return {"prompt": prompt}
        case Picture():
            return dict(vars(prompt))
        case {"prompt": _}:
            return _with_names(prompt, inputs)
    raise ParameterError(
        "A prompt should be text, a Picture, or settings by name with a prompt among them, not "
        "{value}.",
        value=shortened(prompt),
    )


def _with_names(settings: Mapping[str, Any], inputs: dict[str, Input]) -> dict[str, Any]:
    """Replace pictures among settings by their names, and add the pictures to `inputs`."""
    named = dict(settings)
    for name in UPLOADS:
        if settings.get(name) is not None:
            images = settings[name]
            several = isinstance(images, list | tuple) and SETTINGS[name].most_pictures > 1
            found = [
                as_input(image, SETTINGS[name].label) for image in (images if several else [images])
            ]
            named[name] = " ".join(each.name for each in found)
            inputs |= {each.name: each for each in found}
    return named
