"""Weights that are rounded to int8 while they are read, and tokens before products of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.models.layers import Linear, linear
from sd_tpu.request import Request
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from tests.support import flux, pictures, z_image
from tests.support.parity import relative
from tests.support.pictures import SIDE

ASKED = dict(prompts=["a cat", "a fox"], seed=3, steps=4, guidance=1.0)
KINDS = (None, "int8", "w8a8")
NEAR = 1.0  # of 255, that pictures of a tiny random model differ by on average


def drawn(*arguments, **values) -> list[np.ndarray]:
    return [each.astype(int) for each in pictures.drawn(*arguments, asked=ASKED, **values)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny FLUX.1 schnell, and a LoRA for it."""
    folder = tmp_path_factory.mktemp("schnell")
    flux.make_pipeline(folder / "words", dev=False, num_single_layers=1).save_pretrained(
        folder / "model"
    )
    name, torch_seeded = "transformer.transformer_blocks.0.attn.to_v", torch.manual_seed(1)
    factors = {
        f"{name}.lora_{which}.weight": torch.randn(shape, generator=torch_seeded)
        for which, shape in (("A", (4, 48)), ("B", (48, 4)))
    }
    (folder / "loras").mkdir()
    save_file(factors, folder / "loras" / "odd.safetensors")
    return folder


@pytest.fixture(scope="module")
def engines(folder):
    """Engines with the model as it is, in int8 and with tokens in int8 too, by their weights."""
    options = dict(devices=1, size=(SIDE, SIDE), lora_dir=folder / "loras")
    found = {kind: Engine.open(folder / "model", weights=kind, **options) for kind in KINDS}
    yield found
    for engine in found.values():
        engine.close()


@settings(deadline=None)
@given(
    arrays.arrays(
        np.float32, (5, 3), elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
    )
)
def test_a_kernel_is_rounded_to_the_nearest_multiple(kernel):
    multiples, scale = weights.to_int8(kernel)
    assert multiples.dtype == np.int8 and scale.dtype == np.float32
    error = np.abs(multiples * scale - kernel)
    assert (error <= 0.501 * scale + 1e-6 * np.abs(kernel)).all()


