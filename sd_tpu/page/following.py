"""Showing a run on the page while it goes on."""

from collections.abc import Iterator

import gradio as gr
from gradio.components import Component

from sd_tpu.page import cells
from sd_tpu.page.layout import Form, Updates, View
from sd_tpu.page.run import Run
from sd_tpu.page.runs import Runs
from sd_tpu.page.snapshot import Cell, Snapshot
from sd_tpu.page.texts import ENGLISH, Language, language_of


def outputs_of_run(form: Form, view: View) -> list[Component]:
    """What `follow` updates."""
    return [view.line, view.news, *view.cells, view.collection, view.run, form.generate, form.stop]


def follow(form: Form, view: View, runs: Runs, run: Run, visitor: gr.Request, seen: int = 0
           ) -> Iterator[Updates]:
    """Shows a run, or what has changed in it since `seen`, until it is over.

    Meanwhile it can be stopped; what goes on in a run that has been over does not keep anybody
    from beginning another.
    """
    language = language_of(visitor)
    buttons = {form.stop: gr.update(interactive=True)} if seen else form.buttons(running=True)
    first = {view.run: run.key, view.collection: cells.collection(run, language), **buttons}
    for snapshot in runs.follow(run, visitor.session_hash, seen):
        over = form.buttons(running=False) if snapshot.over else {}
        yield {**first, **shown(view, run, snapshot, language), **view.say(snapshot, language),
               **over}
        first = {}


def shown(view: View, run: Run, snapshot: Snapshot, language: Language) -> Updates:
    """The gallery where the snapshot says that it has changed."""
    updates = {view.cells[cell.place]: cells.figure(cell, view.size, language)
               for cell in snapshot.cells}
    if any(cell.picture or cell.state == "blank" for cell in snapshot.cells):
        updates[view.collection] = cells.collection(run, language)
    return updates


def without_stopped(view: View, run: Run | None) -> Updates:
    """Takes unfinished pictures away, which would look like an answer to what was refused."""
    stopped = run.cells("stopped") if run else []
    return {view.cells[cell.place]: cells.figure(Cell(cell.place), view.size, ENGLISH)
            for cell in stopped}
