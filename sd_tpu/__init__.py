"""Stable Diffusion on JAX: the Flax classes that diffusers had, and the parts that the page is made
of."""

import os

# Without PyTorch, transformers begins by warning that "models won't be available". None are meant
# to be: only its tokenizer is used. It reads this when it is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from sd_tpu.checkpoint.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.pipelines.beginning import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
)
from sd_tpu.pipelines.controlnet import FlaxStableDiffusionControlNetPipeline
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    FlaxControlNetModel,
    FlaxUNet2DConditionModel,
)
from sd_tpu.pipelines.pipeline import FlaxDiffusionPipeline
from sd_tpu.pipelines.schedulers import (
    FlaxDDIMScheduler,
    FlaxDDPMScheduler,
    FlaxDPMSolverMultistepScheduler,
    FlaxEulerDiscreteScheduler,
    FlaxKarrasVeScheduler,
    FlaxLMSDiscreteScheduler,
    FlaxPNDMScheduler,
)
from sd_tpu.pipelines.stable_diffusion import FlaxStableDiffusionPipeline
from sd_tpu.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

__all__ = [
    "BUNDLED_MODEL",
    "CheckpointError",
    "FlaxAutoencoderKL",
    "FlaxCLIPTextModel",
    "FlaxCLIPTextModelWithProjection",
    "FlaxControlNetModel",
    "FlaxDDIMScheduler",
    "FlaxDDPMScheduler",
    "FlaxDPMSolverMultistepScheduler",
    "FlaxDiffusionPipeline",
    "FlaxEulerDiscreteScheduler",
    "FlaxKarrasVeScheduler",
    "FlaxLMSDiscreteScheduler",
    "FlaxPNDMScheduler",
    "FlaxStableDiffusionControlNetPipeline",
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionXLPipeline",
    "FlaxUNet2DConditionModel",
]
