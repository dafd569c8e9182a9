"""Convolutions: functions that pick their way by the platform and the shape. Images are NHWC."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sd_tpu.models.platform import platform

# Of a 3x3 kernel over 2x2 results: what becomes of 4 rows (or columns) of the picture, of the
# kernel's 3, and of the products back to 2. F(2x2, 3x3) of Lavin and Gray 2015, arXiv:1509.09308.
TILES = (((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
         ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
         ((1, 1, 1, 0), (0, 1, -1, -1)))
# The same of 3 rows of which the middle one lies there twice: one of the four products is 0 then.
ENLARGED = (((1, -1, 0), (0, 1, 0), (0, 1, -1)),
            ((1, 0, 0), (1, 1, 1), (0, 0, 1)),
            ((1, 1, 0), (0, 1, -1)))


def convolve(x: jax.Array, kernel: jax.Array, strides, padding, **options) -> jax.Array:
    """`lax.conv_general_dilated`, or what is faster on the platform for the shape.

    x [B, H, W, C], kernel [height, width, C, K] -> [B, H', W', K].
    """
    batch, height, width, _ = x.shape
    *sides, inputs, outputs = kernel.shape
    whole = [*padding] == [(1, 1), (1, 1)] and max(strides) == 1
    tiled = sides == [3, 3] and height % 2 == width % 2 == 0
    # Few channels have too few products to win by, few pixels too few to pay for the kernel.
    pays = min(inputs, outputs) >= 256 and 5 * batch * height * width >= 4 * outputs
    if platform() == "cpu" and whole and tiled and pays:
        return winograd(x, kernel)
    return lax.conv_general_dilated(x, kernel, strides, padding, **options)


def convolve_enlarged(x: jax.Array, kernel: jax.Array, strides, padding, **options) -> jax.Array:
    """A 3x3 convolution of x at twice its size, by nearest neighbour, as is fastest there.

    x [B, H, W, C], kernel [3, 3, C, K] -> [B, 2H, 2W, K].
    """
    if platform() == "cpu":
        return winograd_enlarged(x, kernel)
    batch, height, width, channels = x.shape
    # Not by `repeat`: the TPU compiler then takes up to four times the cycles for both.
    enlarged = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
    return lax.conv_general_dilated(enlarged, kernel, strides, padding, **options)


def winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A 3x3 convolution by 16 products for every 2x2 pixels instead of 36.

    x [B, H, W, C] with even H and W, kernel [3, 3, C, K] -> [B, H, W, K].
    """
    height, width = x.shape[1:3]
    x = _bordered(x)
    tiles = [[x[:, i:i + height:2, j:j + width:2] for j in range(4)] for i in range(4)]
    return _filtered(tiles, kernel, *TILES)


def winograd_enlarged(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve_enlarged` by 9 products for each pixel of x, which becomes 2x2, instead of 36.

    x [B, H, W, C], kernel [3, 3, C, K] -> [B, 2H, 2W, K].
    """
    height, width = x.shape[1:3]
    x = _bordered(x)
    tiles = [[x[:, i:i + height, j:j + width] for j in range(3)] for i in range(3)]
    return _filtered(tiles, kernel, *ENLARGED)


def _bordered(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))


def _filtered(tiles: list[list[jax.Array]], kernel: jax.Array, of_tiles, of_kernel,
              of_products) -> jax.Array:
    """2x2 results of each tile, tiles[row][column] being [B, h, w, C] -> [B, 2h, 2w, K]."""
    dtype = kernel.dtype
    # Or XLA transforms the kernels of all layers before the loop of steps, and keeps them there.
    tiles, kernel = lax.optimization_barrier((tiles, kernel))
    tiles, kernel = (jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (tiles, kernel))
    products = jax.tree.map(jnp.matmul, _transformed(of_tiles, tiles),
                            _transformed(of_kernel, kernel))
    pixels = _transformed(of_products, products)
    batch, height, width, channels = products[0][0].shape
    pixels = jnp.stack([jnp.stack(row, axis=3) for row in pixels], axis=2)
    return pixels.reshape(batch, 2 * height, 2 * width, channels).astype(dtype)


def _transformed(matrix, grid: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """matrix @ grid @ matrix^T, for a grid of arrays."""
    def combined(weights, arrays):
        return sum(weight * x for weight, x in zip(weights, arrays, strict=True) if weight)

    rows = [[combined(weights, column) for column in zip(*grid, strict=True)] for weights in matrix]
    return [[combined(weights, row) for weights in matrix] for row in rows]
