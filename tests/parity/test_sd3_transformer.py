"""The transformer of Stable Diffusion 3 against diffusers', at random weights.

Weights and config travel by way of the files that diffusers writes. Each comparison prints its
relative error: `pytest -rP tests/parity/test_sd3_transformer.py | grep parity`.
"""

import json
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.normalization import RMSNorm as TorchRMSNorm
from flax import nnx
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, SD3TransformerConfig
from sd_tpu.models import SD3Transformer2DModel
from sd_tpu.models.layers import RMSNorm

TOLERANCE = 1e-5
WEIGHTS = "diffusion_pytorch_model.safetensors"

TINY = dict(
    sample_size=8,
    in_channels=4,
    out_channels=3,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=3,
    joint_attention_dim=12,
    caption_projection_dim=24,
    pooled_projection_dim=10,
    pos_embed_max_size=7,
)
KINDS = {
    "SD 3": TINY,
    "SD 3.5 medium": TINY
    | dict(qk_norm="rms_norm", dual_attention_layers=(0, 1), pos_embed_max_size=12),
    "SD 3.5 large": TINY | dict(qk_norm="rms_norm"),
    "dual attention in the last block, larger patches": TINY
    | dict(dual_attention_layers=(2, 1), patch_size=4),
}
PUBLISHED = {
    "SD 3 medium": dict(num_layers=24, num_attention_heads=24, pos_embed_max_size=192),
    "SD 3.5 medium": dict(
        num_layers=24,
        num_attention_heads=24,
        pos_embed_max_size=384,
        qk_norm="rms_norm",
        dual_attention_layers=tuple(range(13)),
    ),
    "SD 3.5 large": dict(
        num_layers=38, num_attention_heads=38, pos_embed_max_size=192, qk_norm="rms_norm"
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind) -> diffusers.SD3Transformer2DModel:
    """Diffusers' own, every parameter moved, and the positions, which come with a checkpoint.

    What norms are given is small, so that eps counts; so is what comes of the timesteps, whose
    angles of up to 1000 are rounded to float32 in one way by PyTorch and in another by JAX.
    """
    torch.manual_seed(0)
    made = diffusers.SD3Transformer2DModel(**KINDS[kind])
    small = ["pos_embed.", "context_embedder", "timestep_embedder.linear_2"]
    if made.config.qk_norm:
        small += ["to_q", "to_k", "add_q_proj", "add_k_proj"]
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor += 0.1 * torch.randn_like(tensor)
            if any(part in name for part in small):
                tensor *= 0.1
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """Folder that diffusers writes of the network."""
    folder = tmp_path_factory.mktemp("transformer")
    reference.save_pretrained(folder)
    return folder


def opened(folder, dtype=jnp.float32):
    """Return ours as one program of a folder's weights and of the inputs."""
    config = SD3TransformerConfig.from_dict(json.loads((folder / "config.json").read_text()))
    graph, shapes = weights.abstract(partial(SD3Transformer2DModel, config, dtype=dtype))
    state = weights.load([folder / WEIGHTS], shapes)
    return partial(jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)), state)


@pytest.fixture(scope="module")
def ours(folder):
    return opened(folder)


def inputs(height: int = 8, width: int = 8, times: tuple[float, float] = (961.0, 3.5)) -> list:
    """Latents, timesteps, text and pooled text of a batch of two, channels last."""
    rng = np.random.default_rng(0)
    shapes = (2, height, width, 4), (2, 7, 12), (2, 10)
    latents, text, pooled = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return [latents, np.array(times, np.float32), text, pooled]


def of_diffusers(reference, latents, timesteps, text, pooled) -> np.ndarray:
    x, timesteps, text, pooled = map(torch.tensor, (latents, timesteps, text, pooled))
    out = reference(x.permute(0, 3, 1, 2), text, pooled, timesteps).sample
    return out.permute(0, 2, 3, 1).numpy()


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| of two arrays of one shape."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_agrees(name: str, ours, theirs):
    error = relative(ours, theirs)
    print(f"parity | {name} | {error:.1e} |")
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("size", [(8, 8), (12, 8), (4, 12)], ids=str)
@pytest.mark.parametrize("times", [(961.0, 3.5), (0.25, 1000.0)], ids=str)
def test_the_transformer_is_that_of_diffusers(kind, reference, ours, size, times):
    given = inputs(*size, times)
    found = ours(*given)
    assert found.dtype == jnp.float32
    assert_agrees(
        f"SD3Transformer2DModel, {kind}, {size[0]}x{size[1]}, timesteps {times[0]} and {times[1]}",
        found,
        of_diffusers(reference, *given),
    )


