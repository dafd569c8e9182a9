"""The networks of Stable Diffusion as Flax NNX modules, channels last.

Attributes are spelled as in diffusers and transformers checkpoints, so that
`down_blocks.0.resnets.1.conv1` is a path in both.
"""

from sd_tpu.models.controlnet import ControlNetModel
from sd_tpu.models.ip_adapter import IPAdapter
from sd_tpu.models.safety_checker import StableDiffusionSafetyChecker
from sd_tpu.models.text_encoder import CLIPTextModel, CLIPTextModelWithProjection
from sd_tpu.models.tiny_vae import AutoencoderTiny
from sd_tpu.models.unet import UNet2DConditionModel
from sd_tpu.models.vae import AutoencoderKL

__all__ = [
    "AutoencoderKL",
    "AutoencoderTiny",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "ControlNetModel",
    "IPAdapter",
    "StableDiffusionSafetyChecker",
    "UNet2DConditionModel",
]
