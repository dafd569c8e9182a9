"""Attention: one function that picks the way by the platform and the shape.

Every way computes softmax(q k^T / sqrt(head size)) v with float32 scores and softmax, so what a
checkpoint's `upcast_attention` asks for is always so.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sd_tpu.models.platform import platform
from sd_tpu.models.products import KEPT

# Rows and columns of the piece of the score matrix that exists at a time: on TPUs, on CPUs rows.
QUERIES, KEYS = 256, 512
CHUNK = 512
WORKING = 8 << 20  # bytes of VMEM for all but keys and values


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int,
    *,
    causal: bool = False,
    keys: jax.Array | None = None,
) -> jax.Array:
    """Choose an implementation of attention.

    q [B, N, C], k and v [B, M, C], C = heads * head size -> like q. `keys` [B] int32, from 1 to M,
    is how many keys count in each row, the first ones; None is all of them. k and v may have fewer
    heads, each for as many of q's that follow one another (grouped-query attention, Ainslie et al.
    2023, arXiv:2305.13245).
    """
    target = platform()
    if target == "tpu" and not causal and _fits(q, k, heads):
        # The oldest chips' matrix units take nothing but float32, which they round themselves.
        native = pltpu.get_tpu_info().is_matmul_supported(q.dtype, q.dtype)
        return fused(q, k, v, heads, q.dtype if native else jnp.float32, keys=keys)
    if target == "cpu" and not causal and q.shape[1] * k.shape[1] > CHUNK**2:
        return chunked(q, k, v, heads, keys)
    on_cudnn = target == "gpu" and _cudnn_takes(q, heads)
    implementation = "cudnn" if on_cudnn else None
    return plain(q, k, v, heads, causal=causal, keys=keys, implementation=implementation)


def _cudnn_takes(q: jax.Array, heads: int) -> bool:
    """Whether cuDNN's fused attention takes these: 16 bits, and sizes up to 256 since Hopper.

    Ampere takes up to 128.
    """
    device, size = jax.devices()[0], q.shape[-1] // heads
    if q.dtype.itemsize != 2 or size % 8 or "cuda" not in device.client.platform_version:
        return False  # the last is so on AMD's GPUs, whose capability is no number
    capability = float(device.compute_capability)
    return size <= (256 if capability >= 9 else 128 if capability >= 8 else 0)


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int,
    *,
    causal: bool = False,
    keys: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attend by JAX's own function, left to XLA or to cuDNN.

    q [B, N, C], k and v [B, M, C] or of fewer heads, keys [B] of those that count -> like q.
    """
    size = q.shape[-1] // heads
    split = [t.reshape(*t.shape[:2], -1, size) for t in (q, k, v)]
    out = jax.nn.dot_product_attention(  # ty: ignore[no-matching-overload]
        *split, is_causal=causal, key_value_seq_lengths=keys, implementation=implementation
    )
    return out.reshape(q.shape)


def chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: int, keys: jax.Array | None = None
) -> jax.Array:
    """Attend with one head and at most CHUNK queries at a time, as suits CPUs.

    Scores stay in the cache (decision 0010).

    q [B, N, C], k and v [B, M, C] or of fewer heads, keys [B] of those that count -> like q.
    """
    batch, queries, channels = q.shape
    size = channels // heads
    k, v = (_for_all_queries(x, size, heads) for x in (k, v))
    step = _step(queries)
    filled = -queries % step

    def apart(x: jax.Array) -> jax.Array:
        return x.reshape(batch, -1, heads, size).swapaxes(1, 2).reshape(batch * heads, -1, size)

    counts = None if keys is None else jnp.repeat(keys, heads)
    q = jnp.pad(apart(q), ((0, 0), (0, filled), (0, 0))).reshape(batch * heads, -1, step, size)
    out = _by_chunks(q, apart(k), apart(v), counts).reshape(batch, heads, -1, size)
    return out[:, :, :queries].swapaxes(1, 2).reshape(batch, queries, channels)


