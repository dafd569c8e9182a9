"""What is on the page: the boxes, the settings, the gallery."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

import gradio as gr
from gradio.components import Component

from sd_tpu.engine import Engine
from sd_tpu.images import parse_parameters, parse_token_downsampling, read_parameters
from sd_tpu.page import cells
from sd_tpu.page.compare import Compare, make_compare
from sd_tpu.page.labels import plain
from sd_tpu.page.own import Panel, fields_of, make_panel, show_owns
from sd_tpu.page.snapshot import Cell, Line, Snapshot
from sd_tpu.page.texts import ENGLISH, Language, Translations, label
from sd_tpu.pipeline import FlaxStableDiffusionPipeline
from sd_tpu.request import (
    ACCELERATIONS,
    MAX_PROMPT_LENGTH,
    MAX_PROMPTS,
    RANDOM,
    Request,
    RequestError,
    Settings,
)
from sd_tpu.samplers import SAMPLERS
from sd_tpu.schedule import SPACINGS

OWN_SPACING = ""  # in the spacing's list

Updates = dict[Component, Any]


@dataclasses.dataclass(frozen=True)
class Tools:
    """What fills the boxes without typing into each, and takes that back."""

    copy_first: gr.Button
    clear: gr.Button
    samples: gr.Button
    undo: gr.Button
    redo: gr.Button
    sample_sets: list[list[str]]
    list_text: gr.Textbox
    list_fill: gr.Button
    picture: gr.File


@dataclasses.dataclass(frozen=True)
class Form:
    """What a person fills in; `settings` by their names in a Request. `faster` shows which of them
    make the pictures other than exact. `gathered` is for the contents of all `inputs` in one."""

    tools: Tools
    prompts: list[gr.Textbox]
    counters: list[gr.HTML]
    seed: gr.Number
    roll: gr.Button
    reuse: gr.Button
    settings: dict[str, Component]
    faster: gr.HTML
    own: list[Panel]
    compare: Compare
    generate: gr.Button
    stop: gr.Button
    saved: gr.BrowserState
    gathered: gr.JSON

    def parts(self) -> list[list[Component]]:
        """The `inputs` by where they stand: the prompts, what is common, each box's own."""
        return [self.prompts, [self.seed, *self.settings.values()],
                *(fields_of([panel]) for panel in self.own)]

    def inputs(self) -> list[Component]:
        """All components that say what is asked for."""
        return [component for part in self.parts() for component in part]

    def filled(self, values: Mapping[Component, Any]) -> dict[str, Any]:
        """What has been `gathered`, as `read` returns it."""
        return self.read(values[self.gathered])

    def read(self, contents: Any) -> dict[str, Any]:
        """What the `inputs` hold, as `Request.check` takes it, but with the seed that may be -1.

        Raises:
            RequestError: these are not the contents of the inputs.
        """
        inputs = self.inputs()
        if not isinstance(contents, list) or len(contents) != len(inputs):
            raise RequestError("What is filled in cannot be read; please load the page again.")
        values = dict(zip(inputs, contents, strict=True))
        settings = {name: values[component] for name, component in self.settings.items()}
        seed = values[self.seed]
        return {"prompts": [values[box] for box in self.prompts],
                "seed": RANDOM if seed is None else seed, **settings,
                "own": [panel.read(values) for panel in self.own]}

    def show(self, values: Mapping[str, Any], language: Language) -> Updates:
        """Fills it in with values such as `read` returns."""
        prompts = [*values["prompts"], *[""] * MAX_PROMPTS][:MAX_PROMPTS]
        settings = {self.settings[name]: values[name] for name in self.settings}
        spacing = gr.update(choices=spacings(values["sampler"], language),
                            value=values["spacing"] or OWN_SPACING)
        return {**dict(zip(self.prompts, prompts, strict=True)), self.seed: values["seed"],
                **settings, self.settings["spacing"]: spacing, **show_owns(self.own, values["own"])}

    def show_request(self, request: Request, language: Language) -> Updates:
        """Fills it in with what was asked for."""
        return self.show(dataclasses.asdict(request), language)

    def show_kept(self, values: Any, here: Settings, language: Language) -> Updates:
        """Fills it in with the contents that the browser has kept; else what it begins with stays,
        but for the words in the list of spacings, which the browser cannot translate.

        Of a page that had other fields or samplers only the prompts and the seed are taken, which
        come first.
        """
        inputs, first = self.inputs(), MAX_PROMPTS + 1
        if isinstance(values, list) and len(values) >= first:
            begun = [component.value for component in inputs]
            complete = [values] if len(values) == len(inputs) else []
            for kept in (*complete, values[:first]):
                asked = self.read([*kept, *begun[len(kept):]])
                if asked["sampler"] in SAMPLERS:
                    return self.show(asked, language)
        return {self.settings["spacing"]: gr.update(choices=spacings(here.sampler, language))}

    def buttons(self, *, running: bool) -> Updates:
        """Generate or Stop, whichever makes sense."""
        return {self.generate: gr.update(interactive=not running),
                self.stop: gr.update(interactive=running)}


