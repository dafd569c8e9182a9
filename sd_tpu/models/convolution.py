"""Convolutions: functions that pick their way by the platform and the shape. Images are NHWC.

On CPUs large 3x3 convolutions are Winograd's minimal filtering, made of plain products of matrices,
and in bfloat16, which XLA's convolutions make float32, others a product as well
(decisions 0011, 0014 and 0041).
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sd_tpu.models.platform import platform
from sd_tpu.models.products import kept, matmul

# The matrices B^T, G and A^T by which F(2x2, 3x3) transforms the input, the kernel and the products
# (Lavin and Gray 2015, arXiv:1509.09308).
WINOGRAD = (
    ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    ((1, 1, 1, 0), (0, 1, -1, -1)),
)
# The same for the rows a, b, b, c of an enlarged picture, given a, b, c. The third product is left
# out, as its factor is b - b; the second has 2b, which takes the halves out of the kernel's part.
WINOGRAD_ENLARGED = (
    ((1, -1, 0), (0, 1, 0), (0, 1, -1)),
    ((1, 0, 0), (1, 1, 1), (0, 0, 1)),
    ((1, 1, 0), (0, 1, -1)),
)
# From how many channels and pixels on F(2x2, 3x3) is faster than XLA's convolution, as measured
# (decisions 0011 and 0041): the transforms of few channels take longer than what they save, and so
# does the kernel's for few pixels. In bfloat16, which XLA makes float32, fewer channels suffice.
LEAST_CHANNELS, LEAST_IN_BFLOAT16, LEAST_PIXELS = 128, 32, 1024
# From MANY elements on (pixels times the larger number of channels) tiles are made in strips of
# rows of at most STRIP elements, which stay in the cache, but of at least LEAST_TILES tiles, as
# products of fewer rows take longer (decision 0041).
MANY, STRIP, LEAST_TILES = 1 << 22, 1 << 20, 512
# From how many channels on one product of bfloat16 is faster, and up to how many bytes of patches
# (decision 0014).
MOST_PATCHES = {32: 16 << 20, 256: 48 << 20}


@kept
def convolve(x: jax.Array, kernel: jax.Array, strides, padding, **options) -> jax.Array:
    """Call `lax.conv_general_dilated` as `layers.conv` does: no dilation, groups or precision.

    On CPUs it is `winograd` or, in bfloat16, `patched` where that is faster; `of_few_pixels` has a
    faster gradient alone.

    x [B, H, W, C], kernel [height, width, C, K] -> [B, H', W', K].
    """
    batch, height, width, _ = x.shape
    *sides, inputs, outputs = kernel.shape
    same_size = sides == [3, 3] and [*padding] == [(1, 1), (1, 1)] and max(strides) == 1
    least = LEAST_IN_BFLOAT16 if x.dtype == jnp.bfloat16 else LEAST_CHANNELS
    many = same_size and min(inputs, outputs) >= least
    if platform() == "cpu" and many and height % 2 == width % 2 == 0:
        if batch * height * width >= LEAST_PIXELS:
            return winograd(x, kernel)
        if x.dtype != jnp.bfloat16:
            return of_few_pixels(x, kernel)
    if platform() == "cpu" and x.dtype == jnp.bfloat16 and _is_small(x, kernel, strides):
        return patched(x, kernel, tuple(strides), tuple(padding))
    return lax.conv_general_dilated(x, kernel, strides, padding, **options)


def _is_small(x: jax.Array, kernel: jax.Array, strides) -> bool:
    """Whether there are enough channels for a product, and not too many bytes of patches."""
    *sides, inputs, outputs = kernel.shape
    most = [most for least, most in MOST_PATCHES.items() if min(inputs, outputs) >= least]
    patches = x.size * x.dtype.itemsize * math.prod(sides) // math.prod(strides)
    return bool(most) and (sides == [1, 1] or patches <= most[-1])


@kept
def convolve_enlarged(x: jax.Array, kernel: jax.Array, strides, padding, **options) -> jax.Array:
    """Convolve x at twice its size by nearest neighbour, 3x3, padded by 1, of stride 1.

    x [B, H, W, C], kernel [3, 3, C, K] -> [B, 2H, 2W, K].
    """
    if platform() == "cpu":
        return winograd_enlarged(x, kernel)
    batch, height, width, channels = x.shape
    # Not by `repeat`: the TPU compiler then takes up to four times the cycles for both
    # (decision 0006).
    enlarged = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
    return lax.conv_general_dilated(enlarged, kernel, strides, padding, **options)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def patched(
    x: jax.Array,
    kernel: jax.Array,
    strides: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
) -> jax.Array:
    """Convolve in bfloat16 by one product of each pixel's patch and the kernel.

    x [B, H, W, C], kernel [height, width, C, K] -> [B, H', W', K], summed in float32.
    """
    rows, columns, _, outputs = kernel.shape
    # As integers: XLA moves bfloat16 about by way of float32, which takes twice as long.
    bits = jnp.pad(lax.bitcast_convert_type(x, jnp.uint16), ((0, 0), *padding, (0, 0)))
    height, width = (
        (bits.shape[1] - rows) // strides[0] + 1,
        (bits.shape[2] - columns) // strides[1] + 1,
    )
    patches = jnp.concatenate(
        [
            bits[
                :, i : i + strides[0] * height : strides[0], j : j + strides[1] * width : strides[1]
            ]
            for i in range(rows)
            for j in range(columns)
        ],
        axis=-1,
    )
    return matmul(lax.bitcast_convert_type(patches, x.dtype), kernel.reshape(-1, outputs))


def _patched_forward(x, kernel, strides, padding):
    return patched(x, kernel, strides, padding), (x, kernel)


def _patched_backward(strides, padding, operands, gradient):
    # Integers have no gradient.
    return jax.vjp(_direct(strides, padding), *operands)[1](gradient)


patched.defvjp(_patched_forward, _patched_backward)


@jax.custom_vjp
def of_few_pixels(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve with a padding of 1 by XLA, whose gradient for x is that of `winograd`.

    XLA would exchange the channels of the whole kernel in memory first, which takes longer than
    the convolution of so few pixels (decision 0036).

    x [B, H, W, C] with even H and W, kernel [3, 3, C, K] -> [B, H, W, K].
    """
    return _direct((1, 1), ((1, 1), (1, 1)))(x, kernel)


