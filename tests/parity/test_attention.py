"""Every way of attention gives what the plain one gives; the platform and the shape pick."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sd_tpu.models import attention
from tests.support.parity import relative

HEADS = 4
# Programs, as operation by operation each would be compiled alone.
plain = jax.jit(attention.plain, static_argnames=("heads", "causal"))
chunked = jax.jit(attention.chunked, static_argnames="heads")
fused = jax.jit(attention.fused, static_argnames=("heads", "product_dtype", "interpret"))


def qkv(queries: int, keys: int, size: int, dtype) -> list[np.ndarray]:
    """Random q [1, queries, C], k and v [1, keys, C], C = HEADS * size."""
    random = np.random.default_rng(0)
    return [
        random.normal(size=(1, tokens, HEADS * size)).astype(dtype)
        for tokens in (queries, keys, keys)
    ]


def exact(q, k, v, counts=None) -> np.ndarray:
    """Attend in float64, in each row to the first keys alone: float64 [B, N, C]."""
    rows = []
    for i, count in enumerate(counts or [k.shape[1]] * len(q)):
        split = (x[i].reshape(len(x[i]), HEADS, -1) for x in (q, k[:, :count], v[:, :count]))
        heads_first = (x.transpose(1, 0, 2).astype(np.float64) for x in split)
        each_q, each_k, each_v = heads_first
        scores = each_q @ each_k.transpose(0, 2, 1) / np.sqrt(each_q.shape[-1])
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out = share @ each_v / share.sum(-1, keepdims=True)
        rows.append(out.transpose(1, 0, 2).reshape(q.shape[1:]))
    return np.stack(rows)


@pytest.mark.parametrize(
    "size, keys, queries",
    [
        (40, 1024, 256),
        (64, 1024, 256),
        (80, 77, 256),
        (160, 256, 256),
        (40, 800, 256),
        (64, 1357, 1357),
        (64, 1025, 300),
    ],
    ids=[
        "two blocks",
        "heads apart",
        "text",
        "one block",
        "blocks of 400",
        "of no blocks: picture and text",
        "one key more than two blocks",
    ],
)
def test_the_fused_kernel_is_plain_attention(size, keys, queries):
    operands = qkv(queries, keys, size, np.float32)
    ours = fused(*operands, HEADS, product_dtype=jnp.float32, interpret=True)
    assert relative(ours, exact(*operands)) <= 1e-5
    half = [x.astype(jnp.bfloat16) for x in operands]
    ours = fused(*half, HEADS, product_dtype=jnp.bfloat16, interpret=True)
    expected = exact(*half)
    assert ours.dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits: the plain form is as far from the exact one.
    assert relative(ours, expected) <= 1.5 * relative(plain(*half, HEADS), expected)


@pytest.mark.parametrize("queries, keys", [(1024, 1024), (4096, 77), (1200, 300), (857, 857)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_in_chunks_is_plain_attention(queries, keys, dtype):
    operands = qkv(queries, keys, 40, dtype)
    ours = chunked(*operands, HEADS)
    assert ours.dtype == dtype
    assert relative(ours, exact(*operands)) <= (1e-6 if dtype == jnp.float32 else 0.01)


def cut(q, k, v, counts) -> jax.Array:
    """Attend plainly, row by row, to the first keys alone."""
    rows = [
        attention.plain(q[i : i + 1], k[i : i + 1, :count], v[i : i + 1, :count], HEADS)
        for i, count in enumerate(counts)
    ]
    return jnp.concatenate(rows)


def counted(queries: int, keys: int, size: int, counts, dtype=np.float32) -> list[np.ndarray]:
    """Random q, k and v of a row for each count; the keys beyond it would outweigh all others."""
    q, k, v = (np.tile(x, (len(counts), 1, 1)) for x in qkv(queries, keys, size, np.float32))
    beyond = np.arange(keys)[:, None] >= np.asarray(counts)[:, None, None]
    return [x.astype(dtype) for x in (q, np.where(beyond, 30 * k, k), np.where(beyond, 30 * v, v))]


def test_plain_attention_to_some_keys_is_that_to_these_alone():
    counts = [1, 32, 77]
    operands = counted(77, 77, 40, counts)
    ours = plain(*operands, HEADS, keys=np.array(counts))
    assert relative(ours, exact(*operands, counts)) <= 1e-6


def test_causal_attention_takes_counts():
    counts = [1, 32, 77]
    operands = counted(77, 77, 40, counts)
    ours = jax.jit(
        lambda *qkv: attention.attention(*qkv, HEADS, causal=True, keys=jnp.array(counts))
    )(*operands)
    before, after = plain(*operands, HEADS, causal=True), exact(*operands, counts)
    ours, before = np.asarray(ours), np.asarray(before)
    for row, count in enumerate(counts):
        assert relative(ours[row, :count], before[row, :count]) <= 1e-6
        assert relative(ours[row, count - 1 :], after[row, count - 1 :]) <= 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("queries, keys", [(1024, 1024), (857, 857)])
def test_chunks_with_counts_are_plain_attention_to_these_keys(queries, keys, dtype):
    counts = [keys, 1, 600]
    operands = counted(queries, keys, 40, counts, dtype)
    ours = chunked(*operands, HEADS, np.array(counts))
    assert ours.dtype == dtype
    expected = exact(*operands, counts)
    assert relative(ours, expected) <= (1e-6 if dtype == jnp.float32 else 0.01)


@pytest.mark.parametrize(
    "size, queries, keys, counts",
    [
        (64, 256, 1024, [1024, 1, 512, 511, 513]),
        (40, 300, 800, [400, 33, 799]),
        (64, 256, 1357, [1357, 1024, 1025, 1300]),
        (64, 256, 77, [77, 5]),
    ],
    ids=["two blocks", "blocks of 400", "a last block that is smaller", "one block"],
)
def test_the_kernel_with_counts_is_plain_attention_to_these_keys(size, queries, keys, counts):
    operands, numbers = counted(queries, keys, size, counts), np.array(counts, np.int32)
    ours = np.asarray(fused(*operands, HEADS, jnp.float32, True, numbers))
    for row, theirs in zip(ours, exact(*operands, counts), strict=True):
        assert relative(row, theirs) <= 1e-5
    half = [x.astype(jnp.bfloat16) for x in operands]
    expected = exact(*half, counts)
    ours = fused(*half, HEADS, jnp.bfloat16, True, numbers)
    far = relative(plain(*half, HEADS, keys=numbers), expected)
    assert relative(ours, expected) <= 1.5 * far


@pytest.mark.parametrize("tokens, chunks", [(256, False), (1024, True)])
def test_attention_on_a_cpu_takes_counts(tokens, chunks):
    counts = [1, tokens // 2]
    operands = counted(tokens, tokens, 40, counts)
    keys = np.array(counts, np.int32)
    way = jax.jit(lambda *qkv: attention.attention(*qkv, HEADS, keys=keys))
    assert ("scan" in str(jax.make_jaxpr(way)(*operands))) == chunks
    assert relative(way(*operands), exact(*operands, counts)) <= 1e-6


@pytest.mark.parametrize("size", [128, 40], ids=["heads apart", "heads together"])
@pytest.mark.parametrize("kernel", [True, False], ids=["fused", "chunked"])
def test_heads_of_queries_may_share_keys_and_values(kernel, size):
    counts = [600, 33]
    q, k, v = counted(256, 600, size, counts)
    few = [x[..., : HEADS // 2 * size] for x in (k, v)]
    whole = [np.repeat(x.reshape(2, 600, -1, size), 2, axis=2).reshape(k.shape) for x in few]
    if kernel:
        ours = fused(q, *few, HEADS, jnp.float32, True, np.array(counts, np.int32))
    else:
        ours = chunked(q, *few, HEADS, np.array(counts))
    assert relative(ours, exact(q, *whole, counts)) <= 1e-5
    ours = plain(q, *few, HEADS, keys=np.array(counts))
    assert relative(ours, exact(q, *whole, counts)) <= 1e-5


def test_chunks_of_bfloat16_sum_in_float32():
    """In bfloat16 no number is between 256 and 258: the sum of a thousand ones would be 256."""
    q = k = np.zeros((1, 1024, 16), jnp.bfloat16)
    v = np.ones_like(k)
    v[:, 256:] = 0
    np.testing.assert_array_equal(chunked(q, k, v, 2), np.full_like(v, 0.25))


@pytest.mark.parametrize(
    "queries, keys, chunks", [(1024, 1024, True), (4096, 77, True), (256, 256, False)]
)
def test_a_cpu_takes_chunks_where_scores_are_many(queries, keys, chunks):
    traced = jax.make_jaxpr(lambda *qkv: attention.attention(*qkv, HEADS))(
        *qkv(queries, keys, 40, jnp.float32)
    )
    assert ("scan" in str(traced)) == chunks


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("counts", [None, [600, 20]], ids=["all keys", "some"])
@pytest.mark.parametrize("queries", [512, 1031], ids=["one chunk", "the last filled up"])
@pytest.mark.parametrize("kernel", [False, True], ids=["chunked", "fused"])
def test_chunks_can_be_trained_through(kernel, queries, counts, dtype, tolerance):
    operands = counted(queries, 600, 40, counts or [600, 600], dtype)

    def gradients(way, dtype):
        total = jax.grad(lambda *qkv: jnp.sum(jnp.sin(way(*qkv).astype(jnp.float32))), (0, 1, 2))
        given = [each.astype(dtype) for each in operands]
        traced = jax.jit(total).trace(*given)
        return str(traced.jaxpr), traced.lower().compile()(*given)

    def ours(*qkv):
        given = counts and jnp.array(counts)
        if kernel:
            return attention.fused(*qkv, HEADS, dtype, True, given)
        return attention.chunked(*qkv, HEADS, given)

    _, exactly = gradients(lambda *qkv: cut(*qkv, counts or [600, 600]), jnp.float32)
    program, found = gradients(ours, dtype)
    assert queries <= attention.CHUNK or f"{queries},600]" not in program  # all scores
    for our, their in zip(found, exactly, strict=True):
        assert our.dtype == dtype
        assert relative(our, their) <= tolerance


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "fused"])
def test_attention_in_bfloat16_tells_close_logits_apart(kernel):
    """Logits of 100 and 100.25 are the same number in bfloat16."""
    q = np.tile(np.array([[[32.0, 2.0]]], jnp.bfloat16), (1, attention.QUERIES, 1))
    k = np.array([[[4.5, 0.25 * i] for i in range(4)]], jnp.bfloat16)
    v = np.array([[[i, 1.0] for i in range(4)]], jnp.bfloat16)
    logits = np.asarray(q, float)[0] @ np.asarray(k, float)[0].T / np.sqrt(2)
    share = np.exp(logits - logits.max())
    expected = share @ np.asarray(v, float)[0] / share.sum(-1, keepdims=True)
    if kernel:
        ours = fused(q, k, v, 1, product_dtype=jnp.bfloat16, interpret=True)
    else:
        ours = plain(q, k, v, 1)
    np.testing.assert_allclose(np.asarray(ours, float)[0], expected, rtol=2**-7)


# What the meshes of TPUs and GPUs say of their devices.
CHIPS = {"v2": "TPU v2", "v5e": "TPU v5 lite"}
SELF, TEXT, AUTOENCODER = (4096, 4096, 320, 8), (4096, 77, 320, 8), (4096, 4096, 512, 1)
WIDE = (9216, 9216, 320, 8)  # a picture of 768x768
MEMORY = {"v2": 16 << 20, "v5e": 128 << 20}  # bytes of vector memory


@pytest.mark.parametrize(
    "shape, chip, fits",
    [
        (SELF, "v2", True),
        (TEXT, "v2", True),
        (AUTOENCODER, "v2", True),
        (WIDE, "v2", False),  # keys and values are 12 MB, its vector memory 16
        (WIDE, "v5e", True),
        ((9216, 9216, 512, 1), "v5e", True),  # and its autoencoder, of which
        # keys and values are more than a kernel may hold unless it says so
        ((6400, 1600, 320, 8), "v5e", True),  # every second row and column: of 640x640,
        ((12544, 3136, 320, 8), "v5e", True),  # and of 896x896
        ((4429, 4429, 1536, 24), "v5e", True),  # SD 3's picture of 1024x1024 and its text
        ((64, 64, 1280, 8), "v5e", False),  # the lowest level: too few queries for a block
    ],
)
def test_a_tpu_takes_the_kernel_where_keys_and_values_fit(shape, chip, fits):
    queries, keys, channels, heads = shape
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("data",),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=CHIPS[chip], num_cores=1, platform="tpu"
        ),
    )
    q, k = (jax.ShapeDtypeStruct((2, n, channels), jnp.bfloat16) for n in (queries, keys))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda q, k, v: attention.attention(q, k, v, heads))(q, k, k)
    assert ("pallas_call" in str(traced)) == fits
    if fits:
        limit = int(re.search(r"vmem_limit_bytes=(\d+)", str(traced))[1])
        held = 2 * keys * attention._lanes(k, heads) * k.dtype.itemsize
        assert held < limit <= MEMORY[chip]


def test_a_tpu_gives_the_kernel_the_counts():
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("data",),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=CHIPS["v5e"], num_cores=1, platform="tpu"
        ),
    )
    q = jax.ShapeDtypeStruct((2, 4608, 3840), jnp.bfloat16)  # Z-Image's picture of 1024x1024
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda q, keys: attention.attention(q, q, q, 30, keys=keys))(
            q, counts
        )
    assert "Ref<smem>{i32[2]}" in str(traced)


@pytest.mark.parametrize(
    "keys, blocks",
    [
        (77, [77]),
        (4096, 8 * [512]),
        (2304, 6 * [384]),
        (6400, 25 * [256]),
        (1600, 4 * [400]),
        (3136, 7 * [448]),
        (1000, [512, 512]),
        (4429, [*8 * [512], 384]),
    ],
)
def test_keys_are_taken_in_blocks_of_which_the_last_may_be_filled_up(keys, blocks):
    assert attention._blocks(keys) == blocks


@pytest.mark.parametrize(
    "size, dtype, capability, taken",
    [
        (40, "bfloat16", "9.0", True),
        (160, "bfloat16", "9.0", True),
        (160, "bfloat16", "8.0", False),
        (40, "float32", "9.0", False),
        (40, "float16", "7.5", False),
        (40, "bfloat16", "gfx942", False),
    ],
)
def test_cudnn_gets_what_it_can_take(monkeypatch, size, dtype, capability, taken):
    version = "rocm 60000" if capability.startswith("gfx") else "cuda 12090"
    monkeypatch.setattr(
        jax,
        "devices",
        lambda: [
            SimpleNamespace(
                compute_capability=capability, client=SimpleNamespace(platform_version=version)
            )
        ],
    )
    q = jax.ShapeDtypeStruct((2, 256, HEADS * size), dtype)
    assert attention._cudnn_takes(q, HEADS) == taken
