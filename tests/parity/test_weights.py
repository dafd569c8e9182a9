"""Safetensors to parameters and back: names, shapes, types, placement, memory, damage."""

import contextlib
import json
import math
import shutil
import struct
from functools import partial
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, TextEncoderConfig, VAEConfig
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.models import AutoencoderKL, CLIPTextModel
from sd_tpu.runtime.mesh import make_mesh, replicated
from tests.support.parity import assert_agrees
from tests.support.processes import peak_of_loading

TREE = {
    "conv": {"kernel": jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.float32)},
    "layers": {
        0: {
            "kernel": jax.ShapeDtypeStruct((6, 2), jnp.float32),
            "bias": jax.ShapeDtypeStruct((2,), jnp.float32),
        }
    },
    "norm": {"scale": jax.ShapeDtypeStruct((4,), jnp.float32)},
    "words": {"embedding": jax.ShapeDtypeStruct((5, 3), jnp.float32)},
}


def random_like(tree, dtype=np.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(dtype), tree)


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture
def file(tmp_path) -> Path:
    """TREE's names and shapes as a checkpoint file."""
    weights.save(random_like(TREE), tmp_path / "unet" / "weights.safetensors")
    return tmp_path / "unet" / "weights.safetensors"


def rewritten(file: Path, change) -> Path:
    """The file after `change(its tensors)`."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, dtype):
    params = random_like(TREE, dtype)
    weights.save(params, tmp_path / "a.safetensors")
    loaded = weights.load([tmp_path / "a.safetensors"], TREE, dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(dtype)}
    assert_equal(loaded, params)


def test_files_hold_the_names_and_axes_of_pytorch(file):
    params, tensors = random_like(TREE), load_file(file)
    assert (
        {name: tensor.shape for name, tensor in tensors.items()}
        == {
            "conv.weight": (8, 4, 3, 3),
            "layers.0.weight": (2, 6),
            "layers.0.bias": (2,),
            "norm.weight": (4,),
            "words.weight": (5, 3),
        }
        == weights.shapes(TREE)
    )
    np.testing.assert_array_equal(
        tensors["conv.weight"][7, 2, 0, 1], params["conv"]["kernel"][0, 1, 2, 7]
    )
    np.testing.assert_array_equal(tensors["layers.0.weight"], params["layers"][0]["kernel"].T)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_parameters_are_converted_to_the_type_asked_for(tmp_path, stored, wanted):
    values = torch.randn(4).to(stored)
    save_torch({"weight": values}, tmp_path / "a.safetensors")
    expected = {"scale": jax.ShapeDtypeStruct((4,), jnp.float32)}
    scale = weights.load([tmp_path / "a.safetensors"], expected, wanted)["scale"]
    assert scale.dtype == wanted
    np.testing.assert_array_equal(
        np.asarray(scale, np.float32), values.to(getattr(torch, wanted)).float().numpy()
    )


def test_saving_converts_to_the_type_asked_for(tmp_path):
    params = random_like(TREE)
    weights.save(params, tmp_path / "a.safetensors", jnp.bfloat16)
    stored = load_torch(tmp_path / "a.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * 500 + 1000


def test_parameters_go_where_the_sharding_says(file):
    mesh = make_mesh()
    assert mesh.size == 8
    everywhere = weights.load([file], TREE, jnp.float32, replicated(mesh))
    for leaf in jax.tree.leaves(everywhere):
        assert leaf.sharding == replicated(mesh) and len(leaf.devices()) == 8
    one = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    for leaf in jax.tree.leaves(weights.load([file], TREE, jnp.float32, one)):
        assert leaf.devices() == {jax.devices()[5]}
    with jax.default_device(jax.devices()[3]):  # which is told to this thread alone
        default = weights.load([file], TREE, jnp.float32)
    for leaf in jax.tree.leaves(default):
        assert leaf.devices() == {jax.devices()[3]}
    assert_equal(everywhere, random_like(TREE))


def test_a_network_may_lie_in_several_files(file):
    tensors = load_file(file)
    first = {name: tensors.pop(name) for name in ("conv.weight", "norm.weight")}
    save_file(first, file.with_name("1.safetensors"))
    save_file(tensors, file.with_name("2.safetensors"))
    both = [file.with_name("1.safetensors"), file.with_name("2.safetensors")]
    assert_equal(weights.load(both, TREE, jnp.float32), random_like(TREE))


# --- what does not fit --------------------------------------------------------------------------


def test_every_difference_is_named_in_one_message(file):
    def change(tensors):
        tensors["extra.weight"] = tensors.pop("norm.weight")
        tensors["another.bias"] = tensors["layers.0.bias"]
        del tensors["words.weight"]
        tensors["conv.weight"] = tensors["conv.weight"][:5].copy()

    with pytest.raises(CheckpointError) as caught:
        weights.load([rewritten(file, change)], TREE, jnp.float32)
    headline, *lines = str(caught.value).splitlines()
    assert str(file.parent) in headline and "5 differences" in headline
    assert [line.strip() for line in lines] == [
        "+ unexpected another.bias [2]",
        "+ unexpected extra.weight [4]",
        "- missing    norm.weight [4]",
        "- missing    words.weight [5, 3]",
        "~ shape      conv.weight: the file has [5, 4, 3, 3], the model needs [8, 4, 3, 3]",
    ]


def test_of_many_differences_the_first_are_named_and_the_others_counted(file):
    def change(tensors):
        tensors.update({f"extra.{number:02}": tensors["layers.0.bias"] for number in range(30)})

    with pytest.raises(CheckpointError, match="30 differences") as caught:
        weights.load([rewritten(file, change)], TREE, jnp.float32)
    _, *lines = str(caught.value).splitlines()
    assert lines == [
        *(f"  + unexpected extra.{number:02} [2]" for number in range(20)),
        "  and 10 more",
    ]


def test_a_transposed_square_of_another_size_is_not_accepted(file):
    def change(tensors):
        tensors["layers.0.weight"] = tensors["layers.0.weight"].T.copy()

    with pytest.raises(CheckpointError, match=r"layers\.0\.weight: the file has \[6, 2\]"):
        weights.load([rewritten(file, change)], TREE, jnp.float32)


DAMAGE = {
    "truncated": lambda content: content[: len(content) - 100],
    "cut inside the header": lambda content: content[:40],
    "empty": lambda content: b"",
    "garbage": lambda content: b"<!doctype html> Not found" * 40,
    "a git-lfs pointer": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_one_sentence_that_names_it(file, kind):
    file.write_bytes(DAMAGE[kind](file.read_bytes()))
    with pytest.raises(CheckpointError, match="damaged or incomplete") as caught:
        weights.load([file], TREE, jnp.float32)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tensors", [{"x" * 257: [1]}, {"x": [1] * 9}, {str(number): [0] for number in range(50_001)}]
)
def test_a_header_as_no_network_has_it_is_refused(tmp_path, tensors):
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    with pytest.raises(CheckpointError, match="tensors as no network has them"):
        weights.contents([tmp_path / "odd.safetensors"])
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", 1 << 26) + text)
    with pytest.raises(CheckpointError, match="at most 32 MiB"):
        weights.contents([tmp_path / "odd.safetensors"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_refused_by_name(tmp_path, dtype, value):
    params, file = random_like(TREE), tmp_path / "a.safetensors"
    for changed, accepted in (
        (-65504, contextlib.nullcontext()),
        (
            value,
            pytest.raises(CheckpointError, match=r"conv\.weight holds what is no finite number"),
        ),
    ):
        params["conv"]["kernel"][-1, -1, -1, -1] = changed
        weights.save(params, file, dtype)
        with accepted:
            weights.load([file], TREE)


def test_an_architecture_is_worked_out_once_for_all_that_have_it():
    found = weights.architecture(AutoencoderKL, TINY_VAE, dtype=jnp.float32)
    graph, shapes = weights.abstract(partial(AutoencoderKL, TINY_VAE, dtype=jnp.float32))
    assert found == (graph, shapes) and found[0] is not graph
    assert weights.architecture(AutoencoderKL, TINY_VAE.model_copy(), dtype=jnp.float32) is found
    deeper = TINY_VAE.model_copy(update={"layers_per_block": 2})
    assert weights.architecture(AutoencoderKL, deeper, dtype=jnp.float32)[1] != shapes
    half = weights.architecture(AutoencoderKL, TINY_VAE, dtype=jnp.bfloat16)
    assert weights.shapes(half[1]) == weights.shapes(shapes) and half[1] != shapes


def test_a_file_is_written_as_readable_as_any_other(tmp_path):
    weights.save(random_like(TREE), tmp_path / "a.safetensors")
    (tmp_path / "b").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode


# --- names of other versions --------------------------------------------------------------------

TINY_VAE = VAEConfig(block_out_channels=(4, 4), layers_per_block=1, norm_num_groups=2)
TINY_TEXT = TextEncoderConfig(
    vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2
)


def saved(module, config, file: Path):
    """The module's parameter shapes, and random parameters for it, which are in the file too."""
    _, expected = weights.architecture(module, config, dtype=jnp.float32)
    params = random_like(expected)
    weights.save(params, file)
    return expected, params


