"""Teaching a model from a folder of pictures to a LoRA's file."""

import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.weights import Params, opened
from sd_tpu.families.checkpoint import Checkpoint, Parameters, bytes_of
from sd_tpu.reading import composed, expanded
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.settings import RequestError
from sd_tpu.training.encoding import encode
from sd_tpu.training.factors import Adaptation, replace_file, write_lora
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import Example, digest, read_examples
from sd_tpu.training.step import Pool, State, first_state, make_step, put_batch
from sd_tpu.training.teachable import check_teachable

SUFFIX = ".teaching"  # of the file beside a LoRA's from which its run goes on
SAVED_SECONDS = 45.0  # between two savings
REPORTED_SECONDS = 0.5  # between two reports of progress
SMOOTHED = 0.98  # of the loss that is told: the share of the one before
TRAINING = "training"  # what a run's file says of it


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
        learning_rate: at its highest; by default 1e-4, or 1 with prodigy.
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
        RequestError: an argument or a picture is not possible.
        CheckpointError: the model cannot be read or taught.
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
    unit = checkpoint.model.size_unit
    shown_size = _rounded(size, unit) if size else checkpoint.default_size
    examples = read_examples(Path(pictures), options.name, kind, shown_size, unit)
    run = _Run(checkpoint, options, mesh, file, _identity(model, dtype, options, examples))
    return run.finished(examples, resume, tell)


def _rounded(size: tuple[int, int], unit: int) -> tuple[int, int]:
    """Return a size in multiples of a unit."""
    height, width = (max(unit, round(side / unit) * unit) for side in size)
    return height, width


