"""The transformer of Stable Diffusion 3 against diffusers', and the norm of its heads."""

from functools import partial

import diffusers
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.normalization import RMSNorm as TorchRMSNorm
from flax import nnx
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import SD3TransformerConfig
from sd_tpu.models import SD3Transformer2DModel
from sd_tpu.models.layers import RMSNorm
from tests.support.parity import assert_agrees
from tests.support.transformer_network import WEIGHTS, Inputs, TransformerNetworkTests


def published(heads: int, side: int, layers: int = 24, **values) -> dict:
    """Return a config of full size."""
    return dict(
        sample_size=128,
        num_layers=layers,
        num_attention_heads=heads,
        caption_projection_dim=64 * heads,
        pos_embed_max_size=side,
        **values,
    )


class TestSD3Transformer(TransformerNetworkTests):
    network, config = SD3Transformer2DModel, SD3TransformerConfig
    theirs = diffusers.SD3Transformer2DModel
    tiny = dict(
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
    kinds = {
        "SD 3.5 medium": dict(
            qk_norm="rms_norm", dual_attention_layers=(0, 1), pos_embed_max_size=12
        ),
        "SD 3": dict(),
        "SD 3.5 large": dict(qk_norm="rms_norm"),
        "dual attention in the last block, larger patches": dict(
            dual_attention_layers=(2, 1), patch_size=4
        ),
    }
    published = {
        "SD 3 medium": published(24, 192),
        "SD 3.5 medium": published(
            24, 384, qk_norm="rms_norm", dual_attention_layers=tuple(range(13))
        ),
        "SD 3.5 large": published(38, 192, 38, qk_norm="rms_norm"),
    }
    scales = dict.fromkeys(("pos_embed.", "context_embedder", "timestep_embedder.linear_2"), 0.1)
    sizes = [(12, 8), (8, 8), (4, 12)]
    many = [dict(height=48, width=44)]
    shallow = dict(num_layers=1, pos_embed_max_size=24)
    ordered = False
    misfits = [
        (dict(height=7, width=8), "7x8 latents do not divide into patches of 2"),
        (dict(height=8, width=16), "positions for 14x14"),
    ]
    refused = [
        ("qk_norm", "layer_norm"),
        ("caption_projection_dim", 32),
        ("sample_size", 9),
        ("sample_size", 16),
        ("num_layers", 10**9),
        ("patch_size", 0),
        ("dual_attention_layers", "all"),
    ]
    equal = [{"dual_attention_layers": [0, 1]}, {"dual_attention_layers": [1, 0, 0, 12]}]

    @classmethod
    def moved(cls, **values) -> torch.nn.Module:
        """Return diffusers' network with small queries and keys too, where they are normed."""
        made = super().moved(**values)
        if made.config.qk_norm:
            for name, tensor in made.state_dict().items():
                if any(part in name for part in ("to_q", "to_k", "add_q_proj", "add_k_proj")):
                    tensor *= 0.1
        return made

    @classmethod
    def inputs(cls, kind, height, width, times=(961.0, 3.5)) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 4), "text": (2, 7, 12), "pooled": (2, 10)}
        arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        return {**arrays, "timesteps": np.array(times, np.float32)}

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text, pooled) -> np.ndarray:
        x, timesteps, text, pooled = map(torch.tensor, (x, timesteps, text, pooled))
        out = reference(x.permute(0, 3, 1, 2), text, pooled, timesteps).sample
        return out.permute(0, 2, 3, 1).numpy()


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
