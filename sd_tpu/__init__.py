"""Stable Diffusion on JAX: the guide's pipeline, and the parts that the page is made of."""

from sd_tpu.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.pipeline import FlaxStableDiffusionPipeline

__all__ = ["BUNDLED_MODEL", "CheckpointError", "FlaxStableDiffusionPipeline"]
