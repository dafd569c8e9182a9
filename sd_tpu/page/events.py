"""What happens on the page: who clicks what, and what then changes."""

import dataclasses
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from sd_tpu.engine import Engine
from sd_tpu.images import read_png
from sd_tpu.page import cells
from sd_tpu.page.compare import comparison, suggested
from sd_tpu.page.files import Files, url
from sd_tpu.page.labels import plain, words
from sd_tpu.page.layout import OWN_SPACING, Form, Updates, View, count, spacings
from sd_tpu.page.links import read_link
from sd_tpu.page.own import COMMON, Panel, fields_of, own_choices, show_owns, summary
from sd_tpu.page.runs import Cell, Line, Run, Runs, Snapshot
from sd_tpu.page.texts import ENGLISH, Language, Phrase, Translations, language_of
from sd_tpu.request import (
    ACCELERATIONS,
    MAX_PROMPTS,
    RANDOM,
    Request,
    RequestError,
    Settings,
    drawn_seed,
)
from sd_tpu.samplers import SAMPLERS

# At each event Gradio's browser part visits all components on which any event so far shows its
# progress, by default its outputs, also where nothing of it is to be seen.
QUIET = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
REFRESH_HISTORY = "() => window.sdTpu.refreshHistory()"
LOOK_AT_REFUSAL = "() => window.sdTpu.lookAtRefusal()"
FOCUS = "() => document.querySelector('#generate').focus()"


def connect(engine: Engine, page: gr.Blocks, texts: Translations, form: Form, view: View,
            runs: Runs, files: Files) -> list[Dependency]:
    """Makes the page, which is complete by now, do things; returns what ends with a run."""
    _connect_boxes(engine, form, view)
    _connect_settings(form, view, runs)
    for number, panel in enumerate(form.own, start=1):
        _connect_panel(number, panel)
    _connect_compare(engine, form, view)
    _connect_pictures(engine, form, view, runs, files)
    return _connect_runs(engine, page, texts, form, view, runs)


def gather(trigger: Callable[..., Dependency], form: Form,
           also: Mapping[Component, str] = MappingProxyType({})) -> Dependency:
    """When something is done on the page, puts all that is filled in into `form.gathered`, for the
    server to be asked with it `then`; and into others what JavaScript says.

    At each event Gradio's browser part visits every input of all events that have asked the server
    so far. With the form's fields as inputs, each letter that is typed and each step of a run would
    cost twice as much there.
    """
    return trigger(None, form.inputs(), [form.gathered, *also], **QUIET,
                   js=f"(...form) => [{', '.join(['form', *also.values()])}]")


def browser_of(saved: dict) -> str:
    """The browser's name for itself, which nobody else can guess; a new one if it has none."""
    name = str(saved.get("browser"))
    return name if re.fullmatch("[0-9a-f]{32}", name) else secrets.token_hex(16)


def put_request(form: Form, view: View, request: Request, told: str, here: Settings,
                language: Language) -> Updates:
    """Fills the form in with what a picture from elsewhere was made from, and says so."""
    if (request.width, request.height) != (here.width, here.height):
        size = language.say("read_size", width=request.width, height=request.height,
                            here_width=here.width, here_height=here.height)
        told = f"{told} {size}"
    return {**form.show_request(request, language), **view.tell(told)}


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

    tools.copy_first.click(None, boxes, boxes, **QUIET, js="(...all) => "
                           "Array(all.length).fill(all.find((prompt) => prompt.trim()) ?? '')")
    filled = [*boxes, *fields_of(form.own)]
    tools.clear.click(None, None, filled, **QUIET, js=_emptying(filled))
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


def _connect_compare(engine: Engine, form: Form, view: View) -> None:
    compare = form.compare

    def suggest(what: str, seed: Any) -> Updates:
        by_name = what == "sampler"
        values = suggested(what, engine.defaults, seed)
        return {compare.samplers: gr.update(visible=by_name),
                compare.values: gr.update(visible=not by_name,
                                          value=", ".join(map(plain, values)))}

    def put_back(before: dict | None, visitor: gr.Request) -> Updates:
        language = language_of(visitor)
        contents = before.get("form") if isinstance(before, dict) else None
        return {compare.before: None, compare.back: gr.update(interactive=False),
                **_filled(form, contents, engine.defaults, language),
                **view.tell(language.say("compare_back_done"))}

    compare.what.input(suggest, [compare.what, form.seed], [compare.samplers, compare.values],
                       queue=False, **QUIET)
    compare.back.click(put_back, compare.before,
                       [compare.before, compare.back, *form.inputs(), view.line, view.news],
                       queue=False, **QUIET)


# --- runs ---------------------------------------------------------------------------------------


