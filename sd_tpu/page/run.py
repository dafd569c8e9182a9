"""A run: a request on its way, and whoever follows it.

The engine tells a job's events once. A run keeps what they add up to, so that followers can come,
go and come back: the tab that asked, and the same tab after a reload.
"""

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Iterator

from sd_tpu.engine import Engine
from sd_tpu.job import Cancelled, Done, Event, Failed, ImageReady, Job, Progress, Queued
from sd_tpu.page.files import Picture, data_url, url
from sd_tpu.page.keeping import Keeper
from sd_tpu.page.labels import named
from sd_tpu.page.snapshot import Cell, Line, Snapshot, at_step, making, queued, ready
from sd_tpu.page.texts import Phrase
from sd_tpu.page.works import Work, Works
from sd_tpu.request import MAX_PROMPTS, Request
from sd_tpu.sentence import Sentence

log = logging.getLogger(__name__)

GRACE_SECONDS = 30  # that a run goes on while nobody follows it: a reload takes less


class Run:
    """One request on its way; made by `Runs.start`.

    Single pictures may be drawn again, by jobs of their own: then the request is that of what is
    shown, and each place belongs to the job that was last asked for it.
    """

    def __init__(self, job: Job, engine: Engine, keeper: Keeper, works: Works, grace: float,
                 browser: str = "", *, live: bool = False):
        """Begins with every asked place waiting."""
        self.key = secrets.token_urlsafe(16)
        self.request, self.begun = job.request, time.time()
        self._engine, self._keeper, self._common = engine, keeper, works
        self._grace, self._browser = grace, browser
        self._change = threading.Condition()  # guards the rest
        self._followers: dict[object, str] = {}
        self._version = 1
        self._changed = [1] * MAX_PROMPTS  # the version in which each cell has
        self._cells = [self._first_cell(place) for place in range(MAX_PROMPTS)]
        self._works: list[Work] = []  # which are not over, in the order in which they began
        self._redrawn: dict[int, str] = {}  # what the history has of each place that was
        self._farewell: threading.Timer | None = None
        self._begin(Work(job, engine, live=live))
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
            RequestError: it cannot be served; then all is as it was.
        """
        with self._change:
            before, seen = self._cells[place], self._version
            request = self.request.redrawn(place, alone, self._engine.defaults)
            if request == self.request and before.state in ("waiting", "forming", "done"):
                return None
            job = self._engine.submit(request.with_only(place))
            self.request = request
            self._take_over(place)
            shown = url(before.picture.shown) if before.picture else before.preview
            self._set(place, dataclasses.replace(self._first_cell(place), preview=shown))
            self._begin(Work(job, self._engine, live=True))
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
        me, told = object(), None
        with self._change:
            self._followers[me] = session
            self._mind_loneliness()
        try:
            while not (told and told.over):
                with self._change:
                    while self._version == seen and me in self._followers:
                        self._change.wait()
                    if me not in self._followers:
                        return
                    told, seen = self._since(seen), self._version
                    if told.over:  # whoever draws a picture again from now on must follow anew
                        del self._followers[me]
                yield told
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

    def _begin(self, work: Work) -> None:
        self._works.append(work)
        self._common.add(work)
        self._line = work.line
        threading.Thread(target=self._serve, args=[work], name="run", daemon=True).start()

    def _end(self, work: Work) -> None:
        self._works.remove(work)
        self._common.remove(work)

    def _take_over(self, place: int) -> None:
        """Takes the place from the job that draws it, if one does; called with the lock held."""
        for work in [work for work in self._works if place in work.places]:
            work.places.remove(place)
            work.job.cancel(place)
            if not work.places:
                self._end(work)

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
            news = [making(self.request)] if aloud else []
        else:
            news = ready([cell.place + 1 for cell in cells if cell.state == "done"])
        end = [self._line.text] if self.over and self._line.aloud else []
        return Snapshot(cells, self._line, (*news, *end), self.over)

    # --- a thread of each job -------------------------------------------------------------------

    def _serve(self, work: Work) -> None:
        try:
            for event in work.job.events():
                self._take(work, event)
        except Exception:  # a disk that is full, say: nobody should be left with a dead page
            log.exception("a run failed")
            work.job.cancel()
            self._take(work, Failed(Sentence("The server failed; please try again.")))

    def _take(self, work: Work, event: Event) -> None:
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
                self._end(work)
            self._line = self._works[-1].line if self._works else work.line
            self._change.notify_all()
        if isinstance(event, Done) and len(work.places) == work.count:
            self._common.learn(work, event.seconds)

    def _changes(self, work: Work, event: Event) -> dict[int, dict]:
        """What the event changes in cells, by place."""
        match event:
            case Progress(_, _, previews):
                return {place: dict(state="forming", preview=data_url(pixels))
                        for place, pixels in previews.items()}
            case ImageReady(place, pixels) if place in work.places:
                picture = self._keeper.add(work.job.request, place, pixels)
                self._keep(work, place, picture)
                return {place: dict(state="done", preview="", picture=picture)}
            case Cancelled() | Failed():
                return {place: dict(state="stopped") for place in work.places.copy()
                        if not self._cells[place].picture}
        return {}

    def _keep(self, work: Work, place: int, picture: Picture) -> None:
        """Adds it to the history; of what is drawn again and again, the last one stays there."""
        kept = self._keeper.keep(self._browser, picture, work.job.request.only(place))
        if not (work.live and kept):
            return
        with self._change:
            gone = kept  # if it has been asked for anew meanwhile
            if place in work.places:
                gone, self._redrawn[place] = self._redrawn.get(place), kept
        self._keeper.drop(self._browser, gone)

    def _line_after(self, work: Work, event: Event) -> Line:
        match event:
            case Queued(position, reason):
                return Line(queued(position, reason, self._common.wait(work.job)))
            case Progress(step, steps):
                return Line(at_step(step, steps, work.seconds_left()), share=work.share)
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


