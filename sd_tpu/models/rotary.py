"""Rotary positions (Su et al. 2021, arXiv:2104.09864) along several axes: some channels of a head
turn by where a token is along the first, the next by where it is along the second, and so on."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BITS = 12  # of a frequency's coarse part: its product with a position below 4096 is exact


class Rotation(NamedTuple):
    """Cosines and sines of angles by which pairs of channels turn, each [..., pairs] float32."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


def rotation(positions: jax.Array, sizes: Sequence[int], theta: float) -> Rotation:
    """Return how tokens at positions [..., axes], whole numbers, turn.

    `sizes` are the channels of a head that turn by each axis: pair i of an axis of n channels turns
    by position * theta^(-2i/n). Angles are rounded to float32 once, as in tables that are made in
    float64 (diffusers' are).
    """
    positions = positions.astype(jnp.float32)
    angles = [
        _angles(positions[..., axis, None], theta ** -(np.arange(0, size, 2) / size))
        for axis, size in enumerate(sizes)
    ]
    joined = jnp.concatenate(angles, axis=-1)
    return Rotation(jnp.cos(joined), jnp.sin(joined))


def _angles(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Positions [..., 1] float32, frequencies [pairs] float64 -> their products in float32."""
    mantissa, exponent = np.frexp(frequencies)
    coarse = np.ldexp(np.round(np.ldexp(mantissa, BITS)), exponent - BITS)
    fine = frequencies - coarse
    return positions * coarse.astype(np.float32) + positions * fine.astype(np.float32)


def text_rotation(length: int, size: int, theta: float) -> Rotation:
    """Return how a text's tokens turn, with frequencies of float32 as in transformers: [T, pairs]
    of heads of `size` channels."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = (1 / theta**exponents).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return Rotation(np.cos(angles), np.sin(angles))


def grid_rotation(counts: Sequence[int], sizes: Sequence[int], thetas: Sequence[float]) -> Rotation:
    """Return how the tokens of a grid turn, row by row, with frequencies as in `text_rotation`.

    Args:
        counts: tokens along each axis.
        sizes: channels of a head that turn by each axis.
        thetas: base of the frequencies of each.

    Returns:
        Tables [1, tokens, pairs].
    """
    by_axis = [text_rotation(*each) for each in zip(counts, sizes, thetas, strict=True)]

    def joined(tables: Sequence[jax.Array | np.ndarray]) -> jax.Array:
        spread = [
            jnp.broadcast_to(
                table.reshape([*np.where(np.arange(len(counts)) == axis, counts, 1), -1]),
                (*counts, table.shape[-1]),
            )
            for axis, table in enumerate(tables)
        ]
        return jnp.concatenate(spread, axis=-1).reshape(1, math.prod(counts), -1)

    return Rotation(*map(joined, zip(*by_axis, strict=True)))


def rotate_halves(x: jax.Array, by: Rotation) -> jax.Array:
    """Turn channels i and i + size / 2 of each head of x [B, T, heads, size] in its dtype; `by` is
    what `text_rotation` gives."""
    cos, sin = (np.tile(each, 2)[:, None].astype(x.dtype) for each in by)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def rotate_pairs(x: jax.Array, by: Rotation, heads: int, *, halves: bool = False) -> jax.Array:
    """Turn pairs of channels of each head in float32.

    Args:
        x: [B, N, heads * size].
        by: [B or 1, N, size / 2].
        heads: of x.
        halves: pairs are channels i and i + size / 2 of a head, as in `rotate_halves`; else they
            are channels 2i and 2i + 1.

    Returns:
        Like x, in its dtype.
    """
    shape, axis = ((2, -1), -2) if halves else ((-1, 2), -1)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], heads, *shape)
    real, imaginary = jnp.moveaxis(pairs, axis, 0)
    cos, sin = (each[..., None, :] for each in by)
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    return jnp.stack(turned, axis=axis).reshape(x.shape).astype(x.dtype)
