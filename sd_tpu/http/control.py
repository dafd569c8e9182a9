"""Control and reference pictures in A1111's API: units of its extension ControlNet."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sd_tpu.http.drawing import NOTHING, flag, refuse
from sd_tpu.http.img2img import Start, file_of
from sd_tpu.pictures.detectors import CANNY, canny, in_colours
from sd_tpu.pictures.images import MODULES, a1111_controlnet
from sd_tpu.pictures.inputs import Input, fitted
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.settings import Number, Picture, shortened

SCRIPT = "controlnet"  # as it is called, in any letters, among the scripts that are always on
# The extension has one for each kind of IP-Adapter, and this one for all.
REFERENCE_MODULE = "ip-adapter-auto"
# What the extension also calls those that see as the server's IP-Adapters do.
REFERENCE_MODULES = (
    REFERENCE_MODULE,
    "ip-adapter_clip_sd15",
    "ip-adapter_clip_sdxl",
    "ip-adapter_clip_sdxl_plus_vith",
)
_FITS = ("stretch", "cover", "contain")  # by A1111's number, and by its names
_FIT_NAMES = {"Just Resize": "stretch", "Crop and Resize": "cover", "Resize and Fill": "contain"}
_SETTINGS = {
    "weight": "control_scale",
    "guidance_start": "control_start",
    "guidance_end": "control_stop",
}
_SWITCHES = ("enabled", "enable", "is_enabled", "ad_tab_enable")  # of units
OF = ", of controlnet"
_NO_MODEL = ("None", "")
_BOUND = Number(float, 0, 255)  # of a threshold
# Fields of A1111's extension alone, with the values that change no picture here; those of others
# are NOTHING.
_ABSENT = {"mask": (*NOTHING, "None"), "control_mode": (0, "Balanced")}
# Fields that count only with other modules or hires fix, or say how large a picture is looked at,
# which is drawn at its own size here.
_IDLE = {
    "low_vram",
    "lowvram",
    "processor_res",
    "pixel_perfect",
    "hr_option",
    "save_detected_map",
    "effective_region_mask",
    "union_control_type",
    "is_ui",
    "input_mode",
    "pulid_mode",
    "inpaint_crop_input_image",
    "output_dir",
}
# Scripts whose arguments count on A1111's page alone.
_OF_PAGE = ("seed", "sampler")
_OWN = {
    "image",
    "input_image",
    "module",
    "model",
    "resize_mode",
    "threshold_a",
    "threshold_b",
    "enabled",
    *_SETTINGS,
}


@dataclasses.dataclass(frozen=True)
class Control:
    """Control of all pictures of a request: settings, and the pictures that these name."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[Input, ...] = ()

    @classmethod
    def read(cls, units: Sequence[Mapping[str, Any]], picture: Picture, start: Start) -> Self:
        """Read units for pictures of this size and start; raises RequestError."""
        controls, references = (
            [unit for unit in units if (unit.get("module") in REFERENCE_MODULES) == refers]
            for refers in (False, True)
        )
        if len(controls) > 1:
            raise ParameterError(
                "A picture follows one control picture here; {count} were given.",
                count=len(controls),
            )
        for unit in units:
            _refuse_absent(unit)
        read = [
            *(cls._control(unit, picture, start) for unit in controls),
            *([cls._references(references, start)] if references else []),
        ]
        return cls(
            {name: value for each in read for name, value in each.settings.items()},
            tuple(given for each in read for given in each.inputs),
        )

    @classmethod
    def _control(cls, unit: Mapping[str, Any], picture: Picture, start: Start) -> Self:
        if any(start.closeups):
            raise ParameterError(
                "With a control picture the whole picture is drawn; ask for inpaint_full_res=0."
            )
        detector = _detector(unit.get("module"))
        pixels = fitted(
            _picture(unit, start, "The control picture"), picture, _fit(unit.get("resize_mode", 1))
        )
        if detector == "canny" and (bounds := _bounds(unit)) != CANNY:
            pixels, detector = in_colours(canny(pixels, bounds)), ""
        control = Input.of_pixels(pixels)
        values = {name: unit[field] for field, name in _SETTINGS.items() if field in unit}
        values |= {"control_image": control.name, "detector": detector}
        if isinstance(named := unit.get("model"), str):
            values["controlnet"] = a1111_controlnet(named)
        return cls(values, (control,))

    @classmethod
    def _references(cls, units: Sequence[Mapping[str, Any]], start: Start) -> Self:
        """Read units for reference pictures, which are seen whole and in all steps.

        How many there may be is the model's business. They have one weight and one model; those of
        weight 0 are left out beside others.
        """
        units = [unit for unit in units if unit.get("weight", 1)] or units[:1]
        first, values = units[0], {}
        for field in ("weight", "model"):
            if any(unit.get(field) != first.get(field) for unit in units):
                raise ParameterError(
                    "The reference pictures of a request have one {field} here.", field=field
                )
        if any(
            (unit.get("guidance_start", 0), unit.get("guidance_end", 1)) != (0, 1) for unit in units
        ):
            refuse(["guidance_start", "guidance_end (ip-adapter)"], OF)
        references = [_picture(unit, start, "The reference picture") for unit in units]
        values["reference"] = " ".join(each.name for each in references)
        values["reference_scale"] = first.get("weight", 1.0)
        if isinstance(named := first.get("model"), str):
            values["ip_adapter"] = a1111_controlnet(named)
        return cls(values, tuple(references))


