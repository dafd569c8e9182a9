"""The three networks of Stable Diffusion as Flax NNX modules, channels last.

Attributes are spelled as in diffusers and transformers checkpoints, so that
`down_blocks.0.resnets.1.conv1` is a path in both.
"""

from sd_tpu.models.text_encoder import CLIPTextModel
from sd_tpu.models.unet import UNet2DConditionModel
from sd_tpu.models.vae import AutoencoderKL

__all__ = ["AutoencoderKL", "CLIPTextModel", "UNet2DConditionModel"]
