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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_tpu.engine import Engine, Job
from sd_tpu.history import History, HistoryError
from sd_tpu.job import (
    COMPILING,
    Cancelled,
    Done,
    Event,
    Failed,
    ImageReady,
    Progress,
    Queued,
)
from sd_tpu.page.files import Files, Picture, data_url, url
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
    address of how it looks until it is done: as it forms, or as it was before it is drawn again.
    `picture` is there when it is done. `named` are the settings that its label names.
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
    `kind` is busy, over or wrong; `aloud` is whether its end is read out.
    """

    text: Phrase | Sentence
    kind: str = "busy"
    share: float = 0.0
    aloud: bool = True


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a follower is told: the cells that have changed, the line, and what to read aloud.

    The run is `over` if nothing will change any more, unless a picture is drawn again.
    """

    cells: tuple[Cell, ...]
    line: Line
    news: tuple[Phrase | Sentence, ...]
    over: bool


class _Work:
    """A job of a run, and how far it is with the places that it still draws for it."""

    def __init__(self, job: Job, seconds: Callable[[Request], float], *, live: bool = False):
        """Begins with all places that the job was asked for. `seconds` tells what a picture takes
        alone; `live` is a job that was begun by typing, of which less is said and kept.
        """
        self.job, self.live = job, live
        self.places = set(job.request.places())
        self.count = len(self.places)
        self._seconds = {place: seconds(job.request.only(place)) for place in self.places}
        self.step, self.steps = 0, max(job.request.only(place).steps for place in self.places)
        self.line = Line(Phrase("starting"))
        self._first: tuple[float, int] | None = None

    @property
    def share(self) -> float:
        """What part of it is done."""
        return self.step / self.steps

    @property
    def seconds(self) -> float:
        """What its pictures would take one after the other."""
        return sum(self._seconds.values())

    @property
    def left(self) -> float:
        """What of that is still to be made."""
        return (1 - self.share) * sum(self._seconds[place] for place in self.places.copy())

    def advance(self, step: int) -> None:
        """Takes down how far it is."""
        self.step = step
        self._first = self._first or (time.monotonic(), step)

    def seconds_left(self) -> float | None:
        """By the speed so far, once there is one."""
        begun, first = self._first
        if self.step <= first:
            return None
        each = (time.monotonic() - begun) / (self.step - first)
        return each * (self.steps - self.step)


