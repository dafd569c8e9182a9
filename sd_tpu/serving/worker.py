"""Carries out plans on the devices and reports: plans in, reports out, both plain data."""

import itertools
import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.weights import Params
from sd_tpu.pictures.images import blurred
from sd_tpu.runtime.mesh import replicas, split
from sd_tpu.runtime.previews import SAMPLES, LatentPreview, sample_latents
from sd_tpu.runtime.programs import ImageEncoder, Programs, encoded
from sd_tpu.runtime.programs import TextEncoder as TextProgram
from sd_tpu.runtime.slots import Slots
from sd_tpu.runtime.weights import ReplicaWeights, digest
from sd_tpu.sentence import Sentence
from sd_tpu.serving.plan import (
    Batch,
    Compiled,
    Encoder,
    Plan,
    Program,
    Prompt,
    Report,
    TextEncoder,
    Training,
    Weights,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.1  # that a plan without rows waits for the background at most

BackgroundResult = (
    tuple[Program, Compiled | str]
    | tuple[Training, str]
    | tuple[Weights, list[int], str | None, float]
)


class Trainee(Protocol):
    """Steps of a training, as a worker takes them."""

    def step(self, params: Params) -> bool:
        """Take the next step by parameters [R, ...], and return whether there was one."""

    def suspend(self) -> None:
        """Take the state from the devices; the next step puts it back."""

    def fail(self, message: Sentence) -> None:
        """Take note that there are no more steps, and why; the caller may hold locks."""


class Worker:
    """Owner of the devices of this process; `execute` is called by one thread at a time.

    Weights are brought one after the other, and programs compiled one after the other, beside one
    another and beside what is drawn.
    """

    def __init__(
        self,
        mesh: Mesh,
        read: Callable[[Weights, NamedSharding], Params],
        build: Callable[[Batch], tuple[Programs, Any, Params]],
        build_encoder: Callable[[Encoder], ImageEncoder] | None = None,
        build_text_encoder: Callable[[TextEncoder], tuple[TextProgram, Params]] | None = None,
    ):
        """Begin with nothing compiled and nothing on the devices.

        Args:
            mesh: the devices.
            read: gives the parameters of weights, arrays [1, ...] placed as the sharding says.
            build: gives a batch's programs, not compiled yet; an entry to time them with, of at
                least two rows; and its parameters' shapes.
            build_encoder: gives an encoder of pictures; None where no plan asks for one.
            build_text_encoder: gives an encoder of prompts, not compiled yet, and its parameters'
                shapes; None where no plan asks for one.
        """
        self._read, self._build, self._build_encoder = read, build, build_encoder
        self._build_text_encoder = build_text_encoder
        self.weights = ReplicaWeights(mesh)
        self._replicas = range(replicas(mesh))
        # By architecture, and how they are divided over the chips of a replica.
        self._shapes: dict[str, tuple[Params, Params | None]] = {}
        # By replica and stand-in, whose parameters are in it.
        self._borrowed: dict[tuple[int, Weights], set[Weights]] = {}
        self._programs: dict[Batch, Programs] = {}
        self._slots: dict[Batch, Slots] = {}
        self._encoders: dict[Encoder, ImageEncoder] = {}
        self._text_encoders: dict[TextEncoder, TextProgram] = {}
        self._texts: dict[Prompt, dict[str, np.ndarray]] = {}  # what was made of prompts
        self._loaded = 0  # parameters, which may be others each time
        # By architecture and the autoencoder's digest, which fine-tunes may share.
        self._previews: dict[tuple[str, str], LatentPreview] = {}
        self._digests: dict[Weights, str] = {}  # of autoencoders
        self.trainees: dict[int, Trainee] = {}  # by the numbers of their trainings
        self._results: queue.SimpleQueue[BackgroundResult] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the weights, which compiling uses as well
        self._loader, self._compiler = _Background("load"), _Background("compile")

    def execute(self, plan: Plan) -> Report:
        """Carry out a plan; failures are in the report."""
        for program in plan.release:
            for there in (self._programs, self._slots, self._encoders, self._text_encoders):
                there.pop(program, None)
        for training in plan.suspend:
            self._suspend(training)
        with self._lock:
            for replica, weights in plan.drop:
                self._drop(replica, weights)
        wanted = dict.fromkeys(weights for _, weights in plan.load)
        for weights in sorted(wanted, key=lambda each: len(each.needs)):  # bases first
            self._load(weights, [replica for replica, other in plan.load if other == weights])
        for program in plan.compile:
            self._compiler.do(
                lambda program=program: self._results.put((program, self._compile(program))),
                lambda reason, program=program: self._results.put((program, reason)),
            )
        for prompt in plan.forget:
            self._texts.pop(prompt, None)
        done: dict[str, Any] = self._encode_or_fail(plan.encode) if plan.encode else {}
        if plan.batch and not done.get("unread"):
            done |= self._draw_or_fail(plan)
        elif plan.train:
            done |= {"train_seconds": self._train(plan.train)}
        return Report(**done, **self._finished_in_background(wait=not done))

    def load_later(self, job: Callable[[], object]) -> None:
        """Run a job that reads files after those that replicas wait for by now."""
        self._loader.do(job, lambda reason: None)

    def close(self) -> None:
        """Wait for work in the background, which cannot be stopped."""
        self._loader.close()
        self._compiler.close()

    # --- prompts --------------------------------------------------------------------------------

    def _encode_or_fail(self, prompts: Iterable[Prompt]) -> dict[str, Any]:
        """Encode prompts and keep what is made of them; those of other encoders or weights go on
        where some cannot be encoded."""
        together = defaultdict(list)
        for prompt in prompts:
            together[prompt.encoder, prompt.weights].append(prompt)
        begun, unread = time.monotonic(), dict[Prompt, str]()
        for (encoder, weights), alike in together.items():
            try:
                params = self._everywhere(weights)
                inputs = [prompt.inputs for prompt in alike]
                made = self._text_encoders[encoder].encode(params, inputs)
                self._texts |= zip(alike, made, strict=True)
            except Exception as error:  # as in drawing
                log.exception("prompts could not be encoded")
                unread |= dict.fromkeys(alike, reason_of(error))
        return {"encode_seconds": time.monotonic() - begun, "unread": unread}

    def _everywhere(self, weights: Weights) -> Params:
        """Assemble parameters that all replicas hold."""
        with self._lock:
            return self.weights.together([weights] * len(self._replicas))

    # --- drawing --------------------------------------------------------------------------------

    def _draw_or_fail(self, plan: Plan) -> dict[str, Any]:
        try:
            return self._draw(plan)
        except Exception as error:  # whatever the devices raise: the other batches must go on
            log.exception("a batch failed")
            self._slots.pop(plan.batch, None)  # the failed call may have given them up
            return {"error": reason_of(error)}

    def _draw(self, plan: Plan) -> dict[str, Any]:
        assert plan.batch is not None
        programs, params = self._programs[plan.batch], self._params_of(plan)
        slots = self._slots.pop(plan.batch, None) or programs.empty()
        if plan.enter:
            slots = programs.encode(params, slots, self._entering(plan, programs, params))
        rows = np.zeros(programs.slots, np.int32)
        rows[list(plan.rows)] = list(plan.rows.values())
        slots, seconds = _timed(lambda: programs.advance(params, slots, rows))
        self._slots[plan.batch] = slots
        pictures, decode_seconds = _timed(
            lambda: _drawn(programs, programs.decode, params, slots.latents, plan.finish)
        )
        unsafe, check_seconds = _timed(lambda: programs.unsafe(params, pictures))
        pictures |= {slot: blurred(pictures[slot]) for slot in unsafe}
        previews, preview_seconds = _timed(
            lambda: self._preview(plan, programs, params, slots.clean) if plan.preview else {}
        )
        return dict(
            advance_seconds=seconds,
            decode_seconds=decode_seconds + check_seconds,
            preview_seconds=preview_seconds,
            pictures=pictures,
            previews=previews,
            unsafe=frozenset(unsafe),
        )

    def _entering(self, plan: Plan, programs: Programs, params: Params) -> dict[int, Any]:
        """Return the inputs of slots that a plan fills, with latents in place of their pictures."""
        entering = {
            slot: ticket.slot_inputs.with_texts(self._texts[ticket.prompt])
            for slot, ticket in plan.enter.items()
        }
        latents = defaultdict(dict)
        for encoder in {each for ticket in plan.enter.values() for each in ticket.encoders}:
            whose = {
                replica: (weights.network if encoder.part else weights.root, self._loaded)
                for replica, weights in plan.weights.items()
            }
            made = self._encoders[encoder].latents(params, entering, programs.replica, whose)
            for slot, by_name in made.items():
                latents[slot] |= by_name
        return encoded(entering, latents) if latents else entering

    def _train(self, training: Training) -> float | None:
        """Take a step of a training; return the seconds, None where there is none left."""
        begun, trainee = time.monotonic(), self.trainees.get(training.number)
        if trainee is None:
            return None
        try:
            params = self._everywhere(training.weights) | self._everywhere(training.texts)
            if not trainee.step(params):
                trainee.suspend()
                return None
        except Exception as error:  # such as a device without memory enough
            log.exception("a training failed")
            self._results.put((training, reason_of(error)))
        return time.monotonic() - begun

    def _suspend(self, training: Training) -> None:
        try:
            if trainee := self.trainees.get(training.number):
                trainee.suspend()
        except Exception as error:  # such as a host without memory enough
            log.exception("a training failed")
            self._results.put((training, reason_of(error)))

    def _params_of(self, plan: Plan) -> Params:
        assert plan.batch is not None
        return self._together(plan.batch.architecture, plan.weights)

    def _preview(
        self, plan: Plan, programs: Programs, params: Params, clean: jax.Array
    ) -> dict[int, np.ndarray]:
        if programs.has_previewer:
            return _drawn(programs, programs.preview, params, clean, plan.preview)
        latents = np.asarray(clean)
        return {
            slot: self._previewer_of(programs, params, plan.weights, programs.replica(slot))(
                latents[slot]
            )
            for slot in plan.preview
        }

    def _previewer_of(
        self, programs: Programs, params: Params, weights: dict[int, Weights], replica: int
    ) -> LatentPreview:
        """Return the previewer of a replica's latents, fitted when its autoencoder is new."""
        mine = weights[replica]
        key = self._autoencoder(programs, mine, self.weights.of(replica, mine))
        if key not in self._previews:
            alike = [other for other in weights if weights[other] == mine]
            self._previews[key], _ = _fit_preview(programs, params, alike)
        return self._previews[key]

    def _autoencoder(self, programs: Programs, weights: Weights, params: Params) -> tuple[str, str]:
        """Return a key of the autoencoder of these weights, which no adapter changes."""
        base = weights.root
        digest_of = self._digests.get(base)  # at once: the loader takes those away that it brings
        if digest_of is None:
            digest_of = self._digests[base] = digest(params[programs.autoencoder])
        return base.architecture, digest_of

    def _together(self, architecture: str, wanted: dict[int, Weights]) -> Params:
        """Assemble parameters for the programs: on each replica those that are wanted there.

        A replica that draws nothing may hold any parameters of the architecture; if it holds none,
        it gets a stand-in.
        """
        with self._lock:
            return self._assembled(architecture, wanted)

    def _assembled(self, architecture: str, wanted: dict[int, Weights]) -> Params:
        return self.weights.together(
            [wanted.get(replica) or self._any(replica, architecture) for replica in self._replicas]
        )

    def _any(self, replica: int, architecture: str) -> Weights:
        for name in self.weights.names(replica):
            if name.architecture == architecture:
                return name
        return self._stand_in(replica, architecture)

    def _stand_in(self, replica: int, architecture: str) -> Weights:
        """Put a stand-in on a replica: parameters of the right shapes that nothing is drawn with.

        It shares components of the same shapes that lie there, as a ControlNet's model may,
        and has zeros for the others.
        """
        (shapes, divisions), shared = self._shapes[architecture], {}
        zeros = _nameless(architecture)
        borrowed = self._borrowed[replica, zeros] = set()
        for weights in self.weights.names(replica):
            there = self.weights.of(replica, weights)
            alike = {
                part: there[part]
                for part in shapes.keys() & there.keys() - shared.keys()
                if weights.name and _alike(there[part], shapes[part])
            }
            shared |= alike
            borrowed |= {weights} if alike else set()
        missing = {part: shapes[part] for part in shapes.keys() - shared.keys()}
        self.weights.put(
            replica,
            zeros,
            jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), missing),
            divisions and {part: divisions[part] for part in missing},
        )
        self.weights.record(replica, zeros, {**self.weights.of(replica, zeros), **shared})
        return zeros

    def _drop(self, replica: int, weights: Weights) -> None:
        """Drop parameters, and stand-ins that hold some of them."""
        if not weights.name:
            weights = _nameless(weights.architecture)
        self.weights.drop(replica, weights)
        for (where, zeros), borrowed in self._borrowed.items():
            if where == replica and weights in borrowed:
                self.weights.drop(replica, zeros)

    # --- the background -------------------------------------------------------------------------

    def _load(self, weights: Weights, replicas: list[int]) -> None:
        """Begin to load weights onto replicas."""
        with self._lock:
            for replica in replicas:  # the new weights replace a stand-in
                self._drop(replica, _nameless(weights.architecture))

        def put_result(reason: str | None, seconds: float = 0.0) -> None:
            self._results.put((weights, replicas, reason, seconds))

        def read() -> None:
            begun = time.monotonic()  # not before: others may have been waited for
            params = jax.block_until_ready(self._read(weights, self.weights.on(replicas)))
            with self._lock:  # at once: the next weights may be merged into these
                for replica in replicas:
                    self.weights.record(replica, weights, params)
                self._digests.pop(weights, None)  # the file may have changed
            put_result(None, time.monotonic() - begun)

        self._loader.do(read, put_result)

    def _compile(self, program: Program) -> Compiled:
        if isinstance(program, Batch):
            return self._compile_batch(program)
        begun = time.monotonic()
        if isinstance(program, TextEncoder):
            assert self._build_text_encoder is not None
            text_encoder, shapes = self._build_text_encoder(program)
            text_encoder.compile(shapes)
            self._text_encoders[program] = text_encoder
        else:
            assert self._build_encoder is not None
            encoder = self._build_encoder(program)
            encoder.compile()
            self._encoders[program] = encoder
        return Compiled(seconds=time.monotonic() - begun)

    def _compile_batch(self, batch: Batch) -> Compiled:
        """Compile the programs on slots of their own, and time them.

        Timed are the second evaluation for a picture and the second call that decodes: the first
        ones take much longer than any other.
        """
        if not batch.zeros and not self._held(batch.architecture):
            self._loader.wait()  # on one replica a stand-in takes as much memory as they
        begun = time.monotonic()
        programs, slot_inputs, shapes = self._build(batch)
        self._shapes[batch.architecture] = shapes, programs.divisions
        try:
            return self._compiled(batch, programs, slot_inputs, begun)
        finally:
            if not batch.zeros:  # nothing needs a stand-in once this is over
                with self._lock:
                    for replica in self._replicas:
                        self._drop(replica, _nameless(batch.architecture))

    def _compiled(
        self, batch: Batch, programs: Programs, slot_inputs: Any, begun: float
    ) -> Compiled:
        params = self._together(batch.architecture, {})
        slots = programs.advance(params, programs.encode(params, programs.empty(), {}), 0)
        _drawn(programs, programs.decode, params, slots.latents, [], always=True)
        black = {0: np.zeros((batch.height, batch.width, 3), np.uint8)}
        programs.unsafe(params, black)
        if programs.has_previewer:
            _drawn(programs, programs.preview, params, slots.clean, [], always=True)
        seconds = time.monotonic() - begun
        slots = programs.encode(params, slots, {0: slot_inputs})
        for _ in range(2):
            slots, row = _timed(lambda: programs.advance(params, slots, 1))  # noqa: B023
        with self._lock:  # by now the parameters may be there
            held = self._held(batch.architecture)
            params = self._assembled(batch.architecture, held)
            one = next(iter(held.values()), None)
            alike = [replica for replica in held if held[replica] == one]
            tree = self.weights.of(alike[0], one) if alike else {}
        preview, decode = _fit_preview(programs, params, alike or self._replicas)
        if one is not None:
            self._previews.setdefault(self._autoencoder(programs, one, tree), preview)
        _, check = _timed(lambda: programs.unsafe(params, black))
        self._programs[batch] = programs
        return Compiled(seconds=seconds, row_seconds=row, decode_seconds=decode + check)

    def _held(self, architecture: str) -> dict[int, Weights]:
        """Return the replicas with parameters of the architecture, and which."""
        return {
            replica: weights
            for replica in self._replicas
            for weights in self.weights.names(replica)
            if weights.architecture == architecture and weights.name
        }

    def _finished_in_background(self, *, wait: bool) -> dict[str, Any]:
        results: dict[str, Any] = dict(compiled={}, loaded={}, failed={})
        with suppress(queue.Empty):
            for first in itertools.chain([wait], itertools.repeat(False)):
                self._sort_result(self._results.get(first, WAIT_SECONDS), **results)
        return results

    def _sort_result(
        self, result: BackgroundResult, compiled: dict, loaded: dict, failed: dict
    ) -> None:
        match result:
            case (Batch() | Encoder() | TextEncoder() as program, Compiled() as measured):
                compiled[program] = measured
            case (Batch() | Encoder() | TextEncoder() | Training() as what, reason):
                failed[what] = reason
            case (weights, replicas, str() as reason, _):
                failed.update({(replica, weights): reason for replica in replicas})
            case (weights, replicas, None, seconds):
                self._loaded += 1
                loaded.update({(replica, weights): seconds for replica in replicas})