def _identity(
    model: str | Path, dtype: str, options: Options, examples: list[Example]
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
    """A run of a checkpoint that ends in a file; `identity` is what its result depends on."""

    checkpoint: Checkpoint
    options: Options
    mesh: Mesh
    file: Path
    identity: dict[str, Any]

    @property
    def kept(self) -> Path:
        """The file from which the run goes on."""
        return self.file.with_suffix(SUFFIX)

    def finished(self, examples: list[Example], resume: bool, on_event: Callable) -> Path:
        """Do what is left of the run, and return the LoRA's file."""
        options, model = self.options, self.checkpoint.model
        encoders = getattr(model, "encoders", {}) if options.text_encoders else {}
        trained = self._parameters([model.denoiser, *encoders]).shapes
        adaptation = Adaptation.of(model, trained, options.rank, feed_forward=options.feed_forward)
        state = first_state(adaptation, options)
        if resume:
            state = self._restored(state)
        state = jax.device_put(state, replicated(self.mesh))
        model, pool = self._encoded(examples, on_event)
        adaptation = adaptation.with_model(model)
        # A step that reads texts takes encoders that are not trained too.
        stepping = (
            [part for part in self.checkpoint.parameters.shapes if part != model.autoencoder]
            if options.text_encoders
            else [model.denoiser]
        )
        params = self._parameters(stepping).load(replicated(self.mesh))
        state = self._taught(adaptation, state, params, pool, on_event)
        write_lora(jax.device_get(state["factors"]), self.file, self._metadata(len(examples)))
        self.kept.unlink(missing_ok=True)
        return self.file

    def _parameters(self, parts: list[str]) -> Parameters:
        """Return where the parameters of these components lie."""
        shapes = {part: self.checkpoint.parameters.shapes[part] for part in parts}
        return dataclasses.replace(self.checkpoint.parameters, shapes=shapes)

    def _encoded(self, examples: list[Example], on_event: Callable) -> tuple[Any, Pool]:
        """Encode the pictures, by components that are dropped again."""
        sizes = dict.fromkeys(f"{width}x{height}" for height, width in (e.size for e in examples))
        on_event(
            f"{len(examples)} pictures, looked at as {', '.join(sizes)}; captions such as "
            f"“{examples[0].caption}”."
        )
        if enlarged := sum(each.enlarged for each in examples):
            on_event(f"{enlarged} of them are smaller than that, and enlarged.")
        model = self.checkpoint.model
        others = [part for part in self.checkpoint.parameters.shapes if part != model.denoiser]
        parts = [model.autoencoder] if self.options.text_encoders else others
        params = self._parameters(parts).load(
            jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
        )
        model, pictures = encode(
            self.checkpoint, params, examples, texts=not self.options.text_encoders
        )
        return model, Pool(pictures, self.options)

    def _taught(
        self, adaptation: Adaptation, state: State, params: Params, pool: Pool, on_event: Callable
    ) -> State:
        """Take the steps that are left."""
        options = self.options
        step = make_step(
            adaptation, self.checkpoint.schedule, options, self.mesh, texts=options.text_encoders
        )
        seed, begun = np.uint32(options.seed), int(state["step"])
        begins = [(share, put_batch(batch, self.mesh)) for share, batch in pool.of_each_size()]
        on_event("Compiling, or loading what was compiled before ...")
        programs = {
            batch["latents"].shape: step.lower(state, params, batch, seed, np.float32(0)).compile()
            for _, batch in begins
        }
        tried = [
            (share, *_tried(programs[batch["latents"].shape], state, params, batch))
            for share, batch in begins
        ]
        seconds = sum(share * seconds for share, seconds, _ in tried)
        on_event(Estimate((options.steps - begun) * seconds, max(size for _, _, size in tried)))
        saved = reported = resumed = time.monotonic()
        smoothed, losses = math.nan, []
        with _interruptible() as asked:
            for number in range(begun, options.steps):
                batch = put_batch(pool.batch(number), self.mesh)
                take = programs[batch["latents"].shape]
                state, value = take(state, params, batch, seed, np.float32(options.rate(number)))
                losses.append(value)
                now = time.monotonic()
                if now - reported > REPORTED_SECONDS or number + 1 == options.steps:
                    smoothed = _smoothed(smoothed, [float(each) for each in losses])
                    losses, reported = [], now
                    pace = (time.monotonic() - resumed) / (number + 1 - begun)
                    left = pace * (options.steps - number - 1)
                    on_event(Lesson(number + 1, options.steps, smoothed, left))
                if asked.stop and number + 1 < options.steps:
                    self._save(state)
                    raise TeachingStopped(number + 1, self.kept)
                if now - saved > SAVED_SECONDS:
                    self._save(state)
                    saved = time.monotonic()
        return state

    # --- what is kept ---------------------------------------------------------------------------

    def _save(self, state: State) -> None:
        """Keep a state, so that a run that is cut off loses no more than came after it."""
        tensors = {name: np.asarray(leaf) for name, leaf in _named(jax.device_get(state)).items()}
        replace_file(self.kept, save(tensors, {TRAINING: json.dumps(self.identity)}))

    def _restored(self, first: State) -> State:
        """Return the state that was kept.

        Raises:
            CheckpointError: the file is damaged.
            RequestError: it is of another run.
        """
        with opened(self.kept) as tensors:
            told = json.loads((tensors.metadata() or {}).get(TRAINING, "{}"))
            other = next(
                (key for key, value in self.identity.items() if told.get(key) != value), None
            )
            if other == "pictures":
                raise RequestError(
                    "The pictures or their captions have changed since {file} was kept. Put them "
                    "back, or remove the file to begin anew.",
                    file=self.kept,
                )
            if other:
                raise RequestError(
                    "{file} is of another run: its {key} was {was}, and is {now} now. Go on with "
                    "what it was begun with, or remove the file to begin anew.",
                    file=self.kept,
                    key=other.replace("_", " "),
                    was=told.get(other),
                    now=self.identity[other],
                )
            names = _named(first)
            if names.keys() != {*tensors.keys()}:
                raise CheckpointError(f"{self.kept} is damaged: remove it to begin anew.")
            return jax.tree_util.tree_map_with_path(
                lambda path, _: tensors.get_tensor(jax.tree_util.keystr(path)), first
            )

    def _metadata(self, count: int) -> dict[str, str]:
        """Return what the LoRA's file says of itself, in kohya's keys where they have one."""
        options = self.options
        return {
            "ss_output_name": options.name,
            "ss_sd_model_name": self.identity["model"],
            "ss_base_model_version": type(self.checkpoint.model).__name__,
            "ss_network_dim": str(options.rank),
            "ss_network_alpha": str(options.rank),
            "ss_learning_rate": repr(options.highest_rate),
            "ss_steps": str(options.steps),
            "ss_num_train_images": str(count),
            "ss_seed": str(options.seed),
            "sd_tpu": json.dumps({**self.identity, "captions": count}, sort_keys=True),
        }


def _tried(program: Any, state: State, params: Params, batch: Any) -> tuple[float, int]:
    """Try a step, whose result is dropped: the seconds that it takes, and a device's bytes."""
    copied = jax.tree.map(lambda x: x.copy(), state)
    begun = time.monotonic()
    jax.block_until_ready(program(copied, params, batch, np.uint32(0), np.float32(0)))
    seconds = time.monotonic() - begun
    temporary = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
    return seconds, temporary + bytes_of((state, params, batch))


def _smoothed(before: float, losses: list[float]) -> float:
    """Return a moving average of losses, whose first is NaN."""
    for each in losses:
        before = each if math.isnan(before) else SMOOTHED * before + (1 - SMOOTHED) * each
    return before


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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
