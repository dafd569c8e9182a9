"""The autoencoder of Qwen-Image, by convolutions of two dimensions, against diffusers'."""

import json
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, QwenImageVAEConfig
from sd_tpu.families.anima import Anima
from sd_tpu.families.latent_model import vae_config
from sd_tpu.models import AutoencoderKLQwenImage
from sd_tpu.models.qwen_image_vae import PixelNorm
from tests.support.parity import assert_agrees, compiled, relative
from tests.support.tiny import stir

DECODE = AutoencoderKLQwenImage.decode
WEIGHTS = "diffusion_pytorch_model.safetensors"
STATISTICS = dict(latents_mean=[-0.5, 1.5, 0.1, 2.0], latents_std=[2.5, 1.5, 3.0, 0.5])
KINDS = {
    "four levels": dict(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1),
    "three levels, more blocks": dict(
        base_dim=12, dim_mult=[1, 3, 2], num_res_blocks=2, temperal_downsample=[True, False]
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind) -> diffusers.AutoencoderKLQwenImage:
    torch.manual_seed(0)
    made = diffusers.AutoencoderKLQwenImage(z_dim=4, **STATISTICS, **KINDS[kind])
    stir([made])
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    reference.save_pretrained(folder)
    return folder


def opened(folder, dtype=jnp.float32):
    """Return the network's graph and its parameters, without those for a video's later frames."""
    config = vae_config(json.loads((folder / "config.json").read_text()))
    assert isinstance(config, QwenImageVAEConfig)
    graph, shapes = weights.abstract(partial(AutoencoderKLQwenImage, config, dtype=dtype))
    stored = weights.contents([folder / WEIGHTS])
    stored = {name: each for name, each in stored.items() if not Anima.unread("vae", name)}
    return graph, weights.load_stored(stored, shapes, source=folder)


@pytest.fixture(scope="module")
def ours(folder):
    return nnx.merge(*opened(folder))


def photo(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (1, height, width, 3)).astype(np.float32)


def latents(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, height, width, 4), np.float32)


def frame(x: np.ndarray) -> torch.Tensor:
    """[1, H, W, C] -> a video of one frame, channels first."""
    return torch.tensor(x).permute(0, 3, 1, 2)[:, :, None]


def whitening() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(values).view(1, 4, 1, 1, 1) for values in STATISTICS.values())


@pytest.mark.parametrize("size", [(32, 32), (16, 40)], ids=str)
def test_latents_are_those_of_diffusers(kind, reference, ours, size):
    mean, std = whitening()
    found = reference.encode(frame(photo(*size))).latent_dist
    expected = ((found.mean - mean) / std)[:, :, 0].permute(0, 2, 3, 1)
    ours_mean, ours_logvar = compiled(AutoencoderKLQwenImage.encode, ours, photo(*size))
    assert_agrees(f"AutoencoderKLQwenImage, {kind}, {size}, encoded", ours_mean, expected)
    logvar = (found.logvar - 2 * std.log())[:, :, 0].permute(0, 2, 3, 1)
    assert_agrees(f"AutoencoderKLQwenImage, {kind}, {size}, log-variance", ours_logvar, logvar)


@pytest.mark.parametrize("size", [(4, 4), (2, 5)], ids=str)
def test_pictures_are_those_of_diffusers(kind, reference, ours, size):
    mean, std = whitening()
    given = frame(latents(*size)) * std + mean
    expected = reference.decode(given).sample[:, :, 0].permute(0, 2, 3, 1).numpy()
    found = np.clip(compiled(DECODE, ours, latents(*size)), -1, 1)  # as diffusers' is
    assert np.mean(np.abs(expected) < 1) > 0.5
    assert_agrees(f"AutoencoderKLQwenImage, {kind}, {size}, decoded", found, expected)


def test_kernels_are_the_last_slices_in_time(folder, ours):
    kernel = load_file(folder / WEIGHTS)["encoder.conv_in.weight"]
    assert kernel.shape[2] == 3
    expected = kernel[:, :, -1].permute(2, 3, 1, 0).numpy()
    assert np.array_equal(ours.encoder.conv_in.kernel[...], expected)


def test_in_bfloat16_it_stays_near(folder, ours):
    found = compiled(DECODE, nnx.merge(*opened(folder, jnp.bfloat16)), latents(4, 4))
    assert found.dtype == jnp.float32
    assert 1e-4 < relative(found, compiled(DECODE, ours, latents(4, 4))) < 0.2


def test_a_pixel_of_zeros_stays_so():
    norm = PixelNorm(4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert np.array_equal(norm(jnp.zeros((1, 2, 2, 4))), np.zeros((1, 2, 2, 4)))


def test_a_kernel_of_another_size_is_refused(folder, tmp_path):
    tensors = load_file(folder / WEIGHTS)
    tensors["encoder.conv_in.weight"] = tensors["encoder.conv_in.weight"][..., :2].contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"encoder\.conv_in\.weight: the file has"):
        opened(tmp_path)


def test_parameters_of_full_size_are_those_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLQwenImage().state_dict()
    config = QwenImageVAEConfig.from_dict({})
    assert (config.downscale, config.channels) == (8, 16)
    _, ours = weights.abstract(partial(AutoencoderKLQwenImage, config))
    expected = {
        name: (*value.shape[:2], *value.shape[3:]) if value.ndim == 5 else tuple(value.shape)
        for name, value in theirs.items()
        if ".time_conv." not in name
    }
    assert weights.shapes(ours) == expected


@pytest.mark.parametrize(
    "name, value",
    [
        ("attn_scales", [0.5]),
        ("input_channels", 4),
        ("dim_mult", []),
        ("base_dim", 0),
        ("z_dim", "16"),
        ("num_res_blocks", 99),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError) as caught:
        QwenImageVAEConfig.from_dict({name: value})
    message = str(caught.value)
    assert f"{name}={value!r}" in message and "\n" not in message


def test_large_pictures_are_decoded_by_tiles(ours):
    jaxpr = str(jax.make_jaxpr(ours.decode)(jax.ShapeDtypeStruct((1, 160, 160, 4), jnp.float32)))
    assert "while" in jaxpr or "scan" in jaxpr
