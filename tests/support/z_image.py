"""Tiny Z-Image pipelines of PyTorch's, random in every parameter."""

from pathlib import Path

import diffusers
import torch
import transformers

from tests.support.qwen import make_config, make_tokenizer
from tests.support.tiny import stir, wide_vae

TEXT = 48  # channels of the language model


def make_pipeline(folder: Path, shift: float = 3.0) -> diffusers.ZImagePipeline:
    """Return a tiny pipeline; its tokenizer goes to `folder`, of bytes and Qwen's marks."""
    torch.manual_seed(0)
    parts = dict(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=16,
            dim=48,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=3,
            n_kv_heads=3,
            cap_feat_dim=TEXT,
            axes_dims=[4, 6, 6],
            axes_lens=[1536, 64, 64],
        ),
        vae=wide_vae(0.3611, 0.1159),
        text_encoder=transformers.Qwen3Model(make_config(TEXT)),
    )
    stir(parts.values())
    return diffusers.ZImagePipeline(
        **parts,
        tokenizer=make_tokenizer(folder),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
    )
