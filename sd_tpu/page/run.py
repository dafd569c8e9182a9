"""A run: a request on its way, and whoever follows it.

The engine tells a job's events once. A run keeps what they add up to, so that followers can come,
go and come back: the tab that asked, and the same tab after a reload.
"""

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

from sd_tpu import settings
from sd_tpu.page.files import Picture, Store, url
from sd_tpu.pictures.history import HistoryError
from sd_tpu.pictures.images import data_url
from sd_tpu.pictures.uploads import Inputs
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.job import (
    BLURRED,
    COMPILING,
    WAITING,
    Cancelled,
    Done,
    Event,
    Failed,
    ImageReady,
    Job,
    Progress,
    Queued,
)
from sd_tpu.settings import MAX_PROMPTS, MAX_SEED

log = logging.getLogger(__name__)

GRACE_SECONDS = 30  # that a run goes on while nobody follows it: a reload takes less


@dataclasses.dataclass(frozen=True)
class Card:
    """One place of the gallery.

    `state` is blank (nothing asked for), example (of what the model draws), waiting, forming, done
    or stopped; `preview` is the address of how it looks until its picture is there: as it forms, or
    as it was before it is drawn again. `picture` is there when it is done. `named` are the settings
    that its label names, `kept` is what the history calls it.
    """

    place: int
    state: str = "blank"
    prompt: str = ""
    seed: int = 0
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preview: str = ""
    picture: Picture | None = None
    kept: str | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """What happens, to be said to each follower in his language; `share` of the work is done,
    `kind` is busy, over or wrong, idle where nothing was asked for; `aloud` is whether its end is
    read out, `single` whether only single pictures are drawn again.
    """

    text: str = Sentence("Ready")
    kind: str = "idle"
    share: float = 0.0
    aloud: bool = True
    single: bool = False


