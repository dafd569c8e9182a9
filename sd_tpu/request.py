"""What somebody asks for, checked in one place, with messages that a person understands."""

import dataclasses
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sd_tpu.samplers import SAMPLERS
from sd_tpu.schedule import SPACINGS

MAX_PROMPTS = 8
MAX_PROMPT_LENGTH = 4000  # characters; 77 tokens are rarely more than 400
MAX_STEPS = 200
MAX_GUIDANCE = 50.0
MAX_SEED = 2**32 - 1


class RequestError(ValueError):
    """A request that cannot be served; the message is for the person who made it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a picture depends on besides its prompt and seed."""

    negative_prompt: str = ""
    steps: int = 20
    guidance: float = 7.5
    sampler: str = "dpmpp_2m"
    spacing: str | None = None  # None is the checkpoint's own
    height: int = 512
    width: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """Up to eight prompts that share their settings.

    Picture i has the seed `seed + i`. A blank prompt is a box left empty: no picture is made of
    it, and the others keep their places and so their seeds.
    """

    prompts: tuple[str, ...]
    seed: int = 0

    @classmethod
    def check(cls, values: Mapping[str, Any], defaults: Settings) -> Self:
        """Builds a request out of untrusted values.

        Args:
            values: by field name; absent ones and None take the default. The default spacing is
                the default sampler's: another one takes the checkpoint's own, as does "".
            defaults: of the model, whose picture size is the only one that can be asked for.

        Raises:
            RequestError: what is wrong with which value, and what it should be.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - fields):
            raise RequestError(f"Unknown settings: {', '.join(unknown)}.")
        given = {name: value for name, value in values.items() if value is not None}
        merged = {**dataclasses.asdict(defaults), "prompts": (), "seed": 0, **given}
        if merged["sampler"] != defaults.sampler:
            merged["spacing"] = given.get("spacing")
        request = cls(
            prompts=_prompts(merged["prompts"]),
            negative_prompt=_text(merged["negative_prompt"], "The negative prompt"),
            seed=_whole(merged["seed"], "Seed", 0, MAX_SEED),
            steps=_whole(merged["steps"], "Steps", 1, MAX_STEPS),
            guidance=_guidance(merged["guidance"]),
            sampler=_one_of(merged["sampler"], "Sampler", SAMPLERS),
            spacing=_spacing(merged["spacing"]),
            height=_whole(merged["height"], "Height", 1, 1 << 16),
            width=_whole(merged["width"], "Width", 1, 1 << 16),
        )
        _check_spacing(request)
        if (request.width, request.height) != (defaults.width, defaults.height):
            raise RequestError(
                f"Pictures of {request.width}x{request.height} were asked for; this server makes "
                f"{defaults.width}x{defaults.height}."
            )
        return request

    def places(self) -> list[int]:
        """The numbers of the prompts that are not blank."""
        return [i for i, prompt in enumerate(self.prompts) if prompt]

    def only(self, place: int) -> Self:
        """The request that makes the picture at `place` again, alone."""
        prompt, seed = self.prompts[place], self.image_seed(place)
        return dataclasses.replace(self, prompts=(prompt,), seed=seed)

    def image_seed(self, place: int) -> int:
        """The seed of the picture at `place`."""
        return (self.seed + place) % (MAX_SEED + 1)


def _prompts(values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError("The prompts should be a list of texts.")
    if len(values) > MAX_PROMPTS:
        raise RequestError(f"There are {len(values)} prompts; at most {MAX_PROMPTS} fit.")
    prompts = tuple(_text(value, f"Prompt {i + 1}") for i, value in enumerate(values))
    if not any(prompts):
        raise RequestError("There is no prompt yet: write what you would like to see in a box.")
    return prompts


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{name} should be text, not {type(value).__name__}.")
    if len(value) > MAX_PROMPT_LENGTH:
        raise RequestError(
            f"{name} has {len(value)} characters; at most {MAX_PROMPT_LENGTH} are accepted."
        )
    # Half of a surrogate pair is no character: it can neither be tokenized nor saved.
    return value.encode("utf-8", "ignore").decode("utf-8").strip()


def _shown(value: Any) -> str:
    """The value for a sentence: however long it is, the sentence is not."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to write out whole numbers of thousands of digits
        return "a number as long as that"


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if not _is_number(value) or value != int(value):
        raise RequestError(f"{name} should be a whole number, not {_shown(value)}.")
    if not least <= value <= most:
        raise RequestError(f"{name} should be from {least} to {most}, not {_shown(int(value))}.")
    return int(value)


def _guidance(value: Any) -> float:
    if not _is_number(value):
        raise RequestError(f"Guidance should be a number, not {_shown(value)}.")
    if not 0 <= value <= MAX_GUIDANCE:
        raise RequestError(f"Guidance should be from 0 to {MAX_GUIDANCE:g}, not {value:g}.")
    return float(value)


def _one_of(value: Any, name: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise RequestError(f"{name} {_shown(value)} is unknown; there are {', '.join(known)}.")
    return value


def _spacing(value: Any) -> str | None:
    return None if value in (None, "") else _one_of(value, "Spacing", SPACINGS)


def _check_spacing(request: Request) -> None:
    sampler = SAMPLERS[request.sampler]
    if request.spacing and request.spacing not in sampler.spacings:
        raise RequestError(
            f"{sampler.label} has no {request.spacing} spacing; it has "
            f"{', '.join(sampler.spacings)}."
        )