@pytest.mark.parametrize("number", range(4), ids=["latents", "timesteps", "text", "pooled"])
def test_every_input_of_a_row_matters_to_that_row_alone(ours, number):
    given = inputs()
    before = ours(*given)
    given[number] = given[number].copy()
    given[number][1] += 0.5
    after = ours(*given)
    assert relative(after[0], before[0]) < 1e-6
    assert relative(after[1], before[1]) > 1e-3


def test_every_part_of_the_latents_and_of_the_text_matters(ours):
    given = inputs()

    def total(latents, text):
        return jnp.sum(jnp.sin(ours(latents, given[1], text, given[3])))

    for gradient in jax.grad(total, argnums=(0, 1))(given[0], given[2]):
        assert (np.abs(gradient) > 1e-7).all()


def test_in_bfloat16_it_stays_near(folder, ours):
    given = inputs()
    found = opened(folder, jnp.bfloat16)(*given)
    assert found.dtype == jnp.float32
    assert 1e-4 < relative(found, ours(*given)) < 0.1


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.slow("builds networks of up to 38 blocks, without their numbers")
def test_parameters_of_full_size_are_those_of_diffusers(name):
    config = PUBLISHED[name] | dict(
        caption_projection_dim=64 * PUBLISHED[name]["num_attention_heads"]
    )
    with torch.device("meta"):
        theirs = diffusers.SD3Transformer2DModel(**config).state_dict()
    _, ours = weights.abstract(partial(SD3Transformer2DModel, SD3TransformerConfig(**config)))
    assert weights.shapes(ours) == {name: tuple(value.shape) for name, value in theirs.items()}


def test_rms_norm_is_that_of_diffusers(tmp_path):
    torch.manual_seed(0)
    theirs = TorchRMSNorm(24, eps=1e-3).requires_grad_(False)
    theirs.weight += 0.3 * torch.randn(24)
    save_file(theirs.state_dict(), tmp_path / WEIGHTS)
    graph, shapes = weights.abstract(partial(RMSNorm, 24, 1e-3, dtype=jnp.float32))
    ours = nnx.merge(graph, weights.load([tmp_path / WEIGHTS], shapes))
    x = 0.01 * torch.randn(2, 5, 24)  # small: eps counts
    assert_agrees("RMSNorm", ours(x.numpy()), theirs(x))


def test_rms_norm_takes_its_mean_in_float32():
    norm = RMSNorm(512, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 512)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True))
    found = norm(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8)


@pytest.mark.parametrize(
    "size, sentence",
    [((7, 8), "7x8 latents do not divide into patches of 2"), ((8, 16), "positions for 14x14")],
)
def test_sizes_without_whole_patches_or_positions_are_refused(size, sentence):
    def drawn():
        model = SD3Transformer2DModel(SD3TransformerConfig(**TINY), rngs=nnx.Rngs(0))
        return model(*map(jnp.asarray, inputs(*size)))

    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(drawn)


@pytest.mark.parametrize(
    "name, value",
    [
        ("qk_norm", "layer_norm"),
        ("caption_projection_dim", 32),
        ("sample_size", 9),
        ("sample_size", 16),
        ("num_layers", 10**9),
        ("patch_size", 0),
        ("dual_attention_layers", "all"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError, match=f"{name}={value!r}") as caught:
        SD3TransformerConfig.from_dict(TINY | {name: value})
    assert "\n" not in str(caught.value)


def test_configs_of_one_computation_are_equal():
    one, other = (
        SD3TransformerConfig.from_dict(TINY | {"dual_attention_layers": numbers})
        for numbers in ([0, 1], [1, 0, 0, 12])
    )
    assert one == other and one.size == (8, 8)
