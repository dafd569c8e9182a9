"""A comparison: one prompt up to eight times with the same seed, and one thing that changes.

It is nothing but a request whose pictures have settings of their own, so it is made in one batch,
compiles nothing, and can be read back, linked to and changed like every other.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
from gradio.components import Component

from sd_tpu.page.texts import ENGLISH, Language, label
from sd_tpu.request import (
    MAX_PROMPTS,
    MAX_SEED,
    MAX_STEPS,
    Request,
    RequestError,
    Settings,
    drawn_seed,
    parse_number,
)
from sd_tpu.samplers import SAMPLERS

_SAMPLERS = ("dpmpp_2m", "dpmpp_2m_sde", "euler", "euler_ancestral", "heun", "ddim", "pndm",
             "unipc")
_STEPS = (0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2.5)  # of the model's own
_GUIDANCE = (1, 2, 3, 4, 5, 7.5, 10, 15)
_GUIDANCE_STOP = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_CACHE_INTERVAL = (1, 2, 3, 4, 5, 6, 8, 10)
_BETWEEN = re.compile(r"[\s,;،、，；]+")  # also as Arabic and Chinese write them


@dataclasses.dataclass(frozen=True)
class Compare:
    """What is to be compared; `begun` is the key of the run that was begun last, if it was."""

    what: gr.Radio
    samplers: gr.Dropdown
    values: gr.Textbox
    go: gr.Button
    begun: gr.State

    def inputs(self) -> list[Component]:
        """All components that say what is to be compared."""
        return [self.what, self.samplers, self.values]

    def choices(self, language: Language) -> dict[Component, Any]:
        """What can change, in a language: the browser cannot translate it."""
        return {self.what: gr.update(choices=_kinds(language))}

    def read(self, values: Mapping[Component, Any]) -> tuple[str, list[Any]]:
        """The name in Own of what changes, and the values that it takes.

        Raises:
            RequestError: they are none or too many.
        """
        what = values[self.what]
        return what, check_values(values[self.samplers] if what == "sampler"
                                  else parse_values(values[self.values]))


def _kinds(language: Language) -> list[tuple[str, str]]:
    """What can change, and its name in Own."""
    names = ("sampler", "steps", "guidance", "guidance_stop", "cache_interval", "seed")
    return [(language.say("own_seed" if name == "seed" else name), name) for name in names]


def make_compare(defaults: Settings) -> Compare:
    """The panel; its fold button stands elsewhere."""
    samplers = [(sampler.label, key) for key, sampler in SAMPLERS.items()]
    with gr.Column(elem_id="compare-panel"):
        gr.HTML(f'<p class="note">{label("compare_hint")}</p>', apply_default_css=False,
                js_on_load=None)
        what = gr.Radio(_kinds(ENGLISH), value="sampler", label=label("compare_what"))
        chosen = gr.Dropdown(samplers, value=suggested("sampler", defaults, 0), multiselect=True,
                             max_choices=MAX_PROMPTS, label=label("compare_samplers"))
        values = gr.Textbox(label=label("compare_values"), visible=False)
        with gr.Row():
            go = gr.Button(label("compare_go"), elem_id="compare-go", elem_classes="replaces",
                           min_width=0)
    return Compare(what, chosen, values, go, gr.State())


def suggested(what: str, defaults: Settings, seed: Any) -> list[Any]:
    """Eight values, or fewer, that are worth comparing; the model's own is among them.

    Seeds run on from `seed`, or from one that is drawn if it is none.
    """
    match what:
        case "sampler":
            return list(dict.fromkeys((defaults.sampler, *_SAMPLERS)))[:MAX_PROMPTS]
        case "steps":
            steps = (round(share * defaults.steps) for share in _STEPS)
            return list(dict.fromkeys(min(max(1, count), MAX_STEPS) for count in steps))
        case "guidance":
            nearest = min(_GUIDANCE, key=lambda value: abs(value - defaults.guidance))
            return [defaults.guidance if value == nearest else value for value in _GUIDANCE]
        case "guidance_stop":
            return list(_GUIDANCE_STOP)
        case "cache_interval":
            return list(_CACHE_INTERVAL)
    first = drawn_seed(-1 if seed is None else seed)
    return [(int(first) + place) % (MAX_SEED + 1) for place in range(MAX_PROMPTS)]


def parse_values(text: str) -> list[Any]:
    """The numbers in a text, each once; what is none stands for itself, for the check to name."""
    return [parse_number(word) for word in dict.fromkeys(_BETWEEN.split(text)) if word]


def check_values(values: Sequence[Any]) -> list[Any]:
    """The values, if they fill no more than the boxes; raises RequestError."""
    if not values:
        raise RequestError("There is nothing to compare yet: give up to {limit} values.",
                           limit=MAX_PROMPTS)
    if len(values) > MAX_PROMPTS:
        raise RequestError("There are {count} values to compare; at most {limit} fit.",
                           count=len(values), limit=MAX_PROMPTS)
    return list(values)


def comparison(request: Request, what: str, values: Sequence[Any], defaults: Settings) -> Request:
    """The first picture of the request once for each value of `what`, a name in Own.

    Raises:
        RequestError: a value cannot be served.
    """
    alone = request.only(request.places()[0])
    common = {**dataclasses.asdict(alone), "spacing": alone.spacing or ""}
    for value in values:  # by itself, or it would be refused as that of a box
        Request.check({**common, "spacing": "", what: value}, defaults)
    own = [{"seed": alone.seed, what: value} for value in values]
    return Request.check({**common, "prompts": alone.prompts * len(values), "own": own}, defaults)
