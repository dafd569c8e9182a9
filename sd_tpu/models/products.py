"""Products of matrices, as suits the platform."""

import functools
import math
from collections.abc import Callable
from typing import ParamSpec

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sd_tpu.models.platform import platform

# How many rows are taken at a time on CPUs, of how many numbers on (decision 0015).
ROWS, LARGE = 512, 1 << 20
P = ParamSpec("P")
KEPT = "kept"  # by this name the results of layers can be kept for a gradient (decision 0036)


def kept(layer: Callable[P, jax.Array]) -> Callable[P, jax.Array]:
    """Give the results of a function or a method the name KEPT, which changes nothing else."""

    @functools.wraps(layer)
    def named(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
        return checkpoint_name(layer(*args, **kwargs), KEPT)

    return named


def dot_general(a: jax.Array, b: jax.Array, dimension_numbers, **options) -> jax.Array:
    """Call `lax.dot_general` in the dtype of `a`, with sums in float32."""
    if platform() == "cpu":
        # XLA makes a product of bfloat16 that is to be bfloat16 one of float32, which takes twice
        # as long or longer; one that is to be float32 is computed as it is (decision 0014).
        options["preferred_element_type"] = jnp.float32
    return lax.dot_general(a, b, dimension_numbers, **options).astype(a.dtype)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply a [..., N] @ b [N, M] -> [..., M] in the dtype of `a`, with sums in float32.

    With an axis in front of b, a [B, ..., N] @ b [B, N, M] -> [B, ..., M], each by its own.
    """
    lead = tuple(range(b.ndim - 2))
    return dot_general(a, b, (((a.ndim - 1,), (b.ndim - 2,)), (lead, lead)))


def finished(x: jax.Array) -> jax.Array:
    """Return x, which on TPUs is there in whole before anything that uses it begins.

    XLA would join a norm's sums to the product before it, and what lies between two products to the
    second, which computes it anew for each tile of its outputs (decision 0038).
    """
    return lax.optimization_barrier(x) if platform() == "tpu" else x


def by_rows(
    layer: Callable[[jax.Array], jax.Array], x: jax.Array, *, whole: bool = False
) -> jax.Array:
    """layer(x) for one that takes each row of x [..., N] by itself -> [..., M].

    On CPUs it is given ROWS of a large x at a time, so that what is wider inside of it stays in the
    cache; unless it takes the `whole` of it alone, as pictures with factors of their own are told
    apart by their axis.
    """
    *lead, width = x.shape
    if whole or platform() != "cpu" or x.size < LARGE or math.prod(lead) % ROWS:
        return layer(x)
    return lax.map(layer, x.reshape(-1, ROWS, width)).reshape(*lead, -1)
