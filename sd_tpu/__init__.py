"""Stable Diffusion on JAX: the Flax classes that diffusers had, and the parts that the page is made
of. Each is imported when it is first asked for: together they take seconds."""

import os

import lazy_loader

# Without PyTorch, transformers begins by warning that "models won't be available". None are meant
# to be: only its tokenizer is used. It reads this when it is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpoint.config": ["BUNDLED_MODEL", "CheckpointError"],
        "pipelines.beginning": [
            "FlaxStableDiffusionImg2ImgPipeline",
            "FlaxStableDiffusionInpaintPipeline",
        ],
        "pipelines.controlnet": ["FlaxStableDiffusionControlNetPipeline"],
        "pipelines.models": [
            "FlaxAutoencoderKL",
            "FlaxCLIPTextModel",
            "FlaxCLIPTextModelWithProjection",
            "FlaxControlNetModel",
            "FlaxStableDiffusionSafetyChecker",
            "FlaxUNet2DConditionModel",
        ],
        "pipelines.pipeline": ["FlaxDiffusionPipeline"],
        "pipelines.schedulers": [
            "FlaxDDIMScheduler",
            "FlaxDDPMScheduler",
            "FlaxDPMSolverMultistepScheduler",
            "FlaxEulerDiscreteScheduler",
            "FlaxKarrasVeScheduler",
            "FlaxLMSDiscreteScheduler",
            "FlaxPNDMScheduler",
        ],
        "pipelines.stable_diffusion": ["FlaxStableDiffusionPipeline"],
        "pipelines.stable_diffusion_xl": ["FlaxStableDiffusionXLPipeline"],
    },
)
