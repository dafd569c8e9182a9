"""Runs: pictures on their way to their cards, streamed to subscribers.

The engine emits a job's events once. A run keeps what they add up to, so that subscribers can come,
go and come back: the tab that asked, and the same tab after a reload.
"""

import asyncio
import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from sd_tpu.gallery.files import Files, PictureFile
from sd_tpu.gallery.history import History, HistoryError, new_name
from sd_tpu.gallery.status import STARTING, StatusLine, at_step, queued, ready
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.pictures.images import data_url
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.job import (
    BLURRED,
    Cancelled,
    Done,
    Event,
    Failed,
    ImageReady,
    Job,
    Progress,
    Queued,
)
from sd_tpu.settings import MAX_PROMPTS, MAX_SEED, Picture

log = logging.getLogger(__name__)

BROKEN = Sentence("The server failed; please try again.")
MAX_SUBSCRIBERS = 5  # of a run: the tabs that were opened last
WRITERS = 32  # threads that write the pictures of all runs
GRACE_SECONDS = 30  # that a browser's run goes on while nobody follows it: a reload takes less


@dataclasses.dataclass(frozen=True)
class Backend:
    """The engine that draws, and the stores that pictures come from and go to."""

    engine: EngineClient
    files: Files
    inputs: Inputs
    history: History | None = None


@dataclasses.dataclass(frozen=True)
class Card:
    """A card of the gallery.

    Attributes:
        index: from 0.
        asked: the settings of its picture; None where nothing is asked for.
        state: blank, example (of the model's pictures), waiting, forming, done or stopped.
        named: the settings that its label shows.
        preview: the unfinished picture, as an address that holds the pixels.
        picture: the finished picture.
        kept: the picture's name in the history.
        live: whether it was drawn while somebody typed, and nothing else has asked for it since.
        before: the card with the picture that was finished here before.
        variants: of its picture, to choose from: cards that are numbered from 0.
        changed: the version of the run in which the card changed last.
        ready: the version in which its picture came, 0 where that was another run's.
    """

    index: int
    asked: Any = None  # the settings of that, or of what is drawn
    state: str = "blank"
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preview: str = ""
    picture: Any = None  # a `PictureFile`, once there is one
    kept: Any = None  # a name, once the history has one
    live: bool = False
    before: Self | None = None
    variants: tuple[Self, ...] = ()
    changed: int = 0
    ready: int = 0

    @property
    def finished(self) -> Self | None:
        """The card with the picture that is there, also while its successor is made.

        It has the variants that are there: what draws others may end with the card.
        """
        there = self if self.picture else self.before
        return there and dataclasses.replace(
            there, variants=tuple(each for each in there.variants if each.picture)
        )

    def without_kept(self, name: str) -> Self:
        """Return the card where the history has no picture of this name."""
        return dataclasses.replace(
            self,
            kept=None if self.kept == name else self.kept,
            before=self.before and self.before.without_kept(name),
            variants=tuple(each.without_kept(name) for each in self.variants),
        )

    def drawn_anew(self, asked: Picture) -> Self:
        """Return the card while this picture is drawn on it."""
        there = self.finished
        return type(self)(
            self.index,
            asked,
            "waiting",
            preview="" if there else self.preview,
            before=there and dataclasses.replace(there, before=None),
        )


BLANK = tuple(map(Card, range(MAX_PROMPTS)))


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A `version` of the run for a subscriber: changed cards, the line, and news to read aloud."""

    version: int
    cards: tuple[Card, ...]
    line: StatusLine
    news: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class Task:
    """A job of a run, and the `indices` that it still draws for it.

    `live` is one that was begun by typing, of which less is said and kept, `whole` is the one that
    the run began with; `blurred` is whether a picture is, not being safe for work, and `unkept`
    says why the history lacks a picture. The pictures of a `journey` are there by index; those of a
    strip come under the `card` of this index, and are a run of their own in the history.
    """

    job: Job
    indices: set[int]
    live: bool
    whole: bool = False
    line: StatusLine = STARTING
    blurred: bool = False
    unkept: Sentence | None = None
    journey: dict[int, PictureFile] | None = None
    card: int | None = None
    name: str = ""  # of the run, in the history
    served: Future | None = None  # kept: an event loop holds what it runs by weak references


_LOOP_LOCK = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, of one thread, on which all runs take the events of their jobs."""
    with _LOOP_LOCK:  # or two first runs would begin two
        return _begun_loop()