class Run:
    """One request on its way; made by `Runs.start`.

    Single pictures may be drawn again, by jobs of their own: then the request is that of what is
    shown, and each place belongs to the job that was last asked for it.
    """

    def __init__(self, job: Job, runs: "Runs", files: Files, grace: float, browser: str = "",
                 *, live: bool = False):
        """Begins with every asked place waiting."""
        self.key = secrets.token_urlsafe(16)
        self.request, self.begun = job.request, time.time()
        self._runs, self._files, self._grace, self._browser = runs, files, grace, browser
        self._change = threading.Condition()  # guards the rest
        self._followers: dict[object, str] = {}
        self._version = 1
        self._changed = [1] * MAX_PROMPTS  # the version in which each cell has
        self._cells = [self._first_cell(place) for place in range(MAX_PROMPTS)]
        self._works: list[_Work] = []  # which are not over, in the order in which they began
        self._redrawn: dict[int, str] = {}  # what the history has of each place that was
        self._farewell: threading.Timer | None = None
        self._begin(_Work(job, runs.seconds, live=live))
        with self._change:  # whoever asked may be gone before following it
            self._mind_loneliness(GRACE_SECONDS)

    @property
    def over(self) -> bool:
        """Whether nothing will change any more, unless a picture is drawn again."""
        return not self._works

    @property
    def line(self) -> Line:
        """What happens, or how it ended."""
        return self._line

    def before(self, job: Job) -> float:
        """What is still to be made of what was asked before a job, as `_Work.left`."""
        return sum(work.left for work in self._works.copy() if work.job.number < job.number)

    def cells(self, state: str) -> list[Cell]:
        """The cells in this state."""
        return [cell for cell in self._cells if cell.state == state]

    def pictures(self) -> dict[int, Picture]:
        """What is finished, by place."""
        return {cell.place: cell.picture for cell in self._cells if cell.picture}

    def stop(self) -> None:
        """Ends it, also while it waits; followers are told when it has stopped."""
        for work in self._works.copy():
            work.job.cancel()

    def redraw(self, place: int, alone: Request, session: str) -> int | None:
        """Draws the picture at `place` as `alone` asks, unless it is drawn so already.

        What was on its way there is cancelled, the other places are left alone. Returns since when
        the session should follow the run to see the change, or None if it is told anyway.

        Raises:
            RequestError: as `Runs.start`; then all is as it was.
        """
        with self._change:
            before, seen = self._cells[place], self._version
            request = self._runs.redrawn(self.request, place, alone)
            if request == self.request and before.state in ("waiting", "forming", "done"):
                return None
            job = self._runs.submit_one(request, place)
            self.request = request
            self._take_over(place)
            shown = url(before.picture.shown) if before.picture else before.preview
            self._set(place, dataclasses.replace(self._first_cell(place), preview=shown))
            self._begin(_Work(job, self._runs.seconds, live=True))
            return self._announce(session, seen)

    def blank(self, place: int, session: str) -> int | None:
        """Takes the picture at `place` away, and all that is to be made of it; returns what
        `redraw` does."""
        with self._change:
            seen = self._version
            self.request = self.request.without(place)
            self._take_over(place)
            self._set(place, Cell(place))
            if self.over:
                self._line = Line(Phrase("ready"), "over", aloud=False)
            return self._announce(session, seen)

    def follow(self, session: str, seen: int = 0) -> Iterator[Snapshot]:
        """Yields all there is, or what has changed since `seen`, then what changes, until it is
        over or the session leaves.

        A follower that is slow misses what has been overtaken, and nothing else.
        """
        me, snapshot = object(), None
        self._runs.show(session, self)
        with self._change:
            self._followers[me] = session
            self._mind_loneliness()
        try:
            while not (snapshot and snapshot.over):
                with self._change:
                    while self._version == seen and me in self._followers:
                        self._change.wait()
                    if me not in self._followers:
                        return
                    snapshot, seen = self._since(seen), self._version
                    if snapshot.over:  # whoever draws a picture again from now on must follow anew
                        del self._followers[me]
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

    def stop_if_lonely(self) -> None:
        """Ends it unless somebody follows it."""
        with self._change:
            lonely = not self._followers
        if lonely:
            self.stop()

    def _begin(self, work: _Work) -> None:
        self._works.append(work)
        self._line = work.line
        threading.Thread(target=self._serve, args=[work], name="run", daemon=True).start()

    def _take_over(self, place: int) -> None:
        """Takes the place from the job that draws it, if one does; called with the lock held."""
        for work in [work for work in self._works if place in work.places]:
            work.places.remove(place)
            work.job.cancel(place)
            if not work.places:
                self._works.remove(work)

    def _set(self, place: int, cell: Cell) -> None:
        """Changes a cell, and the labels of others that it no longer or now differs from; called
        with the lock held."""
        self._version += 1
        self._cells[place], self._changed[place] = cell, self._version
        for other in self.request.places():
            label = named(self.request, other)
            if label != self._cells[other].named:
                self._cells[other] = dataclasses.replace(self._cells[other], named=label)
                self._changed[other] = self._version

    def _announce(self, session: str, seen: int) -> int | None:
        """Tells followers; returns what `redraw` does. Called with the lock held."""
        self._change.notify_all()
        self._mind_loneliness()
        return None if session in self._followers.values() else seen

    def _mind_loneliness(self, grace: float | None = None) -> None:
        """Stops the run if nobody comes back to it in time; called with the lock held."""
        if self._farewell:
            self._farewell.cancel()
        if self._followers or self.over:
            return
        wait = self._grace if grace is None else grace
        self._farewell = threading.Timer(wait, self.stop_if_lonely)
        self._farewell.daemon = True
        self._farewell.start()

    def _since(self, seen: int) -> Snapshot:
        cells = tuple(cell for cell, changed in zip(self._cells, self._changed, strict=True)
                      if changed > seen)
        if not seen and not self.over:
            aloud = not all(work.live for work in self._works)
            news = [Phrase("making", count=_count(self.request))] if aloud else []
        else:
            news = _ready([cell.place + 1 for cell in cells if cell.state == "done"])
        end = [self._line.text] if self.over and self._line.aloud else []
        return Snapshot(cells, self._line, (*news, *end), self.over)

    # --- a thread of each job -------------------------------------------------------------------

    def _serve(self, work: _Work) -> None:
        try:
            for event in work.job.events():
                self._take(work, event)
        except Exception:  # a disk that is full, say: nobody should be left with a dead page
            log.exception("a run failed")
            work.job.cancel()
            self._take(work, Failed(Sentence("The server failed; please try again.")))

    def _take(self, work: _Work, event: Event) -> None:
        changes = self._changes(work, event)
        with self._change:
            if work not in self._works:  # all that it drew has been asked for anew
                return
            self._version += 1
            if isinstance(event, Progress):
                work.advance(event.step)
            for place in changes.keys() & work.places:
                self._cells[place] = dataclasses.replace(self._cells[place], **changes[place])
                self._changed[place] = self._version
            work.line = self._line_after(work, event)
            if work.line.kind != "busy":
                self._works.remove(work)
            self._line = self._works[-1].line if self._works else work.line
            self._change.notify_all()
        if isinstance(event, Done) and len(work.places) == work.count:
            self._runs.learn(event.seconds / work.seconds)

    def _changes(self, work: _Work, event: Event) -> dict[int, dict]:
        """What the event changes in cells, by place."""
        match event:
            case Progress(_, _, previews):
                return {place: dict(state="forming", preview=data_url(pixels))
                        for place, pixels in previews.items()}
            case ImageReady(place, pixels) if place in work.places:
                picture = self._files.add(work.job.request, place, pixels)
                self._keep(work, place, picture)
                return {place: dict(state="done", preview="", picture=picture)}
            case Cancelled() | Failed():
                return {place: dict(state="stopped") for place in work.places.copy()
                        if not self._cells[place].picture}
        return {}

    def _keep(self, work: _Work, place: int, picture: Picture) -> None:
        """Adds it to the history; of what is drawn again and again, the last one stays there."""
        kept = self._runs.keep(self._browser, picture, work.job.request.only(place))
        if not (work.live and kept):
            return
        with self._change:
            gone = kept  # if it has been asked for anew meanwhile
            if place in work.places:
                gone, self._redrawn[place] = self._redrawn.get(place), kept
        self._runs.drop(self._browser, gone)

    def _line_after(self, work: _Work, event: Event) -> Line:
        match event:
            case Queued(position, reason):
                return Line(_queued(position, reason, self._runs.wait(work.job)))
            case Progress(step, steps):
                return Line(_step(step, steps, work.seconds_left()), share=work.share)
            case Done(seconds):
                seed = self.request.seed
                if work.live:
                    seed = self.request.image_seed(*work.places)
                return Line(Phrase("done", seconds=seconds, seed=seed), "over", 1.0,
                            aloud=not work.live)
            case Cancelled():
                return Line(Phrase("stopped"), "over", work.share)
            case Failed(message):
                return Line(message, "wrong", work.share)
        return work.line

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
        self._shown: dict[str, str] = {}  # the key of what each session sees
        self._pace: float | None = None  # what pictures take, for what they would take alone

    def start(self, request: Request, *, browser: str = "", grace: float = GRACE_SECONDS,
              previews: bool = True, live: bool = False) -> Run:
        """Submits a request of a browser, or of a program, which is called ""; raises RequestError.

        `grace` is how many seconds it may go on while nobody follows it, `live` whether it was
        begun by typing.
        """
        job = self._engine.submit(request, previews=previews)
        run = Run(job, self, self._files, grace, browser, live=live)
        with self._lock:
            self._runs[run.key] = run
            if browser:
                self._latest[browser] = run.key
            self._forget()
        return run

    def redrawn(self, request: Request, place: int, alone: Request) -> Request:
        """A run's request with another picture at `place`; raises RequestError."""
        return request.redrawn(place, alone, self._engine.defaults)

    def submit_one(self, request: Request, place: int) -> Job:
        """Submits only the picture at `place`, which keeps its place; raises RequestError."""
        for other in request.places():
            if other != place:
                request = request.without(other)
        return self._engine.submit(request)

    def find(self, key: str | None) -> Run | None:
        """The run with this key, if it is still known."""
        return self._runs.get(key)

    def show(self, session: str, run: Run) -> None:
        """Takes down that a session sees this run from now on, or is about to."""
        with self._lock:
            self._shown[session] = run.key

    def shown(self, session: str) -> Run | None:
        """What a session sees, though its page may not have been told of it yet."""
        return self.find(self._shown.get(session))

    def latest(self, browser: str) -> Run | None:
        """What this browser began last, if its pictures are still there."""
        run = self.find(self._latest.get(browser))
        return run if run and time.time() - run.begun < KEEP_SECONDS else None

    def keep(self, browser: str, picture: Picture, request: Request) -> str | None:
        """Adds a browser's finished picture to the history, whose failure costs nobody a run;
        returns its name there.
        """
        if not (browser and self._history):
            return None
        try:
            return self._history.add(browser, Path(picture.png).read_bytes(), request).id
        except (HistoryError, OSError):
            log.exception("a picture is missing from the history")
            return None

    def drop(self, browser: str, name: str | None) -> None:
        """Takes a picture that another has replaced out of the history, unless it has become a
        favourite there.
        """
        if name is None:
            return
        try:
            self._history.delete(browser, name, spare_favourite=True)
        except HistoryError:
            log.exception("a picture is left in the history")

    def leave(self, session: str) -> None:
        """Ends what a session follows that is gone."""
        with self._lock:
            runs = list(self._runs.values())
            self._shown.pop(session, None)
        for run in runs:
            run.leave(session)

    def wait(self, job: Job) -> float | None:
        """Seconds until what was asked for before this job is made, if that can be told."""
        with self._lock:
            earlier = sum(run.before(job) for run in self._runs.values())
        return earlier * self._pace if self._pace else None

    def seconds(self, alone: Request) -> float:
        """What a picture takes alone; while that is not known, all take the same."""
        return self._engine.seconds(alone) or 1.0

    def learn(self, pace: float) -> None:
        """Remembers how fast it goes: the mean of what was known and what is new."""
        self._pace = pace if self._pace is None else (self._pace + pace) / 2

    def _forget(self) -> None:
        needed = set(self._latest.values())  # which a browser that comes back will ask for
        over = sorted((key for key, run in self._runs.items() if run.over), key=needed.__contains__)
        for key in over[:max(0, len(self._runs) - MAX_KEPT)]:
            del self._runs[key]
        self._latest, self._shown = ({who: key for who, key in of.items() if key in self._runs}
                                     for of in (self._latest, self._shown))


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