def test_the_first_autoencoders_names_are_understood(tmp_path):
    expected, params = saved(AutoencoderKL, TINY_VAE, tmp_path / "a.safetensors")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def change(tensors):
        for name in list(tensors):
            for new, before in old.items():
                if f".attentions.0.{new}." in name:
                    tensors[name.replace(new, before)] = tensors.pop(name)
        assert sum("attentions.0.query" in name for name in tensors) == 4  # weight, bias; twice

    file = rewritten(tmp_path / "a.safetensors", change)
    assert_equal(weights.load([file], expected, jnp.float32), params)


def test_text_encoders_may_carry_position_ids_and_lack_the_outermost_name(tmp_path):
    expected, params = saved(CLIPTextModel, TINY_TEXT, tmp_path / "a.safetensors")

    def older(tensors):
        tensors["text_model.embeddings.position_ids"] = np.arange(77)[None]

    def newer(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("text_model.")] = tensors.pop(name)

    for change in (older, newer):
        file = rewritten(tmp_path / "a.safetensors", change)
        assert_equal(weights.load([file], expected, jnp.float32), params)


# --- memory -------------------------------------------------------------------------------------

LOAD = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from sd_tpu.checkpoint import weights
dtype = jnp.dtype(sys.argv[2])
tree = {i: {"kernel": jax.ShapeDtypeStruct((3, 3, 256, 256), dtype)} for i in range(60)}
jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.devices()[0]))
print("ready", flush=True)
sys.stdin.readline()
params = jax.block_until_ready(weights.load([Path(sys.argv[1])], tree, dtype))
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_little_more_memory_than_the_parameters(tmp_path, dtype):
    """From a float32 file of 142 MB, as another process watches."""
    tensor = np.random.default_rng(0).standard_normal((256, 256, 3, 3), np.float32)
    save_file({f"{i}.weight": tensor for i in range(60)}, tmp_path / "a.safetensors")
    peak, parameters = peak_of_loading(LOAD, tmp_path / "a.safetensors", dtype)
    assert parameters == 60 * 9 * 256 * 256 * jnp.dtype(dtype).itemsize
    print(f"memory | {dtype} | {peak / parameters:.2f} of the parameters")
    assert 0.9 < peak / parameters < 1.3