@functools.cache
def _begun_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # Writing a picture may wait for a disk: others' go on meanwhile.
    loop.set_default_executor(ThreadPoolExecutor(WRITERS, thread_name_prefix="runs"))
    threading.Thread(target=loop.run_forever, name="runs", daemon=True).start()
    return loop


class _Subscriber:
    """A coroutine that waits on an event loop: a thread for each would keep others from one."""

    def __init__(self):
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        """Have it look again; from any thread."""
        with suppress(RuntimeError):  # the loop has ended with the server
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self) -> None:
        """Wait until it is to look again."""
        await self._woken.wait()
        self._woken.clear()


class Run:
    """The pictures of the gallery; made by `Runs.start`.

    Single pictures may be drawn again, by jobs of their own: then the request is that of the
    pictures that are shown, and each index belongs to the job that was last asked for it. A
    finished picture stays until its successor comes, and is given back if none does.
    """

    def __init__(
        self,
        backend: Backend,
        request: Request,
        cards: Sequence[Card] = BLANK,
        *,
        browser: str = "",
        program: str = "",
        address: str = "",
        seed: int | None = None,
    ):
        """Prepare a run, which `begin` begins.

        Args:
            backend: the engine and the stores.
            request: for all pictures.
            cards: finished ones stay.
            browser: the name of the browser that asks, or "".
            program: the name of the program that asks, or "".
            address: where that is.
            seed: given or drawn for all pictures; by default the request's.
        """
        self.key, self.begun = secrets.token_urlsafe(16), time.time()
        self.seed = request.seed if seed is None else seed  # of place 0, where seeds run on
        self.browser, self._backend = browser, backend
        self._client, self.address = browser or program, address
        self._lock = threading.RLock()  # guards the rest
        self.request, self.cards, self.line = request, [*cards], STARTING
        self.journey: list[
            PictureFile
        ] = []  # of the journey that was drawn last, once all are there
        self.version = self._first = 0  # of what is shown; and the version whose news is old
        self._subscribers: dict[str, _Subscriber] = {}  # by session
        self._tasks: list[Task] = []  # which are not over, in the order in which they began
        self._unwritten = 0  # pictures on their way into the history
        self._stopping: Future | None = None  # once nobody has come back to it for a while
        self.count = 0  # of the pictures that it began with

    def begin(self, *, live: bool = False) -> Self:
        """Draw the pictures of the request that are not finished on its cards.

        Args:
            live: whether it was begun by typing.

        Raises:
            RequestError: it cannot be served.
        """
        drawn = Request(
            tuple(
                None if card.picture else picture
                for picture, card in zip(self.request.pictures, self.cards, strict=False)
            )
        )
        self.count = len(drawn.indices())
        job = self._submit(drawn) if self.count else None
        with self._lock:
            if job:
                self._draw(job, drawn, live=live, whole=not live)
            else:
                self._say(StatusLine())
            self._first = self.version
            self._schedule_stop(GRACE_SECONDS)  # whoever asked may be gone before following it
        return self

    @property
    def over(self) -> bool:
        """Whether nothing will change any more, unless a picture is drawn again."""
        return not self._tasks and not self._unwritten

    @property
    def draws(self) -> bool:
        """Whether anything is drawn for it, or waits to be."""
        return bool(self._tasks)

    def pictures(self) -> dict[int, PictureFile]:
        """Return the finished pictures, by index."""
        return {card.index: card.picture for card in self.cards if card.picture}

    def seed_for(self, index: int) -> int:
        """Return the seed of a request whose picture at `index` keeps the seed that it has now."""
        asked = self.cards[index].asked
        return (asked.seed - index) % (MAX_SEED + 1) if asked else self.seed

    def stop(self) -> None:
        """End it, also while it waits; subscribers hear when it has stopped."""
        for task in self._tasks.copy():
            task.job.cancel()

    def redraw(self, index: int, picture: Picture | None, *, live: bool = False) -> bool:
        """Draw this picture at `index`, or take away the one that is there if it is None.

        A picture on its way there is cancelled, the other cards are left alone.

        Args:
            index: of the card.
            picture: its new settings.
            live: whether somebody types them.

        Returns:
            Whether there is anything new: a picture that is drawn so already is left alone.

        Raises:
            RequestError: it cannot be served; then all is as it was.
        """
        with self._lock:
            card = self.cards[index]
            if picture == card.asked and card.state != "stopped":
                return False
        request = Request().replaced(index, picture)
        # Resolving takes time: whoever follows the other pictures should not wait for it.
        job = self._submit(request) if picture else None
        with self._lock:
            if job:
                self._draw(job, request, live=live)
            else:
                self._take_over(index)
                self._put(BLANK[index])
                self._say(StatusLine(kind="over", aloud=False))
            self._schedule_stop()
            return True

    def accept(self, index: int) -> None:
        """Keep the picture at `index`, which more than typing has asked for, in the history.

        The next one that is typed takes its card all the same.
        """
        with self._lock:
            card = self.cards[index]
            before = card.before and dataclasses.replace(card.before, live=False)
            self.cards[index] = dataclasses.replace(card, live=False, before=before)

    def draw_journey(self, request: Request) -> None:
        """Draw a journey, which is on no card; once it is finished it is the run's `journey`.

        Raises:
            RequestError: it cannot be served.
        """
        job = self._submit(request, previews=False)
        with self._lock:
            self._draw(job, Request(), live=False, whole=True, journey={})
            self._schedule_stop()

    def draw_strip(self, index: int, request: Request) -> None:
        """Draw variants of a card's picture, under the card, which stays as it is.

        Variants that are there stay where the request has no picture in their place.

        Raises:
            RequestError: they cannot be served; then all is as it was.
        """
        job = self._submit(request, previews=False)
        with self._lock:
            self._drop_strip(index)
            card = self.cards[index]
            variants = {each.index: each for each in card.variants if each.picture} | {
                number: Card(number, request.picture(number), "waiting")
                for number in request.indices()
            }
            shown = tuple(variants[number] for number in sorted(variants))
            self._put(dataclasses.replace(card, variants=shown))
            self._draw(job, Request(), live=False, card=index, name=secrets.token_urlsafe(16))
            self._schedule_stop()

    def close_strip(self, index: int) -> None:
        """Take the variants of a card's picture away; those that are drawn stay in the history."""
        with self._lock:
            self._drop_strip(index)
            self._put(dataclasses.replace(self.cards[index], variants=()))
            busy = self.line.kind == "busy"
            self._say(StatusLine(kind="over", aloud=False) if busy else self.line)
            self._schedule_stop()

    def way(self) -> tuple[dict[int, PictureFile], int]:
        """Return the pictures by index of the journey that is drawn, or was last, and how many it
        has when it is finished."""
        with self._lock:
            for task in reversed(self._tasks):
                if task.journey is not None:
                    return dict(task.journey), len(task.job.request.pictures)
            return dict(enumerate(self.journey)), len(self.journey)

    # --- subscribers ----------------------------------------------------------------------------

    async def stream(self, session: str, seen: int = 0) -> AsyncIterator[Snapshot]:
        """Yield the changes since version `seen`, then further ones until the run is over.

        The stream ends when the session leaves, and is empty if the session is subscribed already.
        A slow subscriber misses versions that others have overtaken, and nothing else. Beyond
        MAX_SUBSCRIBERS the oldest subscription ends.
        """
        me = _Subscriber()
        with self._lock:
            if session in self._subscribers:
                return
            if len(self._subscribers) == MAX_SUBSCRIBERS:
                self.unsubscribe(next(iter(self._subscribers)))
            self._subscribers[session] = me
            self._schedule_stop()
        try:
            while snapshot := await self._next(session, me, seen):
                seen = snapshot.version
                yield snapshot
        finally:
            self.unsubscribe(session, me)

    async def _next(self, session: str, me: _Subscriber, seen: int) -> Snapshot | None:
        """Wait for changes that this subscriber has not seen.

        Returns None, and ends the subscription, if there is nothing to wait for.
        """
        while True:
            with self._lock:
                mine = self._subscribers.get(session) is me
                if mine and self.version != seen:
                    return self._since(seen)
                if not mine or self.over:
                    self.unsubscribe(
                        session, me
                    )  # whoever draws again from now on must follow anew
                    return None
            await me.wait()

    def _since(self, seen: int) -> Snapshot:
        cards = tuple(card for card in self.cards if card.changed > seen or not seen)
        done = [card.index + 1 for card in cards if card.ready > max(seen, self._first)]
        end = [self.line.text] if not self._tasks and self.line.aloud else []
        return Snapshot(self.version, cards, self.line, (*ready(done), *end))

    def is_streamed_to(self, session: str) -> bool:
        """Whether this session is subscribed."""
        return session in self._subscribers

    def unsubscribe(self, session: str, me: _Subscriber | None = None) -> None:
        """End this session's subscription; with `me`, only if that is still its subscriber."""
        with self._lock:
            there = self._subscribers.get(session)
            if there and me in (None, there):
                del self._subscribers[session]
                there.wake()
                self._schedule_stop()

    def stop_if_unwatched(self) -> None:
        """End it unless somebody is subscribed."""
        if not self._subscribers:
            self.stop()

    def _schedule_stop(self, grace: float | None = None) -> None:
        """Stop the run if nobody comes back to it in time; called with the lock held."""
        if self._stopping:
            self._stopping.cancel()
        if self._subscribers or self.over:
            return
        if grace is None:
            grace = GRACE_SECONDS if self.browser else 0
        self._stopping = asyncio.run_coroutine_threadsafe(self._stop_after(grace), _loop())

    async def _stop_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.stop_if_unwatched)

    def _submit(self, request: Request, *, previews: bool = True) -> Job:
        inputs = self._backend.inputs.of(self.browser, request.inputs())
        return self._backend.engine.submit(
            request,
            previews=previews and bool(self.browser),
            inputs=inputs,
            client=self._client,
            address=self.address,
        )

    # --- cards; all of this is called with the lock held ----------------------------------------

    def _draw(self, job: Job, request: Request, **what: Any) -> None:
        """Let a job draw the request's pictures on their cards; other arguments are `Task`'s."""
        task = Task(job, {*request.indices()}, **what)
        if not self._tasks:
            self._first = self.version  # who comes from now on need not be told of what was there
        for index in request.indices():
            self._take_over(index)
            self._put(self.cards[index].drawn_anew(request.picture(index)))
        self._tasks.append(task)
        self._say(task.line)
        task.served = asyncio.run_coroutine_threadsafe(self._serve(task), _loop())

    def _take_over(self, index: int) -> None:
        """Take the card from the task that draws on it, and from that of its strip."""
        self._drop_strip(index)
        for task in [task for task in self._tasks if index in task.indices]:
            task.indices.remove(index)
            task.job.cancel(index)
            if not task.indices:
                self._tasks.remove(task)

    def _drop_strip(self, index: int) -> None:
        """End the task that draws the strip of a card, if one does."""
        for task in [task for task in self._tasks if task.card == index]:
            self._tasks.remove(task)
            task.job.cancel()

    def _put(self, card: Card, *, ready: bool = False) -> None:
        """Change a card, and the labels of others that now differ from it in other settings.

        `ready` says that the card's picture is new.
        """
        self.version += 1
        self.cards[card.index] = dataclasses.replace(
            card, changed=self.version, ready=self.version if ready else card.ready
        )
        if self.request.picture_at(card.index) != card.asked:
            self.request = self.request.replaced(card.index, card.asked)
        for index in self.request.indices():
            named = self.request.labelled(index)
            if named != self.cards[index].named:
                self.cards[index] = dataclasses.replace(
                    self.cards[index], named=named, changed=self.version
                )

    def _say(self, end: StatusLine) -> None:
        """Show the status of the latest task, or how the last one ended."""
        line = self._tasks[-1].line if self._tasks else end
        single = not any(task.whole for task in self._tasks)
        self.line = dataclasses.replace(line, single=single)
        self.version += 1
        for subscriber in self._subscribers.values():
            subscriber.wake()

    # --- events of jobs -------------------------------------------------------------------------

    async def _serve(self, task: Task) -> None:
        try:
            async for event in task.job.events_async():
                await asyncio.to_thread(self._take, task, event)  # writes files
        except Exception:  # a disk that is full, say: nobody should be left with a dead page
            log.exception("a run failed")
            try:
                task.job.cancel()
                await asyncio.to_thread(self._take, task, Failed(BROKEN))
            except Exception:
                log.exception("nor could it be said that it did")

    def _take(self, task: Task, event: Event) -> None:
        changes = self._changes(task, event)
        with self._lock:
            if task not in self._tasks:  # all that it drew has been asked for anew
                return
            for index in changes.keys() & task.indices:
                before = self.cards[index]
                self._put(
                    dataclasses.replace(before, **changes[index]),
                    ready=isinstance(event, ImageReady),
                )
                if self.cards[index].kept and before.kept != self.cards[index].kept:
                    self._keep(task, self.cards[index], before.finished)
            if task.card is not None:
                self._fill_strip(
                    task, task.card, changes, over=isinstance(event, Cancelled | Failed)
                )
            if isinstance(event, Cancelled | Failed):
                for card in [self.cards[index] for index in task.indices]:
                    if not card.picture:
                        self._put(card.finished or dataclasses.replace(card, state="stopped"))
            task.line = _status_after(task, event, self.seed)
            if task.journey and isinstance(event, Done):
                self.journey = [task.journey[index] for index in sorted(task.journey)]
            if task.line.kind != "busy":
                self._tasks.remove(task)
            self._say(task.line)

    def _fill_strip(
        self, task: Task, index: int, changes: Mapping[int, dict], *, over: bool
    ) -> None:
        """Show variants of a card that have come, and no others once it is over."""
        card = self.cards[index]
        variants = [
            dataclasses.replace(each, **changes.get(each.index, {})) for each in card.variants
        ]
        for each in variants:
            if each.kept and each.index in changes:
                self._keep(task, each, None)
        shown = tuple(each for each in variants if each.picture or not over)
        if shown != card.variants:
            self._put(dataclasses.replace(card, variants=shown))

    def _changes(self, task: Task, event: Event) -> dict[int, dict]:
        """Write the files that an event brings, and return its changes to cards by index."""
        match event:
            case Progress(previews=previews):
                return {
                    index: dict(state="forming", preview=data_url(pixels))
                    for index, pixels in previews.items()
                }
            case ImageReady(index, pixels, unsafe) if task.journey is not None:
                task.blurred |= unsafe
                task.journey[index] = self._backend.files.add(
                    task.job.request, index, pixels, self.browser
                )
            case ImageReady(index, pixels, unsafe) if (
                index in task.indices or task.card is not None
            ):
                task.blurred |= unsafe
                picture = self._backend.files.add(task.job.request, index, pixels, self.browser)
                history_name = new_name() if self._backend.history and self.browser else None
                return {
                    index: dict(state="done", picture=picture, live=task.live, kept=history_name)
                }
        return {}

    def _keep(self, task: Task, card: Card, before: Card | None) -> None:
        """Add a card's picture to the browser's history. Needs the lock.

        It replaces the picture of the card `before` if that was drawn while somebody typed.
        """
        history, owner = self._backend.history, self.browser
        assert history is not None

        def done(failure: HistoryError | None) -> None:
            if failure:  # which costs nobody a run
                log.error("a picture is missing from the history", exc_info=failure)
            elif task.live and before and before.live and before.kept:
                with suppress(HistoryError):  # then it has one too many
                    history.drop(owner, before.kept)
            self._note_kept(task, card, failure)

        history.add_later(
            owner,
            Path(card.picture.png),
            task.job.request.picture(card.index),
            done,
            name=card.kept,
            run=task.name or self.key,
            index=card.index,
        )
        self._unwritten += 1  # `done` waits for the lock

    def _note_kept(self, task: Task, card: Card, failure: HistoryError | None) -> None:
        """Say why a picture is not in the history, also of a run that is over.

        Subscribers may leave if that was the last picture to be written.
        """
        with self._lock:
            self._unwritten -= 1
            if failure:
                there = self.cards[card.index if task.card is None else task.card]
                if (noted := there.without_kept(card.kept)) != there:
                    self._put(noted)
                if task.line.kind == "over" and not task.unkept:
                    text = Sentence(
                        "{done}. {reason}", done=task.line.text, reason=failure.sentence
                    )
                    last = not self._tasks and self.line.text == task.line.text
                    task.line = dataclasses.replace(task.line, text=text)
                    if last:  # or it would be said in place of what came later
                        self._say(task.line)
                task.unkept = failure.sentence
            for subscriber in self._subscribers.values():
                subscriber.wake()


