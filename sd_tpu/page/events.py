"""What happens on the page: who clicks what, and what then changes."""

import dataclasses
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from sd_tpu.engine import Engine
from sd_tpu.page import arriving, begin, cells
from sd_tpu.page.asking import LOOK_AT_REFUSAL, QUIET
from sd_tpu.page.files import Files, url
from sd_tpu.page.labels import words
from sd_tpu.page.layout import (
    OWN_SPACING,
    Form,
    Updates,
    View,
    count,
    put_picture,
    spacings,
)
from sd_tpu.page.own import COMMON, Panel, fields_of, show_owns, summary
from sd_tpu.page.runs import Runs
from sd_tpu.page.texts import Translations, language_of
from sd_tpu.request import ACCELERATIONS, MAX_PROMPTS, RANDOM, RequestError, Settings

FOCUS = "() => document.querySelector('#generate').focus()"


def connect(engine: Engine, page: gr.Blocks, texts: Translations, form: Form, view: View,
            runs: Runs, files: Files) -> list[Dependency]:
    """Makes the page, which is complete by now, do things; returns what ends with a run."""
    _connect_boxes(engine, form, view)
    _connect_settings(form, view, runs)
    for number, panel in enumerate(form.own, start=1):
        _connect_panel(number, panel)
    _connect_pictures(engine, form, view, runs, files)
    arrived = arriving.connect(engine, page, texts, form, view)
    return begin.connect(engine, form, view, runs, arrived)


# --- the boxes ----------------------------------------------------------------------------------


def _connect_boxes(engine: Engine, form: Form, view: View) -> None:
    tools, boxes = form.tools, form.prompts

    def fill(text: str, visitor: gr.Request) -> Updates:
        say = language_of(visitor).say
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            return view.tell(say("list_empty"), "wrong")
        said = say("list_filled") if len(lines) <= MAX_PROMPTS else say(
            "list_too_long", count=len(lines), limit=MAX_PROMPTS)
        prompts = [*lines, *[""] * MAX_PROMPTS][:MAX_PROMPTS]
        return {**dict(zip(boxes, prompts, strict=True)), **show_owns(form.own, []),
                **view.tell(said)}

    def recount(visitor: gr.Request, *prompts: str) -> list[str]:
        language = language_of(visitor)
        return [count(prompt, engine.pipeline, language) for prompt in prompts]

    def sample(shown: int) -> Updates:
        prompts = tools.sample_sets[shown % len(tools.sample_sets)]
        return {turn: shown + 1, **dict(zip(boxes, prompts, strict=True)),
                **show_owns(form.own, [])}

    def take(contents: list, visitor: gr.Request) -> Updates:
        language = language_of(visitor)
        return {**form.show_kept(contents, engine.defaults, language),
                **view.tell(language.say("undone"))}

    tools.copy_first.click(None, boxes, boxes, **QUIET, js="(...all) => "
                           "Array(all.length).fill(all.find((prompt) => prompt.trim()) ?? '')")
    filled = [*boxes, *fields_of(form.own)]
    tools.clear.click(None, None, filled, **QUIET, js=_emptying(filled))
    for button, back in ((tools.undo, "true"), (tools.redo, "false")):
        taken = button.click(None, None, form.gathered, **QUIET,
                             js=f"() => [window.sdTpu.take({back})]").then(
            take, form.gathered, [*form.inputs(), view.line, view.news], queue=False, **QUIET)
        taken.success(None, js="() => window.sdTpu.taken(true)", **QUIET)
        taken.failure(None, js="() => window.sdTpu.taken(false)", **QUIET)
    turn = gr.State(1)  # the first set is in the boxes from the start
    tools.samples.click(sample, turn, [turn, *filled], queue=False, **QUIET)
    tools.list_fill.click(fill, tools.list_text, [*filled, view.line, view.news], queue=False,
                          **QUIET).then(None, js=LOOK_AT_REFUSAL, **QUIET)
    gr.on([box.change for box in boxes], recount, boxes, form.counters, queue=False,
          trigger_mode="always_last", **QUIET)


