"""A training, a step at a time: its programs, its pictures and its state."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.checkpoint.weights import Params, opened
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.memory import return_freed_memory
from sd_tpu.runtime.mesh import replicas, replicated, split
from sd_tpu.settings import RequestError
from sd_tpu.training.encoding import Encoded, ExampleEncoder
from sd_tpu.training.factors import Adaptation, replace_file, write_lora
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import Example
from sd_tpu.training.step import Pool, State, first_state, make_step, put_batch

TRAINING = "training"  # what the file of a state says of its run


class Trainer:
    """Steps of a run, whose result depends on its arguments alone.

    Attributes:
        done: how many steps have been taken.
        encoder: of the pictures, which come before the first step.
        parts: the components whose parameters a step takes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: Options,
        mesh: Mesh,
        examples: Sequence[Example],
        identity: Mapping[str, Any],
        *,
        stacked: bool = False,
    ):
        """Begin a run.

        Args:
            checkpoint: of the model.
            options: of the run.
            mesh: the devices.
            examples: the pictures.
            identity: all that the result depends on, for files.
            stacked: whether parameters are [R, ...], divided over the replicas, and not whole on
                each.

        Raises:
            PromptError: a caption cannot be read.
        """
        model, shapes = checkpoint.model, checkpoint.parameters.shapes
        self._checkpoint, self._options, self._mesh = checkpoint, options, mesh
        self._identity, self._stacked = identity, stacked
        self.encoder = ExampleEncoder(
            checkpoint,
            examples,
            mesh.devices.flat[0],
            texts=not options.text_encoders,
            stacked=stacked,
        )
        encoders = getattr(model, "encoders", {}) if options.text_encoders else {}
        trained = {part: shapes[part] for part in (model.denoiser, *encoders)}
        adaptation = Adaptation.of(
            model,
            trained,
            options.rank,
            pixels=options.batch
            // replicas(mesh)
            * max(math.prod(example.size) for example in examples),
            feed_forward=options.feed_forward,
        ).with_model(self.encoder.model)
        # A step that reads texts takes encoders that are not trained too.
        self.parts = (
            [part for part in shapes if part != model.autoencoder]
            if options.text_encoders
            else [model.denoiser]
        )
        self._step = make_step(
            adaptation,
            checkpoint.schedule,
            mesh,
            optimizer=options.optimizer,
            accumulate=options.accumulate,
            texts=options.text_encoders,
            stacked=stacked,
        )
        self._state: State = jax.device_get(first_state(adaptation, options))
        self._is_there = False  # whether the state is on the devices
        self._pictures: list[Encoded] = []
        self._programs: dict[tuple[int, ...], Any] = {}  # by the shape of a batch's latents
        self.done = 0

    @property
    def is_over(self) -> bool:
        """Whether all steps have been taken."""
        return self.done >= self._options.steps

    def compile(self) -> None:
        """Compile the step for each size of pictures."""
        whole, divided = replicated(self._mesh), split(self._mesh)

        def there(x: Any, lead: tuple[int, ...], sharding: NamedSharding) -> Any:
            return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=sharding)

        lead, sharding = ((replicas(self._mesh),), divided) if self._stacked else ((), whole)
        shapes = {part: self._checkpoint.parameters.shapes[part] for part in self.parts}
        params = jax.tree.map(lambda x: there(x, lead, sharding), shapes)
        state = jax.tree.map(lambda x: there(x, (), whole), self._state)
        for _, batch in self._blank().of_each_size():
            self._programs[batch["latents"].shape] = self._step.lower(
                state, params, put_batch(batch, self._mesh), *self._scalars(0)
            ).compile()
        return_freed_memory()

    @property
    def memory(self) -> int:
        """Bytes on a device beside parameters, of programs that are compiled."""
        temporary = [
            getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
            for program in self._programs.values()
        ]
        return max(self.encoder.temporary, *temporary) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, on each device."""
        return bytes_of(self._state)

    @property
    def is_encoded(self) -> bool:
        """Whether all pictures are encoded, so that steps can be taken."""
        return len(self._pictures) == len(self.encoder.examples)

    def encode(self, params: Params) -> None:
        """Encode the next picture by parameters of the encoder's `parts`, or of more."""
        params = {part: params[part] for part in self.encoder.parts}
        if self._stacked:
            params = jax.tree.map(self._on_first_device, params)
        self._pictures.append(self.encoder.encoded(params, len(self._pictures)))

    def take(self, params: Params) -> jax.Array:
        """Take a step by parameters of `parts`, or of more; return its loss, float32 []."""
        params = {part: params[part] for part in self.parts}
        batch = put_batch(self._pool.batch(self.done), self._mesh)
        program = self._programs[batch["latents"].shape]
        if not self._is_there:
            self._state = jax.device_put(self._state, replicated(self._mesh))
            self._is_there = True
        self._state, loss = program(self._state, params, batch, *self._scalars(self.done))
        self.done += 1
        return loss

    def seconds(self, params: Params, timed: Any) -> float:
        """Return the seconds of a step, the mean of all sizes, by steps that are dropped again.

        Args:
            params: as `take` takes them.
            timed: calls a function, and returns the seconds that this took.
        """
        total = 0.0
        for share, batch in self._pool.of_each_size():
            program = self._programs[batch["latents"].shape]
            state = jax.device_put(self.snapshot(), replicated(self._mesh))
            given = put_batch(batch, self._mesh), *self._scalars(0)
            total += share * timed(
                lambda program=program, state=state, given=given: program(state, params, *given)
            )
        return total

    def suspend(self) -> None:
        """Take the state from the devices; the next step puts it back."""
        self._state, self._is_there = self.snapshot(), False

    def snapshot(self) -> State:
        """Return a copy of the state, in NumPy's arrays."""
        return jax.tree.map(np.array, jax.device_get(self._state))

    # --- files ----------------------------------------------------------------------------------

    def save(self, file: Path, state: State | None = None) -> None:
        """Keep a state in a file, so that a run that is cut off loses no more than came after it.

        Args:
            file: from which the run goes on.
            state: a snapshot; by default the state as it is by now.
        """
        tensors = _named(state or self.snapshot())
        replace_file(file, save(tensors, {TRAINING: json.dumps(self._identity)}))

    def restore(self, file: Path) -> None:
        """Go on from a file's state.

        Raises:
            CheckpointError: the file is damaged.
            RequestError: it is of another run.
        """
        with opened(file) as tensors:
            stored = json.loads((tensors.metadata() or {}).get(TRAINING, "{}"))
            self._check(stored, file)
            if _named(self._state).keys() != {*tensors.keys()}:
                raise CheckpointError(f"{file} is damaged: remove it to begin anew.")
            self._state = jax.tree_util.tree_map_with_path(
                lambda path, _: tensors.get_tensor(jax.tree_util.keystr(path)), self._state
            )
        self.done, self._is_there = int(self._state["step"]), False

    def _check(self, stored: Mapping[str, Any], file: Path) -> None:
        """Check that a state is of this run, by what its file says of it."""
        other = next(
            (key for key, value in self._identity.items() if stored.get(key) != value), None
        )
        if other == "pictures":
            raise RequestError(
                "The pictures or their captions have changed since {file} was kept. Put them "
                "back, or remove the file to begin anew.",
                file=file,
            )
        if other:
            raise RequestError(
                "{file} is of another run: its {key} was {was}, and is {now} now. Go on with "
                "what it was begun with, or remove the file to begin anew.",
                file=file,
                key=other.replace("_", " "),
                was=stored.get(other),
                now=self._identity[other],
            )

    def write(self, file: Path, state: State | None = None) -> None:
        """Write the LoRA of a state, as `save` does."""
        state = state or self.snapshot()
        write_lora(state["factors"], file, self._metadata(int(state["step"])))

    def _metadata(self, steps: int) -> dict[str, str]:
        """Return what the LoRA's file says of itself, in kohya's keys where they have one."""
        options, count = self._options, len(self.encoder.examples)
        return {
            "ss_output_name": options.name,
            "ss_sd_model_name": self._identity["model"],
            "ss_base_model_version": type(self._checkpoint.model).__name__,
            "ss_network_dim": str(options.rank),
            "ss_network_alpha": str(options.rank),
            "ss_learning_rate": repr(options.highest_rate),
            "ss_steps": str(steps),
            "ss_num_train_images": str(count),
            "ss_seed": str(options.seed),
            "sd_tpu": json.dumps({**self._identity, "captions": count}, sort_keys=True),
        }

    # --- batches --------------------------------------------------------------------------------

    def _on_first_device(self, x: jax.Array) -> jax.Array:
        """Return the first device's part of an array that is divided over all of them."""
        first = self._mesh.devices.flat[0]
        return next(shard.data for shard in x.addressable_shards if shard.device == first)

    @property
    def _pool(self) -> Pool:
        return Pool(self._pictures, self._options)

    def _blank(self) -> Pool:
        """Return pictures of the same shapes, which need not be encoded yet."""
        numbers = range(len(self.encoder.examples))
        return Pool([self.encoder.blank(number) for number in numbers], self._options)

    def _scalars(self, step: int) -> tuple[np.uint32, np.float32]:
        """Return the seed and the learning rate of a step."""
        return np.uint32(self._options.seed), np.float32(self._options.rate(step))


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
