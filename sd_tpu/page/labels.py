"""What a picture's caption names besides its prompt: the settings that set it apart."""

from collections.abc import Mapping
from typing import Any

from sd_tpu.page.texts import Language
from sd_tpu.request import ACCELERATIONS, Request
from sd_tpu.samplers import SAMPLERS

_ORDER = ("sampler", "spacing", "steps", "guidance", *ACCELERATIONS, "seed", "negative_prompt")


def named(request: Request, place: int) -> dict[str, Any]:
    """The settings, by name, that the label of the picture at `place` should name.

    Where the prompts differ, these are the picture's own. Where all are the same, it is a
    comparison: every picture is labelled by what differs among them, which is their seeds if it is
    nothing else. A seed is no part of other labels, for it is shown anyway.
    """
    places = request.places()
    compared = len(places) > 1 and len({request.prompts[i] for i in places}) == 1
    names = {name for i in (places if compared else [place]) for name in request.own_at(i).given()}
    names -= {"seed"}
    if compared and not names:
        names = {"seed"}
    alone = request.only(place)
    return {name: getattr(alone, name) for name in names}


def words(values: Mapping[str, Any], language: Language) -> str:
    """Settings by their names in Own, as a label: `Euler · 20 steps`. That a sampler has the
    model's own spacing is taken for granted."""
    named = [_word(name, values[name], language) for name in _ORDER if name in values
             if name != "spacing" or values[name] or "sampler" not in values]
    return " · ".join(named)


def all_words(alone: Request, language: Language) -> str:
    """All settings of the request for a single picture, as a label; of no accelerations and no
    negative prompt nothing is said."""
    unsaid = {*ACCELERATIONS, "negative_prompt"} - {*alone.accelerated()}
    if alone.negative_prompt:
        unsaid.remove("negative_prompt")
    return words({name: getattr(alone, name) for name in _ORDER if name not in unsaid}, language)


def plain(value: Any) -> str:
    """A number without a fraction that says nothing."""
    return str(value).removesuffix(".0")


def _word(name: str, value: Any, language: Language) -> str:
    if name == "sampler":
        return SAMPLERS[value].label if value in SAMPLERS else str(value)
    if name == "spacing":
        return value or language.say("label_spacing_own")
    if name == "negative_prompt":
        text = " ".join(value.split())  # in a label there is one line
        return language.say("label_negative" if text else "label_negative_none", value=text)
    return language.say(f"label_{name}", value=plain(value))
