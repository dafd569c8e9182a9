"""Teaching a model from a folder of pictures to a LoRA's file."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint, Parameters
from sd_tpu.reading import composed, expanded
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.settings import RequestError
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import Example, digest, read_examples
from sd_tpu.training.teachable import check_teachable
from sd_tpu.training.trainer import Trainer

SUFFIX = ".teaching"  # of the file beside a LoRA's from which its run goes on
SAVED_SECONDS = 45.0  # between two savings
REPORTED_SECONDS = 0.5  # between two reports of progress
SMOOTHED = 0.98  # of the loss that is reported: the share of the one before


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Time and memory of a run, by steps that were tried.

    Attributes:
        seconds: for all steps that are left.
        bytes: of memory on each device.
    """

    seconds: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class Lesson:
    """How far teaching is.

    Attributes:
        step: of `steps`, done.
        steps: of the whole run.
        loss: of the last steps, smoothed.
        seconds_left: until the end.
    """

    step: int
    steps: int
    loss: float
    seconds_left: float


class TeachingStopped(KeyboardInterrupt):
    """Teaching was stopped by Ctrl+C; it is kept in `file`, and goes on with `resume`."""

    def __init__(self, step: int, file: Path):
        """Say after which step, and where that is kept."""
        super().__init__(f"Stopped after step {step}, which is kept in {file}.")
        self.step, self.file = step, file


def teach(
    model: str | Path,
    pictures: str | Path,
    *,
    name: str,
    kind: Literal["thing", "person", "style"] = "thing",
    out: str | Path | None = None,
    resume: bool = False,
    steps: int = 1000,
    rank: int = 16,
    learning_rate: float | None = None,
    optimizer: Literal["adamw", "prodigy"] = "adamw",
    batch: int | None = None,
    accumulate: int = 1,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    caption_dropout: float = 0.05,
    feed_forward: bool = False,
    text_encoders: bool = False,
    devices: int | None = None,
    dtype: str | None = None,
    on_event: Callable[[str | Estimate | Lesson], None] | None = None,
) -> Path:
    """Teach a model what pictures show, and write a LoRA.

    The same arguments give the same file, to the last bit on the same machine, also where the run
    was stopped and resumed. Ctrl+C keeps what was done.

    Args:
        model: a checkpoint's folder, file or hub id; BUNDLED_MODEL is the bundled one's.
        pictures: a folder of 4 to 40, with captions in text files of the same names, if at all.
        name: the word for it in prompts, and what the file is called.
        kind: what it is, for captions that do not say it.
        out: the file; by default the name with .safetensors behind it.
        resume: go on with the run that was cut off.
        steps: changes of the factors.
        rank: of the factors: how much can be learned, 4 to 128.
        learning_rate: at its highest; by default the model's card's or 1e-4, or 1 with prodigy.
        optimizer: "adamw", or "prodigy", which finds the rate itself.
        batch: pictures looked at together, a multiple of the devices; by default one on each.
        accumulate: batches that make a step.
        size: height and width of the area at which pictures are looked at; by default the model's.
        seed: of everything random.
        caption_dropout: how often a caption is left out.
        feed_forward: train feed-forward layers beside attention.
        text_encoders: train the CLIP text encoders as well.
        devices: how many to use; all by default.
        dtype: "float32" or "bfloat16", of the model; by default float32 on CPU and bfloat16
            elsewhere. The factors are float32.
        on_event: called with sentences, with an Estimate before the first step, and with a Lesson
            twice a second at most.

    Returns:
        The LoRA's file.

    Raises:
        RequestError: an argument or a picture is not possible, or the model cannot be taught.
        CheckpointError: the model cannot be read.
        TeachingStopped: by Ctrl+C, in the main thread.
    """
    tell = on_event or (lambda event: None)
    mesh = make_mesh(devices)
    options = Options(
        name=composed(name).strip(),
        kind=kind,
        steps=steps,
        rank=rank,
        learning_rate=learning_rate,
        optimizer=optimizer,
        batch=mesh.size if batch is None else batch,
        accumulate=accumulate,
        caption_dropout=caption_dropout,
        feed_forward=feed_forward,
        text_encoders=text_encoders,
        seed=seed,
    )
    options.check()
    if options.batch % mesh.size:
        raise RequestError(
            "A batch of {batch} pictures cannot be divided over {devices} devices.",
            batch=options.batch,
            devices=mesh.size,
        )
    file = expanded(out or f"{options.name}.safetensors")
    _check_file(file, resume)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    tell(f"Reading {model} ...")
    checkpoint = Checkpoint.open(model, dtype=dtype)
    check_teachable(checkpoint, str(model), text_encoders=text_encoders)
    options = options.of_model(checkpoint.card.learning_rate)
    unit = checkpoint.model.size_unit
    shown_size = rounded(size, unit) if size else checkpoint.default_size
    examples = read_examples(Path(pictures), options.name, kind, shown_size, unit)
    identified = identity(model, dtype, options, examples)
    trainer = Trainer(checkpoint, options, mesh, examples, identified)
    return _Run(checkpoint, trainer, options, mesh, file).finished(resume, tell)


