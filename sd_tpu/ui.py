"""The page: eight prompts and a seed above a 2x4 gallery, and the same for programs (`/generate`).

A picture lives in a cell of its own, so its place never moves while others come and go. Cells are
HTML instead of Gradio's images because the file offered must be the PNG with its settings, byte for
byte, and because a preview must turn into the picture without a flicker.
"""

import base64
import dataclasses
import html
import logging
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import numpy as np
from gradio.components import Component
from gradio.processing_utils import save_bytes_to_cache
from PIL import Image

from sd_tpu.engine import (
    MAX_WAITING,
    Cancelled,
    Done,
    Engine,
    Event,
    Failed,
    ImageReady,
    Job,
    Progress,
    Queued,
)
from sd_tpu.images import to_png
from sd_tpu.request import MAX_PROMPTS, MAX_SEED, Request, RequestError, Settings
from sd_tpu.samplers import SAMPLERS
from sd_tpu.schedule import SPACINGS
from sd_tpu.theme import SHORTCUT, STYLE, theme

log = logging.getLogger(__name__)

RANDOM = -1  # in the seed's box
OWN_SPACING = ""  # in the spacing's list
SMALL = 256  # pixels: smaller pictures are enlarged as they are, without blur
KEEP_SECONDS = 24 * 3600  # how long a picture's file can be downloaded

Updates = dict[Component, Any]


def build(engine: Engine) -> gr.Blocks:
    """The page on an engine; `launch` shows it."""
    card = engine.pipeline.card
    with gr.Blocks(title=f"{card.name} · sd_tpu", analytics_enabled=False, fill_width=True,
                   delete_cache=(3600, KEEP_SECONDS)) as page:
        gr.HTML(_heading(card.hint), apply_default_css=False)
        form = _form(engine)
        view = _view(engine)
        gr.HTML(_about(engine), apply_default_css=False)
        sessions, files = Sessions(engine), Files(view.status, card.name)
        _connect(engine, form, view, sessions, files)
        _offer_api(engine, sessions, files)
        page.unload(sessions.leave)
        page.load(js=SHORTCUT)
    return page


def launch(page: gr.Blocks, **options) -> str:
    """Serves the page in the background; returns its address. Options are Gradio's own."""
    _, local, shared = page.launch(
        theme=theme(),
        css=STYLE,
        # Each visitor who waits or watches holds a thread; Stop and the files need some as well.
        max_threads=MAX_WAITING + 60,
        max_file_size="1kb",  # nothing is uploaded here, and Gradio's endpoint for it is open
        footer_links=["api"],
        run_history=False,
        prevent_thread_lock=True,
        quiet=True,
        **options,
    )
    return shared or local


# --- what is on the page ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """What a person fills in; `settings` by their names in a Request."""

    prompts: list[gr.Textbox]
    seed: gr.Number
    roll: gr.Button
    reuse: gr.Button
    settings: dict[str, Component]
    generate: gr.Button
    stop: gr.Button

    def inputs(self) -> set[Component]:
        """All components that say what is asked for."""
        return {*self.prompts, self.seed, *self.settings.values()}

    def read(self, values: Mapping[Component, Any]) -> dict[str, Any]:
        """What was filled in, as `Request.check` takes it."""
        settings = {name: values[component] for name, component in self.settings.items()}
        settings["spacing"] = settings["spacing"] or None
        return {"prompts": [values[box] for box in self.prompts],
                "seed": _seed(values[self.seed]), **settings}


@dataclasses.dataclass(frozen=True)
class View:
    """What a person looks at."""

    status: gr.HTML
    cells: list[gr.HTML]
    last_seed: gr.State
    size: tuple[int, int]


def _heading(hint: str) -> str:
    hint = html.escape(hint or "Write what you would like to see.")
    return (f'<header><h1>Eight prompts, eight pictures</h1><p>{hint} Empty boxes are skipped. '
            '<span class="keys">Ctrl+Enter generates.</span></p></header>')


def _form(engine: Engine) -> Form:
    samples = [*engine.pipeline.card.prompts, *[""] * MAX_PROMPTS][:MAX_PROMPTS]
    with gr.Row(elem_id="prompts"):
        prompts = [
            gr.Textbox(sample, label=f"Prompt {i}", lines=2, max_lines=5, min_width=0,
                       placeholder="Left empty: skipped", elem_classes="prompt")
            for i, sample in enumerate(samples, start=1)
        ]
    settings = _settings(engine.defaults)
    with gr.Row(elem_id="actions"):
        with gr.Row(elem_id="seeds"):
            seed = gr.Number(RANDOM, label=f"Seed ({RANDOM} draws a new one)", min_width=0,
                             elem_id="seed")
            roll = gr.Button("Random", elem_id="roll", min_width=0)
            reuse = gr.Button("Reuse last", elem_id="reuse", min_width=0)
        with gr.Row(elem_id="go"):
            generate = gr.Button("Generate", variant="primary", elem_id="generate", min_width=0)
            stop = gr.Button("Stop", variant="stop", elem_id="stop", interactive=False, min_width=0)
    return Form(prompts, seed, roll, reuse, settings, generate, stop)


