"""Spherical interpolation (Shoemake 1985, doi:10.1145/325165.325242)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

PARALLEL = 1e-3  # radians: between directions that are nearer a straight line is as good


def slerp(
    one: Float[Array, "..."],
    other: Float[Array, "..."],
    share: Float[Array, ""],
    axis: int | None = None,
) -> jax.Array:
    """Interpolate between arrays, keeping the length of the ends on the way.

    Args:
        one: where share is 0.
        other: of the same shape, where it is 1.
        share: of the way.
        axis: along which there are vectors; by default the whole array is one.

    Returns:
        An array of that shape, float32.
    """
    one, other = (jnp.asarray(each, jnp.float32) for each in (one, other))

    def dot(a, b):
        return jnp.sum(a * b, axis=axis, keepdims=True)

    lengths = jnp.sqrt(dot(one, one) * dot(other, other))
    cosine = jnp.clip(dot(one, other) / jnp.maximum(lengths, 1e-20), -1, 1)
    angle = jnp.arccos(cosine)
    curved = (angle > PARALLEL) & (angle < jnp.pi - PARALLEL) & (lengths > 0)
    sine = jnp.sin(jnp.where(curved, angle, 1.0))
    first = jnp.where(curved, jnp.sin((1 - share) * angle) / sine, 1 - share)
    second = jnp.where(curved, jnp.sin(share * angle) / sine, share)
    return first * one + second * other
