"""Makes pictures for whoever asks: jobs come in, their events go out.

One thread asks the scheduler what to do and has the worker do it, turn by turn. Between two turns
finished images leave their slots and waiting ones enter, so images of several jobs share a batch
(continuous batching), and a job that is cancelled stops at once.
"""

import copy
import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence, Set
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Self, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sd_tpu.checkpoint.config import BUNDLED_MODEL, CheckpointError, paths_within
from sd_tpu.checkpoint.weights import Params
from sd_tpu.doctor import Device, Diagnosis, diagnose
from sd_tpu.families.adapters import Adapters
from sd_tpu.families.checkpoint import bytes_of
from sd_tpu.families.extra_network import ExtraNetwork
from sd_tpu.families.latent_diffusion import REFERENCE
from sd_tpu.families.model import Model
from sd_tpu.runtime.dtype import chosen_dtype
from sd_tpu.runtime.mesh import device_bytes, make_mesh
from sd_tpu.runtime.programs import ImageEncoder, Programs, encoded
from sd_tpu.runtime.slots import (
    MASKED_PICTURE,
    REFERENCE_PICTURE,
    START_PICTURE,
    PictureSize,
    SlotInputs,
    empty_slots,
)
from sd_tpu.runtime.weights import merge
from sd_tpu.sentence import Sentence
from sd_tpu.serving import journal
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.client import (
    ABANDONED_SECONDS,
    Closing,
    EngineClient,
    ModelOptions,
    Status,
    open_models,
)
from sd_tpu.serving.encoders import Encoders
from sd_tpu.serving.job import Cancelled, Event, Interrupted, Job, tile_indices
from sd_tpu.serving.latency import LatencyModel, lanes_left
from sd_tpu.serving.plan import Batch, Plan, Report, Ticket, Weights
from sd_tpu.serving.resolve import BatchKey, ResolvedPicture, ResolvedRequest
from sd_tpu.serving.scheduler import Busy, Scheduler
from sd_tpu.serving.tally import Tally
from sd_tpu.serving.worker import Worker, reason_of
from sd_tpu.settings import Picture

log = logging.getLogger(__name__)

