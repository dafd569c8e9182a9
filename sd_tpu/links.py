"""Links that open the page with somebody's prompts, seed and settings.

What is asked for stands behind the `#`, which browsers keep to themselves: it gets into no log on
the way, and may be as long as eight long prompts and negative prompts are.
"""

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode

from sd_tpu.request import Request
from sd_tpu.settings import MAX_PROMPTS, OVERRIDABLE, SETTINGS, RequestError

MAX_LENGTH = 1 << 20
MAX_FIELDS = (MAX_PROMPTS + 1) * len(SETTINGS)
_OVERRIDE = re.compile(f"({'|'.join(OVERRIDABLE)})([1-{MAX_PROMPTS}])")


def write_link(request: Request) -> str:
    """Return the part of a link behind the `#`: `prompt=a+cat&prompt=&prompt=a+dog&seed=7&...`.

    An override of the third prompt reads `steps3=10`. Uploaded pictures are left out.
    """
    request = request.without_inputs()
    common, last = request.common, max(request.indices())
    fields = [("prompt", prompt) for prompt in request.prompts[: last + 1]]
    fields += [
        (name, getattr(common, name))
        for name, setting in OVERRIDABLE.items()
        if not setting.expert or getattr(common, name) != setting.default
    ]
    fields += [
        (f"{name}{index + 1}", value)
        for index in request.indices()
        for name, value in request.overrides(index).items()
    ]
    return urlencode(fields)


def read_link(text: str) -> dict[str, Any]:
    """Parse a link into values as `Request.check` takes them.

    Raises:
        RequestError: the text is no link of ours.
    """
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError
        fields = parse_qsl(
            text, keep_blank_values=True, strict_parsing=True, max_num_fields=MAX_FIELDS
        )
    except ValueError:
        raise RequestError("The link cannot be read.") from None
    values: dict[str, Any] = {}
    overrides: list[dict[str, Any]] = []
    for name, value in fields:
        if match := _OVERRIDE.fullmatch(name):
            index = int(match[2])
            overrides += [{} for _ in range(index - len(overrides))]
            overrides[index - 1][match[1]] = _read(match[1], value)
        elif name != "prompt":
            values[name] = _read(name, value)
    prompts = [value for name, value in fields if name == "prompt"]
    return {"prompts": prompts, "overrides": overrides, **values}


def _read(name: str, text: str) -> Any:
    return SETTINGS[name].kind.parse(text) if name in SETTINGS else text
