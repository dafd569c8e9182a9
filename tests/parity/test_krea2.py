"""Krea 2: pictures against PyTorch's, files, and what is refused."""

import inspect
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import transformers
from diffusers import Krea2Pipeline

from sd_tpu.checkpoint.config import CheckpointError, Qwen3Config
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.krea2 import Krea2
from sd_tpu.families.qwen_tokenizer import QwenTokenizer
from tests.support import krea2
from tests.support.kinds import once
from tests.support.pictures import assert_alike
from tests.support.prompts import PROMPTS as MANY_PROMPTS
from tests.support.transformer_pictures import HEIGHT, WIDTH, Kind, TransformerPictureTests

PUBLISHED = Krea2.taken


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    with krea2.few_layers():
        yield


class TestKrea2(TransformerPictureTests):
    family = Krea2
    # The distilled model's program is that of the other without guidance.
    kinds = {
        "base": Kind(dict(distilled=False), 28, 4.5, 0.25),
        "distilled": Kind(dict(distilled=True), 8, 0.0, 0.25),
    }
    prompts = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
    asked = dict(seed=3, steps=4, guidance=2.0, negative_prompt="fog")
    size = 512, 512
    samplers = ("euler",)
    parts = "transformer", "vae"
    adapted = (
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.0.attn.to_gate",
        "transformer_blocks.0.ff.down",
        "text_fusion.layerwise_blocks.0.attn.to_q",
        "text_fusion.projector",
    )
    misfits = [
        ("text_encoder", {"text_config": {"hidden_size": 64}}, "give 128 numbers.*first 3"),
        ("transformer", {"num_text_layers": 3}, "takes 48 of its first 3"),
        ("transformer", {"in_channels": 32}, "takes 8 channels and gives 8"),
        ("vae", {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, "have 4"),
        ("model_index", {"text_encoder_select_layers": [1, 2]}, r"layers=\[1, 2\].*\[1, 3\]"),
        ("model_index", {"patch_size": 4}, "patch_size=4 is not supported"),
    ]
    refused = [
        (dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads"),
        (dict(to_prompt="a dog", share=0.5), "draws nothing between two prompts"),
    ]

    make_pipeline = staticmethod(krea2.make_pipeline)

    def theirs(self, reference, engine, seed=0, height=HEIGHT, width=WIDTH, **values):
        """Return PyTorch's picture of the same noise, which its pipeline takes in patches."""
        h, w, channels = engine.checkpoint.model.latent_shape(height, width)
        key = jax.random.PRNGKey(self.asked["seed"] + seed)
        noise = torch.tensor(np.array(jax.random.normal(key, (1, channels, h, w))))
        asked = {
            "prompt": self.prompts[0],
            "negative_prompt": self.asked["negative_prompt"],
            "num_inference_steps": self.asked["steps"],
            "guidance_scale": self.asked["guidance"],
            **values,
        }
        images = reference(
            **asked,
            height=height,
            width=width,
            latents=reference._pack_latents(noise, 1, channels, h, w),
            output_type="np",
        ).images
        return np.round(images[0] * 255).astype(int)

    @once
    @pytest.mark.slow("compiles for another size")
    def test_a_square_picture_is_that_of_pytorch(self, reference, engine):
        """Whose sigmas are shifted otherwise."""
        ours = self.drawn(engine, height=WIDTH, width=WIDTH)
        assert_alike(ours[0], self.theirs(reference, engine, height=WIDTH))

    @once
    @pytest.mark.slow("compiles the longer bucket")
    def test_a_long_prompt_is_cut_before_the_end_of_its_turn(self, reference, engine):
        prompt = " ".join(200 * ["a fox"])
        ours = self.drawn(engine, prompts=[prompt])
        assert_alike(ours[0], self.theirs(reference, engine, prompt=prompt))
        count = engine.count(prompt)
        assert (count.tokens, count.limit) == (len(prompt) + 5, 512)
        assert prompt.endswith(count.lost) and len(count.lost) == len(prompt) + 5 - 512
        assert engine.count("a fox").lost == ""

    @once
    def test_layers_that_nothing_depends_on_are_not_read(self, folder, engine):
        text = Checkpoint.open(folder / "model").parameters.shapes["text_encoder"]
        assert len(text["layers"]) == krea2.FEW[-1] and text.keys() == {"embed_tokens", "layers"}

    @once
    def test_ids_are_those_of_the_pipeline_but_for_what_fills_them_up(self, reference, tmp_path):
        """By Qwen's own tokenizer, which is carried."""
        ours, template = QwenTokenizer.from_folder(tmp_path), Krea2.template
        ours.save(tmp_path)
        file = str(tmp_path / "tokenizer.json")
        told, states = {}, SimpleNamespace(hidden_states=5 * [torch.zeros(1, 50, 2)])
        asked = SimpleNamespace(
            tokenizer=transformers.PreTrainedTokenizerFast(
                tokenizer_file=file, pad_token="<|endoftext|>"
            ),
            text_encoder=lambda **values: told.update(values) or states,
            text_encoder_select_layers=krea2.FEW,
            **{name: value for name, value in vars(reference).items() if "template" in name},
        )
        prompts = MANY_PROMPTS[::3]
        Krea2Pipeline.get_text_hidden_states(asked, prompts, 512, "cpu")
        most = template.dropped + 512
        for prompt, ids, mask in zip(
            prompts, told["input_ids"], told["attention_mask"], strict=True
        ):
            assert ours.cut(ours.turn(prompt, template), most, template) == ids[mask].tolist()
        assert len(ours.turn("", template._replace(after=""))) == template.dropped


def test_the_layers_whose_states_are_the_text_are_those_of_the_pipeline():
    assert inspect.getsource(Krea2Pipeline.__init__).count(str(PUBLISHED)) == 1


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "mrope_section": [24, 20]}},
        {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20]}},
    ],
)
def test_the_language_model_of_one_that_sees_is_read_as_any_transformers_wrote_it(positions):
    text = {"model_type": "qwen3_vl_text", "hidden_size": 64, **positions}
    config = Qwen3Config.from_dict({"model_type": "qwen3_vl", "text_config": text})
    assert config == Qwen3Config.from_dict({"hidden_size": 64, "rope_theta": 5e6})
    with pytest.raises(CheckpointError, match="rope_type='yarn' is not supported"):
        changed = {**text, "rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}
        Qwen3Config.from_dict({"text_config": changed})
