"""A job: a submitted request, and the events that tell whoever made it how it goes."""

import asyncio
import dataclasses
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import numpy as np

from sd_tpu.pictures.images import blurred
from sd_tpu.pictures.inputs import Canvas
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.serving.tiling import Tiling

COMPILING = "compiling for the first time"  # reasons for waiting
LOADING = "loading the model's weights"
WAITING = "waiting for a free place"
ENDING = Sentence(
    "The server is shutting down before your pictures are done; please ask again in a minute."
)
BLURRED = Sentence("Pictures that the model's safety checker flagged are blurred")


@dataclasses.dataclass(frozen=True)
class Queued:
    """Waiting for its turn: number `position` in the queue, from 1; `reason` says what for, and
    `seconds` for how long, if that is known."""

    position: int
    reason: str
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """Step `step` of `steps`; previews uint8 [h, w, 3] by index, smaller than the pictures;
    `seconds` until all pictures are there, if that is known.

    `steps` are those of the image that takes most, and `step` is as far along them as the job is
    with all its work: the evaluations of the model for all its images that are still wanted, of
    which Heun's steps take two. For images that are alike it is the mean of their steps.
    """

    step: int
    steps: int
    previews: dict[int, np.ndarray]
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class ImageReady:
    """The finished picture at `index`: uint8 [H, W, 3], blurred where it is `unsafe`: where the
    model's safety checker flagged it as not safe for work."""

    index: int
    pixels: np.ndarray
    unsafe: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """All pictures that are still wanted are there; `seconds` since the first was begun."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Cancelled:
    """The job was cancelled; no more events follow."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The job failed for a reason that is not in the request."""

    message: Sentence


@dataclasses.dataclass(frozen=True)
class Interrupted(Failed):
    """The server ended before the job did."""

    message: Sentence = ENDING


class DrawingError(RuntimeError):
    """Pictures were not drawn, for a reason that is not in the request; `sentence` says which."""

    def __init__(self, sentence: str):
        """Take the message for the person who waits."""
        super().__init__(sentence)
        self.sentence = sentence


End = Done | Cancelled | Failed
Event = Queued | Progress | ImageReady | End


class Job:
    """A submitted request: iterate over `events()` or `events_async()`, or `cancel()` it."""

    def __init__(
        self,
        request: Request,
        number: int,
        client: str,
        cancel: Callable[[int, int | None], None],
        canvases: Mapping[int, Canvas | None] | None = None,
        address: str = "",
        tilings: Mapping[int, Tiling] = MappingProxyType({}),
    ):
        """Begin a job, for `EngineClient.submit`.

        Args:
            request: of its pictures.
            number: of the job.
            client: the name of who asks.
            cancel: called with the number and an index to cancel a picture, or with None for all.
            canvases: the start pictures, by index.
            address: where the client is.
            tilings: the tiles of pictures that are drawn by tiles, by index.
        """
        self.request, self.number = request, number
        self.client, self.address = client, address
        self.end: End | None = None  # how it ended, once it has
        self.since = time.monotonic()
        self._cancel, self._canvases = cancel, canvases or {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tilings = tilings
        self._tiles: dict[int, dict[int, ImageReady]] = {index: {} for index in tilings}
        self._ended = self._listening = False
        self._wake: Callable[[], None] = lambda: None  # whoever awaits events
        self._read_at = self.since

    def events(self) -> Iterator[Event]:
        """Yield events as they happen, each once; the last is Done, Cancelled or Failed."""
        while not self._ended:
            with self._listens():
                event = self._events.get()
            # Here: the engine's thread has all clients waiting.
            if taken := self._taken(event):
                yield taken

    async def events_async(self) -> AsyncIterator[Event]:
        """Yield the events of `events` on an event loop, which they wake."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended with the program
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        while not self._ended:
            arrived.clear()
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                with self._listens():
                    await arrived.wait()
                continue
            self._read_at = time.monotonic()
            # Blending takes time that others on the loop should not wait.
            blends = self._canvases or self._tilings
            taken = await asyncio.to_thread(self._taken, event) if blends else self._taken(event)
            if taken:
                yield taken

    @contextmanager
    def _listens(self) -> Iterator[None]:
        self._listening = True
        try:
            yield
        finally:
            self._listening, self._read_at = False, time.monotonic()

    def _taken(self, event: Event) -> Event | None:
        """Return an event as whoever takes it is to see it; None while tiles are still to come."""
        if isinstance(event, End):
            self._ended, self._canvases, self._tiles = True, {}, {}
        return self._composed(self._whole(event))

    def cancel(self, index: int | None = None) -> None:
        """Stop the job, or only its picture at `index`.

        Pictures that wait are gone at once; a slot is free after one call of `advance`, and
        pictures that this call finishes are delivered.
        """
        for each in tile_indices(self.request, index, self._tilings.get(index)):
            self._cancel(self.number, each)

    def put(self, event: Event) -> None:
        """Add an event, for the engine; after one that ends the job there are no more."""
        if self.end is not None:
            return
        if isinstance(event, End):
            self.end = event
        self._events.put(event)
        self._wake()

    def _whole(self, event: Event) -> Event | None:
        """Return the event of a whole picture; None while tiles of it are still to come."""
        match event:
            case ImageReady(index=where):
                number, index = divmod(where, len(self.request.pictures))
                if (tiles := self._tiles.get(index)) is None:
                    return event
                tiles[number] = event
                if len(tiles) < len(self._tilings[index]):
                    return None
                pixels = self._tilings[index].blended(
                    {number: tile.pixels for number, tile in tiles.items()}
                )
                unsafe = any(tile.unsafe for tile in tiles.values())
                tiles.clear()
                return ImageReady(index, blurred(pixels) if unsafe else pixels, unsafe)
        return event

    def _composed(self, event: Event | None) -> Event | None:
        """Return the event with the kept parts of start pictures as they were given."""
        match event:
            case ImageReady(index, pixels):
                return dataclasses.replace(event, pixels=self._with_kept(index, pixels))
            case Progress(previews=previews) if previews:
                return dataclasses.replace(
                    event,
                    previews={
                        index: self._with_kept(index, pixels) for index, pixels in previews.items()
                    },
                )
        return event

    def _with_kept(self, index: int, drawn: np.ndarray) -> np.ndarray:
        canvas = self._canvases.get(index)
        return canvas.composed(drawn) if canvas else drawn

    def idle_seconds(self) -> float:
        """Seconds since anybody took an event or waited for one."""
        return 0.0 if self._listening else time.monotonic() - self._read_at


def tile_indices(request: Request, index: int | None, tiling: Tiling | None) -> list[Any]:
    """Return the indices of a picture's tiles: the picture's own, then ones beyond all pictures.

    A picture without tiles has its own index alone.
    """
    return (
        [index]
        if tiling is None or index is None
        else [index + number * len(request.pictures) for number in range(len(tiling))]
    )
