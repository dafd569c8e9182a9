"""Weights that are rounded to int8 while they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.request import Request
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from tests.support import flux, pictures, z_image
from tests.support.parity import relative
from tests.support.pictures import SIDE

ASKED = dict(prompts=["a cat", "a fox"], seed=3, steps=4, guidance=1.0)
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
    """Engines with the model as it is and in int8, by their weights."""
    options = dict(devices=1, size=(SIDE, SIDE), lora_dir=folder / "loras")
    found = {
        kind: Engine.open(folder / "model", weights=kind, **options) for kind in (None, "int8")
    }
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


@pytest.mark.slow("compiles both")
def test_pictures_are_near_those_of_the_model_as_it_is(engines):
    exact, rounded = (drawn(engines[kind]) for kind in (None, "int8"))
    for ours, theirs in zip(rounded, exact, strict=True):
        assert 0 < np.abs(ours - theirs).mean() < NEAR


def test_t5_is_rounded_with_the_transformer_it_writes_for(engines):
    for kind, engine in engines.items():
        t5 = engine.checkpoint.parameters.shapes["text_encoder_2"]
        assert (np.dtype("int8") in {x.dtype for x in jax.tree.leaves(t5)}) == bool(kind)


@pytest.mark.slow("compiles programs with factors")
def test_a_lora_lies_beside_int8(engines):
    prompts = ["a cat <lora:odd:2>"]
    without = drawn(engines["int8"], prompts=["a cat"])[0]
    exact, rounded = (drawn(engines[kind], prompts=prompts)[0] for kind in (None, "int8"))
    assert np.abs(rounded - exact).mean() < NEAR < np.abs(rounded - without).mean()
    assert np.array_equal(drawn(engines["int8"], prompts=["a cat"])[0], without)
    int8 = engines["int8"]
    assert {*int8.worker.weights.names(0)} == {int8.weights, int8.texts}


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
    for kind, said in ((None, False), ("int8", True)):
        request = Request.check(ASKED, engines[kind].catalog)
        assert ("Weights: int8" in engines[kind].parameters(request)) == said


def test_a_model_without_a_transformer_is_refused(checkpoints):
    with pytest.raises(ValueError, match="Weights in int8 are for models with a transformer"):
        open_models(checkpoints["sd1"], dtype="float32", weights="int8")
    open_models(checkpoints["sd1"], dtype="float32", weights="int8", models=checkpoints["sd1"])


def test_they_are_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="int8 are not written"):
        weights.save({"kernel": np.zeros((2, 2), np.int8)}, tmp_path / "a.safetensors")
