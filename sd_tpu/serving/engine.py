"""Makes pictures for whoever asks: jobs come in, their events go out.

One thread asks the scheduler what to do and has the worker do it, turn by turn. Between two turns
finished images leave their slots and waiting ones enter, so images of several jobs share a batch
(continuous batching), and a job that is cancelled stops at once.
"""

import copy
import dataclasses
import hashlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sd_tpu.checkpoint.config import BUNDLED_MODEL, CheckpointError, paths_within
from sd_tpu.checkpoint.division import Division, bytes_of, undivided
from sd_tpu.checkpoint.weights import Params
from sd_tpu.doctor import Device, Diagnosis, diagnose
from sd_tpu.families.adapters import Adapters
from sd_tpu.families.extra_network import ExtraNetwork
from sd_tpu.families.latent_diffusion import REFERENCE
from sd_tpu.families.model import Model
from sd_tpu.models.factors import Scaled
from sd_tpu.runtime.dtype import chosen_dtype
from sd_tpu.runtime.mesh import device_bytes, make_mesh, replicas
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.programs import TextEncoder as TextProgram
from sd_tpu.runtime.slots import (
    MASKED_PICTURE,
    REFERENCE_PICTURE,
    START_PICTURE,
    SlotInputs,
    empty_slots,
    lanes_of,
)
from sd_tpu.runtime.weights import merge
from sd_tpu.sentence import Sentence
from sd_tpu.serving import journal
from sd_tpu.serving.catalog import Catalog, OpenedModel
from sd_tpu.serving.client import (
    ABANDONED_SECONDS,
    Closing,
    EngineClient,
    ModelOptions,
    Status,
    open_models,
)
from sd_tpu.serving.job import Cancelled, Event, Failed, Interrupted, Job, tile_indices
from sd_tpu.serving.latency import LatencyModel, lanes_left
from sd_tpu.serving.plan import (
    Batch,
    Encoder,
    Plan,
    Prompt,
    Report,
    TextEncoder,
    Ticket,
    Training,
    Weights,
)
from sd_tpu.serving.replicas import fewest_chips
from sd_tpu.serving.resolve import BatchKey, ResolvedPicture, ResolvedRequest, as_request_errors
from sd_tpu.serving.scheduler import Busy, Scheduler
from sd_tpu.serving.tally import Tally
from sd_tpu.serving.worker import Trainee, Worker, reason_of
from sd_tpu.settings import Picture

log = logging.getLogger(__name__)