def test_tokens_are_multiplied_as_int8_row_by_row():
    random = np.random.default_rng(0)
    kernel = random.standard_normal((64, 8)).astype(np.float32)
    tokens = (random.standard_normal((2, 3, 64)) * [[[1], [0], [50]]]).astype(np.float32)
    multiples, scale = weights.to_int8(kernel)
    layer = linear(64, 8, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.to_int8(tokens=True)
    nnx.update(layer, {"kernel": jnp.asarray(multiples), weights.SCALE: jnp.asarray(scale)})
    steps = np.abs(tokens).max(-1, keepdims=True) / 127
    rounded = np.rint(tokens / np.where(steps, steps, 1)) * steps
    found = layer(jnp.asarray(tokens))
    assert relative(found, rounded.astype(np.float64) @ (multiples * scale)) <= 1e-6
    assert 1e-3 < relative(found, tokens @ (multiples * scale)) < 2e-2
    rows = layer(jnp.asarray(tokens.reshape(6, 64)))  # as layers are given few rows on CPUs
    assert np.array_equal(rows, found.reshape(6, 8))


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_only_the_denoisers_blocks_round_tokens(engines, kind):
    model = engines[kind].checkpoint.model
    rounding, *others = (
        {
            ".".join(map(str, path)): layer.rounds_tokens
            for path, layer in nnx.iter_modules(nnx.merge(getattr(model, part), shapes))
            if isinstance(layer, Linear)
        }
        for part in ("transformer", "text_encoder_2")
        for shapes in [engines[kind].checkpoint.parameters.shapes[part]]
    )
    assert not any(others[0].values())
    rounding = {name for name, rounds in rounding.items() if rounds}
    if kind == "int8":
        assert not rounding
    else:
        assert {name.split(".")[0] for name in rounding} == {
            "transformer_blocks",
            "single_transformer_blocks",
        }
        block = "transformer_blocks.0"
        assert {f"{block}.attn.to_q", f"{block}.ff_context.net.2"} < rounding
        assert f"{block}.norm1.linear" not in rounding


@pytest.mark.slow("compiles networks three times")
def test_networks_give_what_they_would_of_the_rounded_numbers(tmp_path):
    """All networks but for the rounding are as they were; those of Z-Image and of its texts."""
    z_image.make_pipeline(tmp_path / "words").save_pretrained(tmp_path / "model")
    wide, params = Checkpoint.from_pretrained(tmp_path / "model")
    inputs = wide.prompt_inputs("a cat", "fog", height=SIDE, width=SIDE, guidance=4.0)
    x = jax.random.normal(jax.random.PRNGKey(0), (2, 4, 4, 16))
    t = jnp.asarray([900.0, 100.0])

    def program(model):
        model = model.for_inputs(inputs)

        @jax.jit
        def call(params):
            cond = model.encode_prompt(params, inputs)
            return cond["text"], model.denoise(params, x, t, cond)

        return call

    def restored(leaves, whole):
        if weights.SCALE in leaves:
            kernel = leaves["kernel"].astype(jnp.float32) * leaves[weights.SCALE]
            return {**{k: v for k, v in leaves.items() if k != weights.SCALE}, "kernel": kernel}
        return {
            key: restored(leaf, whole[key]) if isinstance(leaf, dict) else leaf
            for key, leaf in leaves.items()
        }

    in_float32 = program(wide.model)
    exact = in_float32(params)
    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        narrow, rounded = Checkpoint.from_pretrained(
            tmp_path / "model", dtype=dtype, weights="int8"
        )
        found = program(narrow.model)(rounded)
        expected = in_float32(
            jax.tree.map(lambda x: x.astype(jnp.float32), restored(rounded, params))
        )
        for ours, theirs, plain in zip(found, expected, exact, strict=True):
            assert relative(ours, theirs) <= bound
            assert not np.allclose(theirs, plain)


@pytest.mark.slow("compiles all three")
def test_pictures_are_near_those_of_the_model_as_it_is(engines):
    found = {kind: drawn(engine) for kind, engine in engines.items()}
    away = [
        np.mean([np.abs(a - b).mean() for a, b in zip(found[kind], found[None], strict=True)])
        for kind in KINDS[1:]
    ]
    assert 0 < away[0] < away[1] < NEAR


def test_t5_is_rounded_with_the_transformer_it_writes_for(engines):
    for kind, engine in engines.items():
        t5 = engine.checkpoint.parameters.shapes["text_encoder_2"]
        assert (np.dtype("int8") in {x.dtype for x in jax.tree.leaves(t5)}) == bool(kind)


@pytest.mark.slow("compiles programs with factors")
@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_a_lora_lies_beside_int8(engines, kind):
    prompts = ["a cat <lora:odd:2>"]
    without = drawn(engines[kind], prompts=["a cat"])[0]
    exact, rounded = (drawn(engines[each], prompts=prompts)[0] for each in (None, kind))
    assert np.abs(rounded - exact).mean() < NEAR < np.abs(rounded - without).mean()
    assert np.array_equal(drawn(engines[kind], prompts=["a cat"])[0], without)
    engine = engines[kind]
    assert {*engine.worker.weights.names(0)} == {engine.weights, engine.texts}


def test_they_take_a_quarter_of_float32s_memory(engines):
    sizes = {
        kind: {part: weights_of(engine, part) for part in ("transformer", "text_encoder_2", "vae")}
        for kind, engine in engines.items()
    }
    assert sizes["int8"]["vae"] == sizes[None]["vae"]
    assert sizes["int8"]["transformer"] < 0.35 * sizes[None]["transformer"]


def weights_of(engine, part):
    shapes = engine.checkpoint.parameters.shapes[part]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def test_files_say_so(engines):
    for kind, engine in engines.items():
        request = Request.check(ASKED, engine.catalog)
        written = engine.parameters(request)
        assert f"Weights: {kind}" in written if kind else "Weights" not in written


def test_other_weights_are_refused_by_name(folder):
    with pytest.raises(ValueError, match="weights='w8a16' is not one of int8, w8a8"):
        Checkpoint.open(folder / "model", weights="w8a16")


def test_a_model_without_a_transformer_is_refused(checkpoints):
    with pytest.raises(ValueError, match="--weights int8 is for models with a transformer"):
        open_models(checkpoints["sd1"], dtype="float32", weights="int8")
    open_models(checkpoints["sd1"], dtype="float32", weights="int8", models=checkpoints["sd1"])


def test_they_are_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="int8 are not written"):
        weights.save({"kernel": np.zeros((2, 2), np.int8)}, tmp_path / "a.safetensors")
