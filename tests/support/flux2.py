"""Tiny FLUX.2 klein pipelines of PyTorch's, random in every parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import diffusers
import torch
import transformers

from sd_tpu.families.flux2_klein import Flux2Klein
from tests.support.qwen import make_config, make_tokenizer
from tests.support.tiny import stir

TEXT = 16  # channels of the language model
SHORT = 128  # tokens
FEW = (1, 2, 4)  # not 9, 18 and 27, which take most of the time of tests


@contextmanager
def few_layers() -> Iterator[None]:
    """Have states taken of the first layers, in models that are made or opened meanwhile.

    diffusers is to be told, as `text_encoder_out_layers`.
    """
    with mock.patch.object(Flux2Klein, "taken", FEW):
        yield


@contextmanager
def few_tokens() -> Iterator[None]:
    """Have texts of fewer tokens than diffusers takes, where nothing is compared with it."""
    with (
        mock.patch("sd_tpu.families.flux2_klein.TOKENS", SHORT),
        mock.patch.object(Flux2Klein, "buckets", (SHORT,)),
    ):
        yield


def make_pipeline(
    folder: Path, *, distilled: bool, heads: int = 3, single_layers: int = 2
) -> diffusers.Flux2KleinPipeline:
    """Return a tiny pipeline; its tokenizer goes to `folder`."""
    torch.manual_seed(0)
    parts = dict(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=32,
            num_layers=1,
            num_single_layers=single_layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=3 * TEXT,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(32, 64, 64),
            layers_per_block=1,
            latent_channels=8,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
        ),
        text_encoder=transformers.Qwen3ForCausalLM(
            make_config(
                TEXT,
                intermediate_size=24,
                num_hidden_layers=Flux2Klein.taken[-1] + 2,  # more than are read
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
            )
        ),
    )
    stir(parts.values())
    with torch.no_grad():
        statistics = parts["vae"].bn
        statistics.running_mean += 0.3 * torch.randn(32)
        statistics.running_var *= torch.rand(32) + 0.5
    return diffusers.Flux2KleinPipeline(
        **parts,
        tokenizer=make_tokenizer(folder),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        is_distilled=distilled,
    )
