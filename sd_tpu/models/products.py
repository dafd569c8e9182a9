"""Products of matrices, as suits the platform."""

import jax
import jax.numpy as jnp
from jax import lax

from sd_tpu.models.platform import platform


def dot_general(a: jax.Array, b: jax.Array, dimension_numbers, **options) -> jax.Array:
    """`lax.dot_general` in the dtype of `a`, with sums in float32."""
    if platform() == "cpu":
        # XLA makes a product of bfloat16 that is to be bfloat16 one of float32, which takes twice
        # as long or longer; one that is to be float32 is computed as it is (benchmarks/RESULTS.md).
        options["preferred_element_type"] = jnp.float32
    return lax.dot_general(a, b, dimension_numbers, **options).astype(a.dtype)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [..., N] @ b [N, M] -> [..., M], likewise."""
    return dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))