def _settings(defaults: Settings) -> dict[str, Component]:
    samplers = [(sampler.label, key) for key, sampler in SAMPLERS.items()]
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        negative = gr.Textbox(defaults.negative_prompt, label="Negative prompt",
                              info="What the pictures should not show.", lines=1)
        with gr.Row():
            steps = gr.Number(defaults.steps, label="Steps", min_width=200,
                              info="More of them take longer and refine more.")
            guidance = gr.Number(defaults.guidance, label="Guidance", min_width=200, step=0.5,
                                 info="More follows the prompt more strictly.")
            sampler = gr.Dropdown(samplers, value=defaults.sampler, label="Sampler", min_width=200,
                                  info="The method that turns noise into a picture.")
            spacing = gr.Dropdown(_spacings(defaults.sampler), value=OWN_SPACING, label="Spacing",
                                  min_width=200, info="How the steps are spread over the noise.")
    sampler.change(lambda key: gr.update(choices=_spacings(key), value=OWN_SPACING), sampler,
                   spacing, show_progress="hidden", api_visibility="private")
    return {"negative_prompt": negative, "steps": steps, "guidance": guidance,
            "sampler": sampler, "spacing": spacing}


def _spacings(sampler: str) -> list[tuple[str, str]]:
    return [("the model's own", OWN_SPACING),
            *((name, name) for name in SPACINGS if name in SAMPLERS[sampler].spacings)]


def _view(engine: Engine) -> View:
    size = engine.defaults.width, engine.defaults.height
    # The region stays while its text changes: only then do screen readers read the text out.
    status = gr.HTML(_status("Ready"), elem_id="status",
                     html_template='<div role="status" aria-live="polite">${value}</div>',
                     apply_default_css=False)
    with gr.Row(elem_id="gallery"):
        cells = [gr.HTML(Cell(i).render(size), elem_classes="cell", apply_default_css=False)
                 for i in range(MAX_PROMPTS)]
    return View(status, cells, gr.State(), size)


def _about(engine: Engine) -> str:
    """What the pictures are made with; a line that takes no offence at what is not a TPU."""
    devices = engine.mesh.devices.flat
    parts = [
        html.escape(engine.pipeline.card.name),
        f"{engine.defaults.width}×{engine.defaults.height} pixels",
        f"{len(devices)} × {html.escape(devices[0].device_kind.replace('cpu', 'CPU'))}",
        str(engine.pipeline.models.dtype),
    ]
    if devices[0].platform != "tpu":
        parts.append("no TPU here, so it takes a little longer")
    return f'<p class="about">{" · ".join(parts)}</p>'


