"""The page's form, as texts that page.js keeps and as links: read and written.

A form is {"prompts": texts, "seed": text, "settings": texts by name, "overrides": for each box
texts by name, "keep": whether each card is kept}. The size is among the settings and a box's
overrides as `named_size` writes it.
"""

from collections.abc import Mapping
from typing import Any

from sd_tpu.sentence import Sentence
from sd_tpu.serving.catalog import Catalog
from sd_tpu.settings import (
    MAX_PROMPTS,
    MAX_SEED,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    SIDES,
    Choice,
    Number,
    RequestError,
    Setting,
    named_size,
)

COMMON = {name: setting for name, setting in OVERRIDABLE.items() if name not in {"seed", *SIDES}}
GARBLED = Sentence("What is filled in cannot be read; please load the page again.")
EMPTY = " "  # in a box's own field, what is empty on purpose; what is empty there is as for all


def read(form: Any) -> dict[str, Any]:
    """Parse a form into values as `Request.check` takes them, with a seed that may be -1.

    Raises:
        RequestError: this is no form.
    """
    try:
        prompts, boxes, settings = form["prompts"], form["overrides"], dict(form["settings"])
        size = read_size(settings.pop("size", ""))
        values = {
            name: _parsed(name, text)
            for name, text in settings.items()
            if name in COMMON and (text != "" or isinstance(COMMON[name].kind, Choice))
        }
        seed = _parsed("seed", form["seed"])
        per_picture = [
            {
                **{
                    name: _read_override(name, text)
                    for name, text in box.items()
                    if text != "" and name != "size"
                },
                **read_size(box.get("size", "")),
            }
            for box in boxes
        ]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise RequestError(GARBLED.template) from None
    return {
        "prompts": prompts,
        "seed": RANDOM if seed == "" else seed,
        **values,
        **size,
        "overrides": per_picture,
    }


def show(values: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """Return the form of values such as `read` returns, without the kept cards."""
    prompts = [*values["prompts"], *[""] * MAX_PROMPTS][:MAX_PROMPTS]
    boxes = [*values["overrides"], *[{}] * MAX_PROMPTS][:MAX_PROMPTS]
    return {
        "prompts": prompts,
        "seed": str(values["seed"]),
        "settings": show_settings(values, catalog),
        "sizes": sizes(values["model"], catalog),
        "overrides": [_show_overrides(box or {}, values) for box in boxes],
    }


def show_settings(values: Mapping[str, Any], catalog: Catalog) -> dict[str, str]:
    """Return the settings of a form."""
    return {
        "size": named_size((values["height"], values["width"])),
        **{name: _show(setting, values[name]) for name, setting in COMMON.items()},
        "model": values["model"] or catalog.first,
    }


def sizes(model: str, catalog: Catalog) -> list[str]:
    """Return the sizes that a model is offered in."""
    return list(map(named_size, catalog.sizes(model)))


def _show_overrides(box: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, str]:
    """Return a box's overrides; its size is whole where one side is overridden."""
    shown = {
        name: _show(OVERRIDABLE[name], value) or EMPTY
        for name, value in box.items()
        if name not in SIDES
    }
    if box.keys() & SIDES:
        whole = {**common, **box}
        shown["size"] = named_size((whole["height"], whole["width"]))
    return shown


def swapped(form: Mapping[str, Any], one: int, other: int) -> dict[str, Any]:
    """Return what is filled in once two boxes have changed places, with all that is theirs.

    A box's seed comes along: where it is counted from that of all boxes, it becomes the box's own,
    and where counting gives the same, it is not one any more.

    Args:
        form: a form with a seed that can be read.
        one: the index of a box.
        other: that of the other.
    """
    prompts = [*form["prompts"], *[""] * MAX_PROMPTS][:MAX_PROMPTS]
    boxes = [*map(dict, form["overrides"]), *({} for _ in range(MAX_PROMPTS))][:MAX_PROMPTS]
    keep = [*form["keep"], *[False] * MAX_PROMPTS][:MAX_PROMPTS]
    for each in (prompts, boxes, keep):
        each[one], each[other] = each[other], each[one]
    first = SETTINGS["seed"].kind.parse(form["seed"])
    if isinstance(first, int) and first != RANDOM:
        for place, before in ((one, other), (other, one)):
            if prompts[place].strip():
                own = boxes[place].pop("seed", str((first + before) % (MAX_SEED + 1)))
                if own != str((first + place) % (MAX_SEED + 1)):
                    boxes[place]["seed"] = own
    return {"prompts": prompts, "overrides": boxes, "keep": keep}


def read_size(text: Any) -> dict[str, str | int]:
    """Width and height of what `named_size` wrote. Sides that are no numbers are left to the check
    of the request. Raises ValueError where there are not two."""
    if text == "":
        return {}
    sides = str(text).split("×")
    return {
        name: int(side) if side.isdecimal() else side
        for name, side in zip(("width", "height"), sides, strict=True)
    }


def _read_override(name: str, text: Any) -> Any:
    return "" if text == EMPTY else _parsed(name, text)


def _parsed(name: str, text: Any) -> Any:
    known = name in SETTINGS and isinstance(text, str)
    return SETTINGS[name].kind.parse(text) if known else text


def _show(setting: Setting, value: Any) -> str:
    kind = setting.kind
    if isinstance(kind, Choice) and value not in kind.options:
        return ""
    return kind.shown(value) if isinstance(kind, Number) else str(value)
