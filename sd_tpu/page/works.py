"""The jobs of all runs, and how long they take beside one another."""

import threading
import time

from sd_tpu.engine import Engine
from sd_tpu.job import Job
from sd_tpu.page.snapshot import Line
from sd_tpu.page.texts import Phrase


class Work:
    """A job of a run, and how far it is with the places that it still draws for it."""

    def __init__(self, job: Job, engine: Engine, *, live: bool = False):
        """Begins with all places that the job was asked for; `live` is one that was begun by
        typing, of which less is said and kept.
        """
        self.job, self.live = job, live
        self.places = set(job.request.places())
        self.count = len(self.places)
        # Of each picture alone; while that is not known, all take the same.
        self._seconds = {place: engine.seconds(job.request.only(place)) or 1.0
                         for place in self.places}
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


class Works:
    """What everybody who shares an engine has asked for and is not made yet."""

    def __init__(self):
        """Begins with nothing."""
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._pace: float | None = None  # what pictures take, for what they would take alone

    def add(self, work: Work) -> None:
        """Takes down what has been asked for."""
        with self._lock:
            self._works.append(work)

    def remove(self, work: Work) -> None:
        """Forgets what is over, or what nobody wants any more."""
        with self._lock:
            self._works.remove(work)

    def wait(self, job: Job) -> float | None:
        """Seconds until what was asked for before this job is made, if that can be told."""
        with self._lock:
            earlier = sum(work.left for work in self._works if work.job.number < job.number)
        return earlier * self._pace if self._pace else None

    def learn(self, work: Work, seconds: float) -> None:
        """Remembers how fast it went: the mean of what was known and what is new."""
        pace = seconds / work.seconds
        self._pace = pace if self._pace is None else (self._pace + pace) / 2