# --- the whole checkpoint -----------------------------------------------------------------------


def test_pytorch_loads_what_is_saved_and_agrees(layout, checkpoints, tmp_path):
    checkpoint, params = Checkpoint.from_pretrained(checkpoints[layout])
    params = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, params)  # no longer what was read
    checkpoint.save_pretrained(tmp_path, params)
    reference = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    for part in StableDiffusion.components:
        ours = weights.shapes(params[part])
        assert len(ours) == len(getattr(reference, part).state_dict())

    rng = np.random.default_rng(0)
    ids = checkpoint.tokenizers["tokenizer"](["a cat", "two dogs"])
    latents = rng.standard_normal((2, 16, 16, 4)).astype(np.float32)
    times = np.float32([801, 21])
    encoder, unet, vae = (
        nnx.merge(getattr(checkpoint.model, part), params[part])
        for part in StableDiffusion.components
    )
    text = jax.jit(lambda: encoder(ids))()
    x = torch.tensor(latents).permute(0, 3, 1, 2)
    with torch.no_grad():
        their_text = reference.text_encoder(torch.tensor(ids)).last_hidden_state
        noise = reference.unet(x, torch.tensor(times), their_text).sample
        images = reference.vae.decode(x / reference.vae.config.scaling_factor).sample
    for ours, theirs in (
        (text, their_text),
        (jax.jit(lambda: unet(latents, times, text))(), noise.permute(0, 2, 3, 1)),
        (jax.jit(lambda: vae.decode(latents))(), images.permute(0, 2, 3, 1)),
    ):
        assert_agrees(f"saved and read by PyTorch, {layout}", ours, theirs, 1e-4)


def test_a_flax_schedulers_name_is_saved_as_pytorch_knows_it(checkpoints, tmp_path):
    folder = tmp_path / "flax"
    shutil.copytree(checkpoints["sd1"], folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace("PNDMScheduler", "FlaxPNDMScheduler"))
    checkpoint, params = Checkpoint.from_pretrained(folder)
    checkpoint.save_pretrained(tmp_path / "saved", params)
    reference = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert isinstance(reference.scheduler, diffusers.PNDMScheduler)


def test_a_saved_checkpoint_is_read_back_bit_for_bit(checkpoints, tmp_path):
    checkpoint, params = Checkpoint.from_pretrained(checkpoints["sd2"], dtype=jnp.bfloat16)
    checkpoint.save_pretrained(tmp_path, params)
    again, params_again = Checkpoint.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    assert_equal(params_again, params)
    for part in (*StableDiffusion.components, "scheduler"):
        assert again.configs[part] == checkpoint.configs[part]
    assert again.card == checkpoint.card
    np.testing.assert_array_equal(
        again.tokenizers["tokenizer"](["a cat"]), checkpoint.tokenizers["tokenizer"](["a cat"])
    )
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")} >= {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        *(f"{part}/{stem}.safetensors" for part, stem in StableDiffusion.components.items()),
        *(f"{part}/config.json" for part in StableDiffusion.components),
    }
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"


def test_a_file_that_is_read_is_not_mapped_so_it_takes_no_memory_beside_the_parameters(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(5, np.float32)}, file)
    with weights.opened(file) as tensors:
        assert tensors.get_tensor("a").sum() == 5
        assert str(file) not in Path("/proc/self/maps").read_text()
