"""Generate, Compare and Stop: a run is begun, followed, ended, and found again."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from sd_tpu.engine import Engine
from sd_tpu.page.asking import QUIET, REFRESH_HISTORY, browser_of, gather
from sd_tpu.page.compare import comparison, suggested
from sd_tpu.page.following import follow, outputs_of_run, shown, without_stopped
from sd_tpu.page.labels import plain
from sd_tpu.page.layout import Form, Updates, View
from sd_tpu.page.run import Run
from sd_tpu.page.runs import Runs
from sd_tpu.page.snapshot import Line
from sd_tpu.page.texts import Language, Phrase, language_of
from sd_tpu.request import Request, RequestError, drawn_seed

Values = Mapping[Component, Any]


def connect(engine: Engine, form: Form, view: View, runs: Runs, arrived: Dependency
            ) -> list[Dependency]:
    """Makes the buttons do things, and shows what goes on already to a browser that has `arrived`;
    returns what ends with a run.
    """
    do, compare = _Buttons(engine, form, view, runs), form.compare
    outputs, endless = outputs_of_run(form, view), {"concurrency_limit": None, **QUIET}
    inputs = {form.gathered, form.saved, view.run}
    begun = gather(form.generate.click, form).then(do.generate, inputs, outputs, **endless)
    form.stop.click(do.stop, view.run, queue=False, **QUIET)
    compare.what.input(do.suggest, [compare.what, form.seed], [compare.samplers, compare.values],
                       queue=False, **QUIET)
    compare.go.click(None, js="() => window.sdTpu.lookAtPictures()", **QUIET)
    # Two events, as the form need not be among the outputs of each step.
    compared = gather(compare.go.click, form).then(
        do.compare, {*inputs, *compare.inputs()}, [*outputs, compare.begun, *form.inputs()],
        **QUIET).then(do.show, compare.begun, outputs, **endless)
    ends = [begun, compared, arrived.then(do.come_back, form.saved, outputs, **endless)]
    for end in ends:
        end.then(None, js=REFRESH_HISTORY, **QUIET)
    return ends


@dataclasses.dataclass(frozen=True)
class _Buttons:
    """What happens when one of the buttons is clicked."""

    engine: Engine
    form: Form
    view: View
    runs: Runs

    def generate(self, values: Values, visitor: gr.Request) -> Iterator[Updates]:
        """Begins a run of what is filled in, and shows it."""
        try:
            run = self._start(self._asked(self.form.filled(values)), values, visitor)
        except RequestError as error:
            yield self._refused(error, values, language_of(visitor))
            return
        yield from follow(self.form, self.view, self.runs, run, visitor)

    def compare(self, values: Values, visitor: gr.Request) -> Updates:
        """Begins a comparison, which is to be followed, and fills it in."""
        form, compare, language = self.form, self.form.compare, language_of(visitor)
        try:
            what, compared = compare.read(values)
            asked = self._asked(form.filled(values))
            request = comparison(asked, what, compared, self.engine.defaults)
            run = self._start(request, values, visitor)
        except RequestError as error:
            return {compare.begun: None, **self._refused(error, values, language)}
        return {compare.begun: run.key, **form.show_request(request, language),
                **form.buttons(running=True),
                **self.view.show_line(Line(Phrase("starting")), language)}

    def show(self, key: str | None, visitor: gr.Request) -> Iterator[Updates]:
        """Shows a run by its key, if there is one."""
        yield {self.view.line: gr.skip()}  # where nothing comes, Gradio empties all outputs
        if run := self.runs.find(key):
            yield from follow(self.form, self.view, self.runs, run, visitor)

    def come_back(self, saved: dict, visitor: gr.Request) -> Iterator[Updates]:
        """Shows what this browser began last."""
        run = self.runs.latest(browser_of(saved))
        if run and run.over:  # what it said is old news
            for snapshot in self.runs.follow(run, visitor.session_hash):
                yield {self.view.run: run.key,
                       **shown(self.view, run, snapshot, language_of(visitor))}
        else:
            yield from self.show(run and run.key, visitor)

    def stop(self, key: str | None) -> None:
        """Ends the run that is shown."""
        if run := self.runs.find(key):
            run.stop()

    def suggest(self, what: str, seed: Any) -> Updates:
        """Offers values that are worth comparing."""
        compare, by_name = self.form.compare, what == "sampler"
        values = suggested(what, self.engine.defaults, seed)
        return {compare.samplers: gr.update(visible=by_name),
                compare.values: gr.update(visible=not by_name,
                                          value=", ".join(map(plain, values)))}

    def _asked(self, filled: Mapping[str, Any]) -> Request:
        return Request.check({**filled, "seed": drawn_seed(filled["seed"])}, self.engine.defaults)

    def _start(self, request: Request, values: Values, visitor: gr.Request) -> Run:
        run = self.runs.start(request, browser=browser_of(values[self.form.saved]))
        if before := self.runs.find(values[self.view.run]):  # single pictures may be on their way
            before.leave(visitor.session_hash)
            before.stop_if_lonely()  # another tab may look at it
        return run

    def _refused(self, error: RequestError, values: Values, language: Language) -> Updates:
        return {**self.view.tell(language.translate(error.sentence), "wrong"),
                **without_stopped(self.view, self.runs.find(values[self.view.run]))}