@dataclasses.dataclass(frozen=True)
class View:
    """What a person looks at. `run` is the key of what is shown, `file` is what to download."""

    line: gr.HTML
    news: gr.HTML
    cells: list[gr.HTML]
    collection: gr.HTML
    run: gr.State
    file: gr.Textbox
    size: tuple[int, int]

    def tell(self, text: str, kind: str = "idle") -> Updates:
        """Says something that is not about a run, aloud as well."""
        return {self.line: cells.progress(text, kind), self.news: cells.news(text)}

    def say(self, snapshot: Snapshot, language: Language) -> Updates:
        """Says how a run goes: each step in sight, and what matters aloud."""
        news = " ".join(map(language.translate, snapshot.news))
        aloud = {self.news: cells.news(news)} if news else {}
        return {**self.show_line(snapshot.line, language), **aloud}

    def show_line(self, line: Line, language: Language) -> Updates:
        """Says how a run is, in sight only."""
        return {self.line: cells.progress(language.translate(line.text), line.kind, line.share)}


def make_tools(engine: Engine) -> tuple[Tools, Compare]:
    """The row above the boxes, and the panels that it folds out."""
    card = engine.pipeline.card
    sets = sample_sets((*card.prompts, *card.more_prompts))
    with gr.Row(elem_id="tools"):
        copy_first = gr.Button(label("copy_first"), elem_classes="replaces", min_width=0)
        clear = gr.Button(label("clear"), elem_classes="replaces", min_width=0)
        samples = gr.Button(label("samples"), elem_classes="replaces", min_width=0)
        undo = gr.Button(label("undo"), elem_id="undo", min_width=0)
        redo = gr.Button(label("redo"), elem_id="redo", min_width=0)
        gr.HTML(cells.fold("list"), apply_default_css=False, js_on_load=None)
        gr.HTML(cells.fold("read"), apply_default_css=False, js_on_load=None)
        gr.HTML(cells.fold("compare"), apply_default_css=False, js_on_load=None)
    with gr.Column(elem_id="list-panel"):
        text = gr.Textbox(label=label("list_label"), lines=8, max_lines=16)
        fill = gr.Button(label("list_fill"), elem_classes="replaces", min_width=0)
    with gr.Column(elem_id="read-panel"):
        picture = gr.File(label=label("read_label"), height=140)
    tools = Tools(copy_first, clear, samples, undo, redo, sets, text, fill, picture)
    return tools, make_compare(engine.defaults)


def make_form(engine: Engine, texts: Translations, tools: Tools, compare: Compare) -> Form:
    """The upper half of the page, below the tools."""
    card = engine.pipeline.card
    prompts, counters, panels = _boxes(tools.sample_sets[0], engine, texts)
    with gr.Row(elem_id="settings-fold"):
        gr.HTML(cells.fold("settings"), apply_default_css=False, js_on_load=None)
        faster = gr.HTML("", js_on_load=cells.TRIGGER, apply_default_css=False)
    settings = _settings(engine.defaults, texts)
    with gr.Row(elem_id="actions"):
        with gr.Row(elem_id="seeds"):
            seed = gr.Number(RANDOM, label=label("seed"), placeholder=label("seed_placeholder"),
                             min_width=0, elem_id="seed")
            roll = gr.Button(label("random"), elem_id="roll", elem_classes="replaces", min_width=0)
            reuse = gr.Button(label("reuse"), elem_id="reuse", elem_classes="replaces", min_width=0)
        with gr.Row(elem_id="go"):
            generate = gr.Button(label("generate"), variant="primary", elem_id="generate",
                                 min_width=0)
            stop = gr.Button(label("stop"), variant="stop", elem_id="stop", interactive=False,
                             min_width=0)
    # Not secret from whoever sits at the browser, but it can be read after the server's next start.
    saved = gr.BrowserState({}, storage_key=f"sd_tpu {card.name}", secret="sd_tpu")
    return Form(tools, prompts, counters, seed, roll, reuse, settings, faster, panels, compare,
                generate, stop, saved, gr.JSON(visible=False))


def make_view(engine: Engine, texts: Translations) -> View:
    """The lower half of the page."""
    size = engine.defaults.width, engine.defaults.height
    line = gr.HTML(texts.render(lambda language: cells.progress(language.say("ready"), "idle")),
                   elem_id="line", js_on_load=None, apply_default_css=False)
    # The region stays while its text changes: only then do screen readers read the text out.
    news = gr.HTML("", elem_id="news", apply_default_css=False, js_on_load=None,
                   html_template='<div role="status" aria-live="polite">${value}</div>')
    with gr.Row(elem_id="gallery"):
        figures = [gr.HTML(cells.figure(Cell(i), size, ENGLISH), elem_classes="cell",
                           js_on_load=cells.TRIGGER, apply_default_css=False)
                   for i in range(MAX_PROMPTS)]
    collection = gr.HTML(texts.render(partial(cells.collection, None)), elem_id="collection",
                         js_on_load=cells.TRIGGER, apply_default_css=False)
    gr.HTML(texts.render(cells.viewer), apply_default_css=False, js_on_load=None)
    file = gr.Textbox(visible=False)
    return View(line, news, figures, collection, gr.State(), file, size)


