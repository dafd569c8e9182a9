"""Makes pictures for whoever asks: jobs come in, their events go out.

One thread asks the scheduler what to do and has the worker do it, turn by turn. Between two turns
finished images leave their slots and waiting ones enter, so images of several jobs share a batch
(continuous batching), and a job that is cancelled stops at once.
"""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from sd_tpu.checkpoint.config import BUNDLED_MODEL, paths_within
from sd_tpu.checkpoint.library import Library
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.adapters import Adapters
from sd_tpu.families.checkpoint import Checkpoint, bytes_of
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.decoder import TinyDecoder
from sd_tpu.families.latent_diffusion import CONTROL
from sd_tpu.families.model import Model
from sd_tpu.families.text import Count, PromptOptions, count
from sd_tpu.pictures.images import to_png
from sd_tpu.pictures.inputs import Canvas, Input, control_pixels
from sd_tpu.request import Request
from sd_tpu.runtime.merge import merge
from sd_tpu.runtime.mesh import device_bytes, make_mesh
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import TAKEN, Entry, Given, empty_slots
from sd_tpu.sampling.samplers import Table, make_table, steps_taken
from sd_tpu.sentence import Sentence
from sd_tpu.serving import journal
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.job import Cancelled, Event, Job
from sd_tpu.serving.latency import LatencyModel
from sd_tpu.serving.plan import Batch, Plan, Report, Ticket, Weights
from sd_tpu.serving.scheduler import Busy, Limits, Scheduler
from sd_tpu.serving.tally import Tally
from sd_tpu.serving.worker import Worker, reason_of
from sd_tpu.settings import Picture, RequestError
from sd_tpu.styles import Styles
from sd_tpu.wildcards import Wildcards

log = logging.getLogger(__name__)

SLOTS = 8
ACCELERATOR_GROUP = 4  # slots stepped together at most; a guess until it has been measured
MAX_ENCODERS = 16  # of start pictures, compiled for so many models and sizes
MAX_WAITING = Limits().client_jobs
UNHEARD_SECONDS = 30.0  # after which the job of a client ends whose events nobody takes


class Closing(RequestError):
    """Nothing new is taken, as the server is about to end."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What the programs of a batch are for: a checkpoint's architecture by its name, the model for
    such texts, and what steers it."""

    architecture: str
    model: Model
    controlnet: ControlNet | None = None


