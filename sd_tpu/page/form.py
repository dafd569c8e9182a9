"""What is filled in on the page, as texts that page.js keeps and as links: read and written.

A form is {"prompts": texts, "seed": text, "settings": texts by name, "own": of each box texts by
name, "keep": whether each card is kept}. The size is among the settings and what a box has of its
own, as `named_size` writes it.

Links open the page with somebody's prompts, seed and settings. What is asked for stands behind the
`#`, which browsers keep to themselves: it gets into no log on the way, and may be as long as eight
long prompts and negative prompts are.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.serving.catalog import Catalog
from sd_tpu.settings import (
    MAX_PROMPTS,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    SIDES,
    Choice,
    Number,
    RequestError,
    Setting,
)

COMMON = {name: setting for name, setting in OVERRIDABLE.items() if name not in {"seed", *SIDES}}
GARBLED = Sentence("What is filled in cannot be read; please load the page again.")
MAX_LENGTH = 1 << 20  # of a link
MAX_FIELDS = (MAX_PROMPTS + 1) * len(SETTINGS)
_OWN = re.compile(f"({'|'.join(OVERRIDABLE)})([1-{MAX_PROMPTS}])")
EMPTY = " "  # in a box's own field, what is empty on purpose; what is empty there is as for all


def read(form: Any) -> dict[str, Any]:
    """What is filled in, as `Request.check` takes it, but with the seed that may be -1.

    Raises:
        RequestError: this is no form.
    """
    try:
        prompts, own, settings = form["prompts"], form["own"], dict(form["settings"])
        size = read_size(settings.pop("size", ""))
        values = {name: _parsed(name, text) for name, text in settings.items()
                  if name in COMMON and (text != "" or isinstance(COMMON[name].kind, Choice))}
        seed = _parsed("seed", form["seed"])
        owns = [{**{name: _read_own(name, text) for name, text in box.items()
                    if text != "" and name != "size"}, **read_size(box.get("size", ""))}
                for box in own]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise RequestError(GARBLED.template) from None
    return {"prompts": prompts, "seed": RANDOM if seed == "" else seed, **values, **size,
            "own": owns}


def show(values: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """The form of values such as `read` returns, complete; which cards are kept is not said."""
    prompts, own = ([*given, *[""] * MAX_PROMPTS][:MAX_PROMPTS]
                    for given in (values["prompts"], values["own"]))
    return {"prompts": prompts, "seed": str(values["seed"]),
            "settings": show_settings(values, catalog), "sizes": sizes(values["model"], catalog),
            "own": [_show_own(box or {}, values) for box in own]}


def show_settings(values: Mapping[str, Any], catalog: Catalog) -> dict[str, str]:
    """The settings of a form."""
    return {"size": named_size((values["height"], values["width"])),
            **{name: _show(setting, values[name]) for name, setting in COMMON.items()},
            "model": values["model"] or catalog.first}


def sizes(model: str, catalog: Catalog) -> list[str]:
    """Which sizes a model is offered in."""
    return list(map(named_size, catalog.sizes(model)))


def named_size(size: tuple[int, int]) -> str:
    """A height and width as people say it, width first."""
    return f"{size[1]}×{size[0]}"


def _show_own(box: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, str]:
    """A box's own fields; its size is whole where one side is its own."""
    shown = {name: _show(OVERRIDABLE[name], value) or EMPTY for name, value in box.items()
             if name not in SIDES}
    if box.keys() & SIDES:
        whole = {**common, **box}
        shown["size"] = named_size((whole["height"], whole["width"]))
    return shown


def read_size(text: Any) -> dict[str, str | int]:
    """Width and height of what `named_size` wrote; anything else is for the check to refuse."""
    if text == "":
        return {}
    sides = str(text).split("×")
    return {name: int(side) if side.isdecimal() else side
            for name, side in zip(("width", "height"), sides, strict=False)}


def _read_own(name: str, text: Any) -> Any:
    return "" if text == EMPTY else _parsed(name, text)


def _parsed(name: str, text: Any) -> Any:
    known = name in SETTINGS and isinstance(text, str)
    return SETTINGS[name].kind.parse(text) if known else text


def _show(setting: Setting, value: Any) -> str:
    kind = setting.kind
    if isinstance(kind, Choice) and value not in kind.options:
        return ""
    return kind.shown(value) if isinstance(kind, Number) else str(value)


# --- links --------------------------------------------------------------------------------------


def write_link(request: Request) -> str:
    """What stands behind the `#`: `prompt=a+cat&prompt=&prompt=a+dog&seed=7&...`, and `steps3=10`
    where the third prompt has steps of its own. It is without pictures.
    """
    request = request.without_inputs()
    common, last = request.common, max(request.places())
    fields = [("prompt", prompt) for prompt in request.prompts[:last + 1]]
    fields += [(name, getattr(common, name)) for name, setting in OVERRIDABLE.items()
               if not setting.expert or getattr(common, name) != setting.default]
    fields += [(f"{name}{place + 1}", value) for place in request.places()
               for name, value in request.overrides(place).items()]
    return urlencode(fields)


def read_link(text: str) -> dict[str, Any]:
    """What a link asks for, as `Request.check` takes it.

    Raises:
        RequestError: the text is no link of ours.
    """
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError
        fields = parse_qsl(text, keep_blank_values=True, strict_parsing=True,
                           max_num_fields=MAX_FIELDS)
    except ValueError:
        raise RequestError("The link cannot be read.") from None
    values: dict[str, Any] = {}
    own: list[dict[str, Any]] = []
    for name, value in fields:
        if match := _OWN.fullmatch(name):
            place = int(match[2])
            own += [{} for _ in range(place - len(own))]
            own[place - 1][match[1]] = _parsed(match[1], value)
        elif name != "prompt":
            values[name] = _parsed(name, value)
    prompts = [value for name, value in fields if name == "prompt"]
    return {"prompts": prompts, "own": own, **values}