def put_picture(form: Form, view: View, file: str | PathLike, told: str, engine: Engine,
                language: Language) -> Updates:
    """Fills the form in with what a PNG from elsewhere was made from, and says so, and what of it
    is otherwise here.

    Raises:
        RequestError: the file carries no settings, or bad ones.
    """
    text, told = read_parameters(file), [told]
    request, here = parse_parameters(text), engine.defaults
    if (request.width, request.height) != (here.width, here.height):
        told.append(language.say("read_size", width=request.width, height=request.height,
                                 here_width=here.width, here_height=here.height))
    tokens = parse_token_downsampling(text)
    tokens_here = engine.pipeline.models.token_downsampling
    if tokens != tokens_here:
        told.append(language.say("read_downsampling", there=tokens, here=tokens_here))
    return {**form.show_request(request, language), **view.tell(" ".join(told))}


def spacings(sampler: str, language: Language) -> list[tuple[str, str]]:
    """What the list of spacings offers for a sampler: what is shown and its value."""
    return [(language.say("own"), OWN_SPACING),
            *((name, name) for name in SPACINGS if name in SAMPLERS[sampler].spacings)]


def sample_sets(prompts: tuple[str, ...]) -> list[list[str]]:
    """Prompts by the eight; the last set may be shorter, which leaves boxes empty."""
    padded = [*prompts, *[""] * (-len(prompts) % MAX_PROMPTS)] or [""] * MAX_PROMPTS
    return [padded[i:i + MAX_PROMPTS] for i in range(0, len(padded), MAX_PROMPTS)]


def count(prompt: str, pipeline: FlaxStableDiffusionPipeline, language: Language) -> str:
    """What stands below a prompt's box."""
    if len(prompt) > MAX_PROMPT_LENGTH:
        text = language.say("too_many_characters", count=len(prompt), limit=MAX_PROMPT_LENGTH)
        return f'<p class="tokens over">{text}</p>'
    if not prompt.strip():
        return '<p class="tokens"></p>'
    tokenizer = pipeline.tokenizer
    return cells.counter(tokenizer.count(prompt), tokenizer.lost(prompt),
                         pipeline.card.unknown_words(prompt), language)


def _boxes(
    prompts: list[str], engine: Engine, texts: Translations
) -> tuple[list[gr.Textbox], list[gr.HTML], list[Panel]]:
    boxes, counters, panels = [], [], []
    with gr.Row(elem_id="prompts"):
        for number, prompt in enumerate(prompts, start=1):
            with gr.Column(min_width=0):
                boxes.append(gr.Textbox(
                    prompt, label=f"{label('prompt')} {number}", lines=2, max_lines=5,
                    placeholder=label("prompt_placeholder"), elem_classes="prompt"))
                with gr.Row():
                    counters.append(gr.HTML(texts.render(partial(count, prompt, engine.pipeline)),
                                            min_width=0, apply_default_css=False,
                                            js_on_load=None))
                    gr.HTML(texts.render(partial(cells.own_fold, number)),
                            apply_default_css=False, js_on_load=None)
                panels.append(make_panel(number, engine.defaults))
    return boxes, counters, panels


def _settings(defaults: Settings, texts: Translations) -> dict[str, Component]:
    def own(value: str) -> str:
        return texts.render(lambda language: language.say("own_value", value=value))

    samplers = [(sampler.label, key) for key, sampler in SAMPLERS.items()]
    with gr.Column(elem_id="settings-panel"):
        negative = gr.Textbox(defaults.negative_prompt, label=label("negative"),
                              info=label("negative_help"), lines=1,
                              elem_classes="field-negative")
        with gr.Row():
            steps = gr.Number(defaults.steps, label=label("steps"), min_width=200,
                              placeholder=own(str(defaults.steps)),
                              info=label("steps_help"), elem_classes="field-steps")
            guidance = gr.Number(defaults.guidance, label=label("guidance"), min_width=200,
                                 placeholder=own(f"{defaults.guidance:g}"), step=0.5,
                                 info=label("guidance_help"), elem_classes="field-guidance")
            sampler = gr.Dropdown(samplers, value=defaults.sampler, label=label("sampler"),
                                  min_width=200, info=label("sampler_help"))
            spacing = gr.Dropdown(spacings(defaults.sampler, ENGLISH), value=OWN_SPACING,
                                  label=label("spacing"), min_width=200,
                                  info=label("spacing_help"))
        gr.HTML(f'<p class="note">{label("faster_hint")}</p>', apply_default_css=False,
                js_on_load=None)
        with gr.Row():
            faster = {name: gr.Number(
                value, label=label(name), info=label(f"{name}_help"), min_width=200,
                placeholder=plain(value), elem_classes=f"field-{name}",
                step=1 if name == "cache_interval" else 0.1)
                for name in ACCELERATIONS for value in [getattr(defaults, name)]}
        gr.HTML(texts.render(partial(cells.size_note, defaults)), apply_default_css=False,
                js_on_load=None)
    return {"negative_prompt": negative, "steps": steps, "guidance": guidance,
            "sampler": sampler, "spacing": spacing, **faster}
