"""What somebody asks for, checked in one place, with messages that a person understands."""

import dataclasses
import functools
import math
import numbers
import random
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from sd_tpu.samplers import SAMPLERS, spacing_taken
from sd_tpu.schedule import SPACINGS, NoiseSchedule
from sd_tpu.sentence import Sentence, SentenceError

MAX_PROMPTS = 8
MAX_PROMPT_LENGTH = 4000  # characters; 77 tokens are rarely more than 400
MAX_STEPS = 200
MAX_GUIDANCE = 50.0
MAX_CACHE_INTERVAL = 10  # evaluations; far fewer still look like the exact picture
MAX_SEED = 2**32 - 1
RANDOM = -1  # where a person gives a seed; a request has the one that was drawn
ACCELERATIONS = ("guidance_start", "guidance_stop", "cache_interval")  # exact by default
MAX_SHOWN = 60  # characters of a bad value in a sentence


class RequestError(SentenceError):
    """A request that cannot be served; the message is for the person who made it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a picture depends on besides its prompt and seed."""

    negative_prompt: str = ""
    steps: int = 20
    guidance: float = 7.5
    sampler: str = "dpmpp_2m"
    spacing: str | None = None  # None is the checkpoint's own
    guidance_start: float = 0.0  # shares of the steps: guidance is applied between them only
    guidance_stop: float = 1.0
    cache_interval: int = 1  # every so many evaluations all of the UNet; reuse in between
    height: int = 512
    width: int = 512

    def accelerated(self) -> dict[str, Any]:
        """The settings that make it faster and not quite the same picture, by name; none are by
        default."""
        return {name: getattr(self, name) for name in ACCELERATIONS
                if getattr(self, name) != getattr(Settings, name)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    """What one picture has in place of the request's common settings; None is the common one."""

    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    sampler: str | None = None
    spacing: str | None = None  # "" is the checkpoint's own
    guidance_start: float | None = None
    guidance_stop: float | None = None
    cache_interval: int | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not the common ones, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """Up to eight prompts, and the settings that they share or have on their own.

    Picture i has the seed `seed + i`, if it has none of its own. A blank prompt is a box left
    empty: no picture is made of it, and the others keep their places and so their seeds. `own` is
    empty, or as long as `prompts` with None where all settings are the common ones.
    """

    prompts: tuple[str, ...]
    seed: int = 0
    own: tuple[Own | None, ...] = ()

    @classmethod
    def check(cls, values: Mapping[str, Any], defaults: Settings) -> Self:
        """Builds a request out of untrusted values.

        Args:
            values: by field name; absent ones and None take the default. The default spacing is
                the default sampler's: another one takes the checkpoint's own, as does "". `own`
                is a list by place of None, Own, or values by the names of Own's fields; there an
                absent one or None is the common one, except for a spacing that the own sampler
                does not have: then it takes the checkpoint's own.
            defaults: of the model, whose picture size is the only one that can be asked for.

        Raises:
            RequestError: what is wrong with which value, and what it should be.
        """
        _check_names(values, cls, "")
        given = {name: value for name, value in values.items() if value is not None}
        merged = {**dataclasses.asdict(defaults), "prompts": (), "seed": 0, **given}
        if merged["sampler"] != defaults.sampler:
            merged["spacing"] = given.get("spacing")
        request = cls(
            prompts=_prompts(merged["prompts"]),
            height=_whole(merged["height"], Sentence("Height"), 1, 1 << 16),
            width=_whole(merged["width"], Sentence("Width"), 1, 1 << 16),
            **{name: check(merged[name], "") for name, check in _CHECKS.items()},
        )
        _check_together(request, "")
        if (request.width, request.height) != (defaults.width, defaults.height):
            raise RequestError(
                "Pictures of {width}x{height} were asked for; this server makes "
                "{here_width}x{here_height}.", width=request.width, height=request.height,
                here_width=defaults.width, here_height=defaults.height,
            )
        return dataclasses.replace(request, own=_owns(given.get("own", ()), request))

    def places(self) -> list[int]:
        """The numbers of the prompts that are not blank."""
        return [i for i, prompt in enumerate(self.prompts) if prompt]

    def only(self, place: int) -> Self:
        """The request that makes the picture at `place` again, alone."""
        own = self.own_at(place).given()
        if "spacing" in own:
            own["spacing"] = own["spacing"] or None
        common = {"prompts": (self.prompts[place],), "own": (), "seed": self.image_seed(place)}
        return dataclasses.replace(self, **{**common, **own})

    def explicit(self, schedule: NoiseSchedule) -> Self:
        """The same with the common spacing named that a model of this schedule takes for none."""
        spacing = spacing_taken(self.sampler, schedule, self.spacing)
        return dataclasses.replace(self, spacing=spacing)

    def redrawn(self, place: int, alone: Self, defaults: Settings) -> Self:
        """The request with the picture of `alone`, which makes one only, at `place` instead.

        Raises:
            RequestError: as `check`.
        """
        room = [None] * max(0, place + 1 - len(self.prompts))
        prompts, own = [*self.prompts, *room], [*(self.own or [None] * len(self.prompts)), *room]
        prompts[place] = alone.prompts[0]
        own[place] = {**{name: getattr(alone, name) for name in _CHECKS},
                      "spacing": alone.spacing or ""}
        values = {**vars(self), "spacing": self.spacing or "", "prompts": prompts, "own": own}
        return self.check(values, defaults)

    def without(self, place: int) -> Self:
        """The request without the picture at `place`; it may be one for no picture at all."""
        prompts = tuple("" if i == place else text for i, text in enumerate(self.prompts))
        own = tuple(None if i == place else own for i, own in enumerate(self.own))
        return dataclasses.replace(self, prompts=prompts, own=own if any(own) else ())

    def with_only(self, place: int) -> Self:
        """The request for the picture at `place` only, which keeps its place."""
        return functools.reduce(Request.without, {*self.places()} - {place}, self)

    def own_at(self, place: int) -> Own:
        """What the picture at `place` has in place of the common settings."""
        return (self.own[place] if place < len(self.own) else None) or Own()

    def image_seed(self, place: int) -> int:
        """The seed of the picture at `place`."""
        own = self.own_at(place).seed
        return (self.seed + place) % (MAX_SEED + 1) if own is None else own


def drawn_seed(value: Any) -> Any:
    """A new seed in place of RANDOM, else the value, good or not: `Request.check` says which."""
    return random.randint(0, MAX_SEED) if _is_number(value) and value == RANDOM else value


def parse_number(text: str) -> int | float | str:
    """The number, or what stands in its place: `Request.check` says what is wrong with it."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:  # also for whole numbers of thousands of digits
            continue
        return number if _is_number(number) else text
    return text


def _check_names(values: Mapping[str, Any], kind: type, of: str) -> None:
    unknown = values.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        names = ", ".join(sorted(repr(str(name)[:40])[1:-1] for name in unknown)[:5])
        raise RequestError("Unknown settings{of}: {names}.", of=of, names=names)


def _owns(values: Any, common: Request) -> tuple[Own | None, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError("The own settings should be a list, one of each prompt.")
    places = len(common.prompts)
    if len(values) > places:
        raise RequestError("There are {count} own settings for {places} prompts.",
                           count=len(values), places=places)
    owns = [_own(value, place, common) for place, value in enumerate(values)]
    return (*owns, *[None] * (places - len(owns))) if any(owns) else ()


def _own(value: Any, place: int, common: Request) -> Own | None:
    """What differs from the common settings; nothing in a place where no picture is made."""
    of = Sentence(" of prompt {number}", number=place + 1)
    values = vars(value) if isinstance(value, Own) else {} if value is None else value
    if not isinstance(values, Mapping):
        raise RequestError("The own settings{of} should be values by name, not {value}.", of=of,
                           value=_shown(value))
    _check_names(values, Own, of)
    given = {name: _CHECKS[name](values[name], of) for name in values if values[name] is not None}
    before = common.only(place)
    if before.spacing not in SAMPLERS[given.get("sampler", before.sampler)].spacings:
        given.setdefault("spacing", None)
    after = dataclasses.replace(before, **given)
    _check_together(after, of)
    differing = {name: getattr(after, name) for name in _CHECKS
                 if getattr(after, name) != getattr(before, name)}
    if differing.keys() & {"sampler", "spacing"}:
        differing["spacing"] = after.spacing or ""
    return Own(**differing) if differing and before.prompts[0] else None


def _prompts(values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError("The prompts should be a list of texts.")
    if len(values) > MAX_PROMPTS:
        raise RequestError("There are {count} prompts; at most {limit} fit.", count=len(values),
                           limit=MAX_PROMPTS)
    prompts = tuple(_text(value, Sentence("Prompt {number}", number=number))
                    for number, value in enumerate(values, start=1))
    if not any(prompts):
        raise RequestError("There is no prompt yet: write what you would like to see in a box.")
    return prompts


def _text(value: Any, name: Sentence) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError("{name} should be text, not {kind}.", name=name,
                           kind=type(value).__name__)
    if len(value) > MAX_PROMPT_LENGTH:
        raise RequestError("{name} has {count} characters; at most {limit} are accepted.",
                           name=name, count=len(value), limit=MAX_PROMPT_LENGTH)
    # Half of a surrogate pair is no character: it can neither be tokenized nor saved.
    return value.encode("utf-8", "ignore").decode("utf-8").strip()


def _shown(value: Any) -> str:
    """The value for a sentence: however long it is, the sentence is not."""
    try:
        text = reprlib.repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN - 1]}…"
    except ValueError:  # Python refuses to write out whole numbers of thousands of digits
        return Sentence("a number as long as that")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _whole(value: Any, name: Sentence, least: int, most: int) -> int:
    if not _is_number(value) or value != int(value):
        raise RequestError("{name} should be a whole number, not {value}.", name=name,
                           value=_shown(value))
    if not least <= value <= most:
        raise _out_of_range(_shown(int(value)), name, least, most)
    return int(value)


def _out_of_range(value: str, name: Sentence, least: int, most: int | str) -> RequestError:
    return RequestError("{name} should be from {least} to {most}, not {value}.", name=name,
                        least=least, most=most, value=value)


def _number(value: Any, name: Sentence, most: float) -> float:
    if not _is_number(value):
        raise RequestError("{name} should be a number, not {value}.", name=name,
                           value=_shown(value))
    if not 0 <= value <= most:
        raise _out_of_range(f"{value:g}", name, 0, f"{most:g}")
    return float(value)


def _one_of(value: Any, name: Sentence, of: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise RequestError("{name} {value}{of} is unknown; there are {known}.", name=name,
                           value=_shown(value), of=of, known=", ".join(known))
    return value


def _spacing(value: Any, of: str) -> str | None:
    return None if value in (None, "") else _one_of(value, Sentence("Spacing"), of, SPACINGS)


def _check_together(request: Request, of: str) -> None:
    """Checks what only several settings together can say."""
    sampler = SAMPLERS[request.sampler]
    if request.spacing and request.spacing not in sampler.spacings:
        raise RequestError("{sampler}{of} has no {spacing} spacing; it has {known}.",
                           sampler=sampler.label, of=of, spacing=request.spacing,
                           known=", ".join(sampler.spacings))
    start, stop = request.guidance_start, request.guidance_stop
    if start >= stop:
        raise RequestError("Guidance{of} should start before it stops, not start at {start} and "
                           "stop at {stop}.", of=of, start=f"{start:g}", stop=f"{stop:g}")


# What a picture can have on its own: a check of each, told the value and whose it is.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "negative_prompt": lambda value, of: _text(value, Sentence("The negative prompt{of}", of=of)),
    "steps": lambda value, of: _whole(value, Sentence("Steps{of}", of=of), 1, MAX_STEPS),
    "guidance": lambda value, of: _number(value, Sentence("Guidance{of}", of=of), MAX_GUIDANCE),
    "sampler": lambda value, of: _one_of(value, Sentence("Sampler"), of, SAMPLERS),
    "spacing": _spacing,
    "guidance_start": lambda value, of: _number(value, Sentence("Guidance start{of}", of=of), 1),
    "guidance_stop": lambda value, of: _number(value, Sentence("Guidance stop{of}", of=of), 1),
    "cache_interval": lambda value, of: _whole(value, Sentence("Cache interval{of}", of=of), 1,
                                               MAX_CACHE_INTERVAL),
    "seed": lambda value, of: _whole(value, Sentence("Seed{of}", of=of), 0, MAX_SEED),
}
