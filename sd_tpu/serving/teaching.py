"""LoRAs that people have trained on the page: one training at a time, beside what is drawn.

The engine's scheduler says when a step is taken. What takes long, and what is written, is done in
a thread of its own.
"""

import dataclasses
import logging
import math
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.weights import Params
from sd_tpu.pictures.images import to_webp
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import replicas
from sd_tpu.sentence import Sentence, SentenceError
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.serving.plan import Training
from sd_tpu.serving.scheduler import Busy
from sd_tpu.serving.training_run import (
    DONE,
    FAILED,
    PREPARING,
    STOPPED,
    TRAINING,
    WAITING,
    TrainingRun,
)
from sd_tpu.serving.worker import reason_of
from sd_tpu.settings import MAX_PROMPTS, RequestError
from sd_tpu.training.pictures import FEWEST, MOST, PICTURE_SIDES, captioned
from sd_tpu.training.step import State
from sd_tpu.training.teach import SAVED_SECONDS, identity, rounded, smooth
from sd_tpu.training.teachable import check_teachable
from sd_tpu.training.trainer import Trainer

log = logging.getLogger(__name__)

MAX_ACTIVE = 4  # runs at a time: one that is trained, and others that wait
MAX_RUNS = 64  # whose folders are kept
# Bounds for one network and for one browser: others find room beside them.
NETWORK_ACTIVE, NETWORK_RUNS, OWNER_RUNS = MAX_ACTIVE - 1, MAX_RUNS // 2, MAX_RUNS // 4
MAX_BYTES = 1 << 31  # of the pictures of all runs
KEPT_SECONDS = 7 * 86400.0  # after which a run that nobody goes on with is forgotten
FORGETTING_SECONDS = 3600.0  # between two looks for such runs, while nothing is trained
CLOSING_SECONDS = 10.0  # for what is written; compiling, which takes longer, loses nothing
KEPT_STATES = 4  # of a run, evenly, the last of which is its result
FORWARDS = 4  # forward passes that take as long as a step: two, and a backward pass of twice one
SAMPLE_QUALITY = 80  # of WebP files
OTHER_SERVER = Sentence(
    "This cannot be gone on with: what was kept is damaged, or the server's devices, data type or "
    "model are others now. Discard it and begin anew."
)
TOO_MUCH = Sentence("Too much is being taught already; please try again later.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Request for a training of a LoRA.

    Attributes:
        owner: the browser that asks.
        address: the network that it asks from; "" where that does not count.
        model: by its name in the catalog; "" is the first.
        name: of what is taught.
        kind: of it.
        steps: in all.
        rank: of the factors.
        side: of the pictures that are looked at, as a share of the model's own.
        pictures: files that have been checked.
        captions: of the pictures.
        prompts: to be drawn with each kept state.
        seed: of the first of these.
    """

    owner: str
    model: str
    name: str
    kind: str
    steps: int
    rank: int
    side: float = 1.0
    pictures: Sequence[bytes] = ()
    captions: Sequence[str] = ()
    prompts: Sequence[str] = ()
    seed: int = 0
    address: str = ""


class Teaching:
    """The runs of a server, which are trained one after the other."""

    def __init__(self, engine: Engine, folder: Path, loras: Path):
        """Have no runs yet, nor a thread: `open` gives both.

        Args:
            engine: on whose devices is trained.
            folder: of the runs' own folders.
            loras: the folder where the engine finds LoRAs.
        """
        self._engine, self._folder, self._loras = engine, folder, loras
        self._lock = FileLock(folder / "lock", thread_local=False)
        self._change = threading.Condition()  # guards the runs
        self._runs: dict[str, TrainingRun] = {}
        self._trainee: _Trainee | None = None
        self._closed = False
        self._samples = ThreadPoolExecutor(1, "samples")
        self._thread = threading.Thread(target=self._work, name="teaching", daemon=True)

    @classmethod
    def open(cls, engine: Engine, folder: Path, loras: Path) -> Self:
        """Find the runs of former servers, and begin; the arguments are those of `Teaching`.

        Raises:
            OSError: a folder cannot be written, or another server has it.
        """
        teaching = cls(engine, folder, loras)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            teaching._lock.acquire(timeout=0)
        except Timeout:
            raise OSError(f"another server uses {folder}.") from None
        try:
            found = filter(None, map(TrainingRun.restore, sorted(folder.iterdir())))
            teaching._runs = {run.id: run for run in found}
            teaching._forget_old()
            teaching._thread.start()
        except BaseException:
            teaching._lock.release()
            raise
        return teaching

    def stop_all(self) -> None:
        """Stop the training, which is kept, and begin no other."""
        with self._change:
            self._closed, trainee = True, self._trainee
            self._change.notify_all()
        if trainee:
            trainee.stop()

    def close(self) -> None:
        """Stop the training, which is kept, and end the thread."""
        self.stop_all()
        self._samples.shutdown(wait=False, cancel_futures=True)
        self._thread.join(CLOSING_SECONDS)
        self._lock.release()

    # --- what is there --------------------------------------------------------------------------

    def runs(self, owner: str) -> list[TrainingRun]:
        """Return a browser's runs as they are now, in the order in which they are trained."""
        with self._change:
            return [dataclasses.replace(run) for run in self._runs.values() if run.owner == owner]

    def ahead(self, run: TrainingRun) -> int:
        """Return how many are trained before a run that waits."""
        with self._change:
            active = [each.id for each in self._runs.values() if each.is_active]
        return active.index(run.id) if run.id in active else 0

    def seconds(self, request: TrainingRequest) -> float | None:
        """Estimate how long a training takes while nothing is drawn; None if it is not known."""
        picture = self._engine.catalog.open(request.model).defaults
        pace = [
            self._engine.seconds(dataclasses.replace(picture, steps=steps)) for steps in (10, 20)
        ]
        if None in pace:
            return None
        of_row = (pace[1] - pace[0]) / 10  # ty: ignore[unsupported-operator]
        model = self._engine.catalog.open(request.model).checkpoint.model
        rows = FORWARDS / (2 if model.cfg_scale(picture.guidance) > 1 else 1)
        return request.steps * rows * of_row * request.side**2

    def model_bytes(self, request: TrainingRequest) -> int:
        """Return the bytes of the model's parameters, which those who draw with it share."""
        opened = self._engine.catalog.open(request.model)
        return opened.weights.memory + opened.texts.memory

    # --- what is asked for ----------------------------------------------------------------------

    def check(self, request: TrainingRequest, count: int) -> None:
        """Check a request, whose pictures may be on their way yet.

        Args:
            request: to be checked.
            count: of its pictures.

        Raises:
            RequestError: what is wrong, in a sentence.
        """
        if not FEWEST <= count <= MOST:
            raise RequestError(
                "A model is taught by {fewest} to {most} pictures, not {count}.",
                count=count,
                fewest=FEWEST,
                most=MOST,
            )
        opened = self._engine.catalog.open(request.model)
        check_teachable(opened.checkpoint, opened.weights.name, text_encoders=False)
        self._run(request).options().check()
        self._check_name(request.name)

    def _check_name(self, name: str) -> None:
        """Raise RequestError if files of the name, or of its states, are there or will be."""
        with self._change:
            others = [run.name for run in self._runs.values()]

        def is_of(file: str, name: str) -> bool:
            return bool(re.fullmatch(re.escape(name) + r"(-\d+)?", file, re.IGNORECASE))

        there = {*self._engine.adapters.loras(), *(file.stem for file in self._loras.iterdir())}
        if any(is_of(each, name) for each in (*there, *others)) or any(
            is_of(name, each) for each in others
        ):
            raise RequestError("The name {name} is taken: choose another.", name=name)

    def start(self, request: TrainingRequest) -> TrainingRun:
        """Begin a run, which waits until those before it are over.

        Raises:
            Busy: too many wait.
            RequestError: as `check`.
        """
        self.check(request, len(request.pictures))
        self._forget_old()
        run = self._run(request)
        size = sum(map(len, request.pictures))
        with self._change:
            self._check_room(run, size)
        run = TrainingRun.begin(request.pictures, **vars(run))
        try:
            with self._change:  # another may have begun meanwhile
                self._check_name(run.name)
                self._check_room(run, size)
                self._runs[run.id] = run
                self._change.notify_all()
        except Exception:
            run.forget()
            raise
        return run

    def _check_room(self, run: TrainingRun, size: int) -> None:
        """Raise Busy if a new run with so many bytes of pictures is not taken. Needs the lock."""
        runs = [*self._runs.values()]
        self._check_turn(run)
        if (
            len(runs) >= MAX_RUNS
            or sum(map(run.is_near, runs)) >= NETWORK_RUNS
            or sum(other.owner == run.owner for other in runs) >= OWNER_RUNS
            or size + sum(other.pictures_bytes for other in runs) > MAX_BYTES
        ):
            raise Busy(TOO_MUCH, 600.0)

    def _check_turn(self, run: TrainingRun) -> None:
        """Raise Busy if too many wait for a run to wait as well. Needs the lock."""
        active = [other for other in self._runs.values() if other.is_active]
        if len(active) >= MAX_ACTIVE or sum(map(run.is_near, active)) >= NETWORK_ACTIVE:
            raise Busy(
                TOO_MUCH, min((each.seconds for each in active if each.seconds), default=600.0)
            )

    def _run(self, request: TrainingRequest) -> TrainingRun:
        """Return a request's run, of which nothing is written."""
        opened = self._engine.catalog.open(request.model)
        return TrainingRun(
            folder=self._folder / f"{time.time_ns():x}-{secrets.token_hex(4)}",
            owner=request.owner,
            address=request.address,
            model=opened.weights.name,
            name=request.name,
            kind=request.kind,
            steps=request.steps,
            rank=request.rank,
            size=_size(opened.checkpoint, request.side),
            captions=[*request.captions],
            prompts=_samples(request),
            seed=request.seed,
        )

    def stop(self, owner: str, id: str) -> None:
        """Stop a run after its step; it is kept."""
        with self._change:
            run, trainee = self._mine(owner, id), self._trainee
            if trainee and trainee.run is not run:
                trainee = None
            if run.is_active and not trainee:  # nothing has been done yet, or it is compiled for
                run.status = STOPPED
                run.save()
        if trainee:
            trainee.stop()  # which waits for a step: meanwhile others are answered

    def resume(self, owner: str, id: str) -> None:
        """Go on with a run that was stopped, or that failed."""
        with self._change:
            run = self._mine(owner, id)
            if run.status not in (STOPPED, FAILED):
                return
            self._check_turn(run)
            run.status, run.message = WAITING, ""
            self._runs[id] = self._runs.pop(id)  # after those that wait
            run.save()
            self._change.notify_all()

    def keep(self, owner: str, id: str, step: int) -> str:
        """Keep the LoRA of one state under the run's name, and forget the others and the run.

        Returns the name.
        """
        with self._change:
            run = self._mine(owner, id)
            chosen = self._file(run, step)
            if run.is_active or step not in run.kept or not chosen.exists():
                raise RequestError("This state is not there any more.")
            chosen.replace(self._loras / run.file())
            self._forget(run)
        return run.name

    def discard(self, owner: str, id: str) -> None:
        """Forget a run and all its LoRAs."""
        with self._change:
            run = self._mine(owner, id)
            if not run.is_active:
                self._forget(run)
                if run.status == DONE:
                    (self._loras / run.file()).unlink(missing_ok=True)
                self._engine.adapters.look_again()

    def _mine(self, owner: str, id: str) -> TrainingRun:
        run = self._runs.get(id)
        if run is None or run.owner != owner:
            raise RequestError("This run is not there any more.")
        return run

    def _file(self, run: TrainingRun, step: int) -> Path:
        """Return the LoRA of a kept state; that of the last step has the run's own name."""
        return self._loras / run.file(None if step == run.steps else step)

    def _forget(self, run: TrainingRun) -> None:
        """Forget a run and the LoRAs of its states, but for that of its own name."""
        for step in run.kept:
            (self._loras / run.file(step)).unlink(missing_ok=True)
        run.forget()
        self._runs.pop(run.id, None)
        self._engine.adapters.look_again()

    def _forget_old(self) -> None:
        """Forget runs that nobody has gone on with for long."""
        with self._change:
            for run in list(self._runs.values()):
                with suppress(OSError):
                    if not run.is_active and run.age() > KEPT_SECONDS:
                        self._forget(run)

    # --- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while not (self._closed or self._engine.ready.wait(0.2)):
            pass  # what is drawn first is compiled first
        while run := self._next():
            try:
                self._train(run)
            except (SentenceError, CheckpointError) as error:
                self._end(run, FAILED, error.args[0])
            except Exception as error:
                log.exception("a training failed")
                reason = error.strerror if isinstance(error, OSError) else None  # without a path
                message = Sentence("Teaching failed: {reason}", reason=reason or reason_of(error))
                self._end(run, FAILED, message)

    def _next(self) -> TrainingRun | None:
        """Wait for a run; None once this is closed."""
        with self._change:
            while not self._closed:
                for run in self._runs.values():
                    if run.status == WAITING:
                        run.status = PREPARING
                        return run
                self._change.wait(FORGETTING_SECONDS)
                self._forget_old()
        return None

    def _end(self, run: TrainingRun, status: str, message: str = "") -> None:
        with self._change:
            run.status, run.message, run.seconds = status, message, None
            if run.id in self._runs:
                run.save()

    def _train(self, run: TrainingRun) -> None:
        """Train until the run is over or stopped."""
        opened = self._engine.catalog.open(run.model)
        check_teachable(opened.checkpoint, opened.weights.name, text_encoders=False)
        trainer = self._prepared(run, opened.checkpoint)
        with self._change:
            if run.status != PREPARING:  # somebody has stopped it meanwhile
                return
            if self._closed:
                return self._end(run, STOPPED)
            self._check_memory(run, opened, trainer)
            trainee = self._trainee = _Trainee(run, trainer, self._save)
            run.status, run.memory = TRAINING, trainer.memory
        if not run.samples(0):
            self._samples.submit(self._draw, run, 0)
        try:
            training = self._engine.train(opened, trainer.memory, trainee)
            try:
                trainee.work()
            finally:
                trainee.suspend()  # its room counts as free from here on
                self._engine.end_training(training)
        finally:
            with self._change:
                self._trainee = None
        if trainee.failure:
            self._end(run, FAILED, trainee.failure)
            return
        if not (trainer.is_over and run.steps in run.kept):
            self._save(run, trainer, trainer.snapshot(), keep=bool(trainer.done))
        with self._change:
            if trainer.is_over:
                run.forget_pictures()
            self._end(run, DONE if trainer.is_over else STOPPED)

    def _prepared(self, run: TrainingRun, checkpoint: Any) -> Trainer:
        """Return a run's training, compiled, at the state that was kept."""
        devices = replicas(self._engine.mesh)
        if not run.state.exists():
            run.batch = devices
        elif run.batch % devices:
            raise CheckpointError(OTHER_SERVER)
        options = run.options().of_model(checkpoint.card.learning_rate)
        examples = run.examples(checkpoint.model.size_unit)
        source, dtype = checkpoint.parameters.source, str(checkpoint.model.dtype)
        trainer = Trainer(
            checkpoint,
            options,
            self._engine.mesh,
            examples,
            identity(source, dtype, options, examples),
            stacked=True,
        )
        if run.state.exists():
            try:
                trainer.restore(run.state)
            except (CheckpointError, RequestError) as error:  # says what to do with files
                log.warning("a training cannot be gone on with: %s", error)
                raise CheckpointError(OTHER_SERVER) from error
        run.step = trainer.done
        run.losses = [(step, loss) for step, loss in run.losses if step <= run.step]
        trainer.encoder.compile()
        trainer.compile()
        return trainer

    def _check_memory(self, run: TrainingRun, opened: Any, trainer: Trainer) -> None:
        """Raise RequestError, which says what would fit, if the devices cannot hold a training."""
        weights, texts, area = opened.weights, opened.texts, math.prod(run.size)

        def fits(memory: float) -> bool:
            needs = Training(number=0, weights=weights, texts=texts, memory=int(memory))
            return self._engine.scheduler.fits(needs)

        if fits(trainer.memory):
            return
        # The work of a step grows with the area.
        computed = (trainer.memory - trainer.state_bytes) / area
        sizes = [_size(opened.checkpoint, side) for side in PICTURE_SIDES]
        smaller = [
            size
            for size in sizes
            if math.prod(size) < area and fits(trainer.state_bytes + computed * math.prod(size))
        ]
        needed = f"{(weights.memory + texts.memory + trainer.memory) / 1e9:.1f}"
        if not smaller:
            raise RequestError(
                "Teaching this model takes {needed} GB on each device, which is more than there "
                "is for it. Teach a smaller model.",
                needed=needed,
            )
        height, width = smaller[0]
        raise RequestError(
            "Teaching this model at {size} takes {needed} GB on each device, which is more than "
            "there is for it. About {smaller} would fit: look at the pictures smaller.",
            size=f"{run.size[1]}x{run.size[0]}",
            needed=needed,
            smaller=f"{width}x{height}",
        )

    def _save(self, run: TrainingRun, trainer: Trainer, state: State, *, keep: bool) -> None:
        """Write a state; one to `keep` is offered as a LoRA at once, and prompts drawn with it."""
        step = int(state["step"])
        self._forget_old()
        trainer.save(run.state, state)
        keep = keep and step not in run.kept
        if keep:
            trainer.write(self._file(run, step), state)
            self._engine.adapters.look_again()
        with self._change:
            if keep:
                run.kept.append(step)
            run.save()
            if keep and not self._closed:
                self._samples.submit(self._draw, run, step)

    # --- what is drawn with it ------------------------------------------------------------------

    def _draw(self, run: TrainingRun, step: int) -> None:
        """Draw a run's prompts with the LoRA of a state; 0 is without any."""
        if run.id not in self._runs:  # by now
            return
        tag = f" <lora:{self._file(run, step).stem}:1>" if step else ""
        values = {
            "prompts": [prompt + tag for prompt in run.prompts],
            "seed": run.seed,
            "model": run.model,
        }
        try:
            request = Request.check(values, self._engine.catalog)
            job = self._engine.submit(request, previews=False, client=f"teaching {run.id}")
            for event in job.events():
                if self._closed or run.id not in self._runs:
                    job.cancel()
                elif isinstance(event, ImageReady):
                    webp = to_webp(event.pixels, SAMPLE_QUALITY)
                    run.keep_samples(step, {event.index: webp})
        except (RequestError, OSError) as error:  # such as a queue that is full: it is trained on
            log.warning("nothing was drawn with a state of a training: %s", error)


def _size(checkpoint: Any, side: float) -> tuple[int, int]:
    """Return height and width of a share of a model's own sides."""
    height, width = (round(each * side) for each in checkpoint.default_size)
    return rounded((height, width), checkpoint.model.size_unit)


def _samples(request: TrainingRequest) -> list[str]:
    """Return the prompts that are drawn with each state.

    Where none has the name, half of them are captions: that other words draw what they drew is
    worth seeing too.
    """
    prompts = [prompt for prompt in request.prompts if prompt.strip()][:MAX_PROMPTS]
    if any(request.name.casefold() in prompt.casefold() for prompt in prompts):
        return prompts
    captions = (captioned(text, request.name, request.kind) for text in ("", *request.captions))
    named = [*dict.fromkeys(captions)][: MAX_PROMPTS // 2]
    return [*named, *prompts][:MAX_PROMPTS]


class _Trainee:
    """A run's steps, as the engine takes them; what is written is left to another thread."""

    def __init__(self, run: TrainingRun, trainer: Trainer, save: Callable[..., None]):
        self.run, self._trainer, self._save = run, trainer, save
        self.failure: Sentence | None = None
        self._lock = threading.Lock()  # held while a step is taken
        self._writing: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._over = False
        self._smoothed, self._pace = math.nan, math.nan
        self._saved = self._stepped = time.monotonic()
        self._milestones = {
            math.ceil(run.steps * number / KEPT_STATES) for number in range(1, KEPT_STATES + 1)
        }

    def work(self) -> None:
        """Write what there is to be written, until there are no more steps."""
        while write := self._writing.get():
            write()

    def stop(self) -> None:
        """Take no more steps."""
        with self._lock:
            self._end()

    def fail(self, message: Sentence) -> None:
        """Take no more steps, for a reason; see `Trainee`."""
        self.failure = message
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._writing.put(None)

    def suspend(self) -> None:
        """Take the state from the devices; the next step puts it back."""
        with self._lock:
            self._trainer.suspend()

    def step(self, params: Params) -> bool:
        """Encode the next picture, or take a step; see `Trainee`."""
        trainer = self._trainer
        with self._lock:
            if trainer.is_over:  # a run that failed while its last state was written
                self._end()
            if self._over:
                return False
            if not trainer.is_encoded:
                trainer.encode(params)
                self._stepped = time.monotonic()
                return True
            self._note(float(trainer.take(params)))
            keep = trainer.done in self._milestones
            if keep or time.monotonic() - self._saved > SAVED_SECONDS:
                self._saved, state = time.monotonic(), trainer.snapshot()
                self._writing.put(lambda: self._save(self.run, trainer, state, keep=keep))
            if trainer.is_over:
                self._end()
        return True

    def _note(self, loss: float) -> None:
        """Take note of a step: of the loss, and of the pace, with all that is drawn between."""
        now, run = time.monotonic(), self.run
        taken, self._stepped = now - self._stepped, now
        self._pace = smooth(self._pace, [taken])
        self._smoothed = smooth(self._smoothed, [loss])
        run.step = self._trainer.done
        run.seconds = self._pace * (run.steps - run.step)
        run.note(self._smoothed)
