"""The transformer of FLUX.1 against diffusers', at random weights.

Weights and config travel by way of the files that diffusers writes. Each comparison prints its
relative error: `pytest -rP tests/parity/test_flux_transformer.py | grep parity`.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from diffusers import FluxTransformer2DModel as TorchTransformer
from flax import nnx

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, FluxTransformerConfig
from sd_tpu.models import FluxTransformer2DModel

TOLERANCE = 1e-5
WEIGHTS = "diffusion_pytorch_model.safetensors"

TINY = dict(
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=12,
    pooled_projection_dim=10,
    axes_dims_rope=[4, 6, 6],
)
KINDS = {
    "schnell": TINY,
    "dev": TINY | dict(guidance_embeds=True),
    "other sizes": TINY
    | dict(out_channels=12, num_layers=1, num_single_layers=3, axes_dims_rope=[2, 4, 10]),
}
PUBLISHED = {"schnell": dict(), "dev": dict(guidance_embeds=True)}


def moved(made: TorchTransformer) -> TorchTransformer:
    """Move every parameter.

    What norms are given is small, so that eps counts; so is what comes of timesteps and guidance,
    whose angles of thousands are rounded to float32 in one way by PyTorch and in another by JAX.
    """
    small = ["x_embedder", "context_embedder", "timestep_embedder.linear_2", "to_q.", "to_k."]
    small += ["add_q_proj", "add_k_proj", "guidance_embedder.linear_2"]
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor += 0.1 * torch.randn_like(tensor)
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
    config = FluxTransformerConfig.from_dict(json.loads((folder / "config.json").read_text()))
    graph, shapes = weights.abstract(partial(FluxTransformer2DModel, config, dtype=dtype))
    state = weights.load([folder / WEIGHTS], shapes)
    return partial(jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)), state)


@pytest.fixture(scope="module")
def ours(folder):
    return opened(folder)


def inputs(kind, height=8, width=8, times=(961.0, 3.5), words=7) -> list:
    """Latents, timesteps, texts and guidance of a batch of two, channels last."""
    rng = np.random.default_rng(0)
    shapes = (2, height, width, 4), (2, words, 12), (2, 10)
    latents, text, pooled = (rng.standard_normal(shape, np.float32) for shape in shapes)
    guidance = [np.array([3.5, 1.0], np.float32)] if "guidance_embeds" in KINDS[kind] else []
    return [latents, np.array(times, np.float32), text, pooled, *guidance]


def of_diffusers(reference, latents, timesteps, text, pooled, guidance=None) -> np.ndarray:
    """Draw with the patches, the positions and the thousandths of timesteps of the pipeline."""
    batch, height, width, channels = latents.shape
    x = torch.tensor(latents.transpose(0, 3, 1, 2).copy())
    out = reference(
        FluxPipeline._pack_latents(x, batch, channels, height, width),
        torch.tensor(text),
        torch.tensor(pooled),
        torch.tensor(timesteps) / 1000,
        img_ids=FluxPipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, "cpu", torch.float32
        ),
        txt_ids=torch.zeros(text.shape[1], 3),
        guidance=None if guidance is None else torch.tensor(guidance),
    ).sample
    return FluxPipeline._unpack_latents(out, height, width, 1).numpy().transpose(0, 2, 3, 1)


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| of two arrays of one shape."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_agrees(name: str, ours, theirs):
    error = relative(ours, theirs)
    print(f"parity | {name} | {error:.1e} |")
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("size", [(8, 8), (12, 6), (2, 16), (2, 2)], ids=str)
@pytest.mark.parametrize("times", [(961.0, 3.5), (0.25, 1000.0)], ids=str)
def test_the_transformer_is_that_of_diffusers(kind, reference, ours, size, times):
    given = inputs(kind, *size, times)
    found = ours(*given)
    assert found.dtype == jnp.float32
    for row, theirs in enumerate(of_diffusers(reference, *given)):
        assert_agrees(
            f"FluxTransformer2DModel, {kind}, {size[0]}x{size[1]}, timestep {times[row]}",
            found[row],
            theirs,
        )


@pytest.mark.parametrize("size", [(64, 32), (40, 46)], ids=str)
def test_many_tokens_are_those_of_diffusers(size, tmp_path):
    """Attention is chunked on CPUs where tokens are more than 512."""
    torch.manual_seed(0)
    theirs = moved(TorchTransformer(**TINY | dict(num_layers=1, num_single_layers=1)))
    theirs.save_pretrained(tmp_path)
    given = inputs("schnell", *size, words=256)
    assert_agrees(
        f"FluxTransformer2DModel, {size[0]}x{size[1]}, 256 tokens of text",
        opened(tmp_path)(*given),
        of_diffusers(theirs, *given),
    )


@pytest.mark.parametrize("name", ["latents", "timesteps", "text", "pooled", "guidance"])
def test_every_input_of_a_row_matters_to_that_row_alone(kind, ours, name):
    given = inputs(kind)
    number = ["latents", "timesteps", "text", "pooled", "guidance"].index(name)
    if number == len(given):
        return  # of dev alone
    before = ours(*given)
    given[number] = given[number].copy()
    given[number][1] += 0.5
    after = ours(*given)
    assert relative(after[0], before[0]) < 1e-6
    assert relative(after[1], before[1]) > 1e-3


def test_where_tokens_are_matters_for_the_picture_and_not_for_the_text(kind, ours):
    latents, timesteps, text, *rest = inputs(kind, words=2)
    before = ours(latents, timesteps, text, *rest)
    assert relative(ours(latents, timesteps, text[:, ::-1], *rest), before) < 1e-5
    for axis in (1, 2):
        turned = ours(np.flip(latents, axis), timesteps, text, *rest)
        assert relative(np.flip(turned, axis), before) > 1e-3


def test_in_bfloat16_it_stays_near(kind, folder, ours):
    given = inputs(kind)
    found = opened(folder, jnp.bfloat16)(*given)
    assert found.dtype == jnp.float32
    assert 1e-4 < relative(found, ours(*given)) < 0.1


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.slow("builds networks of 57 blocks, without their numbers")
def test_parameters_of_full_size_are_those_of_diffusers(name):
    with torch.device("meta"):
        theirs = TorchTransformer(**PUBLISHED[name]).state_dict()
    config = FluxTransformerConfig.from_dict(PUBLISHED[name])
    _, ours = weights.abstract(partial(FluxTransformer2DModel, config))
    assert weights.shapes(ours) == {name: tuple(value.shape) for name, value in theirs.items()}


@pytest.mark.parametrize(
    "name, value",
    [
        ("patch_size", 2),
        ("in_channels", 18),
        ("axes_dims_rope", [4, 4, 4, 4]),
        ("axes_dims_rope", [5, 5, 6]),
        ("axes_dims_rope", [4, 4, 6]),
        ("axes_dims_rope", "all"),
        ("attention_head_dim", 32),
        ("num_layers", 10**9),
        ("num_single_layers", -1),
        ("guidance_embeds", 1),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError) as caught:
        FluxTransformerConfig.from_dict(TINY | {name: value})
    message = str(caught.value)
    assert f"{name}={value!r}" in message and "\n" not in message


def test_configs_of_one_computation_are_equal():
    one, other = (
        FluxTransformerConfig.from_dict(TINY | values)
        for values in ({"out_channels": None}, {"out_channels": 16})
    )
    assert one == other and hash(one) == hash(other)