def _status(text: str, kind: str = "idle", share: float = 0.0, notes: tuple[str, ...] = ()) -> str:
    """The progress line; `share` of the work is done, `kind` is idle, busy, over or wrong."""
    lines = "".join(f"<small>{html.escape(note)}</small>" for note in notes)
    return (f'<p class="{kind}">{html.escape(text)}</p>'
            f'<progress value="{share:.3f}" max="1" aria-hidden="true"></progress>{lines}')


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the gallery.

    `state` is blank (nothing asked for), waiting, forming, done or stopped; `file` is the path of
    the finished picture.
    """

    place: int
    state: str = "blank"
    prompt: str = ""
    seed: int = 0
    source: str = ""
    file: str = ""

    def render(self, size: tuple[int, int]) -> str:
        """The cell; size is width and height, kept free from the start so that nothing shifts."""
        width, height = size
        picture = f'<span class="number">{self.place + 1}</span>'
        if self.source:
            small = ' class="small"' if max(size) < SMALL else ""
            picture = (f'<img src="{self.source}" alt="{html.escape(self.prompt)}"{small} '
                       f'width="{width}" height="{height}">')
        return (f'<figure class="{self.state}"><div style="aspect-ratio: {width} / {height}">'
                f'{picture}</div><figcaption>{self._caption()}</figcaption></figure>')

    def _caption(self) -> str:
        if self.state == "blank":
            return "&nbsp;"
        words = {"waiting": "Waiting", "forming": "Forming", "stopped": "Stopped"}
        end = words.get(self.state) or (
            f'<a href="{_url(self.file)}" download="{html.escape(Path(self.file).name)}" '
            f'aria-label="Download picture {self.place + 1} as PNG">PNG</a>'
        )
        return (f'<span class="words" dir="auto" title="{html.escape(self.prompt)}">'
                f'{html.escape(self.prompt)}</span>'
                f'<span class="facts"><span>Seed {self.seed}</span>{end}</span>')


def _url(file: str) -> str:
    """Where Gradio serves a file of its cache, relative to the page, which may lie in a folder."""
    return f"gradio_api/file={quote(file)}"


# --- what happens -------------------------------------------------------------------------------


class Sessions:
    """The running jobs of each browser, so that Stop and a closed tab end their own only."""

    def __init__(self, engine: Engine):
        """Sessions of people who share an engine."""
        self._engine = engine
        self._jobs: dict[str, list[Job]] = defaultdict(list)

    @contextmanager
    def job(self, request: Request, visitor: gr.Request) -> Iterator[Job]:
        """Submits the request for as long as somebody follows it; raises RequestError."""
        job = self._engine.submit(request)
        jobs = self._jobs[visitor.session_hash]
        jobs.append(job)
        try:
            yield job
        finally:
            job.cancel()  # without effect on one that is over
            jobs.remove(job)
            if not jobs:
                self._jobs.pop(visitor.session_hash, None)

    def stop(self, visitor: gr.Request) -> None:
        """Cancels what this browser has running."""
        for job in list(self._jobs.get(visitor.session_hash, ())):
            job.cancel()

    def leave(self, visitor: gr.Request) -> None:
        """Cancels what runs for a browser that has gone."""
        self.stop(visitor)
        self._jobs.pop(visitor.session_hash, None)


class Files:
    """Finished pictures as PNG files, in the folder that Gradio serves and prunes."""

    def __init__(self, keeper: Component, model: str):
        """`keeper` is the component in whose name Gradio prunes them; `model` made them."""
        self._keeper, self._model = keeper, model

    def add(self, request: Request, place: int, pixels: np.ndarray) -> str:
        """Writes the picture uint8 [H, W, 3] at `place`, with its settings; returns the path.

        The folder's name is a salted hash: nobody finds another's pictures by guessing.
        """
        alone = request.only(place)
        words = re.sub(r"\W+", "-", alone.prompts[0].lower())[:40].strip("-")
        name = f"{alone.seed}-{words or 'picture'}.png"
        data = to_png(pixels, alone, self._model)
        path = save_bytes_to_cache(data, name, self._keeper.GRADIO_CACHE)
        self._keeper.temp_files.add(path)
        return path


class Run:
    """One request on its way, as the page shows it: events in, changed components out."""

    def __init__(self, request: Request, view: View, files: Files, notes: tuple[str, ...]):
        """Begins with every asked place waiting; notes stay below the progress line."""
        self._request, self._view, self._files, self._notes = request, view, files, notes
        self._step = 0
        asked = {place: Cell(place, "waiting", request.prompts[place], request.image_seed(place))
                 for place in request.places()}
        self._cells = [asked.get(place, Cell(place)) for place in range(MAX_PROMPTS)]

    def begin(self) -> Updates:
        """The page before the first event."""
        return {self._view.last_seed: self._request.seed, **self._tell("Starting…"),
                **self._show(range(MAX_PROMPTS))}

    def take(self, event: Event) -> Updates:
        """What the event changes."""
        shown: list[int] = []
        match event:
            case Progress(step, _, previews):
                self._step, shown = step, list(previews)
                for place, pixels in previews.items():
                    self._change(place, state="forming", source=_preview(pixels))
            case ImageReady(place, pixels):
                shown = [place]
                file = self._files.add(self._request, place, pixels)
                self._change(place, state="done", source=_url(file), file=file)
            case Done():
                self._step = self._request.steps
            case Cancelled() | Failed():
                shown = [c.place for c in self._cells if c.state in ("waiting", "forming")]
                for place in shown:
                    self._change(place, state="stopped")
        return {**self._tell(_sentence(event, self._request), _kind(event)), **self._show(shown)}

    def _tell(self, text: str, kind: str = "busy") -> Updates:
        if not text:
            return {}
        return {self._view.status: _status(text, kind, self._step / self._request.steps,
                                           self._notes)}

    def _show(self, places: Iterable[int]) -> Updates:
        return {self._view.cells[i]: self._cells[i].render(self._view.size) for i in places}

    def _change(self, place: int, **changes) -> None:
        self._cells[place] = dataclasses.replace(self._cells[place], **changes)


def _sentence(event: Event, request: Request) -> str:
    """What has happened, in words; empty where there is nothing new to say."""
    match event:
        case Queued(position, reason) if reason.startswith("compiling"):
            turn = f" You are number {position} in the queue." if position > 1 else ""
            return f"Compiling for the first time…{turn}"
        case Queued(position):
            return f"Queued as number {position}"
        case Progress(step, steps):
            return f"Step {step} of {steps}"
        case Done(seconds):
            return f"Done in {seconds:.1f} s, seed {request.seed}"
        case Cancelled():
            return "Stopped"
        case Failed(message):
            return message
    return ""


def _kind(event: Event) -> str:
    """How the progress line looks."""
    match event:
        case Failed():
            return "wrong"
        case Done() | Cancelled():
            return "over"
    return "busy"


def _preview(pixels: np.ndarray) -> str:
    """Pixels [H, W, 3] uint8 as a small picture inside the page, needing no request of its own."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=70, method=0)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _seed(value: Any) -> Any:
    """The seed asked for, or a new one; whether it is a good one `Request.check` will say."""
    return random.randint(0, MAX_SEED) if value in (None, RANDOM) else value