def rounded(size: tuple[int, int], unit: int) -> tuple[int, int]:
    """Return a size in multiples of a unit."""
    height, width = (max(unit, round(side / unit) * unit) for side in size)
    return height, width


def identity(
    model: str | Path, dtype: str, options: Options, examples: Sequence[Example]
) -> dict[str, Any]:
    """Return all that a run's result depends on."""
    path = expanded(model)
    shown = path.resolve().name if path.exists() else str(model)
    return {
        **dataclasses.asdict(options),
        "learning_rate": options.highest_rate,
        "model": shown,
        "dtype": dtype,
        "pictures": digest(examples),
    }


def _check_file(file: Path, resume: bool) -> None:
    """Raise RequestError where a run would write over something, or has nothing to go on from."""
    state = file.with_suffix(SUFFIX)
    if file.suffix != ".safetensors":
        raise RequestError("{file} should end in .safetensors.", file=file)
    if not file.parent.is_dir():
        raise RequestError("There is no folder {folder}.", folder=file.parent)
    if file.exists():
        raise RequestError(
            "The name is taken: there is a file {file} already. Choose another name or --out, or "
            "move the file away.",
            file=file,
        )
    if resume and not state.exists():
        raise RequestError("There is no run to resume: {file} is missing.", file=state)
    if state.exists() and not resume:
        raise RequestError(
            "A run of this name was cut off, and is kept in {file}: go on with --resume, or "
            "remove the file to begin anew.",
            file=state,
        )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that ends in a file."""

    checkpoint: Checkpoint
    trainer: Trainer
    options: Options
    mesh: Mesh
    file: Path

    @property
    def kept(self) -> Path:
        """The file from which the run goes on."""
        return self.file.with_suffix(SUFFIX)

    def finished(self, resume: bool, on_event: Callable) -> Path:
        """Do what is left of the run, and return the LoRA's file."""
        trainer = self.trainer
        if resume:
            trainer.restore(self.kept)
        self._encode(on_event)
        params = self._parameters(trainer.parts).load(replicated(self.mesh))
        self._teach(params, on_event)
        trainer.write(self.file)
        self.kept.unlink(missing_ok=True)
        return self.file

    def _parameters(self, parts: list[str]) -> Parameters:
        """Return where the parameters of these components lie."""
        shapes = {part: self.checkpoint.parameters.shapes[part] for part in parts}
        return dataclasses.replace(self.checkpoint.parameters, shapes=shapes)

    def _encode(self, on_event: Callable) -> None:
        """Encode the pictures, by components that are dropped again."""
        encoder = self.trainer.encoder
        examples = encoder.examples
        sizes = dict.fromkeys(f"{width}x{height}" for height, width in (e.size for e in examples))
        on_event(
            f"{len(examples)} pictures, looked at as {', '.join(sizes)}; captions such as "
            f"“{examples[0].caption}”."
        )
        if enlarged := sum(each.enlarged for each in examples):
            on_event(f"{enlarged} of them are smaller than that, and enlarged.")
        encoder.compile()
        params = self._parameters(encoder.parts).load(
            jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
        )
        while not self.trainer.is_encoded:
            self.trainer.encode(params)

    def _teach(self, params: Params, on_event: Callable) -> None:
        """Take the steps that are left."""
        trainer, steps, begun = self.trainer, self.options.steps, self.trainer.done
        on_event("Compiling, or loading what was compiled before ...")
        trainer.compile()
        seconds = trainer.seconds(params, _seconds_of)
        on_event(Estimate((steps - begun) * seconds, trainer.memory + bytes_of(params)))
        saved = reported = resumed = time.monotonic()
        smoothed, losses = math.nan, []
        with _interruptible() as asked:
            while not trainer.is_over:
                losses.append(trainer.take(params))
                now = time.monotonic()
                if now - reported > REPORTED_SECONDS or trainer.is_over:
                    smoothed = smooth(smoothed, [float(each) for each in losses])
                    losses, reported = [], now
                    pace = (time.monotonic() - resumed) / (trainer.done - begun)
                    left = pace * (steps - trainer.done)
                    on_event(Lesson(trainer.done, steps, smoothed, left))
                if asked.stop and not trainer.is_over:
                    trainer.save(self.kept)
                    raise TeachingStopped(trainer.done, self.kept)
                if now - saved > SAVED_SECONDS:
                    trainer.save(self.kept)
                    saved = time.monotonic()


def _seconds_of(function: Callable[[], Any]) -> float:
    begun = time.monotonic()
    jax.block_until_ready(function())
    return time.monotonic() - begun


def smooth(before: float, losses: Sequence[float]) -> float:
    """Return a moving average of losses, whose first is NaN."""
    for each in losses:
        before = each if math.isnan(before) else SMOOTHED * before + (1 - SMOOTHED) * each
    return before


@contextlib.contextmanager
def _interruptible() -> Iterator[SimpleNamespace]:
    """Have Ctrl+C ask for a stop between two steps; asked twice, it stops at once.

    Only the main thread hears of it.
    """
    asked = SimpleNamespace(stop=False)
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: Any) -> None:
        if asked.stop:
            raise KeyboardInterrupt
        asked.stop = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
