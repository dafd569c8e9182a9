"""Tiny pipelines of PyTorch's, what the original repositories call the UNet's parameters, and small
machines."""

import os
import re
from collections.abc import Iterable

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sd_tpu import BUNDLED_MODEL


def flags_of_devices(number: int) -> str:
    """XLA's flags for a program that is to see so many devices, not the eight of the tests."""
    eight, flag = os.environ["XLA_FLAGS"], "platform_device_count="
    return eight.replace(f"{flag}8", f"{flag}{number}")


UNETS = {
    # With two or three levels, each other in what the layouts differ in. Heads are as a file that
    # does not tell them makes them: eight in SD 1, of 64 channels in the others.
    "sd1": dict(
        block_out_channels=(32, 64),
        layers_per_block=2,
        attention_head_dim=8,
        cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "sd2": dict(
        block_out_channels=(64, 128),
        layers_per_block=1,
        attention_head_dim=(1, 2),
        cross_attention_dim=128,
        use_linear_projection=True,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "sdxl": dict(
        block_out_channels=(32, 64, 128),
        layers_per_block=2,
        attention_head_dim=(1, 1, 2),
        cross_attention_dim=192,
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2, 3),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=96 + 6 * 8,
    ),
}
# Where pictures are compared and no names: half of the layers or less, which are compiled sooner.
ONE_LEVEL = dict(
    block_out_channels=(32,),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D",),
    up_block_types=("CrossAttnUpBlock2D",),
)
SHALLOW = {
    "sd1": dict(layers_per_block=1),
    "sdxl": dict(ONE_LEVEL, attention_head_dim=(1,), transformer_layers_per_block=(2,)),
}
SCALING = {"sd1": 0.18215, "sd2": 0.18215, "sdxl": 0.13025}
PIPELINES = {
    "sd1": diffusers.StableDiffusionPipeline,
    "sd2": diffusers.StableDiffusionPipeline,
    "sdxl": diffusers.StableDiffusionXLPipeline,
}
V_PREDICTION = dict(prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False)
COMMON = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
SCHEDULERS = {
    "sd1": diffusers.PNDMScheduler(**COMMON, skip_prk_steps=True, timestep_spacing="leading"),
    "sd2": diffusers.DDIMScheduler(**COMMON, **V_PREDICTION),
    "sdxl": diffusers.EulerDiscreteScheduler(**COMMON, timestep_spacing="leading"),
}


def text_encoder(kind, width: int, act: str, **options):
    return kind(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=width // 64,
            hidden_act=act,
            eos_token_id=2,
            bos_token_id=0,
            **options,
        )
    )


def wide_vae(scale: float, shift: float) -> diffusers.AutoencoderKL:
    """Return an autoencoder as those of flow matching have it: 16 channels, no quant_conv."""
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        latent_channels=16,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        scaling_factor=scale,
        shift_factor=shift,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


@torch.no_grad()
def stir(parts: Iterable[torch.nn.Module]) -> None:
    """Add some noise to every parameter of networks."""
    for part in parts:
        for tensor in part.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
        part.eval()


def make_pipeline(layout: str, **changes) -> diffusers.DiffusionPipeline:
    """Return a tiny pipeline of random weights, biases and norms too; `changes` are of its UNet."""
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer")
    parts = dict(
        unet=diffusers.UNet2DConditionModel(
            sample_size=8, norm_num_groups=32, **{**UNETS[layout], **changes}
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64, 64),
            layers_per_block=1,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            scaling_factor=SCALING[layout],
        ),
        tokenizer=tokenizer,
        scheduler=SCHEDULERS[layout],
        text_encoder=text_encoder(CLIPTextModel, 128, "gelu")
        if layout == "sd2"
        else text_encoder(CLIPTextModel, 64, "quick_gelu"),
    )
    if layout == "sdxl":
        parts |= dict(
            tokenizer_2=tokenizer,
            text_encoder_2=text_encoder(
                CLIPTextModelWithProjection, 128, "gelu", projection_dim=96
            ),
        )
    else:
        parts |= dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if name in parts:
            for parameter in parts[name].parameters():
                torch.nn.init.normal_(parameter, std=0.1)
    return PIPELINES[layout](**parts)


def original_unet(name: str, levels: int, layers: int, attends: list[bool]) -> str:
    """Return the name in the original layout; these tables go the package's way reversed."""
    resnet = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "time_emb_proj": "emb_layers.1",
        "conv_shortcut": "skip_connection",
    }
    if match := re.match(r"mid_block\.(\w+)\.(\d)\.(.*)", name):
        kind, number, rest = match.groups()
        where = f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}"
    elif match := re.match(r"(down|up)_blocks\.(\d)\.(\w+)\.(\d)\.(.*)", name):
        way, level, kind, layer, rest = match.groups()
        level, layer = int(level), int(layer)
        if kind == "downsamplers":
            return f"input_blocks.{(level + 1) * (layers + 1)}.0.op.{rest.split('.')[-1]}"
        if kind == "upsamplers":
            index = 2 if attends[::-1][level] else 1
            return f"output_blocks.{(level + 1) * (layers + 1) - 1}.{index}.{rest}"
        first = (
            f"input_blocks.{1 + level * (layers + 1) + layer}"
            if way == "down"
            else (f"output_blocks.{level * (layers + 1) + layer}")
        )
        where = f"{first}.{int(kind == 'attentions')}"
    else:
        for ours, theirs in (
            ("time_embedding.linear_1", "time_embed.0"),
            ("time_embedding.linear_2", "time_embed.2"),
            ("add_embedding.linear_1", "label_emb.0.0"),
            ("add_embedding.linear_2", "label_emb.0.2"),
            ("conv_in", "input_blocks.0.0"),
            ("conv_norm_out", "out.0"),
            ("conv_out", "out.2"),
        ):
            name = name.replace(ours, theirs)
        return name
    if kind == "resnets":
        module, leaf = rest.split(".")
        rest = f"{resnet[module]}.{leaf}"
    return f"{where}.{rest}"
