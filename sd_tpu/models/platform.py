"""The platform that a program is traced for, by which code picks its way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, PyTree


def platform() -> str:
    """Return the platform of the program's mesh: compiling for a TPU needs no TPU on the host."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def only_if(wanted: Bool[Array, ""], draw: Callable[[PyTree], PyTree], operand: PyTree) -> PyTree:
    """Return `draw(operand)` where it is wanted; else zeros, at no cost."""
    draw = jax.jit(draw, inline=True)  # traced once, for its shapes and for what it draws
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, operand))
    # XLA gives what is in a branch only one of a CPU's cores, except for convolutions and products;
    # for a TPU v6e it makes large convolutions slower in a loop's own body than in a branch
    # (decision 0007).
    if platform() == "cpu":

        def turn(i, _):
            # XLA takes what does not depend on the turn out of the loop, where it is done always.
            return draw(lax.optimization_barrier((operand, i))[0])

        return lax.fori_loop(0, wanted.astype(jnp.int32), turn, zeros)
    return lax.cond(wanted, draw, lambda _: zeros, operand)


TILE = 4  # pictures, where the compiler lays them out side by side


def row_major(x: jax.Array) -> jax.Array:
    """Return x, in a TPU's memory in the order of its axes if its first one is short.

    Left to itself, the compiler may put the pictures of a batch innermost but for the channels, in
    tiles of two or four (decision 0008): mostly padding where there is one picture.
    """
    if platform() != "tpu" or len(x) >= TILE:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
