"""Runs: requests on their way, and whoever follows them.

The engine tells a job's events once. A run keeps what they add up to, so that followers can come,
go and come back: the tab that asked, and the same tab after a reload.
"""

import dataclasses
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_tpu.engine import (
    COMPILING,
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
from sd_tpu.history import History, HistoryError
from sd_tpu.page.files import Files, Picture, data_url
from sd_tpu.page.labels import named
from sd_tpu.page.texts import Phrase, duration
from sd_tpu.request import MAX_PROMPTS, Request
from sd_tpu.sentence import Sentence

log = logging.getLogger(__name__)

GRACE_SECONDS = 30  # that a run goes on while nobody follows it: a reload takes less
MAX_KEPT = 256  # runs, for browsers that come back
KEEP_SECONDS = 24 * 3600  # how long its pictures' files are there


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the gallery.

    `state` is blank (nothing asked for), waiting, forming, done or stopped; `preview` is the
    address of how it looks while it forms, `picture` is there when it is done. `named` are the
    settings that its label names.
    """

    place: int
    state: str = "blank"
    prompt: str = ""
    seed: int = 0
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preview: str = ""
    picture: Picture | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """What happens, to be said to each follower in his language; `share` of the work is done,
    `kind` is busy, over or wrong.
    """

    text: Phrase | Sentence
    kind: str = "busy"
    share: float = 0.0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a follower is told: the cells that have changed, the line, and what to read aloud."""

    cells: tuple[Cell, ...]
    line: Line
    news: tuple[Phrase | Sentence, ...]


class Run:
    """One request on its way; made by `Runs.start`."""

    def __init__(self, job: Job, runs: "Runs", files: Files, grace: float, browser: str = ""):
        """Begins with every asked place waiting."""
        request = job.request
        self.key = secrets.token_urlsafe(16)
        self.request, self.begun = request, time.time()
        self._job, self._runs, self._files, self._grace = job, runs, files, grace
        self._browser = browser
        self._change = threading.Condition()  # guards the rest
        self._followers: dict[object, str] = {}
        self._version = 1
        self._changed = [1] * MAX_PROMPTS  # the version in which each cell has
        self._cells = [self._first_cell(place) for place in range(MAX_PROMPTS)]
        self._line = Line(Phrase("starting"))
        self._step, self._steps = 0, max(request.only(place).steps for place in request.places())
        self._first_progress: tuple[float, int] | None = None
        self._farewell: threading.Timer | None = None
        threading.Thread(target=self._serve, name="run", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self._line.kind != "busy"

    @property
    def work(self) -> int:
        """Steps of single pictures that are still to be made."""
        left = 0 if self.over else self._steps - self._step
        return left * len(self.request.places())

    def cells(self, state: str) -> list[Cell]:
        """The cells in this state."""
        return [cell for cell in self._cells if cell.state == state]

    def pictures(self) -> dict[int, Picture]:
        """What is finished, by place."""
        return {cell.place: cell.picture for cell in self._cells if cell.picture}

    def stop(self) -> None:
        """Ends it, also while it waits; followers are told when it has stopped."""
        self._job.cancel()

    def follow(self, session: str) -> Iterator[Snapshot]:
        """Yields all there is, then what changes, until it is over or the session leaves.

        A follower that is slow misses what has been overtaken, and nothing else.
        """
        me, seen, over = object(), 0, False
        with self._change:
            self._followers[me] = session
            self._mind_loneliness()
        try:
            while not over:
                with self._change:
                    while self._version == seen and me in self._followers:
                        self._change.wait()
                    if me not in self._followers:
                        return
                    snapshot, seen, over = self._since(seen), self._version, self.over
                yield snapshot
        finally:
            with self._change:
                self._followers.pop(me, None)
                self._mind_loneliness()

    def leave(self, session: str) -> None:
        """Ends what this session follows."""
        with self._change:
            self._followers = {f: s for f, s in self._followers.items() if s != session}
            self._change.notify_all()

    def _mind_loneliness(self) -> None:
        """Stops the run if nobody comes back to it in time; called with the lock held."""
        if self._farewell:
            self._farewell.cancel()
        if self._followers or self.over:
            return
        self._farewell = threading.Timer(self._grace, self._give_up)
        self._farewell.daemon = True
        self._farewell.start()

    def _give_up(self) -> None:
        with self._change:
            lonely = not self._followers
        if lonely:
            self.stop()

    def _since(self, seen: int) -> Snapshot:
        cells = tuple(cell for cell, changed in zip(self._cells, self._changed, strict=True)
                      if changed > seen)
        if not seen and not self.over:
            news = [Phrase("making", count=_count(self.request))]
        else:
            news = _ready([cell.place + 1 for cell in cells if cell.state == "done"])
        return Snapshot(cells, self._line, (*news, *([self._line.text] if self.over else [])))

    # --- the run's thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            for event in self._job.events():
                self._take(event)
        except Exception:  # a disk that is full, say: nobody should be left with a dead page
            log.exception("a run failed")
            self._job.cancel()
            self._take(Failed(Sentence("The server failed; please try again.")))

    def _take(self, event: Event) -> None:
        changes = self._changes(event)
        with self._change:
            self._version += 1
            if isinstance(event, Progress):
                self._step = event.step
                self._first_progress = self._first_progress or (time.monotonic(), event.step)
            for place, change in changes.items():
                self._cells[place] = dataclasses.replace(self._cells[place], **change)
                self._changed[place] = self._version
            self._line = self._line_after(event)
            self._change.notify_all()
        if isinstance(event, Done):
            self._runs.learn(event.seconds / (self._steps * len(self.request.places())))

    def _changes(self, event: Event) -> dict[int, dict]:
        """What the event changes in cells, by place."""
        match event:
            case Progress(_, _, previews):
                return {place: dict(state="forming", preview=data_url(pixels))
                        for place, pixels in previews.items()}
            case ImageReady(place, pixels):
                picture = self._files.add(self.request, place, pixels)
                self._runs.keep(self._browser, picture, self.request.only(place))
                return {place: dict(state="done", preview="", picture=picture)}
            case Cancelled() | Failed():
                return {cell.place: dict(state="stopped")
                        for state in ("waiting", "forming") for cell in self.cells(state)}
        return {}

    def _line_after(self, event: Event) -> Line:
        share = self._step / self._steps
        match event:
            case Queued(position, reason):
                return Line(_queued(position, reason, self._runs.wait(self)))
            case Progress(step, steps):
                return Line(_step(step, steps, self._seconds_left()), share=share)
            case Done(seconds):
                return Line(Phrase("done", seconds=seconds, seed=self.request.seed), "over", 1.0)
            case Cancelled():
                return Line(Phrase("stopped"), "over", share)
            case Failed(message):
                return Line(message, "wrong", share)
        return self._line

    def _seconds_left(self) -> float | None:
        """By the speed so far, once there is one."""
        begun, first = self._first_progress
        if self._step <= first:
            return None
        each = (time.monotonic() - begun) / (self._step - first)
        return each * (self._steps - self._step)

    def _first_cell(self, place: int) -> Cell:
        if place not in self.request.places():
            return Cell(place)
        return Cell(place, "waiting", self.request.prompts[place], self.request.image_seed(place),
                    named(self.request, place))


class Runs:
    """The runs of everybody who shares an engine; each is private to who has its key."""

    def __init__(self, engine: Engine, files: Files, history: History | None = None):
        """Pictures go into `files`, and into the history if there is one."""
        self._engine, self._files, self._history = engine, files, history
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Run] = OrderedDict()  # by key, the oldest first
        self._latest: dict[str, str] = {}  # the key of each browser's last
        self._pace: float | None = None  # seconds that a step of one picture takes

    def start(self, request: Request, *, browser: str = "", grace: float = GRACE_SECONDS,
              previews: bool = True) -> Run:
        """Submits a request of a browser, or of a program, which is called ""; raises RequestError.

        `grace` is how many seconds it may go on while nobody follows it.
        """
        job = self._engine.submit(request, previews=previews)
        run = Run(job, self, self._files, grace, browser)
        with self._lock:
            self._runs[run.key] = run
            if browser:
                self._latest[browser] = run.key
            self._forget()
        return run

    def find(self, key: str | None) -> Run | None:
        """The run with this key, if it is still known."""
        return self._runs.get(key)

    def latest(self, browser: str) -> Run | None:
        """What this browser began last, if its pictures are still there."""
        run = self.find(self._latest.get(browser))
        return run if run and time.time() - run.begun < KEEP_SECONDS else None

    def keep(self, browser: str, picture: Picture, request: Request) -> None:
        """Adds a browser's finished picture to the history, whose failure costs nobody a run."""
        if not (browser and self._history):
            return
        try:
            self._history.add(browser, Path(picture.png).read_bytes(), request)
        except (HistoryError, OSError):
            log.exception("a picture is missing from the history")

    def leave(self, session: str) -> None:
        """Ends what a session follows that is gone."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.leave(session)

    def wait(self, run: Run) -> float | None:
        """Seconds until what was asked for before this run is made, if that can be told."""
        with self._lock:
            earlier = [other.work for other in self._runs.values() if other.begun < run.begun]
        return sum(earlier) * self._pace if self._pace else None

    def learn(self, pace: float) -> None:
        """Remembers how fast it goes: the mean of what was known and what is new."""
        self._pace = pace if self._pace is None else (self._pace + pace) / 2

    def _forget(self) -> None:
        needed = set(self._latest.values())  # which a browser that comes back will ask for
        over = sorted((key for key, run in self._runs.items() if run.over), key=needed.__contains__)
        for key in over[:max(0, len(self._runs) - MAX_KEPT)]:
            del self._runs[key]
        self._latest = {browser: key for browser, key in self._latest.items() if key in self._runs}


def _count(request: Request) -> Phrase:
    count = len(request.places())
    return Phrase("one_picture") if count == 1 else Phrase("pictures", count=count)


def _ready(numbers: list[int]) -> list[Phrase]:
    if not numbers:
        return []
    return [Phrase("picture_ready" if len(numbers) == 1 else "pictures_ready", places=numbers)]


def _queued(position: int, reason: str, wait: float | None) -> Phrase:
    if reason == COMPILING:
        return Phrase("compiling_queued" if position > 1 else "compiling", position=position)
    if not wait:
        return Phrase("queued", position=position)
    return Phrase("queued_wait", position=position, time=duration(wait))


def _step(step: int, steps: int, left: float | None) -> Phrase:
    if left is None or step >= steps:
        return Phrase("step", step=step, steps=steps)
    return Phrase("step_left", step=step, steps=steps, time=duration(left))
