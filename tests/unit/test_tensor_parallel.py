"""Networks whose parameters are divided over the chips of a replica."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.adapters import LowRank
from sd_tpu.checkpoint.config import (
    INT8,
    W8A8,
    CosmosTransformerConfig,
    Flux2TransformerConfig,
    FluxTransformerConfig,
    Krea2TransformerConfig,
    Qwen3Config,
    SD3TransformerConfig,
    T5Config,
    ZImageTransformerConfig,
)
from sd_tpu.checkpoint.division import WHOLE, bytes_of, undivided
from sd_tpu.models import (
    CosmosTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    Qwen3Model,
    SD3Transformer2DModel,
    T5EncoderModel,
    ZImageTransformer2DModel,
    products,
)
from sd_tpu.models import factors as factors_module
from sd_tpu.models.flux2_transformer import References
from sd_tpu.models.layers import in_int8
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import _over_devices, placed_shapes, shardings
from sd_tpu.runtime.weights import ReplicaWeights, merge

HEADS, SIZE = 8, 8  # of the heads
WIDTH, TEXT = HEADS * SIZE, 24
DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


SHAPES = (1, 4, 6, 8), (1, 32, TEXT), (1, 16), (1, 4, 8)
LATENTS, WORDS, POOLED, TOKENS = (jnp.asarray(normal(*shape)) for shape in SHAPES)
TIME, IDS = jnp.full(1, 300.0), jnp.arange(32)[None]
REFERENCES = References(TOKENS, jnp.ones((1, 4, 4), jnp.int32), jnp.array([3]))
JOINT = dict(num_attention_heads=HEADS, joint_attention_dim=TEXT)

# Each network, its config, its inputs, and how often its chips add up what they computed.
NETWORKS = {
    "SD 3": (
        SD3Transformer2DModel,
        SD3TransformerConfig(
            sample_size=8,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=SIZE,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
            **JOINT,
        ),
        lambda network: network(LATENTS, TIME, WORDS, POOLED),
        5 + 2,
    ),
    "FLUX.1": (
        FluxTransformer2DModel,
        FluxTransformerConfig(
            in_channels=32,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=SIZE,
            pooled_projection_dim=16,
            axes_dims_rope=(2, 2, 4),
            **JOINT,
        ),
        lambda network: network(LATENTS, TIME, WORDS, POOLED),
        4 + 1,
    ),
    "FLUX.2": (
        Flux2Transformer2DModel,
        Flux2TransformerConfig(
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=SIZE,
            timestep_guidance_channels=32,
            axes_dims_rope=(2, 2, 2, 2),
            guidance_embeds=False,
            **JOINT,
        ),
        lambda network: network(LATENTS, TIME, WORDS, REFERENCES),
        4 + 1,
    ),
    "Z-Image": (
        ZImageTransformer2DModel,
        ZImageTransformerConfig(
            in_channels=8,
            dim=HEADS * 12,  # of which the feed-forward layer makes a multiple of 8
            n_layers=1,
            n_refiner_layers=1,
            n_heads=HEADS,
            cap_feat_dim=TEXT,
            axes_dims=(4, 4, 4),
            axes_lens=(64, 8, 8),
        ),
        lambda network: network(LATENTS, TIME / 1000, WORDS, jnp.array([20])),
        3 * 2,
    ),
    "Cosmos": (
        CosmosTransformer3DModel,
        CosmosTransformerConfig(
            in_channels=8,
            out_channels=8,
            num_attention_heads=HEADS,
            attention_head_dim=18,
            num_layers=1,
            text_embed_dim=TEXT,
            adaln_lora_dim=8,
            max_size=(8, 8, 8),
            extra_pos_embed_type=None,
        ),
        lambda network: network(LATENTS, TIME / 1000, WORDS),
        3,
    ),
    "Krea 2": (
        Krea2Transformer2DModel,
        Krea2TransformerConfig(
            in_channels=32,
            num_layers=1,
            attention_head_dim=SIZE,
            num_attention_heads=2 * HEADS,
            num_key_value_heads=HEADS,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=TEXT,
            num_text_layers=1,
            text_num_attention_heads=HEADS,
            text_num_key_value_heads=HEADS,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(2, 2, 4),
        ),
        lambda network: network(LATENTS, TIME / 1000, WORDS, jnp.array([20])),
        3 * 2,
    ),
    "Qwen3": (
        Qwen3Model,
        Qwen3Config(
            vocab_size=40,
            hidden_size=TEXT,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2 * HEADS,
            num_key_value_heads=HEADS,
            head_dim=SIZE,
        ),
        lambda network: network.states(IDS, [2], jnp.array([20]))[0],
        2 * 2,
    ),
    "T5": (
        T5EncoderModel,
        T5Config(
            d_model=TEXT,
            d_kv=SIZE,
            d_ff=32,
            num_layers=2,
            num_heads=HEADS,
            vocab_size=40,
            feed_forward_proj="gated-gelu",
        ),
        lambda network: network(IDS),
        2 * 2,
    ),
}


COMPILES = pytest.mark.slow("compiles networks over several chips")
DENOISERS = [
    "SD 3",
    "FLUX.1",
    "FLUX.2",
    "Z-Image",
    "Cosmos",
    "Krea 2",
]  # beside factors on four chips
ON_TWO = ["FLUX.1", "FLUX.2", "Z-Image", "Krea 2", "Qwen3", "T5"]  # each with several heads
ON_EIGHT = ["SD 3", "Cosmos", "Qwen3", "T5"]  # each with one
SHARED = [*((name, 2) for name in ON_TWO), *((name, 8) for name in ON_EIGHT)]


@functools.cache
def built(name: str, kind: str = ""):
    """Return a network's structure and random parameters."""
    module, config, _, _ = NETWORKS[name]
    graph, shapes = weights.architecture(module, config)
    values = jax.tree.map(lambda leaf: np.float32(0.3) * normal(*leaf.shape), shapes)
    if kind:
        graph, shapes = in_int8(graph, shapes, tokens=kind == W8A8)
        values = jax.tree_util.tree_map_with_path(
            lambda path, leaf: rounded(values, path, leaf), shapes
        )
    return graph, values


