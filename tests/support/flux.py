"""Tiny FLUX.1 pipelines of PyTorch's, random in every parameter."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTextModel, CLIPTokenizer

from sd_tpu import BUNDLED_MODEL
from tests.support.sd3 import t5_encoder, t5_tokenizer
from tests.support.tiny import stir, text_encoder, wide_vae

TRANSFORMER: dict[str, Any] = dict(
    in_channels=64,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=40,
    pooled_projection_dim=64,
    axes_dims_rope=(4, 6, 6),
)
DYNAMIC = dict(base_shift=0.5, max_shift=1.15, shift=3.0, use_dynamic_shifting=True)


def make_pipeline(folder: Path, *, dev: bool, **transformer) -> diffusers.FluxPipeline:
    """Return a tiny schnell or dev; its T5's tokenizer goes to `folder`.

    Values of the transformer are in place of those that it has by default.
    """
    torch.manual_seed(0)
    values = {**TRANSFORMER, "guidance_embeds": dev, **transformer}
    parts = dict(
        transformer=diffusers.FluxTransformer2DModel(**values),
        vae=wide_vae(0.3611, 0.1159),
        text_encoder=text_encoder(CLIPTextModel, values["pooled_projection_dim"], "quick_gelu"),
        text_encoder_2=t5_encoder(values["joint_attention_dim"]),
    )
    stir(parts.values())
    return diffusers.FluxPipeline(
        **parts,
        tokenizer=CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer"),
        tokenizer_2=t5_tokenizer(folder),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**DYNAMIC if dev else {}),
    )
