"""Layout of the page: Gradio's components, and the facts of the parts in page.html."""

import dataclasses
import json
import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from sd_tpu.gallery.run import Card
from sd_tpu.gallery.status import STARTING, StatusLine
from sd_tpu.language import ENGLISH, LANGUAGES, Language
from sd_tpu.page.compare import comparable
from sd_tpu.page.form import sizes
from sd_tpu.page.parts import part
from sd_tpu.pictures.images import MAX_FILE_BYTES, VERSION, webp_url
from sd_tpu.pictures.movie import kinds_here
from sd_tpu.request import JOURNEYS, preset_steps
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.client import EngineClient
from sd_tpu.settings import (
    CONTROL,
    JOURNEY,
    MAX_PROMPTS,
    REFERENCE,
    SETTINGS,
    SIDES,
    Choice,
    Picture,
    named_size,
)

BARE: dict[str, Any] = dict(js_on_load=None, apply_default_css=False)


@dataclasses.dataclass(frozen=True)
class View:
    """Parts of the page that change.

    They are the progress line, the texts that are read aloud, the pictures, and what all of them
    have; `hub` is where page.js asks the server.
    """

    line: gr.HTML
    news: gr.HTML
    figures: list[gr.HTML]
    collection: gr.HTML
    hub: gr.HTML
    size: tuple[int, int]

    def outputs(self) -> list[gr.HTML]:
        """Return the components that a run changes."""
        return [self.line, self.news, *self.figures, self.collection]


class Texts:
    """Texts of the page in all languages.

    The page has places for them, which are filled for each visitor (`fill`).
    """

    def __init__(self):
        """Begin with no texts."""
        self._texts: dict[str, list[bytes]] = {each.tag: [] for each in LANGUAGES.values()}
        self._mark = secrets.token_hex(8)  # that no prompt and no address has

    def render(self, make: Callable[[Language], str]) -> str:
        """Return the place of a text that is made in each language."""
        for language in LANGUAGES.values():
            # JSON's escapes, and none of HTML's tags, which could end the script that it stands in.
            escaped = json.dumps(make(language), ensure_ascii=False)[1:-1].replace("<", "\\u003c")
            self._texts[language.tag].append(escaped.encode())
        return f"{self._mark} {len(self._texts[ENGLISH.tag]) - 1}."

    def label(self, text: str, **facts: Any) -> str:
        """Return the place of an English text and its translations."""
        return self.render(lambda language: language.say(text, **facts))

    def fill(self, page: bytes, language: Language) -> bytes:
        """Put the texts of a language into their places in Gradio's page."""
        texts = self._texts[language.tag]
        places = rb"%b (\d+)\." % self._mark.encode()
        return re.sub(places, lambda place: texts[int(place[1])], page)


def make_page(
    engine: EngineClient,
    texts: Texts,
    answer: Callable[..., Any],
    *,
    history: bool,
    teach: bool = False,
) -> View:
    """Lay out the tools, the cards and the bar below them, with all panels.

    `answer` answers page.js's requests.
    """
    html = partial(_html, texts)
    card, defaults = engine.checkpoint.card, vars(engine.defaults)
    size = defaults["width"], defaults["height"]
    samples = json.dumps(sample_sets((*card.prompts, *card.more_prompts)))
    choices, offered = choices_of(engine.catalog), sizes(defaults["model"], engine.catalog)
    styles = choices["style"] is not None
    html("head", "head", card, samples, LANGUAGES, history, teach, styles)
    figures = _cards(engine, size, texts)
    collection = html("collection", "collection")
    with gr.Row(elem_id="bar"):
        html("go", "go", STARTING.text)  # first for the keyboard, last to be seen
        html("choices", "presets-and-faster", preset_steps(defaults["steps"]))
        html("seed", "seeds")
        html("selection", "selecting", styles)
        line = html("progress", "line", StatusLine())
        html(
            "sheet",
            "sheet",
            card,
            choices,
            defaults,
            named_size(size[::-1]),
            {each: each for each in offered},
            comparable(engine.defaults, choices, offered, engine.adapters.takes_loras),
            MAX_FILE_BYTES,
            history,
            teach,
        )
    # The region stays while its text changes: only then do screen readers read the text out.
    news = gr.HTML(
        "",
        elem_id="news",
        apply_default_css=False,
        js_on_load=None,
        html_template='<div role="status" aria-live="polite">${value}</div>',
    )
    html("viewer", "full-screen", choices)
    html("beside", "together")
    html("best", "choosing")
    html("painter", "painting")
    if history:
        html("boards_dialog", "boarding")
    html("journey", "travelling", JOURNEYS, kinds_here())
    hub = gr.HTML(
        "", elem_id="hub", apply_default_css=False, js_on_load=HUB, server_functions=[answer]
    )
    return View(line, news, figures, collection, hub, size)


