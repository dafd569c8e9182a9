"""A step of training, compiled once for a size: from a state and pictures to the next state.

A run is a function of its step number alone: pictures, noise and timesteps are derived from it and
the seed, so a run that was cut off anywhere and goes on gives what it would have given.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from sd_tpu.checkpoint.weights import Params
from sd_tpu.runtime.compiler import compiler_options
from sd_tpu.runtime.mesh import REPLICA, REPLICATED, SPLIT
from sd_tpu.sampling.schedule import Schedule
from sd_tpu.training.encoding import Encoded
from sd_tpu.training.factors import Adaptation
from sd_tpu.training.losses import draw_time, loss
from sd_tpu.training.options import Options

Tree = Any
State = dict[str, Any]  # "factors", "optimizer", "step"

CLIPPED = 1.0  # norm of all gradients together, at most
WEIGHT_DECAY = 0.01
BATCHES = PartitionSpec(None, REPLICA)  # of arrays [batches that make a step, pictures, ...]


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Return an optimizer whose updates are yet to be multiplied by the learning rate.

    Args:
        name: "adamw" (Loshchilov and Hutter 2017, arXiv:1711.05101) or "prodigy" (Mishchenko and
            Defazio 2023, arXiv:2306.06101), which finds a rate itself.
    """
    clip = optax.clip_by_global_norm(CLIPPED)
    if name == "prodigy":
        return optax.chain(clip, optax.contrib.prodigy(1.0, weight_decay=WEIGHT_DECAY))
    return optax.chain(clip, optax.adamw(1.0, weight_decay=WEIGHT_DECAY))


def first_state(adaptation: Adaptation, options: Options) -> State:
    """Return the state before the first step."""
    factors = adaptation.first(options.seed)
    return {
        "factors": factors,
        # Some keep the first factors, whose memory a step would be given twice.
        "optimizer": make_optimizer(options.optimizer).init(jax.tree.map(jnp.copy, factors)),
        "step": jnp.zeros((), jnp.int32),
    }


@dataclasses.dataclass(frozen=True)
class Pool:
    """The pictures that steps draw from, by size."""

    pictures: Sequence[Encoded]
    options: Options

    def batch(self, step: int) -> Tree:
        """Return the pictures of a step, all of one size, with or without their captions.

        A picture is as likely as any other, and is seen twice in a step only where there are too
        few of its size. Leading axes are the batches that make a step, and their pictures.
        """
        options, rng = self.options, np.random.default_rng([self.options.seed, step])
        first = int(rng.integers(len(self.pictures)))
        others = rng.permutation([n for n in self._alike(first) if n != first]).astype(int)
        chosen = np.resize([first, *others], options.items).tolist()
        dropped = rng.random(options.items) < options.caption_dropout
        return self._stacked(chosen, dropped.tolist())

    def of_each_size(self) -> list[tuple[float, Tree]]:
        """Return, for each size, its share of the pictures and a step's pictures of it."""
        firsts = {each.latents.shape: n for n, each in reversed([*enumerate(self.pictures)])}
        items = self.options.items
        return [
            (len(self._alike(n)) / len(self.pictures), self._stacked([n] * items, [False] * items))
            for n in firsts.values()
        ]

    def _alike(self, first: int) -> list[int]:
        """Return the numbers of all pictures of one's size."""
        shape = self.pictures[first].latents.shape
        return [n for n, each in enumerate(self.pictures) if each.latents.shape == shape]

    def _stacked(self, chosen: Sequence[int], dropped: Sequence[bool]) -> Tree:
        items = [
            {
                "latents": self.pictures[n].latents,
                "text": self.pictures[n].no_text if without else self.pictures[n].text,
                "number": np.uint32(number),
            }
            for number, (n, without) in enumerate(zip(chosen, dropped, strict=True))
        ]
        lead = self.options.accumulate, self.options.batch
        return jax.tree.map(lambda *x: np.stack(x).reshape(*lead, *np.shape(x[0])), *items)


@lru_cache(maxsize=1)
def make_step(
    adaptation: Adaptation,
    schedule: Schedule,
    mesh: Mesh,
    *,
    optimizer: str,
    accumulate: int,
    texts: bool = False,
    stacked: bool = False,
) -> Wrapped:
    """Return a jitted step: (state, params, batch, seed, rate) -> (state, loss).

    It takes the state's memory for its own. The last one is kept, with what was compiled of it, as
    the next run is often of the same model.

    Args:
        adaptation: of the model.
        schedule: of the checkpoint.
        mesh: the devices over which the pictures of a batch are divided.
        optimizer: by its name in OPTIMIZERS.
        accumulate: batches that make a step.
        texts: whether text encoders are part of the step.
        stacked: whether parameters are [D, ...], divided over the devices, as those who draw have
            them, and not whole on each.
    """
    change, model = make_optimizer(optimizer).update, adaptation.model

    def encoded(params: Params, given: Tree) -> Tree:
        if not texts:
            return given
        both = jax.vmap(partial(model.encode_prompt, params))(given)
        return jax.tree.map(lambda x: x[:, -1], both)

    def batch_loss(factors, params: Params, batch: Mapping[str, Any], key: jax.Array) -> jax.Array:
        params = adaptation.applied(params, factors)
        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))
        for_noise, for_time = keys(batch["number"]).T
        latents = batch["latents"]
        noise = jax.vmap(lambda key: jax.random.normal(key, latents.shape[1:]))(for_noise)
        times = jax.vmap(partial(draw_time, schedule))(for_time)
        cond = encoded(params, batch["text"])
        return loss(model, schedule, params, latents, cond, noise, times)

    def step(state: State, params: Params, batches: Tree, seed: jax.Array, rate: jax.Array):
        if stacked:
            params = jax.tree.map(lambda x: x[0], params)
        key = jax.random.fold_in(jax.random.key(seed), state["step"])
        ask = jax.value_and_grad(batch_loss)

        def add(sums, batch):
            return jax.tree.map(jnp.add, sums, ask(state["factors"], params, batch, key)), None

        nothing = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), state["factors"]))
        # A loop's body would have one of a CPU's cores for much of it (decision 0007).
        sums, _ = jax.lax.scan(add, nothing, batches, unroll=accumulate == 1)
        means = jax.tree.map(lambda x: x / accumulate, sums)
        value, gradients = jax.lax.pmean(means, REPLICA)
        updates, moments = change(gradients, state["optimizer"], state["factors"])
        updates = jax.tree.map(lambda update: rate * update, updates)
        return {
            "factors": optax.apply_updates(state["factors"], updates),
            "optimizer": moments,
            "step": state["step"] + 1,
        }, value

    # Written per device, as the partitioner would part what should stay whole.
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT if stacked else REPLICATED, BATCHES, REPLICATED, REPLICATED),
        out_specs=REPLICATED,
        check_vma=False,
    )
    platform = mesh.devices.flat[0].platform
    return jax.jit(
        mapped,
        donate_argnums=0,
        compiler_options=compiler_options(platform, model.dtype, advance=True),
    )


def put_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Put a step's pictures on the devices that look at them."""
    return jax.device_put(batch, NamedSharding(mesh, BATCHES))
