"""Stable Diffusion on JAX: the guide's pipeline, and the parts that the page is made of."""

import os

# Without PyTorch, transformers begins by warning that "models won't be available". None are meant
# to be: only its tokenizer is used. It reads this when it is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from sd_tpu.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.pipeline import FlaxStableDiffusionPipeline

__all__ = ["BUNDLED_MODEL", "CheckpointError", "FlaxStableDiffusionPipeline"]
