"""Z-Image: the language model and pictures against PyTorch's, files, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, Qwen3Config
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.qwen_tokenizer import ANSWERS, THINKS, QwenTokenizer
from sd_tpu.families.z_image import ZImage
from sd_tpu.models import Qwen3Model
from sd_tpu.settings import RequestError
from tests.support import z_image
from tests.support.parity import assert_agrees
from tests.support.pictures import assert_alike
from tests.support.prompts import PROMPTS as MANY_PROMPTS
from tests.support.transformer_pictures import (
    Kind,
    QwenTests,
    StartPictureTests,
    TransformerPictureTests,
)


class TestZImage(TransformerPictureTests, StartPictureTests, QwenTests):
    family = ZImage
    kinds = {"turbo": Kind(dict(), 9, 0.0, 0.25)}
    prompts = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
    asked = dict(seed=3, steps=6, guidance=0.0, negative_prompt="fog")
    size = 512, 512
    samplers = "euler", "unipc", "lcm"
    parts = "transformer", "vae", "text_encoder"
    adapted = tuple(
        f"layers.0.{name}" for name in ("attention.to_q", "attention.to_out.0", "feed_forward.w1")
    )
    misfits = [
        ("text_encoder", {"hidden_size": 64}, "states of 64, the transformer takes 48"),
        ("transformer", {"axes_lens": [512, 64, 64]}, "positions for 512 tokens of text"),
        ("vae", {"latent_channels": 4}, "16 channels.*latents have 4"),
    ]
    refused = [
        (dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads"),
        (dict(height=1024, width=32), "at most 512x512"),
    ]

    make_pipeline = staticmethod(z_image.make_pipeline)

    @classmethod
    def options(cls, reference, steps) -> dict:
        # The pipeline's own are a list, which UniPC does not take.
        return {"sigmas": np.linspace(1, 1 / steps, steps)}

    def test_the_language_models_states_are_those_of_transformers(self, reference, folder):
        source = folder / "model" / "text_encoder"
        config = Qwen3Config.from_dict(json.loads((source / "config.json").read_text()))
        assert config.rope_theta == 1e6
        graph, expected = weights.architecture(Qwen3Model, config, dtype=jnp.float32)
        params = weights.load([source / "model.safetensors"], expected)
        ids = np.random.default_rng(0).integers(0, 259, (2, 50)).astype(np.int32)
        theirs = reference.text_encoder(torch.tensor(ids).long(), output_hidden_states=True)
        taken = 1, 2
        states = jax.jit(lambda params, ids: nnx.merge(graph, params).states(ids, taken))
        for layers, ours in zip(taken, states(params, ids), strict=True):
            expected = theirs.hidden_states[layers].detach()
            assert_agrees(f"Qwen3Model, {layers} layers", ours, expected)

    def test_a_tokenizer_with_more_tokens_than_the_language_model_is_refused(
        self, reference, tmp_path
    ):
        reference.save_pretrained(tmp_path)
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match=r"has 151669 tokens, and text_encoder knows"):
            Checkpoint.open(tmp_path)

    @pytest.mark.slow("compiles the longer bucket")
    def test_a_long_prompt_is_drawn_as_by_pytorch_and_what_does_not_fit_is_cut(
        self, reference, engine
    ):
        for words in (60, 200):
            prompt = " ".join(words * ["a fox"])
            ours = self.drawn(engine, prompts=[prompt])
            assert_alike(ours[0], self.theirs(reference, engine, prompt=prompt))
        count = engine.count(prompt)
        assert (count.tokens, count.limit) == (len(prompt) + 19, 512)
        assert prompt.endswith(count.lost) and len(count.lost) == len(prompt) + 6 - 512
        assert engine.count("a fox").lost == ""

    def test_a_lora_in_other_names_than_pefts_does_not_fit(self, engine, folder):
        """As the original code has them, with fused layers of another width."""
        name = "diffusion_model.layers.0.attention.qkv.lora_{}.weight"
        tensors = {name.format(each): torch.ones(4, 4) for each in "AB"}
        save_file(tensors, folder / "kohya.safetensors")
        engine.adapters.look_again()
        with pytest.raises(RequestError, match=r"does not fit this model.*in the names of PEFT"):
            self.drawn(engine, prompts=["a <lora:kohya:1>"])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 does not divide into"),
    ],
)
def test_a_language_model_of_another_kind_is_refused_by_name(values, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Qwen3Config.from_dict(values)


def test_the_base_of_positions_is_read_as_any_transformers_wrote_it():
    assert Qwen3Config.from_dict({"rope_theta": 5e6}).rope_theta == 5e6
    assert Qwen3Config.from_dict({"rope_parameters": {"rope_theta": 5e6}}).rope_theta == 5e6


def test_without_a_tokenizer_json_it_is_qwens_own(tmp_path):
    ours = QwenTokenizer.from_folder(tmp_path)
    assert ours.turn("", THINKS) == [151644, 872, 198, 151645, 198, 151644, 77091, 198]
    ours.save(tmp_path)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for prompt in MANY_PROMPTS:
        turn = ours.turn(prompt, ANSWERS)
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert turn == saved(f"{text}<think>\n\n</think>\n\n").input_ids


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    with pytest.raises(CheckpointError, match="is not that of Qwen"):
        QwenTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("shift, steps, guidance", [(3.0, 9, 0.0), (6.0, 50, 4.0)])
def test_the_distilled_model_and_the_other_begin_with_their_own_settings(shift, steps, guidance):
    defaults = ZImage.defaults({"scheduler": {"shift": shift}})
    assert defaults == {"steps": steps, "guidance": guidance, "larger_strength": 0.25}
