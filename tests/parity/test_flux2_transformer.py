"""The transformer of FLUX.2 klein against diffusers', at random weights.

Weights and config travel by way of the files that diffusers writes. Each comparison prints its
relative error: `pytest -rP tests/parity/test_flux2_transformer.py | grep parity`.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Transformer2DModel as TorchTransformer,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from flax import nnx

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, Flux2TransformerConfig
from sd_tpu.models import Flux2Transformer2DModel
from sd_tpu.models.flux2_transformer import References, picture_positions

TOLERANCE = 1e-5
WEIGHTS = "diffusion_pytorch_model.safetensors"

TINY = dict(
    in_channels=8,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=12,
    axes_dims_rope=[4, 4, 4, 4],
    guidance_embeds=False,
)
KINDS = {
    "as published": TINY,
    "other sizes": TINY
    | dict(
        out_channels=6,
        num_layers=1,
        num_single_layers=3,
        timestep_guidance_channels=32,
        mlp_ratio=2.33,
        axes_dims_rope=[2, 6, 4, 4],
        rope_theta=100,
    ),
}
PUBLISHED = {
    "klein 4B": dict(
        num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680
    ),
    "klein 9B": dict(
        num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288
    ),
}


def moved(made: TorchTransformer) -> TorchTransformer:
    """Move every parameter.

    What norms are given is small, so that eps counts; so is what comes of the timesteps, whose
    angles of up to 1000 are rounded to float32 in one way by PyTorch and in another by JAX.
    """
    small = ["x_embedder", "context_embedder", "timestep_embedder.linear_2"]
    small += ["to_q.", "to_k.", "add_q_proj", "add_k_proj", "to_qkv_mlp_proj"]
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor += 0.1 * torch.randn_like(tensor)
            if "to_qkv" in name:
                tensor = tensor[: 2 * made.inner_dim]  # queries and keys
            if any(part in name for part in small):
                tensor *= 0.05
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind) -> TorchTransformer:
    torch.manual_seed(0)
    return moved(TorchTransformer(**KINDS[kind]))


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """Folder that diffusers writes of the network."""
    folder = tmp_path_factory.mktemp("transformer")
    reference.save_pretrained(folder)
    return folder


def opened(folder, dtype=jnp.float32):
    """Return ours as one program of a folder's weights and of the inputs."""
    config = Flux2TransformerConfig.from_dict(json.loads((folder / "config.json").read_text()))
    graph, shapes = weights.abstract(partial(Flux2Transformer2DModel, config, dtype=dtype))
    state = weights.load([folder / WEIGHTS], shapes)
    return partial(jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)), state)


@pytest.fixture(scope="module")
def ours(folder):
    return opened(folder)


def inputs(height=8, width=8, times=(961.0, 3.5), words=7) -> list:
    """Latents, timesteps and text of a batch of two, channels last."""
    rng = np.random.default_rng(0)
    shapes = (2, height, width, 8), (2, words, 12)
    latents, text = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return [latents, np.array(times, np.float32), text]


def of_diffusers(reference, latents, timesteps, text, pictures=()) -> np.ndarray:
    """Draw with the positions, and by the thousandths of timesteps, of the pipeline, after
    reference pictures [h, w, in_channels]."""
    x, timesteps, text = map(torch.tensor, (latents, timesteps, text))
    tokens, ids = x.flatten(1, 2), Flux2KleinPipeline._prepare_latent_ids(x.permute(0, 3, 1, 2))
    if pictures:
        seen = [torch.tensor(each.transpose(2, 0, 1)[None]) for each in pictures]
        where = Flux2KleinPipeline._prepare_image_ids(seen).expand(len(x), -1, -1)
        packed = torch.cat([each.flatten(2).transpose(1, 2) for each in seen], dim=1)
        tokens = torch.cat([tokens, packed.expand(len(x), -1, -1)], dim=1)
        ids = torch.cat([ids, where], dim=1)
    out = reference(
        tokens,
        text,
        timesteps / 1000,
        img_ids=ids,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(text),
    ).sample[:, : x.shape[1] * x.shape[2]]
    return out.unflatten(1, x.shape[1:3]).numpy()


def references(rows, tokens: int) -> References:
    """Return the pictures [h, w, 8] of each row, filled up with noise to so many tokens."""
    rng = np.random.default_rng(1)
    latents = 9 * rng.standard_normal((len(rows), tokens, 8), np.float32)
    positions = rng.integers(0, 50, (len(rows), tokens, 4), np.int32)
    counts = np.zeros(len(rows), np.int32)
    for row, pictures in enumerate(rows):
        for number, picture in enumerate(pictures, 1):
            h, w, _ = picture.shape
            place = slice(counts[row], counts[row] + h * w)
            latents[row, place] = picture.reshape(h * w, 8)
            positions[row, place] = picture_positions(h, w, 10 * number)
            counts[row] += h * w
    return References(latents, positions, counts)


def seen(*sizes) -> list[np.ndarray]:
    """Latents of reference pictures of these sizes."""
    rng = np.random.default_rng(2)
    return [rng.standard_normal((*size, 8), np.float32) for size in sizes]


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| of two arrays of one shape."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_agrees(name: str, ours, theirs):
    error = relative(ours, theirs)
    print(f"parity | {name} | {error:.1e} |")
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("size", [(8, 8), (12, 5), (3, 16), (1, 1)], ids=str)
@pytest.mark.parametrize("times", [(961.0, 3.5), (0.25, 1000.0)], ids=str)
def test_the_transformer_is_that_of_diffusers(kind, reference, ours, size, times):
    given = inputs(*size, times)
    found = ours(*given)
    assert found.dtype == jnp.float32
    for row, theirs in enumerate(of_diffusers(reference, *given)):
        assert_agrees(
            f"Flux2Transformer2DModel, {kind}, {size[0]}x{size[1]}, timestep {times[row]}",
            found[row],
            theirs,
        )