SLOTS = 8
# Slots stepped together at most. By the TPU compiler's cycles for a step of SD 1.4, fours take 20%
# less a picture than ones on v3 and v5e, a third less on v4 and v6e and a tenth less on v2, and on
# v5e 5% less than eights (decision 0009).
ACCELERATOR_GROUP = 4
MATRIX_UNIT = 128  # rows of numbers that a TPU multiplies by at once; v6e's has twice as many
WRITTEN_ANEW = "its files have been written anew; please ask for it again."
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
        """Begin with nothing on the devices; `open` has an engine start.

        Args:
            catalog: the models.
            mesh: the devices.
            group: slots that a replica steps together.
            memory: bytes of each device that may be taken; None is what the devices have.
            adapters: LoRAs and embeddings that prompts may use.
        """
        super().__init__(catalog, adapters)
        self.mesh, self._group, self._replicas = mesh, group, replicas(mesh)
        self.worker = Worker(mesh, self._read, self._build, self._image_encoder, self._text_encoder)
        self._readers: dict[TextEncoder, Model] = {}  # the models of text encoders
        self._batches: dict[BatchKey, Batch] = {}
        self._submitting: dict[int, dict[int, Batch]] = {}  # by job and picture
        self._kinds: dict[Batch, _Kind] = {}
        estimated = self.resolver.estimated(_with_steps(self.defaults))
        self.batch, self.reader = self._batch(estimated), self._prompt(estimated).encoder
        self.programs = self._programs_of(self.batch, _last_programs)
        self.latency = LatencyModel()
        least = sum(each.memory for each in (self.batch, *self.batch.needs))
        least += max(self.weights.memory, self.texts.memory)
        limit = memory or max(device_bytes(mesh), least)
        self.scheduler = Scheduler(self._replicas, self.latency, memory=limit)
        self.tally = Tally()
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._change = threading.Condition()  # guards the scheduler and the jobs
        self._closed = self._draining = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def _start(self) -> None:
        """Read the first model's parameters and start the thread, which compiles and then serves.

        Its text encoders are read when a picture needs them, if there is no room for both.

        Raises:
            CheckpointError: the parameters cannot be read.
        """
        everywhere = range(self._replicas)
        self.checkpoint.texts.check()
        together = self.scheduler.fits(self.batch, self.weights, self.texts)
        for weights in (self.weights, self.texts) if together else (self.weights,):
            params = self._read(weights, self.worker.weights.on(everywhere))
            for replica in everywhere:
                self.scheduler.hold(replica, weights)
                self.worker.weights.record(replica, weights, params)
        self._thread.start()

    @classmethod
    def open(
        cls,
        model: str | Path = BUNDLED_MODEL,
        *,
        devices: int | None = None,
        tensor_parallel: int | None = None,
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
            tensor_parallel: how many of them are a replica, over which transformers and language
                models are divided; by default as few as the first model needs, on CPUs one.
            memory: bytes of each device that may be taken; by default what it has.
            group: slots that a replica steps together; by default what its platform is good at.
            dtype: "float32" or "bfloat16", or "auto" for what the platform is fastest in; by
                default float32 on CPU and bfloat16 elsewhere.
            options: as `open_models` takes them.

        Raises:
            CheckpointError: the model cannot be loaded, or a folder cannot be read.
            ValueError: there are too few devices, or as `open_models`.
        """
        mesh = make_mesh(devices, tensor_parallel or 1)
        platform = mesh.devices.flat[0].platform
        on_cpu = platform == "cpu"
        chosen = chosen_dtype(dtype, platform)
        if dtype == "auto":
            log.info("%s is the faster dtype here.", chosen)
        open_for = partial(open_models, model, dtype=chosen, **options)
        catalog, adapters = open_for(tensor_parallel=tensor_parallel or 1)
        if tensor_parallel is None and not on_cpu:
            room = memory or device_bytes(mesh)
            tensor_parallel = _fewest_chips(catalog.open(""), mesh.size, room, group)
            if tensor_parallel > 1:
                mesh = make_mesh(devices, tensor_parallel)
                catalog, adapters = open_for(tensor_parallel=tensor_parallel)
        first = catalog.open("").checkpoint
        if mesh.size > replicas(mesh):
            log.info(
                "%d chips are a replica: each has %.1f GB of the %.1f GB that %s takes.",
                mesh.size // replicas(mesh),
                first.parameters.memory / 1e9,
                bytes_of(first.parameters.shapes) / 1e9,
                first.card.name,
            )
        if group is None:
            group = 1 if on_cpu else _accelerator_group(replicas(mesh))
        engine = cls(catalog, mesh, group=group, memory=memory, adapters=adapters)
        try:
            engine._start()
        except BaseException:
            engine.worker.close()
            raise
        return engine

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
        batches = self._submitting[number] = {}  # which are not forgotten meanwhile
        try:
            prompts = {index: self._prompt(each) for index, each in resolved.pictures.items()}
            for index, picture in resolved.pictures.items():
                batches[index] = self._batch(picture)
            tickets = [
                Ticket(
                    job=number,
                    index=where,
                    client=client,
                    address=address,
                    batch=batches[index],
                    weights=picture.weights,
                    prompt=prompts[index],
                    encoders=self._encoders(picture, slot),
                    kinds=slot.kinds,
                    previews=previews and not picture.tiling,
                    slot_inputs=slot,
                )
                for index, picture in resolved.pictures.items()
                for where, slot in zip(
                    tile_indices(request, index, picture.tiling), picture.slots, strict=True
                )
            ]
            if any(each.adapters for each in resolved.pictures.values()):
                with self._change:  # before files are read for what there is no room for
                    self._take(partial(self.scheduler.check_room, tickets))
                tickets = self._with_factors(tickets, resolved)
            with self._change:
                submit, now = self.scheduler.submit, time.monotonic()
                self._take(partial(submit, tickets, now, steps=resolved.steps))
                job = self._jobs[number] = Job(
                    request, number, client, self._cancel, canvases, address, tilings
                )
                self._emit_events()
                self._change.notify_all()
        finally:
            del self._submitting[number]
        return job

    def _factors(self, picture: ResolvedPicture) -> Mapping[str, Sequence[Scaled]] | None:
        """Return the LoRAs of which a picture brings factors into its slots, by layer.

        Raises:
            RequestError: a file is damaged, or is of another rank than it was.
        """
        if not picture.adapters:
            return None
        checkpoint = self.catalog.opened(picture.weights.root.name).checkpoint
        with as_request_errors():
            return self.adapters.factors(
                picture.adapters,
                picture.batch.adapter_rank,
                checkpoint.model,
                checkpoint.parameters.shapes,
            )

    def _with_factors(self, tickets: Sequence[Ticket], resolved: ResolvedRequest) -> list[Ticket]:
        """Return a request's tickets with the LoRAs of `_factors`; raises its error."""
        pictures = resolved.pictures.values()
        each = chain.from_iterable([self._factors(one)] * len(one.slots) for one in pictures)
        return [
            dataclasses.replace(
                ticket, slot_inputs=dataclasses.replace(ticket.slot_inputs, adapters=adapters)
            )
            for ticket, adapters in zip(tickets, each, strict=True)
        ]

    def _take(self, take: Callable[[], None]) -> None:
        """Have the scheduler take tickets, or raise the error of `queue`. Needs the lock."""
        if self._closed or self._draining:
            raise Closing("The server is shutting down.")
        try:
            take()
        except Busy:
            self.tally.refused += 1
            raise

    @property
    def params(self) -> Params:
        """The first model's parameters, as `programs` takes them, while all replicas hold them."""
        together = self.worker.weights.together
        return {
            **together([self.weights] * self._replicas),
            **together([self.texts] * self._replicas),
        }

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
                tensor_parallel=self.mesh.size // self._replicas,
                jobs=len(self._jobs),
                waiting=self.scheduler.waiting,
                occupied=self.scheduler.occupied,
                rows=self.scheduler.rows,
                held=self.scheduler.held,
                training=self.scheduler.is_training,
                tally=copy.deepcopy(self.tally),
            )

    def diagnose(self) -> Diagnosis:
        """Look at this machine, as `EngineClient.diagnose`; the devices are its own."""
        devices = [Device.of(each) for each in self.mesh.devices.flat]
        return diagnose(devices, hub=False, public=True)

    def seconds(self, *pictures: Picture) -> float | None:
        """Estimate the seconds of pictures, as `EngineClient.seconds`.

        No replica is done before the longest picture, nor all of them before their share of the
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
        return max(longest, work / self._replicas)

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

    # --- training -------------------------------------------------------------------------------

    def train(self, opened: OpenedModel, memory: int, trainee: Trainee) -> Training:
        """Begin a training beside what is drawn; there is no other until `end_training`.

        Args:
            opened: the model that is trained, by whose parameters steps are taken.
            memory: bytes on each device beside these.
            trainee: takes the steps, in the engine's thread.

        Raises:
            RequestError: the devices can never hold that.
        """
        training = Training(
            number=next(self._numbers), weights=opened.weights, texts=opened.texts, memory=memory
        )
        with self._change:
            self.scheduler.train(training)
            self.worker.trainees[training.number] = trainee
            self._change.notify_all()
        return training

    def end_training(self, training: Training) -> None:
        """End a training; one that has ended already is left alone."""
        with self._change:
            if self.worker.trainees.pop(training.number, None):
                self.scheduler.end_training()

    # --- the engine's thread --------------------------------------------------------------------

    def _serve(self) -> None:
        plan = self.scheduler.prepare(self.reader, self.batch, now=time.monotonic())
        while plan:
            report = self.worker.execute(plan)
            with self._change:
                self.tally.record(plan, report)
                self._note_compiled(report)
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
        return plan

    def _note_compiled(self, report: Report) -> None:
        for program in (self.reader, self.batch):  # in the order in which they are compiled
            if program in report.failed and not self.ready.is_set():
                self.failure = Sentence("Compiling failed: {reason}", reason=report.failed[program])
        if self.batch in report.failed or self.batch in report.compiled:
            self.ready.set()

    def _read(self, weights: Weights, sharding: NamedSharding) -> Params:
        """Read the parameters of weights that are to be loaded."""
        if weights.network:
            network = self.catalog.network_of(weights)
            with paths_within(*(path.parent for path in network.paths)):
                own = network.load(sharding, leading=True)
            return {**self._on_replicas(weights.base, sharding), network.part: own}
        opened = self.catalog.opened(weights.name)
        parameters = opened.checkpoint.texts if weights.texts else opened.checkpoint.drawing
        if weights.adapters:
            checkpoint = opened.checkpoint
            return merge(
                self._on_replicas(weights.base, sharding),
                self.adapters.merged(
                    weights.adapters,
                    checkpoint.model,
                    checkpoint.parameters.shapes,
                    parameters.shapes,
                ),
                parameters.divisions,
            )
        if weights not in (opened.weights, opened.texts):
            raise CheckpointError(WRITTEN_ANEW)
        tiny = parameters.decoder
        try:
            _check_unchanged(opened)
            with paths_within(parameters.source.parent, tiny.folder.parent if tiny else None):
                params = parameters.load(sharding, leading=True)
            _check_unchanged(opened)  # nor while they were read
        except Exception:
            self.catalog.forget(weights.name)
            raise
        # For the picture's file; reading the file again takes seconds.
        self.worker.load_later(partial(self.catalog.hash, weights.name))
        return params

    def _on_replicas(self, weights: Weights | None, sharding: NamedSharding) -> Params:
        """Return the shared parameters that the scheduler has loaded before."""
        assert weights is not None
        there = self.worker.weights
        placed = [there.of(replica, weights) for replica in there.numbers(sharding)]
        if not all(placed):
            raise CheckpointError("The model's own parameters are not there any more.")
        return there.spread(sharding, placed)

    def _batch(self, picture: ResolvedPicture) -> Batch:
        """Return the batch that draws pictures like this one; from now on it can be compiled."""
        key = picture.batch
        if key in self._batches:
            self._batches[key] = self._batches.pop(key)  # the last is that asked about last
        else:
            group, pictures = self._group, 2 * SLOTS
            if key.adapter_rank:
                platform = self.mesh.devices.flat[0].platform
                group = _adapter_group(group, key.adapter_rank, key.guided, platform)
                # Such slots are large: there are so many that a client, who may have half of them,
                # has work for every replica.
                pictures = max(SLOTS, 2 * self._replicas)
            slots = _slots(self._replicas, group, pictures)
            kind = self._kind(picture)
            assert kind.model.shape_key == key.shape_key
            plain = reduce(self.catalog.with_network, kind.networks, picture.weights.root)
            # On several replicas some draw while others have no parameters yet, or none any more.
            batch = Batch(
                architecture=key.architecture,
                height=key.height,
                width=key.width,
                slots=slots,
                group=group,
                guided=key.guided,
                shape_key=key.shape_key,
                adapter_rank=key.adapter_rank,
                zeros=plain.zeros if self._replicas > 1 else None,
                memory=_slots_memory(
                    kind.model,
                    key.height,
                    key.width,
                    slots // self._replicas,
                    self._divisions(kind),
                ),
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
        model = model.with_adapters(checkpoint.parameters.shapes, key.adapter_rank)
        return _Kind(weights.root.architecture, model, tuple(networks))

    def _forget_sizes(self) -> None:
        """Forget half of the batches that were asked about, but for those that are in use."""
        with self._change:
            submitting = chain.from_iterable(
                [*each.values()] for each in [*self._submitting.values()]
            )
            used = {self.batch, *self.scheduler.batches, *submitting}
            for key, batch in [*self._batches.items()][: MAX_SIZES // 2]:
                if batch not in used:
                    del self._batches[key], self._kinds[batch]

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
        programs = (
            self.programs if batch == self.batch else self._programs_of(batch, _make_programs)
        )
        # Texts of any content take as long.
        inputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), programs.model.entry_shapes)
        slot_inputs = dataclasses.replace(
            self.resolver.slot_inputs(checkpoint, sample), inputs=inputs, pictures=None
        )
        networks = {network.part: network.shapes for network in kind.networks}
        return programs, slot_inputs, {**checkpoint.drawing.shapes, **networks}

    def _programs_of(self, batch: Batch, make: Callable[..., Programs]) -> Programs:
        return make(
            self._kinds[batch].model,
            self.mesh,
            _Divisions.of(self._divisions(self._kinds[batch])),
            slots=batch.slots,
            height=batch.height,
            width=batch.width,
            group=batch.group,
            guided=batch.guided,
        )

    def _divisions(self, kind: _Kind) -> Params:
        """Return how the parameters of a batch's programs are divided; networks are whole."""
        checkpoint, _ = self.catalog.sample(kind.architecture)
        networks = {network.part: undivided(network.shapes) for network in kind.networks}
        return {**checkpoint.drawing.divisions, **networks}

    def _prompt(self, picture: ResolvedPicture) -> Prompt:
        """Return a picture's prompt, whose encoder can be compiled from now on."""
        checkpoint, _ = self.catalog.sample(picture.weights.root.architecture)
        (slot, *_) = picture.slots  # tiles have the same prompt
        model = checkpoint.model.for_inputs(slot.inputs)
        inputs = {name: slot.inputs[name] for name in sorted(model.text_input_shapes)}
        digest, leaves = hashlib.sha256(), jax.tree.leaves(inputs)
        for leaf in leaves:
            digest.update(np.ascontiguousarray(leaf).data)
        encoder = TextEncoder(
            architecture=picture.weights.root.architecture,
            shapes=tuple(np.shape(leaf) for leaf in leaves),
            count=-(-SLOTS // self._replicas) * self._replicas,
        )
        self._readers.setdefault(encoder, model)
        return Prompt(
            encoder=encoder,
            weights=picture.texts,
            digest=digest.digest(),
            inputs=inputs,
            memory=bytes_of(model.text_cond_shapes),
        )

    def _text_encoder(self, encoder: TextEncoder) -> tuple[TextProgram, Params]:
        """Return an encoder of prompts, not compiled yet, and its parameters' shapes."""
        checkpoint, _ = self.catalog.sample(encoder.architecture)
        divisions = _Divisions.of(checkpoint.texts.divisions)
        model = self._readers[encoder]
        program = _last_text_program(model, self.mesh, divisions, count=encoder.count)
        return program, checkpoint.texts.shapes

    def _encoders(self, picture: ResolvedPicture, slot: SlotInputs) -> tuple[Encoder, ...]:
        """Return the encoders of a slot's pictures, sorted, as equal ones share a queue."""
        weights = picture.weights
        adapter = weights.network and weights.network[0] == REFERENCE
        encoders = {
            Encoder(
                kind=self.catalog.kind(self.catalog.network_of(weights))
                if adapter and kind == REFERENCE_PICTURE
                else weights.root.architecture,
                height=height,
                width=width,
                references=kind == REFERENCE_PICTURE,
                part=REFERENCE if adapter and kind == REFERENCE_PICTURE else "",
            )
            for kind, height, width in slot.picture_sizes
        }
        return tuple(sorted(encoders, key=dataclasses.astuple))

    def _image_encoder(self, encoder: Encoder) -> ImageEncoder:
        """Return an encoder, not compiled yet."""
        if encoder.part:
            network, divisions = self.catalog.sample_network(encoder.part, encoder.kind), None
            encode, shapes, dtype = network.tokens, {network.part: network.shapes}, network.dtype  # ty: ignore[missing-attribute]
        else:
            checkpoint, _ = self.catalog.sample(encoder.kind)
            model, shapes = checkpoint.model, checkpoint.drawing.shapes
            divisions = checkpoint.drawing.divisions
            encode, dtype = model.encode, model.dtype
            if encoder.references:
                encode = model.encode_reference  # ty: ignore[missing-union-attribute]
        return ImageEncoder(
            encode,
            self.mesh,
            shapes,
            height=encoder.height,
            width=encoder.width,
            network_dtype=dtype,
            dtype=np.uint8 if encoder.part else np.float32,
            names=(REFERENCE_PICTURE,) if encoder.references else (START_PICTURE, MASKED_PICTURE),
            stacked=True,
            divisions=divisions,
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
        if isinstance(event, Failed) and (trainee := self.worker.trainees.pop(number, None)):
            trainee.fail(event.message)
        job = self._jobs.get(number)
        if job is None:  # over already: after a fault jobs are ended wherever they are
            return
        job.put(event)
        if job.end:
            self.tally.ended[type(job.end).__name__.lower()] += 1
            journal.note(job)
            del self._jobs[number]
            self._change.notify_all()  # whoever waits for all of them


class _Divisions(NamedTuple):
    """Divisions of parameters, as a key."""

    structure: Any
    leaves: tuple[Division, ...]

    @classmethod
    def of(cls, divisions: Params) -> Self:
        leaves, structure = jax.tree.flatten(divisions)
        return cls(structure, tuple(leaves))

    @property
    def tree(self) -> Params:
        return jax.tree.unflatten(self.structure, self.leaves)


def _make_programs(model: Model, mesh: Mesh, divisions: _Divisions, **values: Any) -> Programs:
    return Programs(model, mesh, stacked=True, divisions=divisions.tree, **values)


# The programs that were asked for last are kept, with what was compiled of them, for the next
# engine of this process: it often has the same model. An engine has those of its first batch as
# long as it is open anyway, others go as the scheduler says.
_last_programs = lru_cache(maxsize=1)(_make_programs)


@lru_cache(maxsize=1)
def _last_text_program(
    model: Model, mesh: Mesh, divisions: _Divisions, *, count: int
) -> TextProgram:
    return TextProgram(model, mesh, count=count, stacked=True, divisions=divisions.tree)


def _slots(replicas: int, group: int, pictures: int = 2 * SLOTS) -> int:
    """Return how many slots a batch has: one for each picture, rounded up to whole groups on all
    replicas. By default there are twice as many as one client fills, so that another finds one."""
    share = replicas * group
    return -(-pictures // share) * share


def _slots_memory(
    model: Model, height: int, width: int, slots: int, divisions: Params | None = None
) -> int:
    """Return the bytes of a replica's slots on each chip.

    Their state exists twice while it changes. Adapters exist once, with room for one that enters,
    and are divided over a replica's chips as the layers beside them are.
    """
    shape = model.latent_shape(height, width)
    empty = jax.eval_shape(partial(empty_slots, model, slots, shape))
    adapters = divisions and model.adapter_divisions(divisions)
    rest = dataclasses.replace(empty, adapters={})
    return 2 * bytes_of(rest) + (slots + 1) * bytes_of(model.adapter_shapes, adapters)


def _check_unchanged(opened: OpenedModel) -> None:
    """Raise CheckpointError if a model's files are others than those that were opened.

    Its parts are read apart, and could otherwise be of two states of the files. If files are gone,
    reading them raises.
    """
    if opened.checkpoint.parameters.written() not in ((), opened.written):
        raise CheckpointError(WRITTEN_ANEW)


def _accelerator_group(replicas: int) -> int:
    """Return how many slots a replica of accelerators steps together."""
    return min(ACCELERATOR_GROUP, max(1, SLOTS // replicas))


def _adapter_group(group: int, rank: int, guided: bool, platform: str) -> int:
    """Return how many of `group` slots a replica steps together where each brings factors of a
    rank: on TPUs as many as MATRIX_UNIT rows hold."""
    if platform != "tpu":
        return group
    return max(1, min(group, MATRIX_UNIT // (rank * lanes_of(1, guided))))


def _fewest_chips(opened: OpenedModel, devices: int, room: int, group: int | None) -> int:
    """Return the fewest chips whose memory for what stays there holds a model and its slots."""

    def slots_memory(chips: int) -> int:
        count = devices // chips
        slots = _slots(count, group or _accelerator_group(count)) // count
        defaults = opened.defaults
        return _slots_memory(opened.checkpoint.model, defaults.height, defaults.width, slots)

    return fewest_chips(opened.checkpoint, devices, room, slots_memory)


def _with_steps(picture: Picture) -> Picture:
    """Return a picture of at least two steps, which every sampler can take."""
    return dataclasses.replace(picture, steps=max(2, picture.steps))
