"""The guide's API against PyTorch's pipeline."""

import jax
import numpy as np
import pytest
import torch

from sd_tpu import FlaxStableDiffusionPipeline

PROMPTS = ["a cat on a mat", "two dogs", "", "a castle in the clouds, watercolour"]


def differing(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Share of the uint8 values of two float image arrays that differ by more than 1."""
    a, b = ((np.asarray(x) * 255).round().astype(int) for x in (ours, theirs))
    return float(np.mean(np.abs(a - b) > 1))


def test_given_the_same_latents_the_pictures_are_those_of_pytorch(
    layout, torch_pipelines, checkpoints
):
    reference = torch_pipelines[layout]
    latents = np.random.default_rng(0).standard_normal((4, 4, 16, 16)).astype(np.float32)
    reference.set_progress_bar_config(disable=True)
    theirs = reference(PROMPTS, num_inference_steps=12, guidance_scale=5.0, output_type="np",
                       negative_prompt=["ugly"] * 4, latents=torch.tensor(latents)).images
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(checkpoints[layout])
    ours = pipeline(pipeline.prepare_inputs(PROMPTS), params, jax.random.PRNGKey(0), 12,
                    guidance_scale=5.0, latents=latents,
                    neg_prompt_ids=pipeline.prepare_inputs(["ugly"] * 4)).images
    assert ours.shape == (4, 32, 32, 3)
    assert np.std(theirs) > 0.01
    assert differing(ours, theirs) <= 0.001
