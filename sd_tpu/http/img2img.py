"""Start pictures and masks in A1111's API, with its ways of preparing the masked part."""

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.pictures.inputs import Closeup, Input, filled_in
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.settings import MAX_PROMPTS, Number, Picture

_FITS = ("stretch", "cover", "contain")  # by A1111's number; its 3 enlarges latents
_FILLED = 0  # with what surrounds the mask; 1 is what was there, and others are noise or nothing
NUMBERS = {
    "resize_mode": Number(int, 0, len(_FITS) - 1),
    "inpainting_fill": Number(int, _FILLED, 1),
    "inpainting_mask_invert": Number(int, 0, 1),
    "inpaint_full_res": Number(int, 0, 1),
    "inpaint_full_res_padding": Number(int, 0, 256),
}
_DEFAULTS = {"inpaint_full_res": 1}
PICTURES = ("init_images", "mask")


@dataclasses.dataclass(frozen=True)
class Start:
    """Start pictures of a batch.

    Attributes:
        settings: by index, the picture's settings of the table's START.
        inputs: the pictures that these name.
        closeups: by index, the closeup where only the masked part is drawn.
    """

    settings: tuple[dict[str, str], ...]
    inputs: tuple[Input, ...] = ()
    closeups: tuple[Closeup | None, ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any], picture: Picture) -> Self:
        """Read the start of a request, at this picture's size; raises RequestError."""
        files = given.get("init_images")
        if not isinstance(files, list) or not 1 <= len(files) <= MAX_PROMPTS:
            raise ParameterError(
                "init_images should be a list of up to {limit} pictures.", limit=MAX_PROMPTS
            )
        numbers = {
            name: kind.check(_as_number(given.get(name, _DEFAULTS.get(name, 0))), name)
            for name, kind in NUMBERS.items()
        }
        starts = [
            Input(file_of(file), f"Picture {number}") for number, file in enumerate(files, start=1)
        ]
        fit = _FITS[numbers["resize_mode"]]
        if not given.get("mask"):
            return cls(
                tuple({"init_image": start.name, "fit": fit} for start in starts), tuple(starts)
            )
        mask = Input(file_of(given["mask"]), "The mask").as_a1111_mask()
        if numbers["inpainting_mask_invert"]:
            mask = mask.point(lambda shade: 255 - shade)
        prepared = [_prepare(start, np.asarray(mask), numbers, picture) for start in starts]
        return cls(
            tuple(
                {"init_image": start.name, "mask": shown.name, "fit": "stretch" if closeup else fit}
                for start, shown, closeup in prepared
            ),
            tuple(each for start, shown, _ in prepared for each in (start, shown)),
            tuple(closeup for *_, closeup in prepared),
        )

    def finished(self, index: int, pixels: np.ndarray) -> np.ndarray:
        """Return the finished picture uint8 [H, W, 3] of drawn pixels."""
        closeup = self.closeups[index % len(self.closeups)] if self.closeups else None
        return closeup.with_part(pixels) if closeup else pixels


def file_of(text: Any) -> bytes:
    """Decode a file that was sent in base64, perhaps as a data address; raises RequestError."""
    if not isinstance(text, str):
        raise ParameterError("A picture should be a file in base64.")
    text = "".join(text.rpartition(",")[2].split())  # it may be in lines, as in mails
    if len(text) > 4 * MAX_FILE_BYTES // 3 + 4:
        raise ParameterError("The file is larger than {limit} MiB.", limit=MAX_FILE_BYTES >> 20)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ParameterError("A picture should be a file in base64.") from None


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _prepare(
    start: Input, mask: np.ndarray, numbers: Mapping[str, int], picture: Picture
) -> tuple[Input, Input, Closeup | None]:
    """Return the picture and its mask as they are drawn on, and the closeup they are part of."""
    shown, closeup = Input.of_pixels(mask), None
    if start.size != shown.size or not mask.any():
        return start, shown, None  # which is refused, as it is of every client
    if not numbers["inpaint_full_res"] and numbers["inpainting_fill"] != _FILLED:
        return start, shown, None
    pixels = np.asarray(start.on_white())
    if numbers["inpaint_full_res"]:
        closeup = Closeup.of(
            pixels, mask, picture.width / picture.height, numbers["inpaint_full_res_padding"]
        )
        pixels, mask = closeup.part()
    if numbers["inpainting_fill"] == _FILLED:
        pixels = filled_in(pixels, mask)
    return Input.of_pixels(pixels), Input.of_pixels(mask), closeup
