"""Networks applied to overlapping tiles of a picture, one after the other, where the whole of it
would take too much memory. The tiles are blended linearly, as in diffusers' `tiled_decode`."""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIDE = 144  # latents: what has no more than SIDE^2, 1152x1152 pixels for SD, is taken whole
OVERLAP = 32  # latents, or more, that neighbours share


def by_tiles(network: Callable[[jax.Array], jax.Array], x: jax.Array, unit: int = 1) -> jax.Array:
    """Apply a network to x, whole or by tiles of at most SIDE latents along a side.

    Norms and attention of a network see one tile at a time, so by tiles the result is not quite the
    same.

    Args:
        network: maps [B, H, W, C] to [B, s H, s W, C'] float32, for an s that may be a fraction.
        x: [B, H, W, C].
        unit: elements of x along a side for each latent along that side.
    """
    batch, height, width, channels = x.shape
    if height * width <= (SIDE * unit) ** 2:
        return network(x)
    (rows, high), (columns, wide) = _cuts(height // unit), _cuts(width // unit)
    size = (batch, high * unit, wide * unit, channels)
    output = jax.eval_shape(network, jax.ShapeDtypeStruct(size, x.dtype))
    scale = output.shape[1] // high
    vertical, horizontal = (
        jnp.asarray(weights(starts, side, scale))
        for starts, side in ((rows, high), (columns, wide))
    )
    places = jnp.asarray([(row, column) for row in rows for column in columns], jnp.int32)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        row, column = places[number]
        tile = network(lax.dynamic_slice(x, (0, row * unit, column * unit, 0), size))
        weight = (vertical[number // len(columns)][:, None] * horizontal[number % len(columns)])[
            ..., None
        ]
        place = (0, row * scale, column * scale, 0)
        before = lax.dynamic_slice(total, place, tile.shape)
        return lax.dynamic_update_slice(total, before + weight * tile, place)

    whole = (batch, height // unit * scale, width // unit * scale, output.shape[-1])
    return lax.fori_loop(0, len(places), add, jnp.zeros(whole, output.dtype))


def _cuts(side: int) -> tuple[list[int], int]:
    """Return where tiles begin that cover a side, and the length of all of them."""
    count = max(1, math.ceil((side - OVERLAP) / (SIDE - OVERLAP)))
    length = math.ceil((side + (count - 1) * OVERLAP) / count)
    return [round(start) for start in np.linspace(0, side - length, count)], length


def weights(starts: Sequence[int], length: int, scale: int) -> np.ndarray:
    """Return how much each tile counts along itself, [tiles, length * scale] f32.

    It goes from 0 to 1 over the part that a tile shares with its neighbour, with which it sums up
    to 1.
    """
    weights = np.ones((len(starts), length * scale), np.float32)
    for tile, (start, following) in enumerate(itertools.pairwise(starts)):
        shared = (start + length - following) * scale
        ramp = (np.arange(shared) + 0.5) / shared
        weights[tile, -shared:] *= 1 - ramp
        weights[tile + 1, :shared] *= ramp
    return weights
