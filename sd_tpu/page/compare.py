"""A comparison: one prompt up to eight times with the same seed, and one thing that changes.

It is nothing but a request whose pictures have settings of their own, so it is made in one batch,
compiles nothing, and can be read back, linked to and changed like every other.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sd_tpu.page.form import EMPTY, GARBLED, read_size
from sd_tpu.request import Request, changed
from sd_tpu.sentence import Sentence
from sd_tpu.settings import (
    HANDED_IN,
    MAX_PROMPTS,
    OVERRIDABLE,
    SETTINGS,
    Number,
    Picture,
    RequestError,
)

_FIRST = ("guidance", "steps", "sampler")
_LISTED = ("model", "style")  # of which the server knows what there is
COMPARABLE = {
    name: OVERRIDABLE[name]
    for name in dict.fromkeys((*_FIRST, *_LISTED, *OVERRIDABLE))
    if name in _LISTED or OVERRIDABLE[name].suggest
}
SIZE = "size"  # height and width
LORA = "lora"  # the strength that prompts give to what they name so
LORA_LABEL, LORA_VALUES = Sentence("Strength of the LoRA"), (0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4)
_STRENGTH = re.compile(r"<lora:([^:>]+)(?::[^>]*)?>")
_STRENGTHS = Number(float, -10, 10)
_BETWEEN = re.compile(r"[\s,;،、，；]+")  # also as Arabic and Chinese write them


@dataclasses.dataclass(frozen=True)
class Comparable:
    """Something that can change: what it is called, values worth comparing as a text, and, where
    its values can be listed, each with what is shown of it and whether it is ticked at first."""

    name: str
    label: Sentence
    values: str
    listed: list[tuple[str, str, bool]]


def comparable(
    defaults: Picture,
    choices: Mapping[str, Mapping[str, str] | None],
    sizes: Sequence[str],
    loras: bool,
) -> list[Comparable]:
    """Return the settings that can be compared, on a page with these defaults.

    Args:
        defaults: of the first model.
        choices: as `layout.choices_of` returns them.
        sizes: of pictures.
        loras: whether there may be LoRAs.
    """
    listed = []
    for name, setting in COMPARABLE.items():
        options, ticked = choices[name], suggested(name, defaults)
        if options:
            ticked = ticked or [*options][:MAX_PROMPTS]
            ordered = dict.fromkeys((*ticked, *options))
            listed.append(
                Comparable(
                    name,
                    setting.label,
                    "",
                    [(key or EMPTY, options[key], key in ticked) for key in ordered],
                )
            )
        elif options is not None:
            values = ", ".join(map(setting.kind.shown, ticked))
            listed.append(Comparable(name, setting.label, values, []))
    ticked = [(size, size, index < 3) for index, size in enumerate(sizes)]  # each is compiled for
    strengths = Comparable(LORA, LORA_LABEL, ", ".join(map(str, LORA_VALUES)), [])
    return [*listed, Comparable(SIZE, Sentence("Size"), "", ticked), *[strengths] * loras]


def suggested(what: str, defaults: Picture) -> list[Any]:
    """Suggest up to eight values that are worth comparing, the model's own among them.

    The server knows models and styles, and page.js the seed that is filled in, from which seeds run
    on.
    """
    suggest = None if what in (*_LISTED, "seed") else COMPARABLE[what].suggest
    return suggest(getattr(defaults, what)) if suggest else []


def read_comparison(asked: Any) -> tuple[str, list[Any]]:
    """Return the setting that changes, and its values, each once.

    Raises:
        RequestError: there are none or too many, or the setting cannot change.
    """
    what, values = asked["what"], asked["values"]
    if what not in (*COMPARABLE, LORA, SIZE) or not isinstance(values, str | list):
        raise RequestError(GARBLED.template)
    parse = (
        read_size if what == SIZE else (_STRENGTHS if what == LORA else COMPARABLE[what].kind).parse
    )
    words = _BETWEEN.split(values) if isinstance(values, str) else values
    read = [parse(word) for word in dict.fromkeys(map(str, words)) if word]
    if not read:
        raise RequestError(
            "There is nothing to compare yet: give up to {limit} values.", limit=MAX_PROMPTS
        )
    if len(read) > MAX_PROMPTS:
        raise RequestError(
            "There are {count} values to compare; at most {limit} fit.",
            count=len(read),
            limit=MAX_PROMPTS,
        )
    return what, read


def comparison(request: Request, what: str, values: Sequence[Any]) -> Request:
    """Return the first picture of the request once for each value of `what`.

    Raises:
        RequestError: a value cannot be served, or the prompt names no LoRA to compare, or has no
            picture of which it says how it is used.
    """
    first = request.picture(request.indices()[0])
    image = HANDED_IN.get(COMPARABLE[what].section) if what in COMPARABLE else None
    if image and not getattr(first, image):
        raise RequestError("{label}: the first prompt has none.", label=SETTINGS[image].label)
    if what != LORA:
        return Request(
            tuple(changed(first, value if what == SIZE else {what: value}) for value in values)
        )
    if not _STRENGTH.search(first.prompt):
        raise RequestError("The first prompt names no LoRA.")
    return Request(tuple(_with_strength(first, value) for value in values))


def _with_strength(picture: Picture, value: Any) -> Picture:
    strength = _STRENGTHS.check(value, LORA_LABEL)
    prompt = _STRENGTH.sub(rf"<lora:\g<1>:{strength:g}>", picture.prompt)
    return dataclasses.replace(picture, prompt=prompt)
