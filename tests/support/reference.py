"""PyTorch's pipelines of tiny models, which are what ours are compared with."""

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sd_tpu import BUNDLED_MODEL

LAYOUTS = {
    # The differences between the generations that change what is computed.
    "sd1": dict(
        text=dict(hidden_act="quick_gelu", num_hidden_layers=3),
        unet=dict(attention_head_dim=4, use_linear_projection=False),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
        ),
    ),
    "sd2": dict(
        text=dict(hidden_act="gelu", num_hidden_layers=2),
        unet=dict(attention_head_dim=(2, 4), use_linear_projection=True, upcast_attention=True),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type="v_prediction",
        ),
    ),
}


# Where what a network computes is not looked at: a third of the blocks, which are compiled sooner.
LEAST = dict(
    block_out_channels=(16,),
    attention_head_dim=2,
    down_block_types=("DownBlock2D",),
    up_block_types=("UpBlock2D",),
)


def make_torch_pipeline(
    layout: str, seed: int = 0, levels: int = 3, **unet
) -> diffusers.StableDiffusionPipeline:
    """Return a randomly initialised tiny StableDiffusionPipeline, of 8x8 latents.

    Args:
        layout: of LAYOUTS.
        seed: of the parameters.
        levels: of the autoencoder: a picture has `2 ** (levels - 1)` pixels a latent, in each
            direction.
        unet: values of its config, in place of those that it has by default.
    """
    torch.manual_seed(seed)
    parts = LAYOUTS[layout]
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            max_position_embeddings=77,
            **parts["text"],
        )
    )
    values = dict(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
    )
    network = diffusers.UNet2DConditionModel(**{**values, **parts["unet"], **unet})
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, *[16] * (levels - 1)),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
    )
    return diffusers.StableDiffusionPipeline(
        text_encoder=text_encoder.eval(),
        unet=network.eval(),
        vae=vae.eval(),
        tokenizer=CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer"),
        scheduler=parts["scheduler"],
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