def _step(queries: int) -> int:
    """Return how many queries to take at a time: at most CHUNK, and a divisor if a good one is."""
    step = next(n for n in range(min(queries, CHUNK), 0, -1) if queries % n == 0)
    if 2 * step < CHUNK < queries:  # no good divisor: the last chunk is filled up
        return -(-queries // -(-queries // CHUNK))
    return step


@jax.custom_vjp
def _by_chunks(q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array | None) -> jax.Array:
    """Attend with one head and one chunk at a time.

    q [B * heads, chunks, N, size], k and v [B * heads, M, size], counts [B * heads] of the keys
    that count -> like q.
    """
    return _in_turn(lambda *operands: _attended(*operands)[0], q, *_prepared(k, v), counts)


def _by_chunks_forward(q, k, v, counts):
    out, log_sums = _in_turn(_attended, q, *_prepared(k, v), counts)
    out, log_sums = checkpoint_name(out, KEPT), checkpoint_name(log_sums, KEPT)
    return out, (q, k, v, counts, out, log_sums)


def _by_chunks_backward(operands, gradient):
    """Compute scores again: all chunks' would take as much memory as the plain form's.

    With p = softmax(s) and s = size^-0.5 q k^T, the gradient of s is p (g v^T - sum(g out)) (Dao et
    al. 2022, arXiv:2205.14135, appendix B). No matrix of scores is transposed, which would take as
    long as a product.
    """
    q, k, v, counts, out, log_sums = operands
    scale = q.shape[-1] ** -0.5
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    # The means of g v^T by the weights p: [heads, chunks, N].
    means = jnp.sum(gradient.astype(jnp.float32) * out, axis=-1)

    def head(operands):
        q, k, v, count, gradient, log_sums, means = operands
        keys, values = k.T, v.T

        def chunk(sums, operands):
            of_keys, of_values = sums
            q, g, log_sums, means = operands
            scores = _counted(product(q, keys), count)
            p = jnp.exp(scale * scores - log_sums[:, None])
            of_scores = (scale * p * (product(g, values) - means[:, None])).astype(q.dtype)
            sums = (of_keys + product(q.T, of_scores), of_values + product(g.T, p.astype(v.dtype)))
            return sums, product(of_scores, k).astype(q.dtype)

        nothing = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
        sums, of_q = lax.scan(chunk, nothing, (q, gradient, log_sums, means))
        return of_q, *(of_all.T.astype(k.dtype) for of_all in sums)

    of_q, of_k, of_v = lax.map(head, (q, k, v, counts, gradient, log_sums, means))
    return of_q, of_k, of_v, None  # numbers of keys have no gradient


_by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward)


