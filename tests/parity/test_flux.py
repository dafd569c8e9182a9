"""FLUX.1: pictures against PyTorch's, files, and what is refused."""

import importlib
import json
import shutil

import numpy as np
import pytest

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.flux import Flux
from tests.support import flux
from tests.support.pictures import assert_alike
from tests.support.transformer_pictures import (
    JourneyTests,
    Kind,
    StartPictureTests,
    TransformerPictureTests,
)


class TestFlux(TransformerPictureTests, StartPictureTests, JourneyTests):
    family = Flux
    kinds = {
        "dev": Kind(dict(dev=True, num_single_layers=1), 28, 3.5, 0.25, negated=False),
        "schnell": Kind(
            dict(dev=False, num_single_layers=1), 4, 0.0, 0.4, guided=False, negated=False
        ),
    }
    tokens = {"dev": 512, "schnell": 256}
    prompts = ["a cat", "a red fox (with [brackets] and 1:1.5) on the left of a very small house"]
    asked = dict(seed=3, steps=4, guidance=3.0)
    size = 512, 512  # 128 latents of a quarter
    samplers = "euler", "lcm"
    parts = "transformer", "vae", "text_encoder", "text_encoder_2"
    adapted = (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.ff.net.0.proj",
        "single_transformer_blocks.0.proj_out",
    )
    misfits = [
        ("transformer", {"pooled_projection_dim": 65}, "77 tokens and gives 64.* takes 65, of 77"),
        ("text_encoder", {"max_position_embeddings": 60}, "reads 60 tokens"),
        ("transformer", {"joint_attention_dim": 41}, "T5 gives embeddings of 40.*takes 41"),
        ("vae", {"latent_channels": 4}, "16 channels.*latents have 4"),
        ("transformer", {"in_channels": 384, "out_channels": 64}, "takes 96 .* and gives 16"),
    ]
    refused = [(dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads")]

    make_pipeline = staticmethod(flux.make_pipeline)

    @classmethod
    def options(cls, reference, steps) -> dict:
        kind = "dev" if reference.transformer.config.guidance_embeds else "schnell"
        return {"max_sequence_length": cls.tokens[kind]}

    def test_a_prompt_that_is_too_long_is_cut_as_by_pytorch_and_said(self, kind, reference, engine):
        prompt = " ".join(90 * ["a fox."]) + "end"
        ours = self.drawn(engine, prompts=[prompt])
        assert_alike(ours[0], self.theirs(reference, engine, prompt=prompt))
        count, limit = engine.count(prompt), self.tokens[kind]
        ids = reference.tokenizer_2(prompt).input_ids
        assert (count.tokens, count.limit) == (len(ids), limit)
        kept = reference.tokenizer_2.decode(ids[: limit - 1])
        assert prompt.replace(" ", "") == (kept + count.lost).replace(" ", "")
        assert engine.count("a fox").lost == ""

    def test_the_shift_is_that_of_the_pipeline(self, kind, reference, engine):
        module = importlib.import_module(type(reference).__module__)
        for tokens, side in ((4, 16), (256, 128), (4096, 512)):
            model = engine.checkpoint.model
            schedule = model.schedule_of(engine.checkpoint.schedule, side, side, 4)
            shift = np.exp(module.calculate_shift(tokens)) if kind == "dev" else 1.0
            assert schedule.shift == pytest.approx(shift)

    def test_without_t5_it_says_that_it_needs_it(self, engine, folder, tmp_path):
        with pytest.raises(CheckpointError, match=r"draws nothing without T5.*without --no-t5"):
            Checkpoint.open(folder / "model", t5=False)
        shutil.copytree(folder / "model", tmp_path / "model")
        index = tmp_path / "model" / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"text_encoder_2": [None] * 2}))
        with pytest.raises(CheckpointError, match="draws nothing without T5"):
            Checkpoint.open(tmp_path / "model")

    def test_sizes_whose_shifts_say_nothing_are_refused_where_sizes_shift(
        self, kind, engine, folder, tmp_path
    ):
        shutil.copytree(folder / "model", tmp_path / "model")
        file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_image_seq_len": 4096}))
        if kind == "schnell":
            Checkpoint.open(tmp_path / "model")
            return
        with pytest.raises(CheckpointError, match="base_image_seq_len=4096 should not be"):
            Checkpoint.open(tmp_path / "model")