def outputs_of_run(form: Form, view: View) -> list[Component]:
    """What `follow` updates."""
    return [view.line, view.news, *view.cells, view.collection, view.run, form.generate, form.stop]


def follow(form: Form, view: View, run: Run, visitor: gr.Request, seen: int = 0
           ) -> Iterator[Updates]:
    """Shows a run, or what has changed in it since `seen`, until it is over.

    Meanwhile it can be stopped; what goes on in a run that has been over does not keep anybody
    from beginning another.
    """
    language = language_of(visitor)
    buttons = {form.stop: gr.update(interactive=True)} if seen else form.buttons(running=True)
    first = {view.run: run.key, view.collection: cells.collection(run, language), **buttons}
    for snapshot in run.follow(visitor.session_hash, seen):
        over = form.buttons(running=False) if snapshot.over else {}
        yield {**first, **_shown(view, run, snapshot, language), **view.say(snapshot, language),
               **over}
        first = {}


def _connect_runs(engine: Engine, page: gr.Blocks, texts: Translations, form: Form, view: View,
                  runs: Runs) -> list[Dependency]:
    def begin(values: dict[Component, Any], visitor: gr.Request) -> Iterator[Updates]:
        try:
            run = start(asked(values), values, visitor)
        except RequestError as error:
            yield refused(error, values, language_of(visitor))
            return
        yield from follow(form, view, run, visitor)

    def begin_comparison(values: dict[Component, Any], visitor: gr.Request) -> Updates:
        before, language = values[compare.before], language_of(visitor)
        try:
            what, compared = compare.read(values)
            request = comparison(asked(values), what, compared, engine.defaults)
            run = start(request, values, visitor)
        except RequestError as error:
            return {compare.before: before, compare.begun: None,
                    **refused(error, values, language)}
        # What a comparison has left in the boxes is not worth keeping, but what was before it.
        if (not isinstance(before, dict)
                or form.filled(values)["prompts"] != before.get("compared")):
            before = {"form": values[form.gathered]}
        before["compared"] = [*request.prompts, *[""] * MAX_PROMPTS][:MAX_PROMPTS]
        return {compare.before: before, compare.begun: run.key,
                compare.back: gr.update(interactive=True), **form.show_request(request, language),
                **form.buttons(running=True), **view.show_line(Line(Phrase("starting")), language)}

    def follow_comparison(key: str | None, visitor: gr.Request) -> Iterator[Updates]:
        yield {view.line: gr.skip()}  # where nothing comes at all, Gradio empties all outputs
        if run := runs.find(key):
            yield from follow(form, view, run, visitor)

    def asked(values: dict[Component, Any]) -> Request:
        filled = form.filled(values)
        return Request.check({**filled, "seed": drawn_seed(filled["seed"])}, engine.defaults)

    def start(request: Request, values: dict[Component, Any], visitor: gr.Request) -> Run:
        run = runs.start(request, browser=browser_of(values[form.saved]))
        if before := runs.find(values[view.run]):  # of which single pictures may be on their way
            before.leave(visitor.session_hash)
            before.stop_if_lonely()  # another tab may look at it
        return run

    def refused(error: RequestError, values: dict[Component, Any], language: Language) -> Updates:
        return {**view.tell(language.translate(error.sentence), "wrong"),
                **_without_stopped(view, runs.find(values[view.run]))}

    def come_back(saved: dict, visitor: gr.Request) -> Iterator[Updates]:
        run = runs.latest(browser_of(saved))
        yield {view.line: gr.skip()}  # where nothing comes at all, Gradio empties all outputs
        if run and run.over:  # what it said is old news
            for snapshot in run.follow(visitor.session_hash):
                yield {view.run: run.key, **_shown(view, run, snapshot, language_of(visitor))}
        elif run:
            yield from follow(form, view, run, visitor)

    def stop(key: str | None) -> None:
        if run := runs.find(key):
            run.stop()

    compare = form.compare
    outputs, endless = outputs_of_run(form, view), {"concurrency_limit": None, **QUIET}
    inputs = {form.gathered, form.saved, view.run}
    begun = gather(form.generate.click, form).then(begin, inputs, outputs, **endless)
    compare.go.click(None, js="() => window.sdTpu.lookAtPictures()", **QUIET)
    # Two events, as a BrowserState must be among the outputs of none that leaves it as it is.
    compared = gather(compare.go.click, form).then(
        begin_comparison, {*inputs, *compare.inputs(), compare.before},
        [*outputs, compare.before, compare.begun, compare.back, *form.inputs()], **QUIET).then(
        follow_comparison, compare.begun, outputs, **endless)
    form.stop.click(stop, view.run, queue=False, **QUIET)
    arrived = page.load(_restore(engine, page, texts, form, view), [form.saved, compare.before],
                        {form.saved, compare.back, *form.inputs(), view.line, view.news,
                         *texts.updates(page, ENGLISH)}, queue=False,
                        js="(saved, before) => [window.sdTpu.arrive(saved), before]", **QUIET)
    for after in (arrived.then, arrived.failure):
        after(None, [form.saved, *form.inputs()], form.saved, **QUIET,
              js="(...values) => window.sdTpu.saveAll(...values)")
    ends = [begun, compared, arrived.then(come_back, form.saved, outputs, **endless)]
    for end in ends:
        end.then(None, js=REFRESH_HISTORY, **QUIET)
    return ends