def _prepared(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return keys transposed and values with a column of ones, which sums what weighs them."""
    return k.swapaxes(1, 2), jnp.pad(v, ((0, 0), (0, 0), (0, 1)), constant_values=1)


def _in_turn(chunk: Callable[..., Any], q: jax.Array, *others: Any) -> Any:
    """Return chunk(its queries, its head's keys, values and count) of each chunk of each head."""
    return lax.map(lambda each: lax.map(lambda q: chunk(q, *each[1:]), each[0]), (q, *others))


def _attended(
    q: jax.Array, keys: jax.Array, values: jax.Array, count: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Attend in a chunk: q [N, size], of `_prepared` keys and values -> [N, size], and the
    logarithms of the sums of its weights [N]."""
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    scores, scale = _counted(product(q, keys), count), q.shape[-1] ** -0.5
    most = scores.max(-1, keepdims=True)
    out = product(jnp.exp(scale * (scores - most)).astype(values.dtype), values)
    sums = out[:, -1:]
    return (out[:, :-1] / sums).astype(q.dtype), (scale * most + jnp.log(sums))[:, 0]


def _counted(scores: jax.Array, count: jax.Array | None) -> jax.Array:
    """Return scores [N, M] without those of keys that do not count."""
    return scores if count is None else jnp.where(_numbers(scores) < count, scores, -jnp.inf)


def _for_all_queries(x: jax.Array, size: int, heads: int) -> jax.Array:
    """Repeat heads of keys or values [B, M, channels], each of `size`, so that each of so many
    heads of queries has its own: [B, M, heads * size]."""
    shared = heads * size // x.shape[-1]
    if shared == 1:
        return x
    return jnp.repeat(x.reshape(*x.shape[:2], -1, size), shared, axis=2).reshape(*x.shape[:2], -1)


def _numbers(scores: jax.Array) -> jax.Array:
    """Return the number of each score's key: [N, M] -> [N, M] int32."""
    return lax.broadcasted_iota(jnp.int32, scores.shape, 1)


def _fits(q: jax.Array, k: jax.Array, heads: int) -> bool:
    """Whether the fused kernel takes these shapes: keys and values must fit in half the VMEM."""
    many = q.shape[1] >= QUERIES
    held = _held(k, _lanes(q, heads))
    return many and held <= pltpu.get_tpu_info().vmem_capacity_bytes // 2


def _held(k: jax.Array, lanes: int) -> int:
    """Bytes of the keys and values that the fused kernel holds at a time, of so many channels."""
    return 2 * sum(_blocks(k.shape[1])) * lanes * k.dtype.itemsize


def _blocks(keys: int) -> list[int]:
    """Return how many keys are taken at a time, block by block.

    Blocks are equal where their size divides the number of keys, in whole vectors of 128 scores, or
    at least in whole tiles of 16 rows of bfloat16 keys. Else the last one is filled up.
    """
    if keys <= KEYS:
        return [keys]
    sizes = (size for unit in (128, 16) for size in range(KEYS, 0, -unit))
    if size := next((size for size in sizes if keys % size == 0), 0):
        return keys // size * [size]
    return [*keys // KEYS * [KEYS], -(-(keys % KEYS) // 128) * 128]


def _lanes(x: jax.Array, heads: int) -> int:
    """Channels of the fewest heads that fill whole vectors of 128 lanes, or of all heads."""
    size = x.shape[-1] // heads
    return next(
        (g * size for g in range(1, heads) if heads % g == 0 and g * size % 128 == 0), x.shape[-1]
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def fused(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int,
    product_dtype,
    interpret: bool = False,
    keys: jax.Array | None = None,
) -> jax.Array:
    """Compute attention by a Pallas kernel for TPUs that never writes the scores to memory.

    It goes through the keys in blocks and corrects the sums whenever the maximum grows (Milakov and
    Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Heads are cut from the
    channels inside, where they cost nothing: JAX's flash and splash kernels take an axis of heads
    in front of the tokens, which has to be made in memory with heads of 40 padded to 128 lanes
    (decision 0001). The gradient is the plain form's, of a chunk of queries at a time.

    q [B, N, C], k and v [B, M, C] or of fewer heads, all of one dtype, keys [B] of those that count
    -> like q.
    """
    batch, queries, channels = q.shape
    length, lanes = k.shape[1], _lanes(q, heads)
    size, held = channels // heads, sum(_blocks(length))
    if lanes > size:  # else each head of queries reads the keys that it shares
        k, v = (_for_all_queries(x, size, heads) for x in (k, v))
    shared = channels // k.shape[-1]
    k, v = (jnp.pad(x, ((0, 0), (0, held - length), (0, 0))) for x in (k, v))
    counts = [] if keys is None else [keys]
    rows = pl.BlockSpec((1, QUERIES, lanes), lambda b, g, i: (b, i, g))
    # They change so rarely that a second buffer to load ahead would be wasted.
    everything = pl.BlockSpec(
        (1, held, lanes),
        lambda b, g, i: (b, 0, lax.div(g, shared) if shared > 1 else g),
        pipeline_mode=pl.Buffered(1),
    )
    scores = batch * heads * queries * length
    return pl.pallas_call(
        partial(_kernel, keys=length, size=size, dtype=product_dtype),
        # The rows that the last block has beyond the queries are written nowhere.
        grid=(batch, channels // lanes, pl.cdiv(queries, QUERIES)),
        in_specs=[
            rows,
            everything,
            everything,
            *[pl.BlockSpec(memory_space=pltpu.SMEM) for _ in counts],
        ],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            # XLA's own limit is for the keys and values of few tokens.
            vmem_limit_bytes=_held(k, lanes) + WORKING,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * size,
            transcendentals=scores,
            bytes_accessed=2 * (q.size + k.size) * q.dtype.itemsize,
        ),
        interpret=interpret,
    )(q, k, v, *counts)


def _fused_forward(q, k, v, heads, product_dtype, interpret, keys):
    return fused(q, k, v, heads, product_dtype, interpret, keys), (q, k, v, keys)


def _fused_backward(heads, product_dtype, interpret, operands, gradient):
    """Compute scores again, CHUNK queries at a time: all would take gigabytes at a large size."""
    q, k, v, keys = operands
    batch, queries, channels = q.shape
    step = _step(queries)

    def apart(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -queries % step), (0, 0)))
        return x.reshape(batch, -1, step, channels).swapaxes(0, 1)

    def chunk(sums, operands):
        q, gradient = operands
        _, back = jax.vjp(partial(plain, heads=heads, keys=keys), q, k, v)
        of_q, *others = back(gradient)
        return [total + one for total, one in zip(sums, others, strict=True)], of_q

    nothing = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    sums, of_q = lax.scan(chunk, nothing, (apart(q), apart(gradient)))
    of_q = of_q.swapaxes(0, 1).reshape(batch, -1, channels)[:, :queries]
    of_k, of_v = (total.astype(k.dtype) for total in sums)
    return of_q, of_k, of_v, None  # numbers of keys have no gradient


fused.defvjp(_fused_forward, _fused_backward)


def _kernel(q_ref, k_ref, v_ref, *refs, keys: int, size: int, dtype):
    """q and out [1, QUERIES, lanes], k and v [1, M, lanes], of which the first `keys` count, or
    fewer where counts [B] say so."""
    *counts_ref, out_ref = refs
    count = counts_ref[0][pl.program_id(0)] if counts_ref else None
    for start in range(0, out_ref.shape[2], size):
        head = slice(start, start + size)
        out = _one_head(q_ref, k_ref, v_ref, head, keys, count, dtype)
        out_ref[0, :, head] = out.astype(out_ref.dtype)


def _one_head(
    q_ref, k_ref, v_ref, head: slice, keys: int, count: jax.Array | None, dtype
) -> jax.Array:
    blocks = _blocks(keys)
    step, last = blocks[0], blocks[-1]
    scale = (head.stop - head.start) ** -0.5  # of float32 scores: a scaled q would be rounded
    q = q_ref[0, :, head].astype(dtype)

    def block(start, carry, size=step, counts=None):
        out, total, peak = carry
        at = pl.ds(start, size)
        s = lax.dot_general(
            q,
            k_ref[0, at, head].astype(dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if counts is not None:
            s = jnp.where(counts(_numbers(s)), s, -jnp.inf)
        higher = jnp.maximum(peak, s.max(-1, keepdims=True))
        p, shrink = jnp.exp(scale * (s - higher)), jnp.exp(scale * (peak - higher))
        out = shrink * out + lax.dot_general(
            p.astype(dtype),
            v_ref[0, at, head].astype(dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return out, shrink * total + p.sum(-1, keepdims=True), higher

    column = jnp.zeros((q.shape[0], 1), jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), column, column - jnp.inf)
    several = len(blocks) > 1
    whole = keys // step
    if count is not None:
        whole = count // step if several else 0
    carry = lax.fori_loop(
        0, whole, lambda i, carry: block(pl.multiple_of(i * step, step), carry), start
    )
    done = whole * step
    if count is not None:
        # Where the block that is cut would end beyond the last, it begins with keys that are done.
        unit = math.gcd(step, last)
        at = pl.multiple_of(jnp.minimum(done, sum(blocks) - step), unit) if several else 0
        carry = block(at, carry, step, lambda key: (key >= done - at) & (key < count - at))
    elif left := keys - done:
        carry = block(done, carry, last, lambda key: key < left)
    out, total, _ = carry
    return out / total
