"""The training loop: a step compiled once, an average of the weights, checkpoints that resume.

A run is a function of its step number alone: batches and random keys are derived from it, so a run
that was cut off anywhere and resumed gives the weights that it would have given uninterrupted.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import save_file

from sd_tpu.families.checkpoint import keep_compiled
from sd_tpu.runtime.compiler import compiler_options
from sd_tpu.runtime.mesh import REPLICA, REPLICATED, SPLIT, replicated, split

Tree = Any

BEGUN = time.monotonic()  # when the process was, nearly
REPORTED = 50  # steps between two reports
MOST_PROCESSES = 16  # that make batches: each takes some 300 MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and optimizer of a run.

    The learning rate warms up, stays, and falls to zero over the last `decay` of the run. Until it
    falls nothing depends on `steps`, so a resumed run may be given another length.
    """

    steps: int
    batch: int
    learning_rate: float
    warmup: int = 200
    decay: float = 0.25
    weight_decay: float = 0.01
    ema: float = 0.999
    seconds: float | None = None  # of the process; `fitted` then shortens the run

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        left = (self.steps - step) / (self.decay * self.steps)
        return self.learning_rate * min(1, step / self.warmup, left)

    def fitted(self, step: int, speed: float) -> "Schedule":
        """Return the schedule that ends in time, or this one if it does.

        Args:
            step: how many are done.
            speed: in steps a second.
        """
        if self.seconds is None:
            return self
        left = max(0, int(speed * (self.seconds - (time.monotonic() - BEGUN))))
        return dataclasses.replace(self, steps=min(self.steps, step + left))

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW on clipped gradients; its updates are yet to be multiplied by the rate."""
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b2=0.99),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale(-1.0),
        )


def from_command_line(schedule: Schedule, about: str) -> Schedule:
    """Return the schedule, changed by the command line's flags."""
    parser = argparse.ArgumentParser(description=about)
    for name in ("steps", "batch", "learning_rate"):
        default = getattr(schedule, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help="(default: %(default)s)",
        )
    parser.add_argument("--seconds", type=float, help="in which to be done: fewer steps if need be")
    return dataclasses.replace(schedule, **vars(parser.parse_args()))


def train(
    folder: Path,
    schedule: Schedule,
    params: Tree,
    loss: Callable[[Tree, Tree, jax.Array], jax.Array],
    batches: Callable[[range], Iterable[Tree]],
    mesh: Mesh,
    *,
    checkpoint_seconds: float = 120,
    on_checkpoint: Callable[[int, Tree], None] | None = None,
) -> Tree:
    """Train, or resume the run in `folder`, and return the averaged parameters.

    What it compiles is kept for the next time, whatever its length and rate will be.

    Args:
        folder: of `state.safetensors` (weights, their average, optimizer) and `loss.jsonl`.
        schedule: length and optimizer.
        params: initial parameters, float32.
        loss: (params, batch, key) -> scalar.
        batches: steps -> for each of them arrays, whose leading axis is divided over the devices.
        mesh: the devices.
        checkpoint_seconds: between two checkpoints.
        on_checkpoint: called with the step and the averaged parameters after each checkpoint.

    Raises:
        ValueError: the batch cannot be divided over the devices, or the folder's run is of another
            recipe.
    """
    if schedule.batch % mesh.size:
        raise ValueError(f"A batch of {schedule.batch} cannot be divided over {mesh.size} devices.")
    keep_compiled()
    optimizer = schedule.optimizer()
    state = _restore(folder / "state.safetensors", _first(optimizer, params))
    state = jax.device_put(state, replicated(mesh))
    step = _make_step(optimizer, loss, schedule.ema, mesh)
    folder.mkdir(parents=True, exist_ok=True)
    first = int(state["step"])
    reported = saved = time.monotonic()
    whole, losses = schedule, []
    steps = range(first, schedule.steps)
    for i, batch in zip(steps, batches(steps), strict=True):
        batch = jax.device_put(batch, split(mesh))
        key = jax.random.fold_in(jax.random.key(0), i)
        state, value = step(state, batch, key, np.float32(schedule.rate(i)))
        losses.append(value)
        last = i + 1 >= schedule.steps
        if last or (i + 1) % REPORTED == 0:
            mean = float(jnp.mean(jnp.stack(losses)))
            speed = len(losses) / (time.monotonic() - reported)
            losses, reported = [], time.monotonic()
            # The first steps are slow, as they are compiled; a rate that falls goes on to.
            if i + 1 > first + REPORTED and i + 1 < (1 - schedule.decay) * schedule.steps:
                schedule = whole.fitted(i + 1, speed)
            last = i + 1 >= schedule.steps
            _report(folder, i + 1, schedule, mean, speed)
        if last or time.monotonic() - saved > checkpoint_seconds:
            _save(folder / "state.safetensors", state)
            if on_checkpoint:
                on_checkpoint(i + 1, state["ema"])
            saved = reported = time.monotonic()
        if last:
            break
    return state["ema"]