@pytest.mark.parametrize("size", [(32, 16), (20, 23)], ids=str)
def test_many_tokens_are_those_of_diffusers(size, tmp_path):
    """Attention is chunked on CPUs where tokens are more than 512."""
    torch.manual_seed(0)
    theirs = moved(TorchTransformer(**TINY | dict(num_layers=1, num_single_layers=1)))
    theirs.save_pretrained(tmp_path)
    given = inputs(*size, words=512)
    assert_agrees(
        f"Flux2Transformer2DModel, {size[0]}x{size[1]}, 512 tokens of text",
        opened(tmp_path)(*given),
        of_diffusers(theirs, *given),
    )


@pytest.mark.parametrize("height", [8, 32], ids=["plain attention", "chunked"])
def test_with_reference_pictures_it_is_that_of_diffusers(kind, reference, ours, height):
    given = inputs(height, 16, words=7)
    rows = seen((5, 3)), seen((2, 7), (8, 6), (1, 1))
    found = ours(*given, references(rows, 128))
    for row, pictures in enumerate(rows):
        assert_agrees(
            f"Flux2Transformer2DModel, {kind}, {height}x16, {len(pictures)} reference pictures",
            found[row],
            of_diffusers(reference, *given, pictures)[row],
        )


def test_rows_without_reference_pictures_are_as_in_programs_without_them(ours):
    given = inputs()
    found = ours(*given, references([seen((5, 3)), []], 32))
    assert relative(found[1], ours(*given)[1]) < 1e-6
    assert relative(found[0], ours(*given)[0]) > 1e-3


def test_what_reference_pictures_are_filled_up_with_does_not_matter(ours):
    given, filled = inputs(), references([seen((5, 3)), seen((4, 4))], 32)
    before = ours(*given, filled)
    latents, positions = filled.latents.copy(), filled.positions.copy()
    latents[:, 16:], positions[:, 16:] = -3, 7
    assert np.array_equal(ours(*given, References(latents, positions, filled.counts)), before)
    latents[:, 3] += 0.5
    after = ours(*given, References(latents, filled.positions, filled.counts))
    assert relative(after, before) > 1e-4


@pytest.mark.parametrize("number", range(3), ids=["latents", "timesteps", "text"])
def test_every_input_of_a_row_matters_to_that_row_alone(ours, number):
    given = inputs()
    before = ours(*given)
    given[number] = given[number].copy()
    given[number][1] += 0.5
    after = ours(*given)
    assert relative(after[0], before[0]) < 1e-6
    assert relative(after[1], before[1]) > 1e-3


def test_every_part_of_the_latents_and_of_the_text_matters(ours):
    latents, timesteps, text = inputs()

    def total(latents, text):
        return jnp.sum(jnp.sin(ours(latents, timesteps, text)))

    for gradient in jax.grad(total, argnums=(0, 1))(latents, text):
        assert (np.abs(gradient) > 1e-7).all()


def test_where_tokens_are_matters(ours):
    latents, timesteps, text = inputs(words=2)
    before = ours(latents, timesteps, text)
    assert relative(ours(latents, timesteps, text[:, ::-1]), before) > 1e-3
    for axis in (1, 2):
        turned = ours(np.flip(latents, axis), timesteps, text)
        assert relative(np.flip(turned, axis), before) > 1e-3


def test_in_bfloat16_it_stays_near(folder, ours):
    given = inputs()
    found = opened(folder, jnp.bfloat16)(*given)
    assert found.dtype == jnp.float32
    assert 1e-4 < relative(found, ours(*given)) < 0.1


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.slow("builds networks of up to 32 blocks, without their numbers")
def test_parameters_of_full_size_are_those_of_diffusers(name):
    published = PUBLISHED[name] | dict(in_channels=128, guidance_embeds=False)
    with torch.device("meta"):
        theirs = TorchTransformer(**published).state_dict()
    config = Flux2TransformerConfig.from_dict(published)
    _, ours = weights.abstract(partial(Flux2Transformer2DModel, config))
    assert weights.shapes(ours) == {name: tuple(value.shape) for name, value in theirs.items()}


@pytest.mark.parametrize(
    "name, value",
    [
        ("guidance_embeds", True),
        ("patch_size", 2),
        ("eps", 1e-5),
        ("axes_dims_rope", [4, 6, 6]),
        ("axes_dims_rope", [5, 3, 4, 4]),
        ("axes_dims_rope", [4, 4, 4, 6]),
        ("axes_dims_rope", "all"),
        ("attention_head_dim", 32),
        ("num_layers", 10**9),
        ("num_single_layers", -1),
        ("timestep_guidance_channels", 5),
        ("mlp_ratio", 0.0),
        ("rope_theta", 0),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError) as caught:
        Flux2TransformerConfig.from_dict(TINY | {name: value})
    message = str(caught.value)
    assert f"{name}={value!r}" in message and "\n" not in message


def test_a_config_that_is_silent_about_guidance_is_that_of_dev():
    without = {name: value for name, value in TINY.items() if name != "guidance_embeds"}
    with pytest.raises(CheckpointError, match=r"FLUX\.2 \[dev\]"):
        Flux2TransformerConfig.from_dict(without)


def test_configs_of_one_computation_are_equal():
    one, other = (
        Flux2TransformerConfig.from_dict(TINY | values)
        for values in ({"out_channels": None, "rope_theta": 2000}, {"out_channels": 8})
    )
    assert one == other and hash(one) == hash(other)
