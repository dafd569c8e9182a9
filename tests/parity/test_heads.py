"""Heads normed and turned: by XLA and by the kernel for TPUs what the formulas say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sd_tpu.models import heads, products, rotary
from sd_tpu.models.layers import RMSNorm, ZeroCentredRMSNorm
from tests.support.parity import relative

EPS = 1e-5
# Head sizes, heads, tokens: vectors of one head, of several, heads of two vectors.
SHAPES = {"128": (128, 3, 40), "64": (64, 4, 7), "16": (16, 8, 300), "256": (256, 2, 270)}
# Cases: whether heads are normed, and how many rows the tables have for two of tokens; 0 is none.
DONE = {"both": (True, 2), "same positions": (True, 1), "norms": (True, 0), "turns": (False, 1)}


def exact(x, scale, by, count: int, halves: bool) -> np.ndarray:
    """Norm and turn in float64, rounding what is normed to the dtype of x: [B, N, heads * size]."""
    found = np.asarray(x, np.float64).reshape(*x.shape[:2], count, -1)
    if scale is not None:
        found = found / np.sqrt(np.square(found).mean(-1, keepdims=True) + EPS)
        found = np.asarray((found * np.asarray(scale)).astype(x.dtype), np.float64)
    if by is not None:
        pairs = (2, -1) if halves else (-1, 2)
        pairs = np.moveaxis(found.reshape(*found.shape[:3], *pairs), -2 if halves else -1, 0)
        angles = (np.asarray(by.cos, np.float64) + 1j * np.asarray(by.sin))[:, :, None]
        turned = (pairs[0] + 1j * pairs[1]) * angles
        found = np.stack([turned.real, turned.imag], axis=-2 if halves else -1)
    return found.reshape(x.shape)


def operands(shape: str, done: str, dtype):
    size, count, tokens = SHAPES[shape]
    normed, tables = DONE[done]
    random = np.random.default_rng(0)
    x = jnp.asarray(3 * random.standard_normal((2, tokens, count * size)), dtype)
    scale = jnp.asarray(random.uniform(0.5, 2, size), jnp.float32) if normed else None
    positions = jnp.asarray(random.integers(0, 1000, (tables, tokens, 2)))
    by = rotary.rotation(positions, [size // 4, size - size // 4], 100.0) if tables else None
    return x, scale, by


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("halves", [False, True], ids=["neighbours", "halves"])
def test_heads_are_normed_and_turned(shape, done, dtype, halves):
    x, scale, by = operands(shape, done, dtype)
    count = SHAPES[shape][1]
    expected = exact(x, scale, by, count, halves)
    by_xla = heads.plain(x, scale, by, count, EPS, halves)
    by_kernel = heads.fused(x, scale, by, count, EPS, halves, True)
    # Rounding of what is normed may go to the other of two neighbours, once in thousands.
    bound = 1e-6 if dtype == jnp.float32 else 3e-3
    for found in (by_xla, by_kernel):
        assert found.dtype == dtype
        assert relative(found, expected) <= bound
    assert relative(by_kernel, by_xla) <= (1e-6 if dtype == jnp.float32 else 2e-4)


@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("halves", [False, True], ids=["neighbours", "halves"])
def test_the_kernels_gradient_is_that_of_the_plain_form(done, halves):
    x, scale, by = operands("64", done, jnp.float32)
    toward = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)

    def likeness(operands, function, *more):
        x, scale = operands
        return jnp.sum(function(x, scale, by, 4, EPS, halves, *more) * toward)

    ours = jax.grad(likeness)((x, scale), heads.fused, True)
    theirs = jax.grad(likeness)((x, scale), heads.plain)
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert float(jnp.abs(expected).max()) > 0.1
        assert relative(found, expected) <= 1e-5


def program(x, count: int, **options) -> str:
    """Return the program that prepares heads, as it is traced."""
    return str(jax.make_jaxpr(lambda x: heads.prepare_heads(x, count, **options))(x))


def test_the_platform_and_the_size_of_heads_pick_the_way(monkeypatch):
    norm = RMSNorm(64, EPS, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 8, 4 * 64))
    assert "pallas_call" not in program(x, 4, norm=norm)
    monkeypatch.setattr(heads, "platform", lambda: "tpu")
    assert "pallas_call" in program(x, 4, norm=norm)
    assert "pallas_call" not in program(x, 4)  # there is nothing to do
    assert "pallas_call" not in program(x[..., :192], 3, norm=norm)  # a vector and a half
    norm = RMSNorm(48, EPS, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert "pallas_call" not in program(jnp.zeros((1, 8, 8 * 48)), 8, norm=norm)


def test_heads_that_fill_no_vectors_are_normed_by_products_on_tpus(monkeypatch):
    x, scale, _ = operands("64", "norms", jnp.bfloat16)
    x = x[..., :192]
    expected = heads.plain(x, scale, None, 3, EPS, False)
    monkeypatch.setattr(heads, "platform", lambda: "tpu")
    found = heads.plain(x, scale, None, 3, EPS, False)
    assert found.dtype == x.dtype and relative(found, expected) <= 2e-4
    traced = str(jax.make_jaxpr(lambda x: heads.plain(x, scale, None, 3, EPS, False))(x))
    assert "dot_general" in traced and "reduce_sum" not in traced


@pytest.mark.parametrize("channels", [3840, 6144])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_fit_the_smallest_memory(channels, dtype):
    x = jax.ShapeDtypeStruct((1, 4224, channels), dtype)
    by = rotary.Rotation(*[jax.ShapeDtypeStruct((1, 4224, 64), jnp.float32)] * 2)
    scale, count = jax.ShapeDtypeStruct((128,), jnp.float32), channels // 128

    def prepared(x, scale, by):
        return heads.fused.__wrapped__(x, scale, by, count, EPS, False)

    (kernel,) = (
        each.params
        for each in jax.make_jaxpr(prepared)(x, scale, by).eqns
        if each.primitive.name == "pallas_call"
    )
    (rows,) = {
        block.block_shape[1].block_size
        for block in kernel["grid_mapping"].block_mappings
        if len(block.block_shape) == 3
    }
    assert 64 <= rows <= 256 and rows % 16 == 0
    assert rows * (2 * channels * x.dtype.itemsize + 1024) <= heads.HELD


def test_a_norms_own_scale_and_eps_count():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2 * 8)), jnp.float32)
    norm = ZeroCentredRMSNorm(8, 0.5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.linspace(-0.5, 1, 8)
    apart = np.asarray(x, np.float64).reshape(1, 5, 2, 8)
    expected = apart / np.sqrt(np.square(apart).mean(-1, keepdims=True) + 0.5)
    expected = (expected * (1 + np.linspace(-0.5, 1, 8))).reshape(x.shape)
    assert relative(heads.prepare_heads(x, 2, norm), expected) <= 1e-6


@pytest.mark.parametrize(("platform", "barriers"), [("cpu", 0), ("gpu", 0), ("tpu", 1)])
def test_on_tpus_alone_what_is_finished_is_joined_to_nothing(monkeypatch, platform, barriers):
    monkeypatch.setattr(products, "platform", lambda: platform)
    traced = str(jax.make_jaxpr(lambda x: products.finished(x @ x).sum())(jnp.ones((2, 2))))
    assert traced.count("optimization_barrier") == barriers