def ahead(batch_at: Callable[[int], Tree], steps: range) -> Iterator[Tree]:
    """Yield batch_at(step) for each step, made by other processes before it is asked for.

    They find `batch_at` by its name: it is a module's function, or a `partial` of one.
    """
    processes = min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 1))
    # Spawned, as JAX's threads do not survive a fork
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent)
    coming = (pool.submit(batch_at, step) for step in steps)
    try:
        waiting = deque(itertools.islice(coming, 2 * processes))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(coming, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Have the process end when its parent has, however that came about (cpython issue 111873)."""

    def end():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent
    threading.Thread(target=end, daemon=True).start()


def begin(folder: Path, schedule: Schedule, params: Tree) -> bool:
    """Begin the run in `folder` with `params`, float32; return False if it had begun already."""
    file = folder / "state.safetensors"
    if file.exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    _save(file, _first(schedule.optimizer(), params))
    return True


def _first(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    # `params + 0` gives the average buffers of its own: the step donates all of them.
    return {
        "params": params,
        "ema": jax.tree.map(lambda x: x + 0, params),
        "optimizer": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
    }


def _make_step(optimizer, loss, ema: float, mesh: Mesh):
    def step(state, batch, key, rate):
        key = jax.random.fold_in(key, jax.lax.axis_index(REPLICA))
        value, gradients = jax.value_and_grad(loss)(state["params"], batch, key)
        value, gradients = jax.lax.pmean((value, gradients), REPLICA)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(
            state["params"], jax.tree.map(lambda update: rate * update, updates)
        )
        # A young average follows closely, so that it does not remember the initial weights.
        keep = jnp.minimum(ema, (1 + state["step"]) / (10 + state["step"]))
        average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state["ema"], params)
        return {
            "params": params,
            "ema": average,
            "optimizer": moments,
            "step": state["step"] + 1,
        }, value

    # Written per device: left to the partitioner, the gradient of the token embedding (a scatter)
    # made a step on CPU 17 s long where this form takes 0.6 s.
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT, REPLICATED, REPLICATED),
        out_specs=REPLICATED,
        check_vma=False,
    )
    return compiled(mapped, donate_argnums=0)


def compiled(function: Callable, **options) -> Callable:
    """Compile a function by `jax.jit` with the compiler options of the programs."""
    return jax.jit(
        function, **options, compiler_options=compiler_options(jax.default_backend(), jnp.float32)
    )


def _report(folder: Path, step: int, schedule: Schedule, loss: float, speed: float) -> None:
    pictures = step * schedule.batch
    with (folder / "loss.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": step, "pictures": pictures, "loss": round(loss, 5)}) + "\n")
    left = (schedule.steps - step) / speed / 60
    print(
        f"step {step}/{schedule.steps}  loss {loss:.4f}  {speed * schedule.batch:.1f} samples/s  "
        f"{left:.0f} min left",
        flush=True,
    )


def _named(tree: Tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _save(file: Path, state: Tree) -> None:
    # Written beside and renamed: being cut off while writing loses nothing.
    unfinished = file.with_suffix(".unfinished")
    save_file({name: np.asarray(leaf) for name, leaf in _named(state).items()}, unfinished)
    os.replace(unfinished, file)


def _restore(file: Path, state: Tree) -> Tree:
    if not file.is_file():
        return state
    with safe_open(file, framework="np") as tensors:
        missing = _named(state).keys() - set(tensors.keys())
        found = (
            state
            if missing
            else jax.tree_util.tree_map_with_path(
                lambda path, _: tensors.get_tensor(jax.tree_util.keystr(path)), state
            )
        )
    if missing or any(
        np.shape(a) != np.shape(b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
    ):
        raise ValueError(f"{file} is of another recipe: move its folder away to begin anew.")
    return found


def latest(folder: Path, params: Tree) -> Tree:
    """Return the averaged parameters that a run left in `folder`, structured like `params`.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        ValueError: it is of networks of another shape.
    """
    file = folder / "state.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: run the training that writes it first.")
    return _restore(file, {"ema": params})["ema"]