def rounded(values, path, leaf):
    *modules, last = (each.key for each in path)
    for each in modules:
        values = values[each]
    if last == weights.SCALE:
        return weights.to_int8(values["kernel"])[1]
    return weights.to_int8(values[last])[0] if leaf.dtype == np.int8 else values[last]


def divisions(graph, params, chips):
    return nnx.merge(graph, params).tensor_parallel_plan.divisions(params, chips)


def as_floats(values):
    """Return parameters with the numbers that kernels of int8 stand for."""
    if not isinstance(values, dict):
        return values
    floats = {key: as_floats(leaf) for key, leaf in values.items() if key != weights.SCALE}
    if weights.SCALE in values:
        floats["kernel"] = values["kernel"] * values[weights.SCALE]
    return floats


@functools.cache
def compiled(name: str, chips: int, kind: str = ""):
    """Return a network's program on a replica of so many chips, which takes parameters that lie
    there, and how often the chips exchange something."""
    graph, params = built(name, kind)
    _, _, call, _ = NETWORKS[name]
    mesh = make_mesh(chips, chips)
    divided = {"network": divisions(graph, params, chips)}
    specs = jax.tree.map(lambda where: where.spec, shardings(mesh, divided, stacked=True))
    program = _over_devices(
        lambda params, _: call(nnx.merge(graph, params["network"])),
        mesh,
        (specs, jax.sharding.PartitionSpec()),
        dtype=jnp.float32,
        stacked=True,
    )
    traced = program.trace(placed_shapes(mesh, {"network": params}, divided, stacked=True), 0)
    return traced.lower().compile(), exchanges(traced)


def exchanges(traced) -> int:
    return len(re.findall(r"\bpsum", str(traced.jaxpr)))


def computed(name: str, chips: int, *, kind: str = "", deltas=None, params=None):
    """Return what a network computes on a replica of so many chips, its parameters there, and how
    often the chips exchange something. By default it computes with the parameters of `built`."""
    graph, random = built(name, kind)
    params = params or random
    divided = {"network": divisions(graph, params, chips)}
    holder = ReplicaWeights(make_mesh(chips, chips))
    holder.put(0, "model", {"network": params}, divided)
    if deltas is not None:
        merged = merge(holder.of(0, "model"), {"network": deltas}, divided)
        holder.record(0, "model", merged)
    there = holder.together(["model"])
    program, exchanged = compiled(name, chips, kind)
    return np.asarray(program(there, 0)), there["network"], exchanged


