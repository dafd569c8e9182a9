"""One thread owns the devices and serves many people: a queue of jobs, their images in slots.

Between two calls of `advance` finished images leave their slots and waiting ones enter, so images
of several jobs share a batch (continuous batching), and a job that is cancelled stops at once.
"""

import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from sd_tpu.config import BUNDLED_MODEL, ModelCard
from sd_tpu.denoise import Slots, row_kinds
from sd_tpu.images import to_png
from sd_tpu.job import COMPILING, Cancelled, Done, Event, Failed, ImageReady, Job
from sd_tpu.pace import Pace
from sd_tpu.pipeline import FlaxStableDiffusionPipeline
from sd_tpu.programs import Arrival, Programs
from sd_tpu.request import Request, RequestError, Settings
from sd_tpu.samplers import default_sampler, make_table
from sd_tpu.sentence import Sentence
from sd_tpu.sharding import make_mesh, replicated
from sd_tpu.weights import Params

log = logging.getLogger(__name__)

SLOTS = 8
ACCELERATOR_GROUP = 4  # slots stepped together at most; a guess until it has been measured
MAX_WAITING = 100  # jobs


@dataclasses.dataclass
class _Occupant:
    """The image in a slot, as the host keeps account of it."""

    job: Job
    place: int

    @property
    def wanted(self) -> bool:
        return self.place not in self.job.unwanted

    @property
    def rows_left(self) -> int:
        return self.job.rows_left[self.place]

    @property
    def kinds_left(self) -> np.ndarray:
        """What the rows evaluate that are still to be taken, as `Arrival.kinds`."""
        kinds = self.job.arrivals[self.place].kinds
        return kinds[len(kinds) - self.rows_left:]


