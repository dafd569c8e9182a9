"""A job: a submitted request, and the events that tell whoever made it how it goes."""

import dataclasses
import math
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from sd_tpu.programs import Arrival
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence

COMPILING = "compiling for the first time"  # what a job may wait for


@dataclasses.dataclass(frozen=True)
class Queued:
    """Waiting for a slot: number `position` in the queue, from 1; `reason` says what for."""

    position: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Progress:
    """Step `step` of `steps`; previews uint8 [H, W, 3] by place.

    `steps` are those of the image that takes most, and `step` is as far along them as the job is
    with all its work: the evaluations of the model for all its images that are still wanted, of
    which Heun's steps take two. For images that are alike it is the mean of their steps.
    """

    step: int
    steps: int
    previews: dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ImageReady:
    """The finished picture at `place`: uint8 [H, W, 3]."""

    place: int
    pixels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Done:
    """All pictures that are still wanted are there; `seconds` since the first entered a slot."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Cancelled:
    """The job was cancelled; no more events follow."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The job failed for a reason that is not in the request."""

    message: Sentence


End = Done | Cancelled | Failed
Event = Queued | Progress | ImageReady | End


class Job:
    """A submitted request: iterate over `events()`, or `cancel()` it."""

    def __init__(self, request: Request, number: int, arrivals: dict[int, Arrival],
                 withdraw: Callable[["Job", Iterable[int]], None], previews: bool):
        """Made by `Engine.submit`; arrivals by place in the request."""
        self.request, self.number = request, number
        self._withdraw = withdraw
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._steps = max(request.only(place).steps for place in arrivals)
        self._over = self._told = False
        self._position: tuple[int, str] | None = None
        # The rest is the engine's account of it.
        self.arrivals = arrivals
        self.waiting = deque(arrivals)  # places without a slot so far
        self.unwanted: set[int] = set()  # places whose pictures were cancelled
        self.rows = {place: len(arrival.table.rows) for place, arrival in arrivals.items()}
        self.rows_left = dict(self.rows)
        self.begun: float | None = None
        self.next_preview = None if previews else math.inf  # when it is due, once that is known

    def events(self) -> Iterator[Event]:
        """Yields events as they happen, each once; the last is Done, Cancelled or Failed."""
        while not self._told:
            event = self._events.get()
            self._told = isinstance(event, End)
            yield event

    @property
    def cancelled(self) -> bool:
        """Whether none of its pictures is wanted any more."""
        return self.unwanted >= self.arrivals.keys()

    def cancel(self, place: int | None = None) -> None:
        """Stops the job, or only its picture at `place`.

        What still waits is gone at once; a slot is free after one call of `advance`, and what is
        finished by that call is delivered.
        """
        self._withdraw(self, self.arrivals if place is None else [place])

    # --- for the engine -------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Adds an event; after one that ends the job there are no more."""
        if not self._over:
            self._events.put(event)
        if isinstance(event, End):
            self._over = True

    def tell_position(self, position: int, reason: str) -> None:
        """Tells its place in the queue, if that has changed."""
        if self._position != (position, reason):
            self._position = (position, reason)
            self.tell(Queued(position, reason))

    def progress(self, previews: dict[int, np.ndarray]) -> Progress:
        """How far it is with all that is still wanted of it."""
        wanted = self.rows.keys() - self.unwanted or self.rows
        rows, left = (sum(of[place] for place in wanted) for of in (self.rows, self.rows_left))
        return Progress(self._steps * (rows - left) // rows, self._steps, previews)
