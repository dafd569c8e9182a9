"""Pictures that are drawn again, larger, in A1111's API: its hires fix."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from sd_tpu.http.drawing import NOTHING, flag
from sd_tpu.pictures.images import UPSCALER
from sd_tpu.request import LARGER, ModelCatalog, larger, rounded
from sd_tpu.sampling.samplers import steps_taken
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.settings import MAX_SIZE, MAX_STEPS, SETTINGS, Number, Picture, shortened

UPSCALERS = ("None", UPSCALER)  # A1111's None enlarges in the same way
_STRENGTH = SETTINGS["strength"].a1111
_NUMBERS = {
    "hr_scale": Number(float, 1, 8),
    "hr_resize_x": Number(int, 0, MAX_SIZE),
    "hr_resize_y": Number(int, 0, MAX_SIZE),
}
# What only the second pass would have, and what it may be: nothing, or the same as the first's.
_SAME = {
    "hr_sampler_name": "sampler_name",
    "hr_scheduler": "scheduler",
    "hr_prompt": "prompt",
    "hr_negative_prompt": "negative_prompt",
    "hr_cfg": "cfg_scale",
    "hr_checkpoint_name": "",
    "hr_additional_modules": "",
    "firstphase_width": "",
    "firstphase_height": "",
}
_AS_BEFORE = ("Use same sampler", "Use same scheduler", "Use same checkpoint", ["Use same choices"])
PARAMETERS = {"enable_hr", "hr_upscaler", "hr_second_pass_steps", _STRENGTH, *_NUMBERS, *_SAME}


@dataclasses.dataclass(frozen=True)
class Hires:
    """How the pictures of a request are drawn again."""

    width: int
    height: int
    strength: float
    taken: int  # steps, at least

    @classmethod
    def read(cls, given: Mapping[str, Any], picture: Picture, catalog: ModelCatalog) -> Self | None:
        """Read hires fix of a request for pictures like this one; None where it wants none.

        Raises RequestError, also where the larger pictures cannot be drawn.
        """
        if not flag(given, "enable_hr"):
            return None
        other = [
            name
            for name, same in _SAME.items()
            if name in given and given[name] not in (*NOTHING, *_AS_BEFORE, given.get(same))
        ]
        if other:
            raise ParameterError(
                "This server does not have, with enable_hr: {names}.", names=", ".join(other)
            )
        upscaler = given.get("hr_upscaler", UPSCALER)
        if upscaler not in UPSCALERS:
            raise ParameterError(
                "hr_upscaler {value} is unknown; there are {known}.",
                value=shortened(upscaler),
                known=", ".join(UPSCALERS),
            )
        values = {
            name: kind.check(given.get(name, LARGER if name == "hr_scale" else 0), name)
            for name, kind in _NUMBERS.items()
        }
        strength = SETTINGS["strength"].check(
            given.get(_STRENGTH, catalog.larger_strength(picture.model))
        )
        most = steps_taken(MAX_STEPS, strength)
        taken = Number(int, 0, max(0, most)).check(
            given.get("hr_second_pass_steps", 0), "hr_second_pass_steps"
        )
        size = _size(picture, catalog.size_unit(picture.model), **values)
        hires = cls(*size, strength, taken)
        catalog.check(hires.again(picture))
        return hires

    def again(self, picture: Picture) -> Picture:
        """Return the settings that draw a picture again; raises RequestError."""
        if self.taken:  # which may be fewer than the share of its own
            picture = dataclasses.replace(picture, steps=self.taken)
        return larger(
            picture, self.width, self.height, strength=self.strength, taken=self.taken or 1
        )


def _size(
    picture: Picture, unit: int, hr_scale: float, hr_resize_x: int, hr_resize_y: int
) -> tuple[int, int]:
    """Width and height; a side that is 0 follows from the other. What is not given in pixels is
    rounded to this unit."""
    width, height = picture.width, picture.height
    if not (hr_resize_x or hr_resize_y):
        return rounded(hr_scale * width, unit), rounded(hr_scale * height, unit)
    return (
        hr_resize_x or rounded(hr_resize_y * width / height, unit),
        hr_resize_y or rounded(hr_resize_x * height / width, unit),
    )
