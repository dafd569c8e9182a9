"""What a single box asks for in place of the common settings, folded away below it.

Each box has a panel of its own, though one for the box one is at would be fewer components: it
stands where the thumb and the Tab key are, right below its prompt, several can be open to be
compared, and nothing has to be known about which box is meant.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
from gradio.components import Component

from sd_tpu.page import cells
from sd_tpu.page.labels import plain, words
from sd_tpu.page.links import NUMBERS
from sd_tpu.page.texts import ENGLISH, Language, label
from sd_tpu.request import ACCELERATIONS, MAX_PROMPTS, Settings, parse_number
from sd_tpu.samplers import SAMPLERS
from sd_tpu.schedule import SPACINGS

COMMON = ""  # in every field: as for all
_MODELS_OWN = "own"  # in the list of spacings, where "" is taken
_NONE = " "  # a negative prompt that is empty on purpose: the empty field is the common one


@dataclasses.dataclass(frozen=True)
class Panel:
    """The fields of one box, by their names in Own, and what shows their values while folded."""

    fields: dict[str, Component]
    summary: gr.HTML

    def read(self, values: Mapping[Component, Any]) -> dict[str, Any]:
        """What was filled in, as `Request.check` takes it."""
        filled = {name: values[field] for name, field in self.fields.items()}
        given = {name: parse_number(value) if name in NUMBERS and isinstance(value, str) else value
                 for name, value in filled.items() if value not in (None, COMMON)}
        if given.get("spacing") == _MODELS_OWN:
            given["spacing"] = ""
        return given

    def show(self, given: Mapping[str, Any] | None) -> dict[Component, Any]:
        """Fills it in with values such as `read` returns; None is for "as common" everywhere."""
        shown = {name: value for name, value in (given or {}).items() if value is not None}
        if shown.get("sampler") not in SAMPLERS:
            shown.pop("sampler", None)
        if "spacing" in shown:
            shown["spacing"] = shown["spacing"] or _MODELS_OWN
        if "negative_prompt" in shown:
            shown["negative_prompt"] = shown["negative_prompt"] or _NONE
        shown |= {name: plain(shown[name]) for name in NUMBERS if name in shown}
        return {field: shown.get(name, COMMON) for name, field in self.fields.items()}


def fields_of(panels: Sequence[Panel]) -> list[Component]:
    """All fields of all panels."""
    return [field for panel in panels for field in panel.fields.values()]


def show_owns(
    panels: Sequence[Panel], owns: Sequence[Mapping[str, Any] | None]
) -> dict[Component, Any]:
    """Fills all panels in; those beyond the end of `owns` with what is common."""
    padded = [*owns, *[None] * MAX_PROMPTS][:MAX_PROMPTS]
    return {field: value for panel, own in zip(panels, padded, strict=True)
            for field, value in panel.show(own).items()}


def make_panel(number: int, defaults: Settings) -> Panel:
    """The panel of the box with this number; its fold button stands elsewhere.

    Its numbers are texts, because a number of Gradio's that begins empty is 0 in the browser.
    """
    summary = gr.HTML("", js_on_load=cells.TRIGGER, apply_default_css=False)
    with gr.Column(elem_id=f"own-{number}-panel", min_width=0):
        made = {
            "steps": gr.Textbox(placeholder=str(defaults.steps), **_about("steps")),
            "guidance": gr.Textbox(placeholder=f"{defaults.guidance:g}", **_about("guidance")),
            "sampler": gr.Dropdown(_choices("sampler", ENGLISH), value=COMMON,
                                   **_about("sampler")),
            "spacing": gr.Dropdown(_choices("spacing", ENGLISH), value=COMMON,
                                   **_about("spacing")),
            "seed": gr.Textbox(placeholder=label("seed_placeholder"), **_about("own_seed")),
            **{name: gr.Textbox(placeholder=plain(getattr(defaults, name)), **_about(name))
               for name in ACCELERATIONS},
            "negative_prompt": gr.Textbox(placeholder=defaults.negative_prompt,
                                          **_about("negative")),
        }
    return Panel(made, summary)


def own_choices(panels: Sequence[Panel], language: Language) -> dict[Component, Any]:
    """The lists of all panels in a language, which the browser cannot translate."""
    return {panel.fields[name]: gr.update(choices=_choices(name, language))
            for panel in panels for name in ("sampler", "spacing")}


def summary(number: int, given: Mapping[str, Any], language: Language) -> str:
    """What a box shows of its own settings, and how to be rid of them; nothing if it has none."""
    if not given:
        return ""
    clear = language.say("own_clear", number=number)
    return cells.summary(words(given, language), clear, f"own-{number}-panel")


def _choices(name: str, language: Language) -> list[tuple[str, str]]:
    common = language.say("as_common"), COMMON
    if name == "sampler":
        return [common, *((sampler.label, key) for key, sampler in SAMPLERS.items())]
    return [common, (language.say("own"), _MODELS_OWN), *((name, name) for name in SPACINGS)]


def _about(key: str) -> dict[str, Any]:
    return {"label": label(key), "min_width": 0, "elem_classes": f"field-{key}"}