def _restore(engine: Engine, page: gr.Blocks, texts: Translations, form: Form,
             view: View) -> Callable[[dict, dict | None, gr.Request], Updates]:
    """What fills the boxes when the page opens: the link's request, or what was in them last."""

    def restore(saved: dict, before: dict | None, visitor: gr.Request) -> Updates:
        link, shown = saved.pop("link", ""), saved.pop("shown", "")
        language = language_of(visitor)
        filled = {form.compare.back: gr.update(interactive=bool(before)),
                  **fill(saved, link, language)}
        labels = {}
        if language is not ENGLISH:
            labels = own_choices(form.own, language) | form.compare.choices(language)
        if shown != language.tag:
            for component, update in texts.updates(page, language).items():
                labels[component] = {**labels.get(component, {}), **update}
        return {**labels, **{component: _both(labels.get(component), update)
                             for component, update in filled.items()}}

    def fill(saved: dict, link: str, language: Language) -> Updates:
        updates = {form.saved: saved,
                   **_filled(form, saved.get("form"), engine.defaults, language)}
        if not link:
            return updates
        try:
            request = Request.check(read_link(link), engine.defaults)
        except RequestError as error:
            return {**updates, **view.tell(language.translate(error.sentence), "wrong")}
        return {**updates, **form.show_request(request, language),
                **view.tell(language.say("link_opened"))}

    return restore


def _both(label: dict | None, update: Any) -> Any:
    """An update of a component, whose texts may change as well."""
    if not label:
        return update
    return {**label, **(update if isinstance(update, dict) else gr.update(value=update))}


def _filled(form: Form, values: list | None, here: Settings, language: Language) -> Updates:
    """The form as the browser has kept it; else what it begins with stays, but for the words in the
    list of spacings, which the browser cannot translate.

    Of a page that had other fields or samplers only the prompts and the seed are taken, which come
    first.
    """
    inputs, first = form.inputs(), MAX_PROMPTS + 1
    if values and len(values) >= first:
        begun = [component.value for component in inputs]
        complete = [values] if len(values) == len(inputs) else []
        for kept in (*complete, values[:first]):
            asked = form.read([*kept, *begun[len(kept):]])
            if asked["sampler"] in SAMPLERS:
                return form.show(asked, language)
    return {form.settings["spacing"]: gr.update(choices=spacings(here.sampler, language))}


def _shown(view: View, run: Run, snapshot: Snapshot, language: Language) -> Updates:
    updates = {view.cells[cell.place]: cells.figure(cell, view.size, language)
               for cell in snapshot.cells}
    if any(cell.picture or cell.state == "blank" for cell in snapshot.cells):
        updates[view.collection] = cells.collection(run, language)
    return updates


def _without_stopped(view: View, run: Run | None) -> Updates:
    """Takes unfinished pictures away, which would look like an answer to what was refused."""
    stopped = run.cells("stopped") if run else []
    return {view.cells[cell.place]: cells.figure(Cell(cell.place), view.size, ENGLISH)
            for cell in stopped}


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
        try:
            request = read_png(file)
        except RequestError as error:
            return {form.tools.picture: None,
                    **view.tell(language.translate(error.sentence), "wrong")}
        told = language.say("read_done", file=Path(file).name)
        return {form.tools.picture: None,
                **put_request(form, view, request, told, engine.defaults, language)}

    told = [view.line, view.news]
    gr.on([cell.click for cell in view.cells], put_back, view.run, [*form.inputs(), *told],
          queue=False, **QUIET).then(None, js=FOCUS, **QUIET)
    view.collection.click(pack, view.run, [view.file, *told], **QUIET).then(
        None, view.file, None, js="(file) => window.sdTpu.download(file)", **QUIET)
    form.tools.picture.upload(read, form.tools.picture,
                              [form.tools.picture, *form.inputs(), *told], **QUIET).then(
        None, js=LOOK_AT_REFUSAL, **QUIET)