SLOTS = 8
# Slots stepped together at most. By the TPU compiler's cycles for a step of SD 1.4, fours take 20%
# less a picture than ones on v3 and v5e, a third less on v4 and v6e and a tenth less on v2, and on
# v5e 5% less than eights (decision 0009).
ACCELERATOR_GROUP = 4
MAX_SIZES = 512  # of models that somebody has asked about and nobody draws


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Purpose of a batch's programs.

    Attributes:
        architecture: of the checkpoint, by its name.
        model: for texts of this length.
        networks: beside the model's own.
    """

    architecture: str
    model: Any  # of a family
    networks: tuple[ExtraNetwork, ...] = ()


class Engine(EngineClient):
    """Engine that makes pictures for whoever asks, on all devices of its mesh."""

    def __init__(
        self,
        catalog: Catalog,
        mesh: Mesh,
        *,
        group: int = 1,
        memory: int | None = None,
        adapters: Adapters | None = None,
    ):
        """Read the first model's parameters and start the thread, which compiles and then serves.

        Args:
            catalog: the models.
            mesh: the devices.
            group: slots that a device steps together.
            memory: bytes of each device that may be taken; None is what the devices have.
            adapters: LoRAs and embeddings that prompts may use.

        Raises:
            CheckpointError: the first model's parameters cannot be read.
        """
        super().__init__(catalog, adapters)
        self.mesh, self._group = mesh, group
        self._encoders = Encoders()
        self._finished_jobs: list[int] = []  # jobs whose encoders may still be used by a plan
        self._loaded = 0  # parameters, which may be others each time
        self.worker = Worker(mesh, self._read, self._build, self._prepare)
        params = self._read(self.weights, self.worker.weights.on(range(mesh.size)))
        self._batches: dict[BatchKey, Batch] = {}
        self._submitting: dict[int, set[Batch]] = {}  # needed by jobs that are being submitted
        self._kinds: dict[Batch, _Kind] = {}
        self.batch = self._batch(self.resolver.estimated(_with_steps(self.defaults)))
        self.programs = self._programs_of(self.batch)
        self.latency = LatencyModel()
        least = sum(each.memory for each in (self.batch, *self.batch.needs, self.weights))
        limit = memory or max(device_bytes(mesh), least)
        self.scheduler = Scheduler(mesh.size, self.latency, memory=limit)
        for device in range(mesh.size):
            self.scheduler.hold(device, self.weights)
            self.worker.weights.record(device, self.weights, params)
        self.tally = Tally()
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._change = threading.Condition()  # guards the scheduler and the jobs
        self._closed = self._draining = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        model: str | Path = BUNDLED_MODEL,
        *,
        devices: int | None = None,
        memory: int | None = None,
        group: int | None = None,
        dtype: str | None = None,
        **options: Unpack[ModelOptions],
    ) -> Self:
        """Load a checkpoint and start an engine for it.

        >>> with Engine.open() as engine:
        ...     (cat,) = engine.draw("a cat")

        Args:
            model: folder, single file or hub id, or the name of one of the other models.
            devices: how many of this process's devices to use; all by default.
            memory: bytes of each device that may be taken; by default what it has.
            group: slots that a device steps together; by default what its platform is good at.
            dtype: "float32" or "bfloat16", or "auto" for what the platform is fastest in; by
                default float32 on CPU and bfloat16 elsewhere.
            options: as `open_models` takes them.

        Raises:
            CheckpointError: the model cannot be loaded, or a folder cannot be read.
            ValueError: there are too few devices, or as `open_models`.
        """
        mesh = make_mesh(devices)
        platform = mesh.devices.flat[0].platform
        on_cpu = platform == "cpu"
        chosen = chosen_dtype(dtype, platform)
        if dtype == "auto":
            log.info("%s is the faster dtype here.", chosen)
        catalog, adapters = open_models(model, dtype=chosen, **options)
        if group is None:
            group = 1 if on_cpu else min(ACCELERATOR_GROUP, max(1, SLOTS // mesh.size))
        return cls(catalog, mesh, group=group, memory=memory, adapters=adapters)

    def queue(
        self,
        resolved: ResolvedRequest,
        *,
        previews: bool = True,
        client: str = "",
        address: str = "",
    ) -> Job:
        """Queue a resolved request, as `EngineClient.queue`."""
        request, number = resolved.request, next(self._numbers)
        tilings = {index: each.tiling for index, each in resolved.pictures.items() if each.tiling}
        canvases = {index: each.canvas for index, each in resolved.pictures.items() if each.canvas}
        tickets = [
            Ticket(
                job=number,
                index=where,
                client=client,
                address=address,
                batch=self._batch(picture),
                weights=picture.weights,
                kinds=slot.kinds,
                previews=previews and not picture.tiling,
                slot_inputs=slot,
            )
            for index, picture in resolved.pictures.items()
            for where, slot in zip(
                tile_indices(request, index, picture.tiling), picture.slots, strict=True
            )
        ]
        with self._change:
            self._check_room(tickets)  # before anything is compiled for them
        self._submitting[number] = {ticket.batch for ticket in tickets}
        try:
            for ticket in tickets:
                self._encoders_of(ticket.batch, ticket.slot_inputs.picture_sizes, number)
            with self._change:
                self._check_room(tickets)
                self.scheduler.submit(tickets, time.monotonic(), steps=resolved.steps)
                job = self._jobs[number] = Job(
                    request, number, client, self._cancel, canvases, address, tilings
                )
                self._emit_events()
                self._change.notify_all()
        except BaseException:
            self._encoders.release(number)
            raise
        finally:
            del self._submitting[number]
        return job

    def _check_room(self, tickets: Sequence[Ticket]) -> None:
        """Raise the error of `submit` if the tickets are not taken now. Needs the lock."""
        if self._closed or self._draining:
            raise Closing("The server is shutting down.")
        try:
            self.scheduler.check_room(tickets)
        except Busy:
            self.tally.refused += 1
            raise

    @property
    def params(self) -> Params:
        """The first model's parameters, as `programs` takes them, while all devices hold them."""
        return self.worker.weights.together([self.weights] * self.mesh.size)

    @property
    def occupied(self) -> int:
        """How many slots have a picture on its way."""
        with self._change:
            return self.scheduler.occupied

    def jobs(self) -> list[Job]:
        """Return the jobs that are not over."""
        with self._change:
            return list(self._jobs.values())

    def status(self) -> Status:
        """Return the engine's load, as `EngineClient.status`."""
        with self._change:
            taking = (
                self.ready.is_set()
                and not (self.failure or self._draining or self._closed)
                and self._thread.is_alive()
            )
            return Status(
                taking=taking,
                devices=tuple(d.device_kind for d in self.mesh.devices.flat),
                dtype=str(self.checkpoint.model.dtype),
                jobs=len(self._jobs),
                waiting=self.scheduler.waiting,
                occupied=self.scheduler.occupied,
                rows=self.scheduler.rows,
                held=self.scheduler.held,
                tally=copy.deepcopy(self.tally),
            )

    def diagnose(self) -> Diagnosis:
        """Look at this machine, as `EngineClient.diagnose`; the devices are its own."""
        devices = [Device.of(each) for each in self.mesh.devices.flat]
        return diagnose(devices, hub=False, public=True)

    def seconds(self, *pictures: Picture) -> float | None:
        """Estimate the seconds of pictures, as `EngineClient.seconds`.

        No device is done before the longest picture, nor all of them before their share of the
        work is.
        """
        longest = work = 0.0
        for picture, count in Counter(pictures).items():
            try:
                resolved = self.resolver.estimated(picture)
            except ValueError:
                return None
            batch = self._batches.get(resolved.batch)  # an estimate adds no batch
            latency = self.latency.measured(batch) if batch else None
            if latency is None:
                return None
            kinds = [slot.kinds for slot in resolved.slots]
            longest = max(longest, sum(map(latency.of_picture, kinds)))
            work += count * sum(latency.in_crowd(lanes_left(each)[-1]) for each in kinds)
        return max(longest, work / self.mesh.size)

    def drain(self, seconds: float) -> bool:
        """Wait for all jobs and take no others, as `EngineClient.drain`."""
        with self._change:
            self._draining = True
            done = self._change.wait_for(lambda: not self._jobs, seconds)
            for number in list(self._jobs):
                self._pass_on(number, Interrupted())
            return done

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
        self.worker.close()

    # --- the engine's thread --------------------------------------------------------------------

    def _serve(self) -> None:
        plan = self.scheduler.prepare(self.batch, time.monotonic())
        while plan:
            report = self.worker.execute(plan)
            with self._change:
                self.tally.record(plan, report)
                self._note_compiled(report)
                self._loaded += len(report.loaded)
                try:
                    self.scheduler.update(report, time.monotonic())
                    self._emit_events()  # before it waits for whoever asks next
                    plan = self._next_plan()
                except Exception as error:  # a fault of ours: who waits is told, others are served
                    log.exception("the scheduler failed")
                    self.scheduler.abandon(
                        Sentence("Making the pictures failed: {reason}", reason=reason_of(error))
                    )
                    self._emit_events()
                    plan = Plan()

    def _next_plan(self) -> Plan | None:
        """Wait until there is something to do; None once the engine is closed. Needs the lock."""
        while self.scheduler.idle and self.ready.is_set() and not self._closed:
            self._change.wait()
        if self._closed:
            for number in list(self._jobs):
                self._pass_on(number, Cancelled())
            return None
        for job in list(self._jobs.values()):
            if job.client and job.idle_seconds() > ABANDONED_SECONDS:
                self.scheduler.cancel(job.number, time.monotonic())
        plan = self.scheduler.schedule(time.monotonic())
        self._emit_events()
        while self._finished_jobs:
            self._encoders.release(self._finished_jobs.pop())
        return plan

    def _note_compiled(self, report: Report) -> None:
        if self.batch in report.failed and not self.ready.is_set():
            self.failure = Sentence("Compiling failed: {reason}", reason=report.failed[self.batch])
        if self.batch in report.failed or self.batch in report.compiled:
            self.ready.set()

    def _read(self, weights: Weights, sharding: NamedSharding) -> Params:
        """Read the parameters of weights that are to be loaded."""
        if weights.network:
            network = self.catalog.network_of(weights)
            with paths_within(*(path.parent for path in network.paths)):
                own = network.load(sharding, leading=True)
            return {**self._on_devices(weights.base, sharding), network.part: own}
        if weights.adapters:
            shapes = self.catalog.opened(weights.name).checkpoint.parameters.shapes
            return merge(
                self._on_devices(weights.base, sharding),
                self.adapters.deltas(weights.adapters, shapes),
            )
        opened = self.catalog.opened(weights.name)
        if opened.weights != weights:
            raise CheckpointError("its files have been written anew; please ask for it again.")
        parameters = opened.checkpoint.parameters
        tiny = parameters.decoder
        try:
            with paths_within(parameters.source.parent, tiny and tiny.folder.parent):
                params = parameters.load(sharding, leading=True)
        except Exception:
            self.catalog.forget(weights.name)
            raise
        # For the picture's file; reading the file again takes seconds.
        self.worker.load_later(partial(self.catalog.hash, weights.name))
        return params

    def _on_devices(self, weights: Weights | None, sharding: NamedSharding) -> Params:
        """Return the shared parameters that the scheduler has loaded before."""
        assert weights is not None
        there = self.worker.weights
        placed = [there.of(device, weights) for device in there.numbers(sharding)]
        if not all(placed):
            raise CheckpointError("The model's own parameters are not there any more.")
        return there.spread(sharding, placed)

    def _batch(self, picture: ResolvedPicture) -> Batch:
        """Return the batch that draws pictures like this one; from now on it can be compiled."""
        key = picture.batch
        if key in self._batches:
            self._batches[key] = self._batches.pop(key)  # the last is that asked about last
        else:
            share = self.mesh.size * self._group
            # As many again as one client can fill: there is always a free one for another.
            slots = -(-2 * SLOTS // share) * share
            kind = self._kind(picture)
            assert kind.model.shape_key == key.shape_key
            plain = reduce(self.catalog.with_network, kind.networks, picture.weights.root)
            # On several devices some draw while others have no parameters yet, or none any more.
            batch = Batch(
                architecture=key.architecture,
                height=key.height,
                width=key.width,
                slots=slots,
                group=self._group,
                guided=key.guided,
                shape_key=key.shape_key,
                zeros=plain.zeros if self.mesh.size > 1 else None,
                memory=self._memory_of(kind.model, key, slots),
            )
            self._kinds[batch] = kind
            self._batches[key] = batch
            if len(self._batches) > MAX_SIZES:
                self._forget_sizes()
        return self._batches[key]

    def _kind(self, picture: ResolvedPicture) -> _Kind:
        """Return the programs that a picture needs, for its texts and with its networks."""
        weights, key = picture.weights, picture.batch
        checkpoint, _ = self.catalog.sample(weights.root.architecture)
        model = checkpoint.model.for_inputs(picture.slots[0].inputs)
        networks = [
            self.catalog.network_of(each) for each in (*weights.needs, weights) if each.network
        ]
        for network in networks:
            model = network.joined(model, key.height, key.width)
        return _Kind(weights.root.architecture, model, tuple(networks))

    def _forget_sizes(self) -> None:
        """Forget half of the batches that were asked about, but for those that are in use."""
        with self._change:
            used = {self.batch, *self.scheduler.batches, *chain(*self._submitting.values())}
            for key, batch in [*self._batches.items()][: MAX_SIZES // 2]:
                if batch not in used:
                    del self._batches[key], self._kinds[batch]

    def _memory_of(self, model: Model, key: BatchKey, slots: int) -> int:
        """Bytes on a device of a batch's slots, of which there are two while they change."""
        shape = model.latent_shape(key.height, key.width)
        slots_there = jax.eval_shape(partial(empty_slots, model, slots, shape))
        return 2 * bytes_of(slots_there) // self.mesh.size

    def _build(self, batch: Batch) -> tuple[Programs, SlotInputs, Params]:
        """Return a batch's programs, slot inputs to time them with, and its parameters' shapes."""
        kind = self._kinds[batch]
        checkpoint, defaults = self.catalog.sample(kind.architecture)
        sample = dataclasses.replace(
            _with_steps(defaults),
            prompt="",
            height=batch.height,
            width=batch.width,
            guidance=2.0 if batch.guided else 0.0,  # with any, or with none whatever the family
        )
        programs = self.programs if batch == self.batch else self._programs_of(batch)
        # Texts of any content take as long.
        inputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), programs.model.input_shapes)
        slot_inputs = dataclasses.replace(
            self.resolver.slot_inputs(checkpoint, sample), inputs=inputs, pictures=None
        )
        networks = {network.part: network.shapes for network in kind.networks}
        return programs, slot_inputs, {**checkpoint.parameters.shapes, **networks}

    def _programs_of(self, batch: Batch) -> Programs:
        return Programs(
            self._kinds[batch].model,
            self.mesh,
            slots=batch.slots,
            height=batch.height,
            width=batch.width,
            group=batch.group,
            guided=batch.guided,
            stacked=True,
        )

    def _prepare(self, plan: Plan, programs: Programs, params: Params) -> dict[int, SlotInputs]:
        """Return the inputs of slots that a plan fills, with latents in place of their pictures."""
        entering = {slot: ticket.slot_inputs for slot, ticket in plan.enter.items()}
        sizes = {size for slot_inputs in entering.values() for size in slot_inputs.picture_sizes}
        latents = defaultdict(dict)
        for encoder, of in self._encoders_of(plan.batch, sizes):  # ty: ignore[invalid-argument-type]
            whose = {
                device: (of(weights), self._loaded) for device, weights in plan.weights.items()
            }
            made = encoder.latents(params, entering, programs.device, whose)
            for slot, by_name in made.items():
                latents[slot] |= by_name
        return encoded(entering, latents)

    def _encoders_of(
        self, batch: Batch, sizes: Set[PictureSize], job: int | None = None
    ) -> list[tuple[ImageEncoder, Callable[[Weights], Hashable]]]:
        """Return the encoders for a batch's pictures of these kinds and sizes.

        Each comes with a function from weights to the part of them that it depends on. A `job`
        keeps the encoders until it is over, so that no plan has to compile them.
        """
        kind, found = self._kinds[batch], []
        checkpoint, _ = self.catalog.sample(kind.architecture)
        seeing = next((each for each in kind.networks if each.part == REFERENCE), None)
        if any(name in (START_PICTURE, MASKED_PICTURE) for name, _, _ in sizes):
            encoder = self._encoder(
                job,
                kind.architecture,
                checkpoint.model.encode,
                checkpoint.parameters.shapes,
                height=batch.height,
                width=batch.width,
                network_dtype=checkpoint.model.dtype,
            )
            found.append((encoder, lambda weights: weights.root))
        for height, width in sorted(size for name, *size in sizes if name == REFERENCE_PICTURE):
            sees: dict[str, Any] = dict(height=height, width=width, names=(REFERENCE_PICTURE,))
            if seeing:
                encoder = self._encoder(
                    job,
                    self.catalog.kind(seeing),
                    seeing.tokens,  # ty: ignore[missing-attribute]
                    {REFERENCE: seeing.shapes},
                    network_dtype=seeing.dtype,
                    dtype=np.uint8,
                    **sees,
                )
                found.append((encoder, lambda weights: weights.network))
            else:
                encoder = self._encoder(
                    job,
                    f"{kind.architecture}, references",
                    kind.model.encode_reference,
                    checkpoint.parameters.shapes,
                    network_dtype=checkpoint.model.dtype,
                    **sees,
                )
                found.append((encoder, lambda weights: weights.root))
        return found

    def _encoder(
        self,
        job: int | None,
        kind: str,
        encode: Callable,
        params: Params,
        *,
        height: int,
        width: int,
        **options: Any,
    ) -> ImageEncoder:
        """Return the encoder for networks of a kind and pictures of a size."""
        return self._encoders.get(
            (kind, height, width),
            lambda: ImageEncoder(
                encode, self.mesh, params, height=height, width=width, stacked=True, **options
            ),
            job,
        )

    def _cancel(self, number: int, index: int | None) -> None:
        """Give up a job or a picture of it, for `Job.cancel`."""
        with self._change:
            self.scheduler.cancel(number, time.monotonic(), index)
            self._emit_events()
            self._change.notify_all()

    def _emit_events(self) -> None:
        """Pass on the scheduler's events. Needs the lock."""
        for number, event in self.scheduler.events():
            self._pass_on(number, event)

    def _pass_on(self, number: int, event: Event) -> None:
        """Pass an event on to its job, and forget a job that this ends. Needs the lock."""
        job = self._jobs.get(number)
        if job is None:  # over already: after a fault jobs are ended wherever they are
            return
        job.put(event)
        if job.end:
            self.tally.ended[type(job.end).__name__.lower()] += 1
            journal.note(job)
            del self._jobs[number]
            self._finished_jobs.append(number)
            self._change.notify_all()  # whoever waits for all of them


def _with_steps(picture: Picture) -> Picture:
    """Return a picture of at least two steps, which every sampler can take."""
    return dataclasses.replace(picture, steps=max(2, picture.steps))
