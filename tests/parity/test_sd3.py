"""Stable Diffusion 3 and 3.5: pictures against PyTorch's, files, and what is refused."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion_3 import StableDiffusion3
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from tests.support import sd3
from tests.support.transformer_pictures import (
    JourneyTests,
    Kind,
    StartPictureTests,
    TransformerPictureTests,
)


class TestStableDiffusion3(TransformerPictureTests, StartPictureTests, JourneyTests):
    family = StableDiffusion3
    kinds = {
        "SD 3.5 medium with T5": Kind(dict(kind="SD 3.5 medium", t5=True), 28, 7.0, 0.25),
        "SD 3 without T5": Kind(dict(kind="SD 3", t5=False), 28, 7.0, 0.25),
    }
    prompts = [
        "a cat",
        "a red fox on the left of a very small house, at night, in the style of Klee",
    ]
    asked = dict(seed=3, steps=6, guidance=4.0, negative_prompt="fog")
    size = 32, 32
    samplers = tuple(FLOW_SAMPLERS)
    parts = "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"
    adapted = tuple(
        f"transformer_blocks.0.{name}" for name in ("attn.to_q", "attn.add_k_proj", "ff.net.0.proj")
    )
    misfits = [
        ("transformer", {"pooled_projection_dim": 81}, "pooled texts of 80.*224 and 81"),
        ("vae", {"latent_channels": 4}, "16 channels.*latents have 4"),
    ]
    refused = [(dict(height=72, width=32), "at most 64x64")]

    make_pipeline = staticmethod(sd3.make_pipeline)

    def theirs(self, reference, engine, seed=0, kind="", **values) -> np.ndarray:
        if kind != "Inpaint":
            return super().theirs(reference, engine, seed, kind, **values)
        decode, shift = reference.vae.decode, reference.vae.config.shift_factor
        # diffusers' other pipelines of SD 3 add the shift before they decode, this one forgets it.
        shifted = mock.patch.object(
            reference.vae, "decode", lambda z, **rest: decode(z + shift, **rest)
        )
        with shifted:
            return super().theirs(reference, engine, seed, kind, **values)

    def test_a_shift_by_size_is_refused_when_the_checkpoint_is_opened(
        self, engine, folder, tmp_path
    ):
        shutil.copytree(folder / "model", tmp_path / "model")
        file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
        with pytest.raises(CheckpointError, match="use_dynamic_shifting=true is not supported"):
            Checkpoint.open(tmp_path / "model")
