"""The platform that a program is traced for, by which code picks its way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, PyTree


def platform() -> str:
    """That of the mesh the program is for: compiling for a TPU needs no TPU on the host."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def only_if(wanted: Bool[Array, ""], draw: Callable[[PyTree], PyTree], given: PyTree) -> PyTree:
    """What `draw(given)` gives where it is wanted; else zeros, at no cost."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, given))
    # XLA gives what is in a branch only one of a CPU's cores, except for convolutions and products;
    # for a TPU v6e it makes large convolutions slower in a loop's own body than in a branch
    # (benchmarks/RESULTS.md).
    if platform() == "cpu":
        def turn(i, _):
            # XLA takes what does not depend on the turn out of the loop, where it is done always.
            return draw(lax.optimization_barrier((given, i))[0])

        return lax.fori_loop(0, wanted.astype(jnp.int32), turn, zeros)
    return lax.cond(wanted, draw, lambda _: zeros, given)


def row_major(x: jax.Array) -> jax.Array:
    """x, whose axes a TPU's memory has in their order.

    Left to itself, the compiler lays the pictures of a batch next to each other, in tiles of four
    of which three are empty where there is one picture.
    """
    if platform() != "tpu":
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