class Engine:
    """Makes pictures for whoever asks, on all devices of its mesh."""

    def __init__(self, offer: Catalog, mesh: Mesh, *, group: int = 1, memory: int | None = None,
                 adapters: Adapters | None = None):
        """Reads the first model's parameters and starts the thread, which compiles the programs for
        it and then serves.

        Args:
            offer: the models.
            mesh: the devices.
            group: guided slots that a device steps together.
            memory: bytes of each device that may be taken; None is what the devices have.
            adapters: what prompts may use beside the models.

        Raises:
            CheckpointError: the first model's parameters cannot be read.
        """
        self.offer, self.mesh, self._group = offer, mesh, group
        self.adapters = adapters or Adapters()
        first = offer.open("")
        self.pipeline, self.defaults = first.checkpoint, first.defaults
        self.weights = first.weights
        self._encoders: dict[tuple, Future[ImageEncoder]] = {}
        self._finding = threading.Lock()  # of encoders; held for no compilation
        self.worker = Worker(mesh, self._read, self._build, self._prepare)
        params = self._read(self.weights, self.worker.weights.on(range(mesh.size)))
        self._batches: dict[tuple, Batch] = {}
        self._kinds: dict[Batch, _Kind] = {}
        self.batch = self._batch(self.defaults)
        self.programs = self._programs_of(self.batch)
        self.latency = LatencyModel()
        limit = memory or max(device_bytes(mesh), self.batch.memory + self.weights.memory)
        self.scheduler = Scheduler(mesh.size, self.latency, memory=limit)
        for device in range(mesh.size):
            self.scheduler.hold(device, self.weights)
            self.worker.weights.take(device, self.weights, params)
        self.tally = Tally()
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._change = threading.Condition()  # guards the scheduler and the jobs
        self._closed = self._draining = False
        self.ready = threading.Event()  # the first batch is compiled, or failed to be
        self.failure: Sentence | None = None  # why compiling it failed
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, model: str | Path = BUNDLED_MODEL, *, models: Path | None = None,
             revision: str | None = None, variant: str | None = None, dtype: str | None = None,
             devices: int | None = None, size: tuple[int, int] | None = None,
             max_pixels: int | None = None, memory: int | None = None, group: int | None = None,
             token_downsampling: int = 1, decoder: str | Path | None = None,
             decoder_for: str = "previews", prediction_type: str | None = None,
             zero_snr: bool | None = None, lora_dir: Path | None = None,
             embedding_dir: Path | None = None,
             prompt_chunks: int = PromptOptions.chunks, wildcard_dir: Path | None = None,
             styles: Path | None = None, controlnets: Sequence[str | Path] = ()) -> Self:
        """Loads a checkpoint and starts an engine for it.

        Args:
            model: folder, single file or hub id, or the name of one in `models`.
            models: a folder whose checkpoints are offered as well.
            revision: branch, tag or commit on the hub.
            variant: of the weight files, such as "fp16".
            dtype: "float32" or "bfloat16"; by default float32 on CPU and bfloat16 elsewhere.
            devices: how many of this process's devices to use; all by default.
            size: height and width of pictures that leave it open; by default what their model was
                trained on.
            max_pixels: of a picture; by default four times those its model was trained on.
            memory: bytes of each device that may be taken; by default what it has.
            group: guided slots that a device steps together; by default what its platform is good
                at.
            token_downsampling: as `Checkpoint.open` takes it.
            decoder: folder or hub id of a tiny autoencoder for the models of one family, which its
                name says; else for those of the first model's.
            decoder_for: what it draws: "previews", or "pictures" as well, whose start pictures it
                then encodes.
            prediction_type: of this model, as `Checkpoint.open` takes it.
            zero_snr: likewise.
            lora_dir: as `Adapters` takes it, like the next two.
            embedding_dir: see there.
            prompt_chunks: see there.
            wildcard_dir: as `Wildcards` takes it.
            styles: as `Styles` takes it.
            controlnets: folders or hub ids of ControlNets that pictures may be steered by.

        Raises:
            CheckpointError: the model or a ControlNet cannot be loaded, or a folder cannot be read.
            ValueError: there are too few devices, the size or the downsampling is not possible,
                or the decoder is for none of the models.
        """
        adapters = Adapters(lora_dir, embedding_dir, prompt_chunks)
        mesh = make_mesh(devices)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        options = dict(dtype=dtype or ("float32" if on_cpu else "bfloat16"), variant=variant,
                       token_downsampling=token_downsampling)
        if models is not None and not models.is_dir():
            raise ValueError(f"There is no folder {str(models)!r} with models.")
        library = Library(models)
        options["decoder"] = tiny = decoder and TinyDecoder.open(
            decoder, pictures=decoder_for == "pictures")
        of_first = dict(revision=revision, prediction_type=prediction_type, zero_snr=zero_snr)
        first = Checkpoint.open(library.find(str(model)) or model, **of_first, **options)
        if tiny and not (first.parameters.decoder or models):
            raise ValueError(f"The decoder {tiny.name} is for {tiny.family.pipelines[0]}; "
                             f"{first.card.name} is another kind of model.")
        if tiny:
            options["decoder"] = tiny.of(type(first.model))

        def reopen(path: Path) -> Checkpoint:
            again = path == first.parameters.source
            return Checkpoint.open(path, **of_first if again else {}, **options)

        offer = Catalog(first, library, reopen, size=size, max_pixels=max_pixels,
                        wildcards=Wildcards(wildcard_dir), styles=Styles(styles),
                        controlnets=[ControlNet.open(name, dtype=options["dtype"], variant=variant)
                                     for name in controlnets])
        if group is None:
            group = 1 if on_cpu else min(ACCELERATOR_GROUP, max(1, SLOTS // mesh.size))
        return cls(offer, mesh, group=group, memory=memory, adapters=adapters)

    def submit(self, request: Request, *, previews: bool = True, client: str = "",
               inputs: Mapping[str, Input] = MappingProxyType({})) -> Job:
        """Queues a checked request; without `previews` none are made. The job's request
        holds the prompts with styles applied, and which ControlNet steers a picture.

        `inputs` are the pictures that it begins with, by their names. The first of a model and a
        size compiles what encodes them before this returns.

        Clients share the devices fairly. A job of a named client ends when nobody takes its events
        for UNHEARD_SECONDS; "" is whoever runs this program.

        Raises:
            Busy: too much waits already.
            Closing: the server is shutting down.
            RequestError: a sampler cannot take its steps, a prompt cannot be drawn, or what a
                picture begins with is missing or cannot be used, or cannot be compiled for.
        """
        request = self._settled(request)
        canvases, controls = self._canvases(request, inputs), self._controls(request, inputs)
        arrivals = {place: self.arrival(request, place, canvas, controls[place])
                    for place, canvas in canvases.items()}
        number = next(self._numbers)
        tickets = [Ticket(job=number, place=place, client=client, kinds=arrival.kinds,
                          batch=self._batch(request.pictures[place], arrival),
                          weights=self._weights_of(request, place), entry=arrival)
                   for place, arrival in arrivals.items()]
        with self._change:
            self._check_room(tickets)  # before anything is compiled for them
        for ticket in tickets:
            if ticket.entry.pictures:
                self._encoder(ticket.batch)
        with self._change:
            self._check_room(tickets)
            self.scheduler.submit(tickets, time.monotonic(), previews=previews,
                                  steps=max(_steps(request.pictures[place]) for place in arrivals))
            job = self._jobs[number] = Job(request, number, client, self._cancel, canvases)
            self._tell()
            self._change.notify_all()
        return job

    def _settled(self, request: Request) -> Request:
        """The same with styles applied, and ControlNets named that were left open."""
        def one(picture: Picture) -> Picture:
            picture = self.offer.styles.applied(picture)
            if picture.steered and not picture.controlnet:
                found = self.offer.controlnet(picture).name
                picture = dataclasses.replace(picture, controlnet=found)
            return picture

        return Request(tuple(picture and one(picture) for picture in request.pictures))

    def _check_room(self, tickets: Sequence[Ticket]) -> None:
        """Raises what `submit` raises where they are not taken. Needs the lock."""
        if self._closed or self._draining:
            raise Closing("The server is shutting down.")
        try:
            self.scheduler.check_room(tickets)
        except Busy:
            self.tally.refused += 1
            raise

    def arrival(self, request: Request, place: int, canvas: Canvas | None = None,
                control: np.ndarray | None = None) -> Entry:
        """The picture at `place` as the programs take it, with what it begins with and what steers
        it, as `control_pixels` gives it.

        Raises:
            RequestError: its sampler cannot take its steps, or its model cannot draw it.
        """
        picture = request.pictures[place]
        with _told_by_whose(request, place):
            return self._entry(self.offer.open(picture.model).checkpoint, picture, canvas, control)

    def _canvases(self, request: Request, inputs: Mapping[str, Input]) -> dict[int, Canvas | None]:
        """What the pictures begin with, by place; those that begin with the same share it."""
        made, canvases = {}, {}
        for place in request.places():
            picture = request.pictures[place]
            self.offer.check(picture)
            key = (picture.init_image, picture.mask, picture.fit, picture.mask_blur,
                   picture.height, picture.width)
            if key not in made:
                with _told_by_whose(request, place):
                    made[key] = Canvas.of(picture, inputs)
            canvases[place] = made[key]
        return canvases

    def _controls(self, request: Request,
                  inputs: Mapping[str, Input]) -> dict[int, np.ndarray | None]:
        """What steers the pictures, by place; those that follow the same share it."""
        made, controls = {}, {}
        for place in request.places():
            picture = request.pictures[place]
            key = (picture.steered, picture.control_image, picture.detector, picture.fit,
                   picture.height, picture.width)
            if key not in made:
                with _told_by_whose(request, place):
                    made[key] = control_pixels(picture, inputs)
            controls[place] = made[key]
        return controls

    def _weights_of(self, request: Request, place: int) -> Weights:
        """The parameters that the picture is drawn with.

        Raises:
            RequestError: a LoRA that it asks for cannot be used.
        """
        picture = request.pictures[place]
        offered = self.offer.open(picture.model)
        with _told_by_whose(request, place):
            asked = self.adapters.asked(picture.prompt, picture.negative_prompt)
            self.adapters.check(asked, offered.checkpoint.parameters.shapes)
            controlnet = self.offer.controlnet(picture)
        weights = dataclasses.replace(offered.weights, adapters=asked)
        return self.offer.steered(weights, controlnet) if controlnet else weights

    def _entry(self, checkpoint: Checkpoint, picture: Picture, canvas: Canvas | None = None,
               control: np.ndarray | None = None) -> Entry:
        settings = {name: getattr(picture, name) for name in TAKEN}
        model = checkpoint.model
        settings["guidance"] = model.cfg_scale(picture.guidance)
        inputs = checkpoint.prompt_inputs(picture.prompt, picture.negative_prompt,
                                          height=picture.height, width=picture.width,
                                          guidance=picture.guidance,
                                          options=self.adapters.options(model))
        return Entry.of(
            _table(checkpoint, picture),
            inputs if control is None else {**inputs, "control": control},
            **settings,
            given=Given.of(model, model.latent_shape(picture.height, picture.width),
                           canvas and canvas.image, canvas and canvas.mask, picture.strength),
            # What jax.random.PRNGKey makes of the seed, without asking a device.
            key=np.array([0, picture.seed], np.uint32),
        )

    @property
    def params(self) -> Params:
        """The first model's parameters, as `programs` takes them, while all devices hold them."""
        return self.worker.weights.together([self.weights] * self.mesh.size)

    @property
    def occupied(self) -> int:
        """How many slots have a picture on its way."""
        with self._change:
            return self.scheduler.occupied

    @property
    def waiting(self) -> int:
        """How many pictures have no slot yet."""
        with self._change:
            return self.scheduler.waiting

    @property
    def taking(self) -> bool:
        """Whether it draws what is asked for: it is compiled, and is not about to end."""
        return self.ready.is_set() and not (
            self.failure or self._draining or self._closed) and self._thread.is_alive()

    def jobs(self) -> list[Job]:
        """Those that are not over."""
        with self._change:
            return list(self._jobs.values())

    def seconds(self, picture: Picture) -> float | None:
        """What this picture takes while no other is made, as far as is known;
        None before anything is, or if it cannot be drawn.
        """
        try:
            entry = self._entry(self.offer.open(picture.model).checkpoint, picture)
            latency = self.latency.of(self._batch(picture, entry))
        except ValueError:
            return None
        return latency.of_picture(entry.kinds) if latency.known else None

    def notes(self, request: Request) -> list[str]:
        """Sentences about words past the tokens that the model sees, or unknown to it.

        Raises:
            RequestError: a prompt cannot be drawn.
        """
        request = self._settled(request)
        pictures = {place: request.pictures[place] for place in request.places()}
        models = {place: self.offer.open(picture.model).checkpoint
                  for place, picture in pictures.items()}
        lost = {f"Prompt {place + 1}": self.count(picture.prompt, picture.model).lost
                for place, picture in pictures.items()}
        for place, picture in pictures.items():
            own = "negative_prompt" in request.overrides(place)
            whose = f" of prompt {place + 1}" if own else ""
            lost[f"The negative prompt{whose}"] = self.count(
                picture.negative_prompt, picture.model).lost
        notes = [f"{name} is too long for the model, which will not see its end: “{_short(words)}”"
                 for name, words in lost.items() if words]
        unknown = dict.fromkeys(word for place, picture in pictures.items()
                                for word in models[place].unknown_words(picture.prompt))
        if unknown:
            notes.append("The model was never shown these words, and draws something else there: "
                         f"“{_short(', '.join(unknown))}”")
        return notes

    def count(self, prompt: str, model: str = "") -> Count:
        """How long a prompt is for a model, and what of it is cut; raises RequestError if it cannot
        be drawn."""
        checkpoint = self.offer.open(model).checkpoint
        with _as_request_errors():
            return count(checkpoint.tokenizer, prompt, self.adapters.options(checkpoint.model))

    def to_png(self, pixels: np.ndarray, request: Request) -> bytes:
        """A PNG file of pixels uint8 [H, W, 3] that says which request and model made them, and
        names the spacing of the steps also where that was left to the model."""
        request = self._settled(request)  # that of a job is so already, and stays what was drawn
        drawn = [request.pictures[place] for place in request.places()]
        checkpoint = self.offer.known(request.common.model).checkpoint
        decoder = checkpoint.parameters.decoder
        explicit = request.explicit(
            lambda picture: self.offer.known(picture.model).checkpoint.schedule)
        return to_png(pixels, explicit, model_hash=self.offer.hash(request.common.model),
                      token_downsampling=checkpoint.model.token_downsampling,
                      vae=decoder.name if decoder and decoder.pictures else "",
                      lora_hashes=self.adapters.hashes(*(
                          text for picture in drawn
                          for text in (picture.prompt, picture.negative_prompt))))

    def drain(self, seconds: float) -> bool:
        """Takes nothing new, and waits so long at most for what has been asked for; whether all of
        it is done."""
        with self._change:
            self._draining = True
            return self._change.wait_for(lambda: not self._jobs, seconds)

    def close(self) -> None:
        """Cancels everything and ends the thread."""
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
                self.tally.take(plan, report)
                self._note_compiled(report)
                try:
                    self.scheduler.update(report, time.monotonic())
                    self._tell()  # before it waits for whoever asks next
                    plan = self._next_plan()
                except Exception as error:  # a fault of ours: who waits is told, others are served
                    log.exception("the scheduler failed")
                    self.scheduler.abandon(Sentence("Making the pictures failed: {reason}",
                                                    reason=reason_of(error)))
                    self._tell()
                    plan = Plan()

    def _next_plan(self) -> Plan | None:
        """Waits until there is something to do; None once the engine is closed. Needs the lock."""
        while self.scheduler.idle and self.ready.is_set() and not self._closed:
            self._change.wait()
        if self._closed:
            for number in list(self._jobs):
                self._pass_on(number, Cancelled())
            return None
        for job in list(self._jobs.values()):
            if job.client and job.unheard() > UNHEARD_SECONDS:
                self.scheduler.cancel(job.number, time.monotonic())
        plan = self.scheduler.schedule(time.monotonic())
        self._tell()
        return plan

    def _note_compiled(self, report: Report) -> None:
        if self.batch in report.failed:
            self.failure = Sentence("Compiling failed: {reason}",
                                    reason=report.failed[self.batch])
        if self.batch in report.failed or self.batch in report.compiled:
            self.ready.set()

    def _read(self, weights: Weights, sharding: Sharding) -> Params:
        """The parameters of weights that are to be brought."""
        if weights.controlnet:
            controlnet = self.offer.controlnets[weights.controlnet]
            with paths_within(controlnet.folder.parent):
                own = controlnet.load(sharding, leading=True)
            offered = self.offer.known(weights.name).weights
            base = dataclasses.replace(offered, adapters=weights.adapters)
            return {**self._base(base, sharding), CONTROL: own}
        if weights.adapters:
            base = self._base(dataclasses.replace(weights, adapters=()), sharding)
            shapes = self.offer.known(weights.name).checkpoint.parameters.shapes
            return merge(base, self.adapters.deltas(weights.adapters, shapes))
        parameters = self.offer.known(weights.name).checkpoint.parameters
        tiny = parameters.decoder
        try:
            with paths_within(parameters.source.parent, tiny and tiny.folder.parent):
                params = parameters.load(sharding, leading=True)
        except Exception:
            self.offer.forget(weights.name)
            raise
        # For the picture's file; reading the file again takes seconds.
        threading.Thread(target=self.offer.hash, args=(weights.name,), daemon=True).start()
        return params

    def _base(self, weights: Weights, sharding: Sharding) -> Params:
        """The parameters that adapters are merged into or a ControlNet is put beside: those on the
        devices, which are shared, or else read."""
        there = self.worker.weights
        placed = [there.of(device, weights) for device in there.numbers(sharding)]
        return there.spread(sharding, placed) if all(placed) else self._read(weights, sharding)

    def _batch(self, picture: Picture, entry: Entry | None = None) -> Batch:
        """What draws a picture of this model and size, of texts as in the entry."""
        weights = self.offer.open(picture.model).weights
        architecture, controlnet = weights.architecture, self.offer.controlnet(picture)
        checkpoint, _ = self.offer.sample(architecture)
        model = checkpoint.model
        model = model.for_inputs(entry.inputs) if entry else model
        if controlnet:
            model = model.steered_by(controlnet.network, picture.height, picture.width)
            weights = self.offer.steered(weights, controlnet)
        key = weights.architecture, picture.height, picture.width, model.extras
        if key not in self._batches:
            share = self.mesh.size * self._group
            # As many again as one client can fill: there is always a free one for another.
            slots = -(-2 * SLOTS // share) * share
            memory = self._memory_of(model, weights, picture, slots)
            batch = Batch(architecture=key[0], height=picture.height, width=picture.width,
                          slots=slots, group=self._group, extras=model.extras, memory=memory)
            self._kinds[batch] = _Kind(architecture, model, controlnet)
            self._batches[key] = batch
        return self._batches[key]

    def _memory_of(self, model: Model, weights: Weights, picture: Picture, slots: int) -> int:
        """Bytes on a device of a batch's slots, of which there are two while they change; and of
        parameters on a device that holds none of the architecture, while others draw."""
        shape = model.latent_shape(picture.height, picture.width)
        slots_there = jax.eval_shape(partial(empty_slots, model, slots, shape))
        zeros = weights.memory if self.mesh.size > 1 else 0
        return 2 * bytes_of(slots_there) // self.mesh.size + zeros

    def _build(self, batch: Batch) -> tuple[Programs, Entry, Params]:
        """The programs of a batch, an entry to time them with, and its parameters' shapes."""
        kind = self._kinds[batch]
        checkpoint, defaults = self.offer.sample(kind.architecture)
        sample = dataclasses.replace(defaults, prompt="a sample", cache_interval=2,
                                     height=batch.height, width=batch.width,
                                     steps=max(4, defaults.steps))
        programs = self.programs if batch == self.batch else self._programs_of(batch)
        # Texts of any content take as long.
        inputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), programs.model.input_shapes)
        entry = self._entry(checkpoint, sample).replace(inputs=inputs, pictures=None)
        shapes = checkpoint.parameters.shapes
        if kind.controlnet:
            shapes = {**shapes, CONTROL: kind.controlnet.shapes}
        return programs, entry, shapes

    def _programs_of(self, batch: Batch) -> Programs:
        return Programs(self._kinds[batch].model, self.mesh, slots=batch.slots, height=batch.height,
                        width=batch.width, group=batch.group, stacked=True)

    def _prepare(self, plan: Plan, programs: Programs, params: Params) -> dict[int, Entry]:
        """The entries that enter by a plan, with latents in place of their pictures."""
        entries = {slot: ticket.entry for slot, ticket in plan.enter.items()}
        if not any(entry.pictures for entry in entries.values()):
            return entries
        own = {part: params[part] for part in params if part != CONTROL}
        return self._encoder(plan.batch).encode(own, entries, programs.device)

    def _encoder(self, batch: Batch) -> ImageEncoder:
        """What encodes the pictures that a batch's images begin with. Whoever asks first compiles
        it, and only who asks for the same one waits; a failure is a RequestError to all of them."""
        key = self._kinds[batch].architecture, batch.height, batch.width
        with self._finding:
            found = self._encoders.pop(key, None)
            encoder = self._encoders[key] = found or Future()  # the last is that used last
            if len(self._encoders) > MAX_ENCODERS:
                del self._encoders[next(iter(self._encoders))]
        if found is None:
            self._compile_encoder(batch, key, encoder)
        return encoder.result()

    def _compile_encoder(self, batch: Batch, key: tuple, encoder: Future[ImageEncoder]) -> None:
        try:
            checkpoint, _ = self.offer.sample(key[0])
            encoder.set_result(ImageEncoder(
                checkpoint.model, self.mesh, checkpoint.parameters.shapes, height=batch.height,
                width=batch.width, stacked=True))
        except Exception as error:
            log.exception("compiling an encoder failed")
            with self._finding:
                if self._encoders.get(key) is encoder:
                    del self._encoders[key]  # it is tried again when it is next asked for
            encoder.set_exception(RequestError("Compiling failed: {reason}",
                                               reason=reason_of(error)))

    def _cancel(self, number: int, place: int | None) -> None:
        """Gives up a job or a picture of it, for `Job.cancel`."""
        with self._change:
            self.scheduler.cancel(number, time.monotonic(), place)
            self._tell()
            self._change.notify_all()

    def _tell(self) -> None:
        """Passes on what the scheduler has to tell. Needs the lock."""
        for number, event in self.scheduler.events():
            self._pass_on(number, event)

    def _pass_on(self, number: int, event: Event) -> None:
        """Tells a job; one that this ends is counted and forgotten. Needs the lock."""
        job = self._jobs.get(number)
        if job is None:  # over already: after a fault jobs are ended wherever they are
            return
        job.tell(event)
        if job.end:
            self.tally.ended[type(job.end).__name__.lower()] += 1
            journal.note(job)
            del self._jobs[number]
            self._change.notify_all()  # whoever waits for all of them


@contextlib.contextmanager
def _as_request_errors(whose: str = "") -> Iterator[None]:
    """Tells whoever asked what cannot be done."""
    try:
        yield
    except ValueError as error:
        raise RequestError("{whose}{reason}", whose=whose, reason=error.args[0]) from error


def _told_by_whose(request: Request, place: int) -> contextlib.AbstractContextManager[None]:
    """The same of one of several pictures."""
    own = request.overrides(place)
    return _as_request_errors(Sentence("Prompt {number}: ", number=place + 1) if own else "")


def _table(checkpoint: Checkpoint, picture: Picture) -> Table:
    """What the picture's sampler does; raises ValueError if it cannot take its steps."""
    return make_table(picture.sampler, checkpoint.schedule, picture.steps,
                      spacing=picture.spacing or None, begin=picture.steps - _steps(picture))


def _steps(picture: Picture) -> int:
    """How many steps the picture takes: the last ones where it begins with another."""
    return steps_taken(picture.steps, picture.strength) if picture.init_image else picture.steps


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