STARTING = Line(Sentence("Starting…"), "busy")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a follower is told: the cards that have changed, the line, and what to read aloud.

    The run is `over` if nothing will change any more, unless a picture is drawn again.
    """

    cards: tuple[Card, ...]
    line: Line
    news: tuple[Sentence, ...]
    over: bool


class Work:
    """A job of a run, and the places that it still draws for it."""

    def __init__(self, job: Job, *, live: bool = False, whole: bool = False):
        """Begins with all places that the job was asked for; `live` is one that was begun by
        typing, of which less is said and kept, `whole` is what the run began with.
        """
        self.job, self.live, self.whole = job, live, whole
        self.line = dataclasses.replace(STARTING, single=not whole)
        self.places = set(job.request.places())
        self.blurred = False  # whether a picture is, not being safe for work
        self.unkept: Sentence | None = None  # why the history lacks a picture


class Run:
    """One request on its way; made by `Runs.start`.

    Single pictures may be drawn again, by jobs of their own: then the request is that of what is
    shown, and each place belongs to the job that was last asked for it. What was there before stays
    until its successor comes, and is given back if none does.
    """

    def __init__(self, job: Job, engine: EngineClient, store: Store, inputs: Inputs, grace: float,
                 browser: str = "", *, live: bool = False, seed: int | None = None,
                 former: Self | None = None, request: Request | None = None):
        """Begins with every place that the job draws waiting.

        `former` is the run that was shown before; of the `request` it has what the job leaves out.
        """
        self.key = secrets.token_urlsafe(16)
        self.request, self.begun = request or job.request, time.time()
        self.seed = job.request.seed if seed is None else seed  # of place 0, where seeds run on
        self._engine, self._store = engine, store
        self._client, self._address = job.client, job.address
        self._inputs = inputs
        self._grace, self._browser = grace, browser
        self._change = threading.Condition()  # guards the rest
        self._followers: dict[object, str] = {}
        self._version = 1
        self._changed = [1] * MAX_PROMPTS  # the version in which each card has
        # What is to be given back, and what it was made from.
        self._former = {place: kept for place in self.request.places()
                        if former and (kept := former.finished(place))}
        self._cards = [self._first_card(place) for place in range(MAX_PROMPTS)]
        for place in {*self.request.places()} - {*job.request.places()}:
            card, _ = self._former.pop(place)
            self._cards[place] = dataclasses.replace(card, named=self.request.labelled(place))
        self._works: list[Work] = []  # which are not over, in the order in which they began
        self._redrawn: dict[int, str] = {}  # what the history has of each place that was
        self._farewell: threading.Timer | None = None
        self._begin(Work(job, live=live, whole=not live))
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

    def cards(self, state: str) -> list[Card]:
        """The cards in this state."""
        return [card for card in self._cards if card.state == state]

    def pictures(self) -> dict[int, Picture]:
        """What is finished, by place."""
        return {card.place: card.picture for card in self._cards if card.picture}

    def finished(self, place: int) -> tuple[Card, settings.Picture] | None:
        """The picture at `place` and what it was made from, also while its successor is made."""
        if self._cards[place].picture:
            return self._cards[place], self.request.pictures[place]
        return self._former.get(place)

    def seed_at(self, place: int) -> int:
        """The seed of the picture at `place`, or of one that would be drawn there."""
        picture = (*self.request.pictures, *[None] * MAX_PROMPTS)[place]
        return picture.seed if picture else (self.seed + place) % (MAX_SEED + 1)

    def stop(self) -> None:
        """Ends it, also while it waits; followers are told when it has stopped."""
        for work in self._works.copy():
            work.job.cancel()

    def redraw(self, place: int, picture: settings.Picture, session: str, *, live: bool = False
               ) -> int | None:
        """Draws this picture at `place`, unless it is drawn so already; `live` is by typing.

        What was on its way there is cancelled, the other places are left alone. Returns since when
        the session should follow the run to see the change, or None if it is told anyway.

        Raises:
            RequestError: it cannot be served; then all is as it was.
        """
        with self._change:
            before, seen = self._cards[place], self._version
            request = self.request.replaced(place, picture)
            if request == self.request and before.state in ("waiting", "forming", "done"):
                return None
            alone = request.with_only(place)
            job = self._engine.submit(alone, client=self._client, address=self._address,
                                      inputs=self._inputs.of(self._browser, alone.inputs()))
            if kept := self.finished(place):
                self._former[place] = kept
            self.request = request
            self._take_over(place)
            first = self._first_card(place)
            self._set(place, dataclasses.replace(first, preview=first.preview or before.preview))
            self._begin(Work(job, live=live))
            return self._announce(session, seen)

    def blank(self, place: int, session: str) -> int | None:
        """Takes the picture at `place` away, and all that is to be made of it; returns what
        `redraw` does."""
        with self._change:
            seen = self._version
            self.request = self.request.replaced(place, None)
            self._former.pop(place, None)
            self._take_over(place)
            self._set(place, Card(place))
            if self.over:
                self._line = Line(kind="over", aloud=False)
            return self._announce(session, seen)

    def follow(self, session: str, seen: int = 0, pause: float = 0.0) -> Iterator[Snapshot]:
        """Yields all there is, or what has changed since `seen`, then what changes, until it is
        over or the session leaves; the end at once, all else `pause` seconds apart.

        A follower that is slow misses what has been overtaken, and nothing else.
        """
        me, told = object(), None
        with self._change:
            self._followers[me] = session
            self._mind_loneliness()
        try:
            while not (told and told.over):
                with self._change:
                    if told:
                        self._change.wait_for(
                            lambda: self.over or me not in self._followers, pause)
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
        self._show_line(work)
        threading.Thread(target=self._serve, args=[work], name="run", daemon=True).start()

    def _show_line(self, last: Work) -> None:
        """Says how the latest work goes, or how the last one ended."""
        line = self._works[-1].line if self._works else last.line
        single = not any(work.whole for work in self._works)
        self._line = dataclasses.replace(line, single=single)

    def _take_over(self, place: int) -> None:
        """Takes the place from the job that draws it, if one does; called with the lock held."""
        for work in [work for work in self._works if place in work.places]:
            work.places.remove(place)
            work.job.cancel(place)
            if not work.places:
                self._works.remove(work)

    def _set(self, place: int, card: Card) -> None:
        """Changes a card, and the labels of others that it no longer or now differs from; called
        with the lock held."""
        self._version += 1
        self._cards[place], self._changed[place] = card, self._version
        for other in self.request.places():
            named = self.request.labelled(other)
            if named != self._cards[other].named:
                self._cards[other] = dataclasses.replace(self._cards[other], named=named)
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
        cards = tuple(card for card, changed in zip(self._cards, self._changed, strict=True)
                      if changed > seen)
        if not seen and not self.over:
            aloud = not all(work.live for work in self._works)
            count = sum(len(work.places) for work in self._works)
            news = [making(count)] if aloud else []
        else:
            news = ready([card.place + 1 for card in cards if card.state == "done"])
        end = [self._line.text] if self.over and self._line.aloud else []
        return Snapshot(cards, self._line, (*news, *end), self.over)

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
            for place in changes.keys() & work.places:
                self._cards[place] = dataclasses.replace(self._cards[place], **changes[place])
                self._changed[place] = self._version
                if self._cards[place].picture:
                    self._former.pop(place, None)
            if isinstance(event, Cancelled | Failed):
                self._give_back(work.places)
            work.line = self._line_after(work, event)
            if work.line.kind != "busy":
                self._works.remove(work)
            self._show_line(work)
            self._change.notify_all()

    def _give_back(self, places: set[int]) -> None:
        """Shows again what was there before; called with the lock held."""
        for place in places & self._former.keys():
            card, picture = self._former.pop(place)
            self.request = self.request.replaced(place, picture)
            self._set(place, card)

    def _changes(self, work: Work, event: Event) -> dict[int, dict]:
        """What the event changes in cards, by place."""
        match event:
            case Progress(previews=previews):
                return {place: dict(state="forming", preview=data_url(pixels))
                        for place, pixels in previews.items()}
            case ImageReady(place, pixels, unsafe) if place in work.places:
                work.blurred |= unsafe
                picture = self._store.add(work.job.request, place, pixels, self._browser)
                kept = self._keep(work, place, picture)
                return {place: dict(state="done", picture=picture, kept=kept)}
            case Cancelled() | Failed():
                return {place: dict(state="stopped") for place in work.places.copy()
                        if not self._cards[place].picture}
        return {}

    def _keep(self, work: Work, place: int, picture: Picture) -> str | None:
        """Adds it to the history and returns its name there; of what is drawn again and again, the
        last one stays there."""
        try:
            kept = self._store.keep(self._browser, picture, work.job.request.pictures[place],
                                    self.key, place)
        except (HistoryError, OSError) as error:  # which costs nobody a run
            log.exception("a picture is missing from the history")
            work.unkept = getattr(error, "sentence", Sentence(
                "The picture could not be added to the history"))
            return None
        if not (work.live and kept):
            return kept
        with self._change:
            gone = kept  # if it has been asked for anew meanwhile
            if place in work.places:
                gone, self._redrawn[place] = self._redrawn.get(place), kept
        self._store.drop(self._browser, gone)
        return kept

    def _line_after(self, work: Work, event: Event) -> Line:
        match event:
            case Queued(position, reason, seconds):
                return Line(queued(position, reason, seconds), "busy", work.line.share)
            case Progress(step, steps, _, seconds):
                return Line(at_step(step, steps, seconds), "busy", step / steps)
            case Done(seconds):
                pictures = work.job.request.pictures  # the first of them may be kept, or none
                seed = next(picture.seed for picture in pictures if picture)
                told = Sentence("Done in {seconds:.1f} s, seed {seed}", seconds=seconds, seed=seed)
                if work.blurred:
                    told = Sentence("{done}. {reason}", done=told, reason=BLURRED)
                if work.unkept:
                    told = Sentence("{done}. {reason}", done=told, reason=work.unkept)
                return Line(told, "over", 1.0, aloud=not work.live)
            case Cancelled():
                return Line(Sentence("Stopped"), "over", work.line.share)
            case Failed(message):
                return Line(message, "wrong", work.line.share)
        return work.line

    def _first_card(self, place: int) -> Card:
        if place not in self.request.places():
            return Card(place)
        picture, kept = self.request.pictures[place], self._former.get(place)
        return Card(place, "waiting", picture.prompt, picture.seed, self.request.labelled(place),
                    preview=url(kept[0].picture.shown) if kept else "")


# --- what is said ---------------------------------------------------------------------------------


def making(count: int) -> Sentence:
    """That a run of so many pictures begins."""
    pictures = Sentence("1 picture") if count == 1 else Sentence("{count} pictures", count=count)
    return Sentence("Making {count}.", count=pictures)


def ready(numbers: list[int]) -> list[Sentence]:
    """That the pictures with these numbers are finished, if there are any."""
    if len(numbers) == 1:
        return [Sentence("Picture {places} is ready.", places=numbers)]
    return [Sentence("Pictures {places} are ready.", places=numbers)] if numbers else []


def queued(position: int, reason: str, wait: float | None) -> Sentence:
    """What a run waits for, and how many seconds if that is known. Whoever is next is not told
    that he is number 1: he may be the only one."""
    if reason != WAITING:
        what = (Sentence("Compiling for the first time…") if reason == COMPILING
                else Sentence("Loading the model…"))
        return what if position == 1 else Sentence("{what} Queued as number {position}.", what=what,
                                                   position=position)
    if position == 1:
        return (Sentence("Starting in about {time}…", time=duration(wait)) if wait
                else STARTING.text)
    if not wait:
        return Sentence("Queued as number {position}", position=position)
    return Sentence("Queued as number {position}, about {time} until it starts", position=position,
                    time=duration(wait))


def duration(seconds: float) -> Sentence:
    """A time that is only an estimate."""
    if seconds < 90:
        return Sentence("{count} s", count=max(1, round(seconds)))
    return Sentence("{count} min", count=round(seconds / 60))


def at_step(step: int, steps: int, left: float | None) -> Sentence:
    """How far a run is, and how many seconds are left if that is known."""
    if left is None or step >= steps:
        return Sentence("Step {step} of {steps}", step=step, steps=steps)
    return Sentence("Step {step} of {steps}, about {time} left", step=step, steps=steps,
                    time=duration(left))
