"""Tiny Z-Image pipelines of PyTorch's, random in every parameter."""

from pathlib import Path

import diffusers
import torch
import transformers

from tests.support.qwen import make_tokenizer

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
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64, 64),
            layers_per_block=1,
            latent_channels=16,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=transformers.Qwen3Model(
            transformers.Qwen3Config(
                vocab_size=300,
                hidden_size=TEXT,
                intermediate_size=80,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rope_theta=1e6,
            )
        ),
    )
    with torch.no_grad():
        for part in parts.values():
            for tensor in part.parameters():
                tensor += 0.1 * torch.randn_like(tensor)
            part.eval()
    return diffusers.ZImagePipeline(
        **parts,
        tokenizer=make_tokenizer(folder),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
    )