def _of_few_pixels_forward(x, kernel):
    return of_few_pixels(x, kernel), (x, kernel)


def _of_few_pixels_backward(operands, gradient):
    x, kernel = operands
    (of_x,) = jax.vjp(lambda x: winograd(x, kernel), x)[1](gradient)
    direct = _direct((1, 1), ((1, 1), (1, 1)))
    (of_kernel,) = jax.vjp(lambda kernel: direct(x, kernel), kernel)[1](gradient)
    return of_x, of_kernel


of_few_pixels.defvjp(_of_few_pixels_forward, _of_few_pixels_backward)


def _direct(strides, padding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return XLA's convolution of x [B, H, W, C] and a kernel [height, width, C, K]."""
    return partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve with a padding of 1, by 16 products for every 2x2 pixels instead of 36.

    Sums are in float32, what is multiplied is in the dtype of x.

    x [B, H, W, C] with even H and W, kernel [3, 3, C, K] -> [B, H, W, K] in the dtype of x.
    """
    return _by_tiles(x, kernel, 2, *WINOGRAD)


def winograd_enlarged(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve x at twice its size by 9 products for each pixel of x, summed in float32.

    x [B, H, W, C], kernel [3, 3, C, K] -> [B, 2H, 2W, K] in the dtype of x.
    """
    return _by_tiles(x, kernel, 1, *WINOGRAD_ENLARGED)


def _by_tiles(
    x: jax.Array, kernel: jax.Array, stride: int, of_input, of_kernel, of_products
) -> jax.Array:
    """2x2 results for each tile of stride + 2 rows and columns, one every `stride` pixels."""
    batch, height, width, _ = x.shape
    # Tied to x, which changes in the loop of steps: XLA would transform all layers' kernels before
    # it and keep them.
    x, kernel = lax.optimization_barrier((x, kernel))
    dtype, wide = x.dtype, partial(jax.tree.map, lambda part: part.astype(jnp.float32))
    narrow = partial(jax.tree.map, lambda part: part.astype(dtype))
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    kernels, enlargement = narrow(_transformed(of_kernel, wide(kernel))), 2 // stride
    size = enlargement * width, kernel.shape[-1]
    rows = _rows_of_strip(x, kernel, stride)
    x = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))

    def with_strip(index: jax.Array, results: jax.Array) -> jax.Array:
        part = wide(lax.dynamic_slice_in_dim(x, index * rows, rows + 2, axis=1))
        # Else XLA cuts and pads it anew for each of the tiles, which takes five times as long.
        part = lax.optimization_barrier(jnp.pad(part, ((0, 0), (0, 0), (1, 1), (0, 0))))
        tiles = [
            [part[:, i : i + rows : stride, j : j + width : stride] for j in range(stride + 2)]
            for i in range(stride + 2)
        ]
        products = jax.tree.map(product, narrow(_transformed(of_input, tiles)), kernels)
        pixels = [jnp.stack(row, axis=3) for row in _transformed(of_products, products)]
        strip = jnp.stack(pixels, axis=2).astype(dtype).reshape(batch, enlargement * rows, *size)
        return lax.dynamic_update_slice_in_dim(results, strip, enlargement * index * rows, axis=1)

    # Begins as values of x, all of which are overwritten: XLA would make zeros for all layers at
    # the beginning, and keep them.
    values = lax.stop_gradient(x[:, 1:2, :1, :1])
    results = jnp.broadcast_to(values, (batch, enlargement * height, *size))
    return lax.fori_loop(0, height // rows, with_strip, results)


def _rows_of_strip(x: jax.Array, kernel: jax.Array, stride: int) -> int:
    """Return the rows of a strip: a multiple of the stride that divides the height of x, or all."""
    batch, height, width, _ = x.shape
    pixels, channels = batch * width, max(kernel.shape[2:])
    if height * pixels * channels < MANY:
        return height
    most = max(STRIP // channels, LEAST_TILES * stride**2) // pixels
    return max((n for n in range(stride, most + 1, stride) if height % n == 0), default=height)


def _transformed(matrix, grid) -> list[list[jax.Array]]:
    """matrix @ grid @ matrix^T, for a grid of arrays or an array that begins with two such axes."""

    def combined(weights, arrays):
        return sum(weight * x for weight, x in zip(weights, arrays, strict=True) if weight)

    rows = [[combined(weights, column) for column in zip(*grid, strict=True)] for weights in matrix]
    return [[combined(weights, row) for weights in matrix] for row in rows]
