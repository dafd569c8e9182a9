"""Links that open the page with somebody's prompts, seed and settings.

What is asked for stands behind the `#`, which browsers keep to themselves: it gets into no log on
the way, and may be as long as eight long prompts are.
"""

from typing import Any
from urllib.parse import parse_qsl, urlencode

from sd_tpu.request import Request, RequestError, parse_number

MAX_LENGTH = 1 << 19
MAX_FIELDS = 32
NUMBERS = ("seed", "steps", "guidance")


def write_link(request: Request) -> str:
    """What stands behind the `#`: `prompt=a+cat&prompt=&prompt=a+dog&seed=7&...`."""
    last = max(request.places())
    fields = [("prompt", prompt) for prompt in request.prompts[:last + 1]]
    fields += [(name, getattr(request, name)) for name in (*NUMBERS, "sampler")]
    fields += [("spacing", request.spacing or ""), ("negative_prompt", request.negative_prompt)]
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
    values: dict[str, Any] = {name: parse_number(value) if name in NUMBERS else value
                              for name, value in fields if name != "prompt"}
    return {**values, "prompts": [value for name, value in fields if name == "prompt"]}