class Engine:
    """Makes pictures for whoever asks, on all devices of its mesh."""

    def __init__(self, pipeline: FlaxStableDiffusionPipeline, params: Params, mesh: Mesh,
                 defaults: Settings, *, group: int = 1):
        """Starts the thread, which compiles the programs and then serves.

        Args:
            pipeline: tokenizer, noise schedule and networks.
            params: on every device of the mesh.
            mesh: the devices.
            defaults: settings of requests that leave them open; their size is the only size.
            group: guided slots that a device steps together.

        Raises:
            ValueError: the model cannot make pictures of the defaults' size.
        """
        self.pipeline, self.mesh, self.defaults = pipeline, mesh, defaults
        self.programs = Programs(pipeline.models, mesh, slots=SLOTS, height=defaults.height,
                                 width=defaults.width, group=group)
        self.params = params
        self._slots = None
        self._occupants: list[_Occupant | None] = [None] * self.programs.slots
        self._jobs: deque[Job] = deque()  # those with images that wait for a slot
        self._numbers = itertools.count(1)
        self._change = threading.Condition()
        self._closed = False
        self._pace = Pace(group)
        self.ready = threading.Event()  # compiled, or failed to
        self.failure: Sentence | None = None  # why compiling failed
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, model: str | Path = BUNDLED_MODEL, *, revision: str | None = None,
             variant: str | None = None, dtype: str | None = None, devices: int | None = None,
             size: tuple[int, int] | None = None, group: int | None = None,
             token_downsampling: int = 1) -> Self:
        """Loads a checkpoint and starts an engine for it.

        Args:
            model: folder or hub id.
            revision: branch, tag or commit on the hub.
            variant: of the weight files, such as "fp16".
            dtype: "float32" or "bfloat16"; by default float32 on CPU and bfloat16 elsewhere.
            devices: how many of this process's devices to use; all by default.
            size: height and width of the pictures; by default what the model was trained on.
            group: guided slots that a device steps together; by default what its platform is good
                at.
            token_downsampling: as `FlaxStableDiffusionPipeline.from_pretrained` takes it.

        Raises:
            CheckpointError: the model cannot be loaded.
            ValueError: there are too few devices, or the size or the downsampling is not possible.
        """
        mesh = make_mesh(devices)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        dtype = dtype or ("float32" if on_cpu else "bfloat16")
        pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
            model, revision=revision, variant=variant, dtype=dtype, sharding=replicated(mesh),
            token_downsampling=token_downsampling,
        )
        card, (height, width) = pipeline.card, size or pipeline.default_size
        defaults = dataclasses.replace(
            card_defaults(card, pipeline.configs["scheduler"]), height=height, width=width
        )
        if group is None:
            group = 1 if on_cpu else min(ACCELERATOR_GROUP, max(1, SLOTS // mesh.size))
        return cls(pipeline, params, mesh, defaults, group=group)

    def submit(self, request: Request, *, previews: bool = True) -> Job:
        """Queues a checked request; without `previews` no time goes into drawing them.

        Raises:
            RequestError: a sampler cannot take its steps, or too many jobs wait already.
        """
        arrivals = {place: self.arrival(request, place) for place in request.places()}
        with self._change:
            if self._closed:
                raise RequestError("The server is shutting down.")
            if len(self._jobs) >= MAX_WAITING:
                raise RequestError("Too many people are waiting; please try again in a minute.")
            job = Job(request, next(self._numbers), arrivals, self._withdraw, previews)
            self._jobs.append(job)
            self._tell_positions()
            self._change.notify()
        return job

    def arrival(self, request: Request, place: int) -> Arrival:
        """The picture at `place` as the programs take it.

        Raises:
            RequestError: its sampler cannot take its steps.
        """
        alone = request.only(place)
        try:
            table = make_table(alone.sampler, self.pipeline.schedule, alone.steps,
                               spacing=alone.spacing)
        except ValueError as error:
            own = request.own_at(place).given()
            whose = Sentence("Prompt {number}: ", number=place + 1) if own else ""
            raise RequestError("{whose}{reason}", whose=whose, reason=error.args[0]) from error
        return Arrival(
            ids=self.pipeline.prepare_inputs([alone.negative_prompt, *alone.prompts]),
            table=table,
            guidance=alone.guidance,
            guidance_start=alone.guidance_start,
            guidance_stop=alone.guidance_stop,
            cache_interval=alone.cache_interval,
            # What jax.random.PRNGKey makes of the seed, without asking a device.
            key=np.array([0, alone.seed], np.uint32),
        )

    @property
    def occupied(self) -> int:
        """How many slots have a picture on its way."""
        return sum(map(bool, self._occupants))

    def seconds(self, settings: Settings) -> float | None:
        """What one picture with these settings takes while no other is made, as far as is known;
        None before anything is, or if the sampler cannot take its steps.
        """
        try:
            table = make_table(settings.sampler, self.pipeline.schedule, settings.steps,
                               spacing=settings.spacing)
        except ValueError:
            return None
        if self.failure or not self.ready.is_set():
            return None
        kinds = row_kinds(table, settings.guidance, start=settings.guidance_start,
                          stop=settings.guidance_stop, interval=settings.cache_interval)
        return self._pace.of_picture(kinds)

    def notes(self, request: Request) -> list[str]:
        """Sentences about words past the 77 tokens that the model sees, or unknown to it."""
        texts = {f"Prompt {place + 1}": request.prompts[place] for place in request.places()}
        for place in request.places():
            shared = request.own_at(place).negative_prompt is None
            whose = "" if shared else f" of prompt {place + 1}"
            texts[f"The negative prompt{whose}"] = request.only(place).negative_prompt
        lost = {name: self.pipeline.tokenizer.lost(text) for name, text in texts.items()}
        notes = [f"{name} is too long for the model, which will not see its end: “{_short(words)}”"
                 for name, words in lost.items() if words]
        asked = " ".join(request.prompts[place] for place in request.places())
        if unknown := self.pipeline.card.unknown_words(asked):
            notes.append("The model was never shown these words, and draws something else there: "
                         f"“{_short(', '.join(unknown))}”")
        return notes

    def to_png(self, pixels: np.ndarray, request: Request) -> bytes:
        """A PNG file of pixels uint8 [H, W, 3] that says which request and model made them, and
        names the common spacing of the steps also where that was left to the model."""
        return to_png(pixels, request.explicit(self.pipeline.schedule), self.pipeline.card.name,
                      token_downsampling=self.pipeline.models.token_downsampling)

    def close(self) -> None:
        """Cancels everything and ends the thread."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    # --- the engine's thread --------------------------------------------------------------------

    def _serve(self) -> None:
        self._warm_up()
        while True:
            with self._change:
                while not (self._closed or self._jobs or any(self._occupants)):
                    self._change.wait()
                if self._closed:
                    return self._abandon(Cancelled())
            try:
                with self._change:
                    entering = self._admit()
                self._turn(entering)
            except Exception as error:  # whatever the devices raise: the other jobs must go on
                log.exception("a batch failed")
                self._recover(error)

    def _warm_up(self) -> None:
        """Compiles the three programs on idle slots, and times the second whole and the second
        shallow evaluation for a picture: the first ones take much longer than any other.
        """
        try:
            slots = self.programs.encode(self.params, self.programs.empty(), {})
            slots = self.programs.advance(self.params, slots, 0)
            self._decode(slots.latents, [])
            settings = {"steps": max(4, self.defaults.steps), "cache_interval": 2}
            sample = Request(**{**vars(self.defaults), **settings}, prompts=("a sample",))
            slots = self.programs.encode(self.params, slots, {0: self.arrival(sample, 0)})
            for row in range(4):
                slots, self._pace.row_seconds[row % 2] = self._advance(slots, 1)
            for _ in range(2):
                self._decode(slots.latents, [0])
            self._slots = self.programs.encode(self.params, slots, {0: None})
        except Exception as error:  # such as a device without memory enough
            log.exception("compiling failed")
            self.failure = Sentence("Compiling failed: {reason}", reason=_first_line(error))
            self._recover(error)
        with self._change:
            self.ready.set()
            self._tell_positions()

    def _turn(self, entering: dict[int, Arrival | None]) -> None:
        """One call of `advance`, and what goes before and after it."""
        if self._slots is None:  # a failed call may have given them up
            self._slots = self.programs.empty()
        if entering:
            self._slots = self.programs.encode(self.params, self._slots, entering)
        live = {i: occupant for i, occupant in enumerate(self._occupants) if occupant}
        if not live:
            return
        rows, evaluations = self._pace.next_rows(self._kinds(live))
        self._slots, seconds = self._advance(self._slots, rows)
        self._pace.learn(evaluations, seconds)
        for occupant in live.values():
            occupant.job.rows_left[occupant.place] -= rows
        self._deliver({i: o for i, o in live.items() if not o.rows_left})
        self._report({i: o for i, o in live.items() if o.rows_left and o.wanted})

    def _advance(self, slots: Slots, rows: int) -> tuple[Slots, float]:
        """The slots some rows on, and how many seconds that took. Donates `slots`."""
        begun = time.monotonic()
        slots = jax.block_until_ready(self.programs.advance(self.params, slots, rows))
        return slots, max(time.monotonic() - begun, 1e-6)

    def _kinds(self, live: Mapping[int, _Occupant]) -> list[np.ndarray]:
        """Of each device's live slots, the kinds of all rows that they take before one ends."""
        rows = min(occupant.rows_left for occupant in live.values())
        on_devices: dict[int, list[np.ndarray]] = {}
        for i, occupant in live.items():
            on_devices.setdefault(self.programs.device(i), []).append(occupant.kinds_left[:rows])
        return [np.stack(kinds) for kinds in on_devices.values()]

    def _most(self, slots: Iterable[int]) -> int:
        """How many of the slots are on the device that has most of them; 1 if there are none."""
        return max(Counter(map(self.programs.device, slots)).values(), default=1)

    def _admit(self) -> dict[int, Arrival | None]:
        """Frees slots of cancelled pictures and fills free ones; what `encode` must be told."""
        entering: dict[int, Arrival | None] = {}
        for i, occupant in enumerate(self._occupants):
            if occupant and not occupant.wanted:
                self._occupants[i] = None
                entering[i] = None
                self._end_if_idle(occupant.job)
        while self._jobs and None in self._occupants:
            slot, job = self._free_slot(), self._jobs[0]
            job.begun = job.begun or time.monotonic()
            place = job.waiting.popleft()
            self._occupants[slot] = _Occupant(job, place)
            entering[slot] = job.arrivals[place]
            if not job.waiting:
                self._jobs.popleft()
        self._tell_positions()
        return entering

    def _free_slot(self) -> int:
        """The first free one on a device that has the fewest pictures."""
        slots = range(self.programs.slots)
        live = Counter(self.programs.device(i) for i in slots if self._occupants[i])
        free = [i for i in slots if not self._occupants[i]]
        return min(free, key=lambda slot: live[self.programs.device(slot)])

    def _deliver(self, finished: dict[int, _Occupant]) -> None:
        if not finished:
            return
        images = self._decode(self._slots.latents, finished)
        with self._change:
            for i, occupant in finished.items():
                self._occupants[i] = None
                occupant.job.tell(ImageReady(occupant.place, images[i]))
                self._end_if_idle(occupant.job)

    def _report(self, live: dict[int, _Occupant]) -> None:
        """Progress for each job that runs, with previews where they are due."""
        jobs = {occupant.job.number: occupant.job for occupant in live.values()}.values()
        for job in jobs:
            if job.next_preview is None:
                mine = self._most(i for i, o in live.items() if o.job is job)
                job.next_preview = job.begun + self._pace.preview_pause(mine)
        now = time.monotonic()
        due = {i: o for i, o in live.items() if now >= o.job.next_preview}
        images = self._decode(self._slots.clean, due) if due else None
        for job in jobs:
            previews = {o.place: images[i] for i, o in due.items() if o.job is job}
            if previews:
                job.next_preview = time.monotonic() + self._pace.preview_pause(self._most(due))
            job.tell(job.progress(previews))

    def _decode(self, latents: jax.Array, wanted) -> np.ndarray:
        begun = time.monotonic()
        mask = np.isin(np.arange(self.programs.slots), list(wanted))
        images = np.asarray(self.programs.decode(self.params, latents, mask))
        self._pace.decode_seconds = (time.monotonic() - begun) / self._most(wanted)
        return images

    def _withdraw(self, job: Job, places: Iterable[int]) -> None:
        """Marks pictures as unwanted and takes them out of the queue, for `Job.cancel`."""
        with self._change:
            job.unwanted.update(places)
            job.waiting = deque(p for p in job.waiting if p not in job.unwanted)
            if job in self._jobs and not job.waiting:
                self._jobs.remove(job)
                self._end_if_idle(job)
            self._tell_positions()
            self._change.notify()

    def _end_if_idle(self, job: Job) -> None:
        """Ends a job of which nothing is left to be made. Needs the lock."""
        if not job.waiting and not any(o and o.job is job for o in self._occupants):
            job.tell(Cancelled() if job.cancelled else Done(time.monotonic() - job.begun))

    def _recover(self, error: Exception) -> None:
        """Ends the jobs that were in the slots; the next turn starts over with empty ones."""
        message = Sentence("Making the pictures failed: {reason}", reason=_first_line(error))
        self._slots = None
        with self._change:
            failed = {o.job.number: o.job for o in self._occupants if o}
            self._occupants = [None] * self.programs.slots
            for job in failed.values():
                job.tell(Failed(message))
            self._jobs = deque(job for job in self._jobs if job.number not in failed)

    def _abandon(self, event: Event) -> None:
        for job in [*self._jobs, *(o.job for o in self._occupants if o)]:
            job.tell(event)

    def _tell_positions(self) -> None:
        """Tells each waiting job its place in the queue, if that has changed. Needs the lock."""
        ready = self.ready.is_set()
        reason = "waiting for a free place" if ready else COMPILING
        waiting = [job for job in self._jobs if job.begun is None]
        for position, job in enumerate(waiting, start=1):
            job.tell_position(position, reason)


def card_defaults(card: ModelCard, scheduler_config: dict[str, Any]) -> Settings:
    """What a model's own files say of how to draw with it; the size is not in these."""
    sampler, spacing = default_sampler(scheduler_config)
    if card.sampler:
        sampler, spacing = card.sampler, card.spacing
    return Settings(steps=card.steps, guidance=card.guidance, sampler=sampler, spacing=spacing)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