HUB = "window.sdTpu.connect(server.answer, (asked) => trigger('click', asked), upload);"


def _html(texts: Texts, name: str, id: str, *facts: Any) -> gr.HTML:
    """Return a part of the page, in the language of whoever reads it."""
    return gr.HTML(texts.render(lambda language: part(name, language, *facts)), elem_id=id, **BARE)


def choices_of(catalog: Catalog) -> dict[str, dict[str, str] | None]:
    """Return the options of each setting that can be listed, by its name.

    None stands where there is nothing. Of the models only the first is listed: there may be
    thousands, and the page holds every list once for each language, so page.js asks for the others.
    """
    listed = {
        name: dict(setting.kind.options) if isinstance(setting.kind, Choice) else {}
        for name, setting in SETTINGS.items()
    }
    lacking = {*SIDES}  # which are chosen as one
    for name, names, least in (
        ("style", catalog.styles.templates(), 1),
        ("controlnet", catalog.controlnets, 2),
        ("ip_adapter", catalog.ip_adapters, 2),
    ):
        listed[name] = {"": SETTINGS[name].caption_of(""), **{each: each for each in names}}
        if len(names) < least:
            lacking.add(name)
    if not catalog.ip_adapters:  # which alone take a strength
        lacking.add("reference_scale")
    # Nothing is on the way to another here.
    sections = {CONTROL: catalog.controlnets, REFERENCE: catalog.takes_references, JOURNEY: ()}
    lacking |= {name for name, setting in SETTINGS.items() if not sections.get(setting.section, 1)}
    return {**listed, "model": {catalog.first: catalog.first}, **dict.fromkeys(lacking)}


def _cards(engine: EngineClient, size: tuple[int, int], texts: Texts) -> list[gr.HTML]:
    """Lay out each picture with its prompt, and the remark on that."""
    figures, samples = [], [*engine.checkpoint.card.prompts, *[""] * MAX_PROMPTS]
    label, examples = texts.label("Example"), engine.checkpoint.parameters.source / "examples"
    with gr.Row(elem_id="cards"):
        for index, prompt in zip(range(MAX_PROMPTS), samples, strict=False):
            with gr.Column(min_width=0, elem_classes="card"):
                first = part("figure", ENGLISH, example(examples, index, prompt), size)
                # The pictures themselves are not sent once for each language.
                figures.append(
                    gr.HTML(
                        first.replace(">Example<", f">{label}<"),
                        elem_id=f"picture-{index + 1}",
                        elem_classes="cell",
                        **BARE,
                    )
                )
                gr.Textbox(
                    prompt,
                    label=texts.label("Prompt {number}", number=index + 1),
                    show_label=False,
                    lines=2,
                    max_lines=2,
                    interactive=True,
                    elem_id=f"prompt-{index + 1}",
                    elem_classes="prompt",
                    placeholder=texts.label("Write, drop a picture, or leave empty"),
                )
                _html(texts, "below", f"below-{index + 1}", index)
    return figures


def example(folder: Path, index: int, prompt: str) -> Card:
    """Return the card before anybody has drawn: with an example, if the folder has one."""
    file = folder / f"{index}.webp"
    if not file.is_file():
        return Card(index)
    return Card(index, Picture(prompt=prompt), "example", preview=webp_url(file.read_bytes()))


def sample_sets(prompts: tuple[str, ...]) -> list[list[str]]:
    """Return sample prompts by the eight; the last set may be shorter."""
    padded = [*prompts, *[""] * (-len(prompts) % MAX_PROMPTS)] or [""] * MAX_PROMPTS
    return [padded[i : i + MAX_PROMPTS] for i in range(0, len(padded), MAX_PROMPTS)]


def about(engine: EngineClient, language: Language) -> str:
    """Return the text about the model and the server that draw the pictures."""
    found = engine.diagnose()
    tpu = any("TPU" in device.kind for device in found.devices)
    return part("about", language, engine, found, tpu, f"sd_tpu {VERSION}, {found.packages}")