def _status_after(task: Task, event: Event, seed: int) -> StatusLine:
    """Return the status of a task after this event, in a run whose index 0 has this seed."""
    match event:
        case Queued(position, reason, seconds):
            return StatusLine(queued(position, reason, seconds), "busy", task.line.share)
        case Progress(step, steps, _, seconds):
            return StatusLine(at_step(step, steps, seconds), "busy", step / steps)
        case Done(seconds):
            # Only a seed that gives the pictures in their places again: those of a journey have no
            # places, and a picture with a seed of its own does not ask for the others'.
            named = task.journey is None and any(
                picture and picture.seed == (seed + index) % (MAX_SEED + 1)
                for index, picture in enumerate(task.job.request.pictures)
            )
            text = (
                Sentence("Done in {seconds:.1f} s, seed {seed}", seconds=seconds, seed=seed)
                if named
                else Sentence("Done in {seconds:.1f} s", seconds=seconds)
            )
            for reason in filter(None, (BLURRED if task.blurred else None, task.unkept)):
                text = Sentence("{done}. {reason}", done=text, reason=reason)
            return StatusLine(text, "over", 1.0, aloud=not task.live)
        case Cancelled():
            return StatusLine(Sentence("Stopped"), "over", task.line.share)
        case Failed(message):
            return StatusLine(message, "wrong", task.line.share)
    return task.line
