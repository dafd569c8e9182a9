"""Requests: up to eight complete pictures, and how settings for all of them fill them in."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self

from sd_tpu.sampling.samplers import spacing_taken, steps_taken
from sd_tpu.sampling.schedule import Schedule
from sd_tpu.sentence import Sentence
from sd_tpu.settings import (
    HANDED_IN,
    LARGER_STRENGTH,
    MAX_PROMPTS,
    MAX_SEED,
    MAX_STEPS,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    SIDES,
    UPLOADS,
    Choice,
    Picture,
    RequestError,
    about,
    check_together,
    of_prompt,
    shortened,
)

JOURNEYS = (8, 16, 32)  # pictures of which there are that many on the way from one to another
LARGER = 2  # times as large as a picture, one drawn from it is
NOT_YET = "0" * 64  # the name of a picture that is still to be drawn, or handed in
_ACCEPTED = ("prompts", "overrides", *(name for name in SETTINGS if name != "prompt"))


Sizes = list[tuple[int, int]]  # height and width


class ModelCatalog(Protocol):
    """The models that a server can draw with, as far as requests depend on them."""

    def defaults(self, model: str) -> Picture:
        """Return the settings of a model's pictures that leave them open; "" is the first model.

        Raises:
            RequestError: there is no such model.
        """

    def check(self, picture: Picture, index: int | None = None) -> None:
        """Raise RequestError if the model is not there, or cannot draw this size."""

    def size_unit(self, model: str) -> int:
        """Pixels of which the sides of a model's pictures are multiples; raises as `defaults`."""

    def larger_strength(self, model: str) -> float:
        """Strength that suits drawing a model's pictures larger; raises as `defaults`."""

    def fill(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Replace prompts that stand for several by a value each; raises RequestError."""


class _NoWildcards:
    """A catalog that takes prompts and sizes as they are."""

    def size_unit(self, model: str) -> int:
        """Return 1."""
        return 1

    def larger_strength(self, model: str) -> float:
        """Return what suits most models."""
        return LARGER_STRENGTH

    def fill(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Return the prompts unchanged."""
        return list(prompts)


@dataclasses.dataclass(frozen=True)
class SingleModelCatalog(_NoWildcards):
    """The catalog of a server with one model, which draws in one size."""

    picture: Picture

    def defaults(self, model: str) -> Picture:
        """Return the model's defaults; raises RequestError for another model."""
        self.check(dataclasses.replace(self.picture, model=model or self.picture.model))
        return self.picture

    def check(self, picture: Picture, index: int | None = None) -> None:
        """Raise RequestError for another model or size."""
        here = self.picture
        if picture.model != here.model:
            raise RequestError(
                "There is no model {value}; there are {known}.",
                setting="model",
                index=index,
                value=shortened(picture.model),
                known=here.model,
            )
        if (picture.width, picture.height) != (here.width, here.height):
            raise RequestError(
                "Pictures of {width}x{height} were asked for; this server makes "
                "{here_width}x{here_height}.",
                setting="width",
                index=index,
                width=picture.width,
                height=picture.height,
                here_width=here.width,
                here_height=here.height,
            )


class AnyModelCatalog(_NoWildcards):
    """A catalog of all models in all sizes, for requests that are only read."""

    def defaults(self, model: str) -> Picture:
        """Return the table's defaults."""
        return Picture(model=model)

    def check(self, picture: Picture, index: int | None = None) -> None:
        """Accept everything."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Pictures by index, up to eight but of a journey; None where no picture is made."""

    pictures: tuple[Picture | None, ...] = ()

    @classmethod
    def check(
        cls, values: Mapping[str, Any], catalog: ModelCatalog | Picture, *, limit: int = MAX_PROMPTS
    ) -> Self:
        """Fill a request in with untrusted values.

        Picture i has the seed `seed + i`, if it has none of its own. A blank prompt is a box left
        empty: no picture is made of it, and the others keep their places and so their seeds. A
        prompt that stands for several fills the blank ones that follow it, as `Wildcards.fill`.

        Args:
            values: `prompts`, a list of texts; the settings that the pictures share, by name; and
                `overrides`, a list by index of None or what this picture has instead, by name. What
                is absent or None takes the default, in `overrides` the common value. The default
                spacing is the default sampler's: another one takes the checkpoint's own, as does
                "". So does a picture's own sampler that does not have the common spacing.
            catalog: what the server can draw; a Picture is that of its only model in its only size.
                A model brings its defaults, also where only a single picture has it, but for the
                size, which is then the others'.
            limit: how many prompts there may be.

        Raises:
            RequestError: what is wrong with which value, and what it should be.
        """
        _check_names(values, _ACCEPTED)
        common_values = {name: value for name, value in values.items() if value is not None}
        prompts = _prompts(common_values.pop("prompts", ()), limit)
        per_picture = _overrides(common_values.pop("overrides", ()), len(prompts))
        catalog = SingleModelCatalog(catalog) if isinstance(catalog, Picture) else catalog
        common = for_all(common_values, catalog)
        prompts = catalog.fill(prompts, common.seed)
        pictures = [
            changed(_base(common, common_values, overrides, catalog, index), overrides, index)
            for index, overrides in enumerate(per_picture)
        ]
        for index, picture in enumerate(pictures):
            catalog.check(picture, index)
        return cls(
            tuple(
                dataclasses.replace(picture, prompt=prompt) if prompt else None
                for prompt, picture in zip(prompts, pictures, strict=True)
            )
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts by index, empty where no picture is made."""
        return tuple(picture.prompt if picture else "" for picture in self.pictures)

    @property
    def seed(self) -> int:
        """The common seed: that of picture i is this plus i where it is not overridden."""
        return self.common.seed

    def indices(self) -> list[int]:
        """Return the indices at which pictures are made."""
        return [index for index, picture in enumerate(self.pictures) if picture]

    @functools.cached_property
    def common(self) -> Picture:
        """The settings that most pictures share, without a prompt.

        Among equally frequent values the default wins, else the one that comes first.
        """
        bases = [
            dataclasses.replace(_at(picture, -index), prompt="")
            for index, picture in enumerate(self.pictures)
            if picture
        ]
        if not bases:
            return Picture()
        shared = Picture(
            **{
                name: _most_frequent([getattr(base, name) for base in bases], setting.default)
                for name, setting in SETTINGS.items()
            }
        )
        try:
            check_together(shared)
        except RequestError:  # of settings that depend on each other each one's majority is another
            return bases[0]
        return shared

    @property
    def common_without_inputs(self) -> Picture:
        """The common settings without uploaded pictures and settings that only matter with them.

        Each picture has these as overrides.
        """
        used = {section for section, image in HANDED_IN.items() if getattr(self.common, image)}
        return dataclasses.replace(
            self.common,
            **{
                name: setting.default
                for name, setting in SETTINGS.items()
                if setting.section in used
            },
        )

    def overrides(self, index: int, common: Picture | None = None) -> dict[str, Any]:
        """Return the settings in which the picture at `index` differs from the common ones."""
        picture, base = self.pictures[index], _at(common or self.common, index)
        return {
            name: getattr(picture, name)
            for name in OVERRIDABLE
            if picture and getattr(picture, name) != getattr(base, name)
        }

    @property
    def compares(self) -> bool:
        """Whether it draws one prompt several times."""
        return len(self.indices()) > 1 and len({*filter(None, self.prompts)}) == 1

    def labelled(self, index: int) -> dict[str, Any]:
        """Return the settings, by name, that the label of the picture at `index` should show.

        Where the prompts differ, these are the picture's overrides. A comparison labels every
        picture by the settings that differ among them, or by their seeds if nothing else does.
        Other labels leave the seed out, for it is shown anyway.
        """
        names = {
            name
            for i in (self.indices() if self.compares else [index])
            for name in self.overrides(i)
        } - {"seed"}
        if names & SIDES:
            names |= SIDES
        if self.compares and not names:
            names = {"seed"}
        return {name: getattr(self.picture(index), name) for name in names}

    def beside_compared(self, index: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides at `index` without those that this comparison has set."""
        compared = self.labelled(index) if self.picture_at(index) else {}
        changed = {
            name for name in overrides.keys() & compared.keys() if overrides[name] != compared[name]
        }
        if changed & SIDES:
            changed |= SIDES
        return {
            name: value
            for name, value in overrides.items()
            if name not in compared.keys() - changed
        }

    def values(self, common: Picture | None = None) -> dict[str, Any]:
        """Return the request as `check` takes it.

        Args:
            common: the settings for all pictures; by default those that most of them share.
        """
        common = common or self.common
        shared = {name: value for name, value in vars(common).items() if name != "prompt"}
        overrides = [self.overrides(index, common) or None for index in range(len(self.pictures))]
        return {
            "prompts": list(self.prompts),
            **shared,
            "overrides": overrides if any(overrides) else [],
        }

    def only(self, index: int) -> Self:
        """Return a request for the picture at `index` alone."""
        return type(self)((self.pictures[index],))

    def picture(self, index: int) -> Picture:
        """Return the picture at `index`, which is one of `indices`.

        Raises:
            LookupError: no picture is made there.
        """
        picture = self.pictures[index]
        if picture is None:
            raise LookupError(f"prompt {index + 1} is blank")
        return picture

    def picture_at(self, index: int) -> Picture | None:
        """Return the picture at `index`, if there is one."""
        return self.pictures[index] if index < len(self.pictures) else None

    def replaced(self, index: int, picture: Picture | None) -> Self:
        """Return the request with this picture, or none, at `index`."""
        pictures = [*self.pictures, *[None] * (index + 1 - len(self.pictures))]
        pictures[index] = picture
        return type(self)(tuple(pictures))

    def each(self, change: Callable[[Picture], Picture]) -> Self:
        """Return the request with this change to each of its pictures."""
        return type(self)(tuple(picture and change(picture) for picture in self.pictures))

    def with_known_models(self, models: Collection[str]) -> Self:
        """Return the request with unknown models left to the server."""
        return self.each(
            lambda picture: (
                picture if picture.model in models else dataclasses.replace(picture, model="")
            )
        )

    def inputs(self) -> set[str]:
        """Return the names of the uploaded pictures that the request uses."""
        return {
            name
            for picture in self.pictures
            if picture
            for setting in UPLOADS
            for name in getattr(picture, setting).split()
        }

    def without_inputs(self) -> Self:
        """Return the request without uploaded pictures."""
        none = dict.fromkeys(UPLOADS, "")
        return self.each(lambda picture: dataclasses.replace(picture, **none))

    def explicit(self, schedule_of: Callable[[Picture], Schedule]) -> Self:
        """Return the request with the spacings named that models use by default.

        Args:
            schedule_of: returns the schedule of a picture's model.
        """

        def named(picture: Picture) -> Picture:
            spacing, schedule = picture.spacing or None, schedule_of(picture)
            spacing = spacing_taken(picture.sampler, schedule, spacing)
            return dataclasses.replace(picture, spacing=spacing)

        return self.each(named)


def for_all(common_values: Mapping[str, Any], catalog: ModelCatalog) -> Picture:
    """Return the settings for all pictures, without a prompt, that untrusted values ask for.

    Args:
        given: as `Request.check` takes them.
        catalog: the models that can be drawn with.

    Raises:
        RequestError: a value is not allowed.
    """
    defaults = catalog.defaults(SETTINGS["model"].check(common_values.get("model")))
    values = {**vars(defaults), "prompt": "", **common_values, "model": defaults.model}
    if values["sampler"] != defaults.sampler:
        values["spacing"] = common_values.get("spacing", "")
    common = Picture(**{name: setting.check(values[name]) for name, setting in SETTINGS.items()})
    check_together(common)
    catalog.check(common)
    return common


def changed(picture: Picture, values: Mapping[str, Any], index: int | None = None) -> Picture:
    """Return the picture with other settings, by name; None changes nothing.

    A choice that does not go with a new value, such as the spacing with a sampler, is left to the
    checkpoint.

    Args:
        picture: the picture to change.
        values: untrusted, but for the names, which are OVERRIDABLE's.
        index: the picture's index if the values are its overrides.

    Raises:
        RequestError: what is wrong with which value, and what it should be.
    """
    checked = {
        name: OVERRIDABLE[name].check(value, index)
        for name, value in values.items()
        if value is not None
    }
    picture = dataclasses.replace(picture, **checked)
    left = {
        name: ""
        for name, setting in OVERRIDABLE.items()
        if isinstance(setting.kind, Choice)
        and name not in checked
        and getattr(picture, name) not in setting.kind.allowed(vars(picture))
    }
    picture = dataclasses.replace(picture, **left)
    check_together(picture, index)
    return picture


def larger(picture: Picture, width: int, height: int, strength: float, taken: int = 1) -> Picture:
    """Return the settings that draw a finished picture again at a larger size.

    This is the second pass of A1111's hires fix: the picture is enlarged in pixels and put under
    noise. Its start picture is NOT_YET there.

    Args:
        picture: as it was drawn.
        width: of the larger picture, in pixels.
        height: of the larger picture, in pixels.
        strength: the share that becomes noise.
        taken: the least number of steps to take, even if that needs a longer table.

    Raises:
        RequestError: a value is not allowed.
    """
    return _started_anew(picture, strength, taken, width=width, height=height)


FEW_STEPS = ("lcm", "tcd")  # samplers of models that were distilled into few


def preset_steps(steps: int) -> list[int]:
    """Return the steps of the presets Draft, Balanced and Fine, for a model of so many."""
    return [min(max(1, round(steps * share)), MAX_STEPS) for share in (0.5, 1, 2)]


def finished(picture: Picture, steps: int) -> Picture | None:
    """Return the settings that draw a draft again, finely and from the same noise.

    Args:
        picture: as it was drawn.
        steps: of its model.

    Returns:
        None for what is no draft: it has more steps than the preset of that name, or is drawn by
        a sampler that needs few.
    """
    draft, own, fine = preset_steps(steps)
    if picture.steps > draft or draft == own or picture.sampler in FEW_STEPS:
        return None
    return dataclasses.replace(picture, steps=fine)


def reworded(picture: Picture, words: Any, strength: Any, *, edits: bool) -> Picture:
    """Return the settings that draw a finished picture again, changed as words say.

    The words are the prompt of a model that edits, and the picture is its only reference picture.
    With other models they follow the picture's prompt, and the picture is the start picture. It is
    NOT_YET in either place.

    Args:
        picture: as it was drawn.
        words: untrusted; what should be different.
        strength: untrusted; the share that becomes noise, with models that do not edit.
        edits: whether the picture's model edits.

    Raises:
        RequestError: a value is not allowed, or there are no words.
    """
    prompt = SETTINGS["prompt"]
    words = prompt.check(words).strip()
    if not words:
        raise RequestError("Say what should change, in a few words.")
    if edits:
        scale = SETTINGS["reference_scale"].default
        anew = changed(
            picture, dict(init_image="", mask="", reference=NOT_YET, reference_scale=scale)
        )
    else:
        words = prompt.check(f"{picture.prompt.rstrip(' ,')}, {words}")
        anew = _started_anew(picture, strength)
    return dataclasses.replace(anew, prompt=words)


def varied(picture: Picture, strength: Any, seed: int) -> Picture:
    """Return the settings that draw a new picture from a finished one, which is NOT_YET there.

    Args:
        picture: as it was drawn.
        strength: untrusted; the share that becomes noise.
        seed: of that noise.

    Raises:
        RequestError: a value is not allowed.
    """
    return dataclasses.replace(_started_anew(picture, strength), seed=seed)


def extended(picture: Picture, sides: Sequence[int], unit: int) -> tuple[Picture, list[int]]:
    """Return the settings that draw what lies beside a finished picture, which stays as it is.

    Its start picture is the larger canvas and its mask what is new there; both are NOT_YET.

    Args:
        picture: as it was drawn.
        sides: untrusted; pixels to the left, above, to the right and below.
        unit: of which they become multiples.

    Returns:
        The picture, and the pixels on each side.

    Raises:
        RequestError: a value is not allowed, or there is nothing to draw.
    """
    if min(sides) < 0 or not any(sides):
        raise RequestError("Drag an edge outward: there is nothing to draw beside the picture.")
    left, top, right, bottom = grown = [-(-side // unit) * unit for side in sides]
    size = dict(width=picture.width + left + right, height=picture.height + top + bottom)
    return changed(_started_anew(picture, 1.0, **size), dict(mask=NOT_YET)), grown


def _started_anew(picture: Picture, strength: Any, taken: int = 1, **values: Any) -> Picture:
    """Return a picture with other values that starts from what it became, which is NOT_YET there.

    It has enough steps for at least `taken` of them to be taken.
    """
    strength, most = SETTINGS["strength"].check(strength), MAX_STEPS
    enough = (n for n in range(picture.steps, most) if steps_taken(n, strength) >= taken)
    return changed(
        picture,
        dict(
            values,
            init_image=NOT_YET,
            mask="",
            fit="cover",
            strength=strength,
            steps=next(enough, most),
        ),
    )


def rounded(side: float, unit: int) -> int:
    """Round a side of a picture to the nearest multiple of `unit`."""
    return round(side / unit) * unit


def journey(first: Picture, to_prompt: str, to_seed: int, count: Any) -> Request:
    """Return the pictures between one and the same with another prompt and seed, equally spaced.

    The last of them is complete in itself: it has no second prompt or seed.

    Args:
        first: the picture where the journey begins.
        to_prompt: untrusted; "" is the first picture's.
        to_seed: untrusted; RANDOM is the first picture's.
        count: the number of pictures, both ends included.

    Raises:
        RequestError: the journey leads nowhere or has an unknown length, or a value is not allowed.
    """
    if count not in JOURNEYS:
        raise RequestError(
            "A journey has {known} pictures, not {value}.",
            known=", ".join(map(str, JOURNEYS)),
            value=shortened(count),
        )
    to_prompt = SETTINGS["prompt"].check(to_prompt)
    to_seed = SETTINGS["to_seed"].check(to_seed)
    ends = dict(
        to_prompt="" if to_prompt == first.prompt else to_prompt,
        to_seed=RANDOM if to_seed == first.seed else to_seed,
    )
    if not ends["to_prompt"] and ends["to_seed"] == RANDOM:
        raise RequestError("A journey needs another prompt or another seed to go to.")
    between = [
        changed(first, {**ends, "share": number / (count - 1)}) for number in range(1, count - 1)
    ]
    last = dataclasses.replace(
        first, prompt=to_prompt or first.prompt, seed=first.seed if to_seed == RANDOM else to_seed
    )
    return Request((first, *between, last))


def _check_names(
    values: Mapping[str, Any], known: Collection[str], index: int | None = None
) -> None:
    unknown = values.keys() - set(known)
    if unknown:
        names = ", ".join(sorted(repr(str(name)[:40])[1:-1] for name in unknown)[:5])
        raise RequestError(
            "Unknown settings{of}: {names}.", index=index, of=of_prompt(index), names=names
        )


def _prompts(values: Any, limit: int) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError("The prompts should be a list of texts.")
    if len(values) > limit:
        raise RequestError(
            "There are {count} prompts; at most {limit} fit.", count=len(values), limit=limit
        )
    prompts = [_prompt(value, index) for index, value in enumerate(values)]
    if not any(prompts):
        raise RequestError("There is no prompt yet: write what you would like to see in a box.")
    return prompts


def _prompt(value: Any, index: int) -> str:
    with about("prompt", index):
        return SETTINGS["prompt"].kind.check(value, Sentence("Prompt {number}", number=index + 1))


def _overrides(values: Any, count: int) -> list[Mapping[str, Any]]:
    """Return each picture's overrides, with known names."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RequestError("The overrides should be a list, one for each prompt.")
    if len(values) > count:
        raise RequestError(
            "There are {count} overrides for {prompts} prompts.", count=len(values), prompts=count
        )
    per_picture = [{} if value is None else value for value in values]
    for index, value in enumerate(per_picture):
        if not isinstance(value, Mapping):
            raise RequestError(
                "The overrides{of} should be values by name, not {value}.",
                index=index,
                of=of_prompt(index),
                value=shortened(value),
            )
        _check_names(value, OVERRIDABLE, index)
    return [*per_picture, *[{}] * (count - len(per_picture))]


def _base(
    common: Picture,
    given: Mapping[str, Any],
    overrides: Mapping[str, Any],
    catalog: ModelCatalog,
    index: int,
) -> Picture:
    """Return a picture before its overrides.

    A model of its own brings that model's defaults, except for the size, where the request leaves
    settings open.
    """
    if overrides.get("model") and overrides["model"] != common.model:
        size = {name: overrides.get(name) or getattr(common, name) for name in SIDES}
        with about("model", index):
            common = for_all({**given, **size, "model": overrides["model"]}, catalog)
    return _at(common, index)


def _at(common: Picture, index: int) -> Picture:
    """Return the picture at `index` without overrides; seeds count up by index."""
    return dataclasses.replace(common, seed=(common.seed + index) % (MAX_SEED + 1))


def _most_frequent(values: Sequence[Any], default: Any) -> Any:
    """Return the most frequent value; the default wins a tie, else the first."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == default))