def _connect(engine: Engine, form: Form, view: View, sessions: Sessions, files: Files) -> None:
    quiet = {"show_progress": "hidden", "api_visibility": "private"}

    def show(values: dict[Component, Any], visitor: gr.Request) -> Iterator[Updates]:
        run = None
        try:
            request = Request.check(form.read(values), engine.defaults)
            with sessions.job(request, visitor) as job:
                run = Run(request, view, files, tuple(engine.notes(request)))
                yield {**run.begin(), **_buttons(form, running=True)}
                for event in job.events():
                    yield run.take(event)
        except RequestError as error:
            yield {view.status: _status(str(error), "wrong")}
        except Exception:  # a disk that is full, say: nobody should be left with a dead page
            log.exception("a run failed")
            sorry = "The server failed; please try again."
            yield run.take(Failed(sorry)) if run else {view.status: _status(sorry, "wrong")}
        yield _buttons(form, running=False)

    outputs = [view.status, *view.cells, view.last_seed, form.generate, form.stop]
    form.generate.click(show, form.inputs(), outputs, concurrency_limit=None, **quiet)
    form.stop.click(sessions.stop, queue=False, **quiet)
    form.roll.click(lambda: RANDOM, None, form.seed, queue=False, **quiet)
    form.reuse.click(lambda seed: RANDOM if seed is None else seed, view.last_seed, form.seed,
                     queue=False, **quiet)


def _buttons(form: Form, *, running: bool) -> Updates:
    return {form.generate: gr.update(interactive=not running),
            form.stop: gr.update(interactive=running)}


# --- the same for programs ----------------------------------------------------------------------


def _offer_api(engine: Engine, sessions: Sessions, files: Files) -> None:

    def generate(
        visitor: gr.Request,
        prompts: list[str],
        seed: int = RANDOM,
        negative_prompt: str = "",
        steps: int | None = None,
        guidance: float | None = None,
        sampler: str | None = None,
        spacing: str | None = None,
    ) -> tuple[list[dict], int, str]:
        """Draws a picture of each prompt; yields what is finished and what is happening.

        Args:
            prompts: One to eight texts; no picture is made of an empty one.
            seed: Of the first picture, the next one has seed + 1; -1 draws a seed.
            negative_prompt: What the pictures should not show.
            steps: How many steps to take; the model's own number by default.
            guidance: How strictly to follow the prompts; the model's own by default.
            sampler: A key that /samplers lists; the model's own by default.
            spacing: One of the sampler's spacings that /samplers lists; by default the model's own.

        Returns:
            PNG files in the places of their prompts, null where there is none (yet); the seed of
            the first; and a sentence that says what is happening.
        """
        asked = {"prompts": prompts, "seed": _seed(seed), "negative_prompt": negative_prompt,
                 "steps": steps, "guidance": guidance, "sampler": sampler, "spacing": spacing}
        try:
            request = Request.check(asked, engine.defaults)
            with sessions.job(request, visitor) as job:
                yield from _answers(job, files)
        except RequestError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def samplers() -> list[dict]:
        """Lists the samplers: their keys for /generate, their names and their spacings."""
        return [{"key": key, "label": sampler.label, "spacings": list(sampler.spacings)}
                for key, sampler in SAMPLERS.items()]

    gr.api(generate, api_name="generate", concurrency_limit=None)
    gr.api(samplers, api_name="samplers", queue=False)


def _answers(job: Job, files: Files) -> Iterator[tuple[list[dict | None], int, str]]:
    """What a program is told: the pictures so far, the seed and the sentence of each event."""
    request, sentence = job.request, ""
    pictures: list[dict | None] = [None] * len(request.prompts)
    for event in job.events():
        if isinstance(event, Failed):
            raise RequestError(event.message)
        if isinstance(event, ImageReady):
            path = files.add(request, event.place, event.pixels)
            pictures[event.place] = gr.FileData(path=path).model_dump()
        sentence = _sentence(event, request) or sentence
        yield list(pictures), request.seed, sentence