class _Background:
    """A thread that runs one job after the other."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object], failed: Callable[[str], None]) -> None:
        """Run a job after those before it; `failed` gets a short reason if it raises."""

        def run() -> None:
            try:
                job()
            except Exception as error:  # such as a device without memory enough
                log.exception("%s failed", self._thread.name)
                failed(reason_of(error))

        self._jobs.put(run)

    def wait(self) -> None:
        """Wait for the jobs before; return at once when it is closed."""
        over = threading.Event()
        self._jobs.put(over.set)
        while not (self._closed or over.wait(WAIT_SECONDS)):
            pass

    def close(self) -> None:
        """End after the present job."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) and not self._closed:
            job()


def _nameless(architecture: str) -> Weights:
    return Weights(name="", architecture=architecture)


def _alike(params: Params, shapes: Params) -> bool:
    """Whether parameters [1, ...] on a replica have these shapes and types."""

    def of(tree: Params, lead: int) -> list:
        return [
            (path, leaf.shape[lead:], leaf.dtype)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    return of(params, 1) == of(shapes, 0)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the function's result once it is ready, and the seconds that took."""
    begun = time.monotonic()
    result = jax.block_until_ready(function())
    return result, max(time.monotonic() - begun, 1e-6)


def _drawn(
    programs: Programs,
    draw: Callable,
    params: Params,
    latents: jax.Array,
    wanted: Iterable[int],
    *,
    always: bool = False,
) -> dict[int, np.ndarray]:
    """Draw the wanted slots by one of the programs; without any it is called only if `always`."""
    wanted = list(wanted)
    if not (wanted or always):
        return {}
    mask = np.isin(np.arange(programs.slots), wanted)
    images = np.asarray(draw(params, latents, mask))
    return {slot: images[slot].copy() for slot in wanted}


def _fit_preview(
    programs: Programs, params: Params, replicas: Iterable[int]
) -> tuple[LatentPreview, float]:
    """Fit a previewer to samples that these replicas decode in two calls.

    Returns it, and the seconds that a picture took in the second call.
    """
    free = [slot for slot in range(programs.slots) if programs.replica(slot) in set(replicas)]
    h, w, channels = programs.latent_shape
    used = free[: max(1, SAMPLES // (2 * h * w))]
    samples = sample_latents(2 * programs.slots, (h, w, channels))
    latents, pictures = [], []
    for half in np.split(samples, 2):
        on_devices = jax.device_put(half, split(programs.mesh))
        drawn, seconds = _timed(lambda: _drawn(programs, programs.decode, params, on_devices, used))  # noqa: B023
        latents.append(half[used])
        pictures.append(np.stack(list(drawn.values())))
    most = max(Counter(map(programs.replica, used)).values())
    return LatentPreview.fit(np.concatenate(latents), np.concatenate(pictures)), seconds / most


def reason_of(error: Exception) -> str:
    """Return a short reason; messages written for people stay as they are."""
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]
