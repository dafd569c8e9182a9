"""The transformer of FLUX.1 against diffusers'."""

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers import FluxTransformer2DModel as TorchTransformer

from sd_tpu.checkpoint.config import FluxTransformerConfig
from sd_tpu.models import FluxTransformer2DModel
from tests.support.transformer_network import Inputs, TransformerNetworkTests


class TestFluxTransformer(TransformerNetworkTests):
    network, theirs, config = FluxTransformer2DModel, TorchTransformer, FluxTransformerConfig
    tiny = dict(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=[4, 6, 6],
    )
    kinds = {
        "dev": dict(guidance_embeds=True),
        "schnell": dict(),
        "other sizes": dict(
            out_channels=12, num_layers=2, num_single_layers=1, axes_dims_rope=[2, 4, 10]
        ),
    }
    published = {"dev": dict(guidance_embeds=True)}  # of which schnell has all but the guidance
    scales = dict.fromkeys(
        """x_embedder context_embedder timestep_embedder.linear_2 guidance_embedder.linear_2
        to_q. to_k. add_q_proj add_k_proj""".split(),
        0.05,
    )
    sizes = [(12, 6), (2, 2)]
    many = [dict(height=64, width=32, words=256), dict(height=40, width=46, words=256)]
    shallow = dict(num_single_layers=1, guidance_embeds=True)
    ordered = False
    refused = [
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
    ]
    equal = [{"out_channels": None}, {"out_channels": 16}]

    @classmethod
    def inputs(cls, kind, height, width, times=(961.0, 3.5), words=7) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 4), "text": (2, words, 12), "pooled": (2, 10)}
        guidance = {"guidance": np.array([3.5, 1.0], np.float32)} if kind == "dev" else {}
        return {
            "timesteps": np.array(times, np.float32),
            **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()},
            **guidance,
        }

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text, pooled, guidance=None) -> np.ndarray:
        """Draw with the patches, the positions and the thousandths of timesteps of the pipeline."""
        batch, height, width, channels = x.shape
        latents = torch.tensor(x.transpose(0, 3, 1, 2).copy())
        out = reference(
            FluxPipeline._pack_latents(latents, batch, channels, height, width),
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