@functools.cache
def alone(name: str, kind: str = "") -> np.ndarray:
    return computed(name, 1, kind=kind)[0]


def relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@COMPILES
@pytest.mark.parametrize(("name", "chips"), SHARED)
def test_chips_compute_together_what_one_does(name, chips):
    ours, there, exchanged = computed(name, chips)
    assert relative(ours, alone(name)) < 1e-5
    assert exchanged == NETWORKS[name][-1]
    graph, params = built(name)
    for device in make_mesh(chips).devices.flat:
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(there)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert held == bytes_of(params, divisions(graph, params, chips))


@pytest.mark.parametrize("name", NETWORKS)
def test_all_that_heads_and_feed_forward_layers_have_is_divided(name):
    graph, params = built(name)
    inside = (
        r"\b(to_[a-z_]+|add_\w+|attn\w*\.\w+_proj|proj_mlp|ff\w*|feed_forward|mlp|wi_0|wi_1|wo)\."
    )
    outside = r"norm|t_embedder|\.bias$"
    paths = jax.tree_util.tree_leaves_with_path(divisions(graph, params, 8))
    whole = {".".join(str(each.key) for each in path) for path, each in paths if each == WHOLE}
    assert not [x for x in whole if re.search(inside, x) and not re.search(outside, x)]


@COMPILES
@pytest.mark.parametrize(
    ("name", "kind", "bound"),
    [
        ("FLUX.1", INT8, 1e-5),
        ("FLUX.2", INT8, 1e-5),
        ("Qwen3", INT8, 1e-5),
        ("FLUX.2", W8A8, 2e-2),  # chips round their shares of tokens, each by its largest number
    ],
)
def test_chips_compute_with_int8_what_one_does(name, kind, bound):
    ours, *_ = computed(name, 2, kind=kind)
    assert relative(ours, alone(name, kind)) < bound


@COMPILES
@pytest.mark.parametrize(
    ("name", "kind"),
    [("FLUX.1", ""), ("FLUX.1", INT8), ("FLUX.2", ""), ("FLUX.2", INT8), ("Z-Image", "")],
)
def test_adapters_are_merged_into_shares(name, kind):
    deltas = adapters(name)
    one, *_ = computed(name, 1, kind=kind, deltas=deltas)
    together, there, _ = computed(name, 2, kind=kind, deltas=deltas)
    assert relative(together, one) < 1e-5
    assert relative(one, alone(name, kind)) > 1e-2
    graph, params = built(name, kind)
    for leaf, division in zip(
        jax.tree.leaves(there), jax.tree.leaves(divisions(graph, params, 2)), strict=True
    ):
        shares = {shard.data.size for shard in leaf.addressable_shards}
        assert shares == {leaf.size // division.chips}


@functools.cache
def adapters(name: str):
    """Return a difference of rank 4 for each dense layer's weight."""
    _, params = built(name)
    return {
        key: [(LowRank(*factors(*shape), np.float32(0.02)), 0.5)]
        for key, shape in weights.shapes(params).items()
        if len(shape) == 2 and key.endswith(".weight")
    }


def factors(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(inputs, 4), normal(4, outputs)


@functools.cache
def computed_with_rows(name: str, chips: int, platform: str, *, kind: str = ""):
    """Return what a network computes with the factors of `adapters` beside its layers as on that
    platform, how often the chips exchange something, and the bytes of factors on one chip and by
    the account."""
    graph, params = built(name, kind)
    _, _, call, _ = NETWORKS[name]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    network = nnx.merge(graph, shapes)
    layers = factors_module.adapt(network, lambda name: True)
    adapted, deltas, mesh = nnx.graphdef(network), adapters(name), make_mesh(chips, chips)
    divided = divisions(graph, params, chips)
    of_factors = factors_module.factor_divisions(layers, divided)
    rows = {}
    for layer, its in of_factors.items():
        ((delta, strength),) = deltas[f"{layer}.weight"]
        values = {"A": delta.left, "B": strength * delta.scale * delta.right}
        rows[layer] = {factor: its[factor].in_order(values[factor])[None] for factor in its}
    holder = ReplicaWeights(mesh)
    holder.put(0, "model", {"network": params}, {"network": divided})
    there = holder.together(["model"])
    specs, row_specs = (
        jax.tree.map(lambda where: where.spec, shardings(mesh, tree, stacked=True))
        for tree in ({"network": divided}, of_factors)
    )
    row_places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), row_specs)
    rows = jax.device_put(rows, row_places)
    program = _over_devices(
        lambda params, rows: call(
            nnx.merge(adapted, factors_module.applied(params["network"], layers, rows))
        ),
        mesh,
        (specs, row_specs),
        dtype=jnp.float32,
        stacked=True,
    )
    with pytest.MonkeyPatch.context() as patch:  # layers ask for it while they are traced
        patch.setattr(factors_module, "platform", lambda: platform)
        traced = program.trace(there, rows)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(rows))
    counted = bytes_of(factors_module.factor_shapes(layers, 4, np.float32), of_factors)
    found = np.asarray(traced.lower().compile()(there, rows))
    return found, exchanges(traced), held, counted