def take_units(scripts: Any) -> tuple[list[Mapping[str, Any]], Any]:
    """Return the units among A1111's scripts, and the other scripts.

    Raises:
        ParameterError: they are none.
    """
    if not isinstance(scripts, Mapping):
        return [], scripts
    others = {
        name: script for name, script in scripts.items() if str(name).strip().lower() != SCRIPT
    }
    units = []
    for script in (scripts[name] for name in scripts.keys() - others.keys()):
        args = (script.get("args") if isinstance(script, Mapping) else script) or []
        args = [arg for arg in args if arg is not None] if isinstance(args, list) else args
        if not isinstance(args, list) or not all(isinstance(arg, Mapping) for arg in args):
            raise ParameterError(
                'The units of controlnet should be a list of values by name as "args".'
            )
        units += [
            {name: value for name, value in arg.items() if value is not None}
            for arg in args
            if flag(arg, "enabled", True)
        ]
    return units, {
        name: script
        for name, script in others.items()
        if str(name).strip().lower() not in _OF_PAGE and not _is_off(script)
    }


def _is_off(script: Any) -> bool:
    """Whether a script that is always on is switched off by what it is given: nothing, a switch
    that comes first, as most have, or units that are all off, as ADetailer has them."""
    args = script.get("args") if isinstance(script, Mapping) else script
    args = [args] if isinstance(args, Mapping) else args
    if not args or not isinstance(args, list):
        return not args
    units = [arg for arg in args if isinstance(arg, Mapping)]
    first = next((arg for arg in args if arg is not None), None)
    return _is_false(first) or not any(args) or (bool(units) and all(map(_is_unit_off, units)))


def _is_unit_off(unit: Mapping[str, Any]) -> bool:
    return (
        not unit
        or any(_is_false(unit.get(name)) for name in _SWITCHES)
        or unit.get("ad_model") in _NO_MODEL
    )


def _is_false(value: Any) -> bool:
    return str(value).lower() == "false"


def _refuse_absent(unit: Mapping[str, Any]) -> None:
    names = sorted(map(str, unit.keys() - _OWN - _IDLE))
    refuse((name for name in names if unit.get(name) not in _ABSENT.get(name, NOTHING)), OF)


def _picture(unit: Mapping[str, Any], start: Start, whose: str) -> Input:
    """Return a unit's picture, by default the first start picture."""
    image = unit.get("image") or unit.get("input_image")
    if isinstance(image, Mapping):  # as the extension's page has it, with a mask
        if image.get("mask"):
            refuse(["mask"], OF)
        image = image.get("image")
    if image:
        return Input(file_of(image), whose)
    if not start.inputs:
        raise ParameterError("controlnet has no picture to follow.")
    return start.inputs[0]


def _detector(module: Any) -> str:
    module = "none" if module is None else module
    if not isinstance(module, str) or module not in MODULES:
        raise ParameterError(
            "controlnet has no module {value}; there are {known}.",
            value=shortened(module),
            known=", ".join(modules(REFERENCE_MODULE)),
        )
    return MODULES[module]


def modules(*others: str) -> list[str]:
    """Return the names of the detectors, and others, in A1111's extension."""
    first: dict[str, str] = {}
    for name, detector in MODULES.items():
        first.setdefault(detector, name)
    return [*first.values(), *others]


def _fit(mode: Any) -> str:
    fits = _FIT_NAMES | dict(enumerate(_FITS))
    if not isinstance(mode, str | int) or mode not in fits:
        raise ParameterError(
            "controlnet has no resize_mode {value}; there are {known}.",
            value=shortened(mode),
            known=", ".join(_FIT_NAMES),
        )
    return fits[mode]


def _bounds(unit: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of Canny's detector; absent or negative ones are the detector's own."""
    thresholds = [unit.get(name) for name in ("threshold_a", "threshold_b")]
    low, high = (
        own if value is None or value == -1 else _BOUND.check(value, f"threshold_{letter}")
        for letter, value, own in zip("ab", thresholds, CANNY, strict=True)
    )
    return low, high
