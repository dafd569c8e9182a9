"""Live: while its switch is on, a box's picture is drawn again shortly after its typing stops.

Only that box's picture is: what was on its way in its place is cancelled, and the other places of
the run that is shown are left alone. With the seed left open it keeps the seed of what is shown,
so that nothing but the change of words changes the picture. page.js waits for the pause.
"""

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from sd_tpu.engine import Engine
from sd_tpu.page import cells
from sd_tpu.page.asking import QUIET, REFRESH_HISTORY, browser_of, gather
from sd_tpu.page.following import follow, outputs_of_run
from sd_tpu.page.layout import Form, Updates, View
from sd_tpu.page.run import Run
from sd_tpu.page.runs import Runs
from sd_tpu.page.snapshot import Line
from sd_tpu.page.texts import Phrase, label, language_of
from sd_tpu.request import RANDOM, Request, RequestError, Settings, drawn_seed

MAX_SECONDS = 3.0  # that a picture may take: who waits longer has lost the thread
REDRAW = '<button type="button" data-do="redraw" hidden></button>'  # which page.js clicks


@dataclasses.dataclass(frozen=True)
class Switch:
    """The switch, and beside it why it cannot be switched on; `told` is what stands there. `place`
    is the box that is to be drawn again."""

    on: gr.Checkbox
    why: gr.HTML
    told: gr.State
    place: gr.Number


def make_switch() -> Switch:
    """The switch as it looks where Live is possible."""
    with gr.Row(elem_id="live"):
        on = gr.Checkbox(False, label=label("live"), info=label("live_help"), min_width=0)
        why = gr.HTML(REDRAW, js_on_load=cells.TRIGGER, apply_default_css=False)
    return Switch(on, why, gr.State(), gr.Number(visible=False))


def connect(engine: Engine, page: gr.Blocks, form: Form, view: View, runs: Runs, switch: Switch,
            ends: list[Dependency]) -> None:
    """Makes the switch do things; at the end of a run it may have become possible or not."""
    live = _Live(engine, form, view, runs, switch)
    for place, panel in enumerate(form.own):  # of what is typed page.js knows by itself
        chosen = [panel.fields[name].input for name in ("sampler", "spacing")]
        gr.on([panel.summary.click, *chosen], None, js=f"() => window.sdTpu.changed({place})",
              **QUIET)
    gathered = gather(switch.why.click, form, {switch.place: "window.sdTpu.changedPlace"})
    redrawn = gathered.then(live.redraw, {form.gathered, form.saved, view.run, switch.place},
                            outputs_of_run(form, view), trigger_mode="multiple",
                            concurrency_limit=None, **QUIET)
    redrawn.then(None, js=REFRESH_HISTORY, **QUIET)
    switch.on.input(None, [form.saved, switch.on], form.saved, **QUIET,
                    js="(saved, live) => ({ ...saved, live })")
    switch.on.input(live.settle, view.run, view.line, queue=False, **QUIET)
    offered = {"fn": live.offer, "inputs": {*form.settings.values(), form.saved, switch.told},
               "outputs": [switch.on, switch.why, switch.told], "queue": False, **QUIET}
    gr.on([page.load, *(field.change for field in form.settings.values())], **offered)
    for end in [*ends, redrawn]:
        end.then(**offered)


@dataclasses.dataclass(frozen=True)
class _Live:
    """What happens while the switch is on, and whether it can be."""

    engine: Engine
    form: Form
    view: View
    runs: Runs
    switch: Switch
    beginning: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def offer(self, values: Mapping[Component, Any], visitor: gr.Request) -> Updates:
        """Shows whether Live is possible with what is filled in, if that is not shown yet."""
        slow = self._too_slow(self._common(values))
        why = language_of(visitor).translate(slow.sentence) if slow else ""
        if why == values[self.switch.told]:
            return {self.switch.told: why}
        if why:
            switch = gr.update(value=False, interactive=False)
        elif values[self.form.saved].get("live") is True:
            switch = gr.update(value=True, interactive=True)
        else:  # it may just have been switched on: this must not put it back
            switch = gr.update(interactive=True)
        return {self.switch.told: why,
                self.switch.on: switch,
                self.switch.why: f'{REDRAW}<p class="note">{escape(why)}</p>'}

    def redraw(self, values: Mapping[Component, Any], visitor: gr.Request) -> Iterator[Updates]:
        """Draws the picture at `switch.place` as its box asks now, and shows it on its way."""
        yield {self.view.line: gr.skip()}  # where nothing comes at all, Gradio empties all outputs
        place, session = int(values[self.switch.place]), visitor.session_hash
        try:
            asked = bool(str(self.form.filled(values)["prompts"][place]).strip())
            with self.beginning:  # of two redraws that a page sends at once only one begins a run
                run = self.runs.shown(session) or self.runs.find(values[self.view.run])
                begins = asked and not run
                if begins:
                    run = self._begin(values, place)
                    self.runs.show(session, run)
            if begins:
                seen = 0
            elif asked:
                seen = run.redraw(place, self._checked(values, place, run).only(place), session)
            else:
                seen = run and run.blank(place, session)
        except RequestError as error:
            told = language_of(visitor).translate(error.sentence)
            yield self.view.tell(told, "wrong")
            return
        if seen is not None:
            yield from follow(self.form, self.view, self.runs, run, visitor, seen)
        else:  # what was wrong before is right again
            yield self.settle(run and run.key, visitor)

    def settle(self, key: str | None, visitor: gr.Request) -> Updates:
        """Says how it stands, in place of what was wrong elsewhere."""
        run, language = self.runs.find(key), language_of(visitor)
        line = run.line if run else Line(Phrase("ready"), "idle")
        return self.view.show_line(line, language)

    def _begin(self, values: Mapping[Component, Any], place: int) -> Run:
        """A run that is a first picture, where none is shown yet."""
        return self.runs.start(self._checked(values, place), live=True,
                               browser=browser_of(values[self.form.saved]))

    def _checked(self, values: Mapping[Component, Any], place: int, run: Run | None = None
                 ) -> Request:
        """What the box at `place` asks for, whatever is in the others.

        Raises:
            RequestError: it cannot be served, or not soon enough.
        """
        filled = self.form.filled(values)
        own = filled["own"][place]
        if filled["seed"] == RANDOM and run:
            own = {"seed": run.request.image_seed(place), **own}
            filled["seed"] = run.request.seed
        request = Request.check({**filled, "seed": drawn_seed(filled["seed"]),
                                 "prompts": [*[""] * place, filled["prompts"][place]],
                                 "own": [*[None] * place, own]}, self.engine.defaults)
        if slow := self._too_slow(request.only(place)):
            raise slow
        return request

    def _common(self, values: Mapping[Component, Any]) -> Settings:
        """What all boxes share; the model's own while something is filled in that cannot be."""
        filled = {name: values[field] for name, field in self.form.settings.items()}
        try:
            return Request.check({**filled, "prompts": ["any"], "seed": 0}, self.engine.defaults)
        except RequestError:
            return self.engine.defaults

    def _too_slow(self, settings: Settings) -> RequestError | None:
        """Why no picture is drawn with these settings while somebody types, if there is a reason;
        until it is known there is none."""
        seconds = self.engine.seconds(settings) or 0.0
        if seconds <= MAX_SECONDS:
            return None
        return RequestError(
            "With these settings a picture takes about {seconds} s here; Live is for pictures that "
            "take {limit} s at most.", seconds=math.ceil(seconds), limit=round(MAX_SECONDS))
