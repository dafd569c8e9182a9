"""Tiny networks beside a model, of random weights: ControlNets, IP-Adapters, decoders."""

from pathlib import Path

import diffusers
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection


def make_controlnet(
    unet: diffusers.UNet2DConditionModel, seed: int = 1, **values
) -> diffusers.ControlNetModel:
    """Return a ControlNet of random weights for a tiny UNet, whose maps are told apart by its
    pictures.
    """
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel.from_unet(
        unet,
        load_weights_from_unet=False,
        **{"conditioning_embedding_out_channels": (8, 16, 16), **values},
    )
    stds = {
        "controlnet_down_blocks": 1.0,
        "controlnet_mid_block": 1.0,
        "controlnet_cond_embedding": 0.3,
    }
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, std=stds.get(name.split(".")[0], 0.1))
    return made.eval()


def make_tiny(levels: int = 3) -> diffusers.AutoencoderTiny:
    torch.manual_seed(3)
    widths, blocks = (8,) * levels, (1,) * levels
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
    )
    torch.nn.init.normal_(tiny.decoder.layers[-1].weight, std=0.3)  # colours
    return tiny


ENCODER = dict(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=28,
    patch_size=7,
    projection_dim=32,
)


def make_encoder(folder: Path, **values) -> None:
    """Return a tiny image encoder of random weights, as transformers writes it."""
    torch.manual_seed(2)
    made = CLIPVisionModelWithProjection(CLIPVisionConfig(**{**ENCODER, **values}))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder)


def make_adapter(
    unet: diffusers.UNet2DConditionModel,
    file: Path,
    *,
    plus: bool = False,
    seed: int = 1,
    encoder: dict = ENCODER,
    loud: float = 1.0,
) -> None:
    """Write an IP-Adapter of random weights for a UNet, named as h94/IP-Adapter's files are."""
    rng, width = np.random.default_rng(seed), unet.config.cross_attention_dim
    tensors = {}

    def put(name: str, *shape: int, std: float = 0.3) -> None:
        tensors[name] = (std * rng.standard_normal(shape)).astype(np.float32)

    if plus:
        hidden, heads, tokens = 40, 2, 6
        put("image_proj.latents", 1, tokens, hidden)
        for name, outputs, inputs in (
            ("proj_in", hidden, encoder["hidden_size"]),
            ("proj_out", width, hidden),
        ):
            put(f"image_proj.{name}.weight", outputs, inputs)
            put(f"image_proj.{name}.bias", outputs)
        for layer in range(4):  # the only depth that diffusers has
            place = f"image_proj.layers.{layer}"
            for norm in ("0.norm1", "0.norm2", "1.0"):
                put(f"{place}.{norm}.weight", hidden)
                put(f"{place}.{norm}.bias", hidden)
            put(f"{place}.0.to_q.weight", 64 * heads, hidden)
            put(f"{place}.0.to_kv.weight", 128 * heads, hidden)
            put(f"{place}.0.to_out.weight", hidden, 64 * heads)
            put(f"{place}.1.1.weight", 4 * hidden, hidden)
            put(f"{place}.1.3.weight", hidden, 4 * hidden)
    else:
        put("image_proj.proj.weight", 4 * width, encoder["projection_dim"])
        put("image_proj.proj.bias", 4 * width)
    norm = "norm_out" if plus else "norm"
    put(f"image_proj.{norm}.weight", width, std=1.0)
    put(f"image_proj.{norm}.bias", width)
    attending = [name for name in unet.attn_processors if "attn2" in name]
    for number, name in enumerate(attending):
        channels = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for part in ("to_k_ip", "to_v_ip"):
            put(f"ip_adapter.{2 * number + 1}.{part}.weight", channels, width, std=loud)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
