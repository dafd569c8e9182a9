"""Configs of published models."""

import inspect

import diffusers

from benchmarks.make_checkpoint import MODELS


def controlnet_of(unet: dict) -> dict:
    """Return the config of a ControlNet for a UNet of this one."""
    names = inspect.signature(diffusers.ControlNetModel).parameters
    return {name: value for name, value in unet.items() if name in names}


# The published configs that no checkpoint of the benchmarks has, as far as they shape the networks.
SDXL = MODELS["sdxl"]["unet"]
PUBLISHED = MODELS | {
    "ssd-1b": dict(
        unet=SDXL
        | dict(
            transformer_layers_per_block=[1, [2, 2], [4, 4]],
            mid_block_type="UNetMidBlock2D",
            reverse_transformer_layers_per_block=[[4, 4, 10], [2, 1, 1], 1],
        )
    ),
    "vega": dict(
        unet=SDXL
        | dict(
            transformer_layers_per_block=[1, [1, 1], [2, 2]],
            mid_block_type="UNetMidBlock2D",
            reverse_transformer_layers_per_block=[[2, 2, 2], [1, 1, 1], 1],
        )
    ),
    "lcm": dict(unet=MODELS["sd14"]["unet"] | dict(time_cond_proj_dim=256)),
    "bk-sdm-small": dict(
        unet=MODELS["sd14"]["unet"] | dict(layers_per_block=1, mid_block_type=None)
    ),
    "bk-sdm-tiny": dict(
        unet=MODELS["sd14"]["unet"]
        | dict(
            layers_per_block=1,
            mid_block_type=None,
            block_out_channels=[320, 640, 1280],
            down_block_types=["CrossAttnDownBlock2D"] * 3,
            up_block_types=["CrossAttnUpBlock2D"] * 3,
        )
    ),
    "taesd": dict(decoder={}),
    "sd14-canny": dict(controlnet=controlnet_of(MODELS["sd14"]["unet"])),
    "sdxl-canny": dict(controlnet=controlnet_of(SDXL)),
}