ON_CPUS = [(name, "cpu") for name in DENOISERS]  # where layers add two products, not compute one
ON_TPUS = [(name, "tpu") for name in ("FLUX.2", "Z-Image")]


@COMPILES
@pytest.mark.parametrize(
    ("name", "platform", "kind"),
    [*((*each, "") for each in ON_CPUS + ON_TPUS), ("FLUX.2", "cpu", INT8)],
)
def test_factors_beside_layers_are_what_is_merged_into_them(name, platform, kind):
    """Kernels of int8 stay as they are beside factors, and are not rounded again."""
    ours, *_ = computed_with_rows(name, 1, platform, kind=kind)
    _, params = built(name, kind)
    merged, *_ = computed(name, 1, deltas=adapters(name), params=as_floats(params))
    assert relative(ours, merged) < 1e-5
    assert relative(ours, alone(name, kind)) > 1e-2


@COMPILES
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_tokens_are_rounded_before_kernels_and_not_before_factors(platform):
    ours, *_ = computed_with_rows("FLUX.2", 1, platform, kind=W8A8)
    _, params = built("FLUX.2", W8A8)
    merged, *_ = computed("FLUX.2", 1, deltas=adapters("FLUX.2"), params=as_floats(params))
    assert 1e-4 < relative(ours, merged) < 5e-2


@pytest.mark.parametrize(
    ("name", "times"),
    {"SD 3": 7, "FLUX.1": 5, "FLUX.2": 5, "Z-Image": 9, "Cosmos": 3, "Krea 2": 5}.items(),
)
def test_on_tpus_blocks_keep_what_they_add_apart(name, times, monkeypatch):
    monkeypatch.setattr(products, "platform", lambda: "tpu")
    graph, params = built(name)
    call = NETWORKS[name][2]
    traced = str(jax.make_jaxpr(lambda params: call(nnx.merge(graph, params)))(params))
    assert traced.count("optimization_barrier") == times


@COMPILES
@pytest.mark.parametrize(("name", "platform"), ON_CPUS + ON_TPUS)
def test_chips_with_shares_of_factors_compute_together_what_one_does(name, platform):
    one, exchanged, _, whole = computed_with_rows(name, 1, platform)
    assert exchanged == 0
    together, exchanged, held, counted = computed_with_rows(name, 4, platform)
    assert relative(together, one) < 1e-5
    # As often again as beside kernels alone for what A makes of shares of its rows.
    assert exchanged == (2 if platform == "cpu" else 1) * NETWORKS[name][-1]
    assert held == counted < whole


def test_parameters_are_read_into_shares(tmp_path):
    name = "FLUX.2"
    graph, params = built(name)
    weights.save(params, tmp_path / "a.safetensors")
    where = replicated(make_mesh(4, 4))
    divided = divisions(graph, params, 4)
    stored = weights.contents([tmp_path / "a.safetensors"])
    read = weights.load_stored(
        stored, params, sharding=where, source=tmp_path, leading=True, divisions=divided
    )
    holder = ReplicaWeights(make_mesh(4, 4))
    holder.put(0, "model", params, divided)
    for one, other in zip(
        jax.tree.leaves(read), jax.tree.leaves(holder.of(0, "model")), strict=True
    ):
        assert one.sharding == other.sharding and np.array_equal(one, other)


def test_a_network_whose_heads_do_not_divide_stays_whole():
    graph, params = built("Z-Image")
    assert divisions(graph, params, 3) == undivided(params)


def test_devices_that_do_not_make_up_replicas_are_refused():
    with pytest.raises(ValueError, match="6 devices do not make up replicas of 4 each"):
        make_mesh(6, 4)
