"""Heads of queries and keys as attention takes them: normed, and turned by positions."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sd_tpu.models.layers import RMSNorm, rms_norm
from sd_tpu.models.platform import platform
from sd_tpu.models.rotary import Rotation, rotate_pairs

ROWS, TILE = 256, 16  # tokens that the kernel takes at most at a time, and a multiple of them
LANES = 128  # of a vector
# Bytes of VMEM for the tokens and tables of a block, of which two lie there; and for the rest.
HELD, WORKING = 5 << 20, 2 << 20


def prepare_heads(
    x: jax.Array,
    heads: int,
    norm: RMSNorm | None = None,
    by: Rotation | None = None,
    *,
    halves: bool = False,
) -> jax.Array:
    """Norm each head of queries or keys, and turn it by its token's position.

    On TPUs a kernel does both in one pass over memory: XLA lays out an axis of heads or of pairs
    anew (decision 0038).

    Args:
        x: [B, N, heads * size].
        heads: of x.
        norm: of the channels of a head, or None (Henry et al. 2020, arXiv:2010.04245).
        by: [B or 1, N, size / 2], or None where positions do not count.
        halves: which channels turn together, as in `rotate_pairs`.

    Returns:
        Like x, in its dtype.
    """
    if norm is None and by is None:
        return x
    scale, eps = (None, 0.0) if norm is None else (norm.multiplier, norm.eps)
    if platform() == "tpu" and _fits(x, heads):
        return fused(x, scale, by, heads, eps, halves)
    return plain(x, scale, by, heads, eps, halves)


def plain(
    x: jax.Array, scale: jax.Array | None, by: Rotation | None, heads: int, eps: float, halves: bool
) -> jax.Array:
    """Norm and turn x [B, N, heads * size] as `prepare_heads` does, left to XLA."""
    if scale is not None and platform() == "tpu":
        x = _normed_by_products(x, scale, heads, eps)
    elif scale is not None:
        x = rms_norm(x.reshape(*x.shape[:2], heads, -1), eps, scale).reshape(x.shape)
    return x if by is None else rotate_pairs(x, by, heads, halves=halves)


def _normed_by_products(x: jax.Array, scale: jax.Array, heads: int, eps: float) -> jax.Array:
    """Norm heads of x [B, N, heads * size] without an axis of heads (decision 0029)."""
    size = x.shape[-1] // heads
    of_head = jnp.repeat(jnp.eye(heads, dtype=jnp.float32), size, axis=0)  # [heads * size, heads]
    exact = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(exact(jnp.square(wide), of_head) / size + eps)
    return (wide * (exact(factor, of_head.T) * jnp.tile(scale, heads))).astype(x.dtype)


def _fits(x: jax.Array, heads: int) -> bool:
    """Whether whole heads fill vectors, or the other way round."""
    channels = x.shape[-1]
    size = channels // heads
    return channels % LANES == 0 and (size % LANES == 0 or LANES % size == 0)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def fused(
    x: jax.Array,
    scale: jax.Array | None,
    by: Rotation | None,
    heads: int,
    eps: float,
    halves: bool,
    interpret: bool = False,
) -> jax.Array:
    """Norm and turn x [B, N, heads * size] as `prepare_heads` does, by a Pallas kernel for TPUs.

    So is the gradient of turning; that of norming is by products.
    """
    batch, count, channels = x.shape
    size = channels // heads
    width = max(size, LANES)
    row = 2 * channels * x.dtype.itemsize + 2 * width * 4  # bytes of it in, out and in tables
    rows = min(count, ROWS, HELD // row // TILE * TILE)
    tokens = pl.BlockSpec((1, rows, channels), lambda b, i: (b, i, 0))
    operands, specs = [x], [tokens]
    if scale is not None:
        operands.append(jnp.tile(scale.astype(jnp.float32), width // size)[None])
        specs.append(pl.BlockSpec((1, width), lambda b, i: (0, 0)))
    if by is not None:
        every = len(by.cos) == 1
        table = pl.BlockSpec((1, rows, width), lambda b, i: (0 if every else b, i, 0))
        operands += [jnp.tile(each, width // size) for each in _by_channel(by, halves)]
        specs += [table, table]
    return pl.pallas_call(
        partial(_kernel, size=size, eps=None if scale is None else eps, halves=halves),
        grid=(batch, pl.cdiv(count, rows)),
        in_specs=specs,
        out_specs=tokens,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=2 * HELD + WORKING,  # what is next is loaded meanwhile
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * x.size,
            transcendentals=batch * count * heads,
            bytes_accessed=2 * x.size * x.dtype.itemsize,
        ),
        interpret=interpret,
    )(*operands)


def _fused_forward(x, scale, by, heads, eps, halves, interpret):
    return fused(x, scale, by, heads, eps, halves, interpret), (x, scale, by)


def _fused_backward(heads, eps, halves, interpret, operands, gradient):
    x, scale, by = operands
    if by is not None:
        back = Rotation(by.cos, -by.sin)
        gradient = fused(gradient, None, back, heads, eps, halves, interpret)
    if scale is None:
        return gradient, None, None
    _, normed = jax.vjp(lambda x, scale: _normed_by_products(x, scale, heads, eps), x, scale)
    return *normed(gradient), None  # positions have no gradient


fused.defvjp(_fused_forward, _fused_backward)


def _by_channel(by: Rotation, halves: bool) -> tuple[jax.Array, jax.Array]:
    """Return what multiplies each channel, and what multiplies the other of its pair: [..., size]
    for tables [..., size / 2]."""
    axis = -2 if halves else -1
    cos, sin = (
        jnp.stack(pair, axis=axis).reshape(*pair[0].shape[:-1], -1)
        for pair in ((by.cos, by.cos), (-by.sin, by.sin))
    )
    return cos, sin


def _kernel(x_ref, *refs, size: int, eps: float | None, halves: bool):
    """x and out [1, N, heads * size]; before out, scales [1, width] if there is an `eps`, and two
    tables [1, N, width] if positions count. The width is that of one head or of a vector."""
    *refs, out_ref = refs
    width = max(size, LANES)

    def step(number, _):
        at = pl.ds(pl.multiple_of(number * width, width), width)
        x = x_ref[0, :, at].astype(jnp.float32)
        channel = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        if eps is not None:
            x = x * (_inverse(x, channel // size, width // size, eps) * refs[0][...])
            x = x.astype(x_ref.dtype).astype(jnp.float32)
        if len(refs) > 1:
            cos, sin = (ref[0] for ref in refs[-2:])
            apart = size // 2 if halves else 1
            behind, before = pltpu.roll(x, width - apart, 1), pltpu.roll(x, apart, 1)
            x = x * cos + jnp.where(channel % (2 * apart) < apart, behind, before) * sin
        out_ref[0, :, at] = x.astype(out_ref.dtype)

    lax.fori_loop(0, x_ref.shape[2] // width, step, None)


def _inverse(x: jax.Array, head: jax.Array, heads: int, eps: float) -> jax.Array:
    """Return one over the root mean square of each channel's head: x [N, width], heads as their
    numbers [N, width] -> [N, width or 1]."""
    square = jnp.square(x)
    if heads == 1:
        return lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + eps)
    means = (
        jnp.sum(jnp.where(head == number, square, 0), axis=-1, keepdims=True) * heads / x.shape[1]
        for number in range(heads)
    )
    found, *others = (lax.rsqrt(mean + eps) for mean in means)
    for number, factor in enumerate(others, 1):
        found = jnp.where(head == number, factor, found)
    return found