def _connect_settings(form: Form, view: View, runs: Runs) -> None:
    def reuse(key: str | None, visitor: gr.Request) -> Updates:
        run = runs.find(key)
        if not run:
            return view.tell(language_of(visitor).say("reuse_none"), "wrong")
        return {form.seed: run.request.seed}

    def offer_spacings(sampler: str, visitor: gr.Request) -> dict:
        return gr.update(choices=spacings(sampler, language_of(visitor)), value=OWN_SPACING)

    def summarise(values: dict[Component, Any], visitor: gr.Request) -> str:
        language = language_of(visitor)
        chosen = {name: values[field] for name, field in accelerations.items()
                  if values[field] not in (None, getattr(Settings, name))}
        clear = language.say("exact_again")
        return cells.summary(words(chosen, language), clear, "settings-panel") if chosen else ""

    accelerations = {name: form.settings[name] for name in ACCELERATIONS}
    fields = [*accelerations.values()]
    gr.on([field.change for field in fields], summarise, {*fields}, form.faster, queue=False,
          trigger_mode="always_last", **QUIET)
    exact = [getattr(Settings, name) for name in ACCELERATIONS]
    form.faster.click(None, None, fields, js=f"() => {exact}", **QUIET)
    form.roll.click(lambda: RANDOM, None, form.seed, queue=False, **QUIET)
    form.reuse.click(reuse, view.run, [form.seed, view.line, view.news], queue=False, **QUIET)
    sampler, spacing = form.settings["sampler"], form.settings["spacing"]
    sampler.input(offer_spacings, sampler, spacing, queue=False, **QUIET)
    first = 0
    for part in form.parts():  # each change makes Gradio read all that might have been the trigger
        gr.on([component.change for component in part], None, [form.saved, *part], form.saved,
              js=f"(...values) => window.sdTpu.save({first}, ...values)", **QUIET)
        first += len(part)


def _connect_panel(number: int, panel: Panel) -> None:
    inputs = [*panel.fields.values()]
    panel.summary.click(None, None, inputs, **QUIET, js=_emptying(inputs))

    def summarise(values: dict[Component, Any], visitor: gr.Request) -> str:
        return summary(number, panel.read(values), language_of(visitor))

    gr.on([field.change for field in inputs], summarise, {*inputs}, panel.summary, queue=False,
          trigger_mode="always_last", **QUIET)


def _emptying(fields: list[Component]) -> str:
    """What empties prompts and own settings, in the browser."""
    return f"() => Array({len(fields)}).fill('{COMMON}')"


# --- pictures -----------------------------------------------------------------------------------


def _connect_pictures(engine: Engine, form: Form, view: View, runs: Runs, files: Files) -> None:
    def put_back(key: str | None, event: gr.EventData, visitor: gr.Request) -> Updates:
        run, place, language = runs.find(key), int(event.place), language_of(visitor)
        if not run or place not in run.pictures():
            return view.tell(language.say("gone"), "wrong")
        alone, told = run.request.only(place), language.say(f"{event.do}_done", number=place + 1)
        prompts = alone.prompts * (MAX_PROMPTS if event.do == "vary" else 1)
        request = dataclasses.replace(alone, prompts=prompts)
        return {**form.show_request(request, language), **view.tell(told)}

    def pack(key: str | None, event: gr.EventData, visitor: gr.Request) -> Updates:
        run = runs.find(key)
        try:
            pictures = run.pictures() if run else {}
            if not pictures:
                raise FileNotFoundError
            path = (files.archive(pictures) if event.do == "zip"
                    else files.grid(run.request, pictures))
        except OSError:
            return {view.file: "", **view.tell(language_of(visitor).say("gone"), "wrong")}
        return {view.file: url(path)}

    def read(file: str, visitor: gr.Request) -> Updates:
        language = language_of(visitor)
        told = language.say("read_done", file=Path(file).name)
        try:
            updates = put_picture(form, view, file, told, engine, language)
        except RequestError as error:
            updates = view.tell(language.translate(error.sentence), "wrong")
        return {form.tools.picture: None, **updates}

    told = [view.line, view.news]
    gr.on([cell.click for cell in view.cells], put_back, view.run, [*form.inputs(), *told],
          queue=False, **QUIET).then(None, js=FOCUS, **QUIET)
    view.collection.click(pack, view.run, [view.file, *told], **QUIET).then(
        None, view.file, None, js="(file) => window.sdTpu.download(file)", **QUIET)
    # A file may also be dropped, so it takes no click to replace what is filled in.
    form.tools.picture.upload(None, js="() => window.sdTpu.remember()", **QUIET).then(
        read, form.tools.picture, [form.tools.picture, *form.inputs(), *told], **QUIET).then(
        None, js=LOOK_AT_REFUSAL, **QUIET)
