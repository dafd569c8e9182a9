"""Anima: pictures against PyTorch's, files, and what is refused."""

import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.anima import Anima
from sd_tpu.families.checkpoint import Checkpoint
from tests.support import anima
from tests.support.pictures import assert_alike
from tests.support.transformer_pictures import (
    HEIGHT,
    PHOTO,
    START,
    WIDTH,
    Kind,
    TransformerPictureTests,
)


class TestAnima(TransformerPictureTests):
    family = Anima
    kinds = {"base": Kind(dict(), 30, 4.0, 0.25)}
    prompts = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
    asked = dict(seed=3, steps=6, guidance=3.0, negative_prompt="fog")
    size = 512, 512
    samplers = "euler", "unipc", "lcm"
    parts = "transformer", "vae", "text_encoder", "text_conditioner"
    adapted = tuple(
        f"transformer_blocks.0.{name}"
        for name in ("attn1.to_q", "attn2.to_k", "attn2.to_out.0", "ff.net.0.proj")
    )
    misfits = [
        ("text_encoder", {"hidden_size": 64}, "states of 64 and the conditioner embeddings of 32"),
        ("transformer", {"text_embed_dim": 48}, "take 40 and the transformer 48"),
        ("transformer", {"out_channels": 8}, "takes 16 channels and gives 8"),
        ("vae", {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, "have 4"),
    ]
    refused = [
        (dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads"),
        (dict(height=512, width=32), "at most 128x128"),
        (dict(to_prompt="a dog", share=0.5), "draws nothing between two prompts"),
    ]

    @classmethod
    def make_pipeline(cls, folder):
        """Return a tiny pipeline with a LoRA in the original names beside what is its own."""
        made = anima.make_pipeline(folder)
        torch.manual_seed(6)
        tensors = {}
        for name, part in {
            "blocks.1.cross_attn.v_proj": "transformer_blocks.1.attn2.to_v",
            "blocks.0.mlp.layer2": "transformer_blocks.0.ff.net.2",
            "blocks.0.adaln_modulation_mlp.1": "transformer_blocks.0.norm3.linear_1",
            "llm_adapter.blocks.1.cross_attn.q_proj": "blocks.1.cross_attn.q_proj",
        }.items():
            of_text = name.startswith("llm_adapter")
            network = made.text_conditioner if of_text else made.transformer
            layer = network.get_submodule(part)
            tensors |= {
                f"diffusion_model.{name}.lora_A.weight": torch.randn(4, layer.in_features) / 4,
                f"diffusion_model.{name}.lora_B.weight": torch.randn(layer.out_features, 4) / 4,
            }
        save_file(tensors, folder.parent / "brush.safetensors")
        return made

    def theirs(self, reference, engine, seed=0, **values) -> np.ndarray:
        asked = {
            "prompt": self.prompts[0],
            "negative_prompt": self.asked["negative_prompt"],
            "num_inference_steps": self.asked["steps"],
            "height": HEIGHT,
            "width": WIDTH,
            **values,
        }
        reference.guider.guidance_scale = asked.pop("guidance_scale", self.asked["guidance"])
        h, w, channels = engine.checkpoint.model.latent_shape(HEIGHT, WIDTH)
        key = jax.random.PRNGKey(self.asked["seed"] + seed)
        noise = np.array(jax.random.normal(key, (1, channels, h, w)))[:, :, None]
        images = reference(**asked, latents=torch.tensor(noise), output_type="np", output="images")
        return np.round(images[0] * 255).astype(int)

    @pytest.mark.parametrize("strength", [0.5, 1.0])
    def test_a_picture_that_begins_with_another_is_that_of_pytorch(
        self, reference, engine, strength
    ):
        ours = self.drawn(engine, init_image=START.name, strength=strength)
        image = Image.fromarray(PHOTO)
        assert_alike(ours[0], self.theirs(reference, engine, image=image, strength=strength))

    def test_without_a_negative_prompt_the_language_model_reads_nothing(self, reference, engine):
        ours = self.drawn(engine, negative_prompt="")
        assert_alike(ours[0], self.theirs(reference, engine, negative_prompt=""))

    def test_what_does_not_fit_is_cut_as_by_pytorch(self, reference, engine):
        """By either tokenizer: of words Qwen's here makes more tokens, of letters T5's."""
        for prompt in (" ".join(130 * ["a fox"]), 300 * "a "):
            ours = self.drawn(engine, prompts=[prompt])
            assert_alike(ours[0], self.theirs(reference, engine, prompt=prompt))
            count = engine.count(prompt)
            assert count.tokens > count.limit == 512
            assert count.lost and prompt.endswith(count.lost)
        assert (engine.count("a").tokens, engine.count("a fox").tokens) == (3, 5)
        assert engine.count("a fox").lost == ""

    def test_ids_are_those_of_either_tokenizer(self, reference, engine):
        for prompt in (*self.prompts, "", "two\nlines", "<|im_end|>", "</s> <pad>"):
            inputs = engine.checkpoint.prompt_inputs(prompt, "fog")
            for names, tokenizer in (
                (("ids", "lengths"), reference.tokenizer),
                (("t5_ids", "t5_lengths"), reference.t5_tokenizer),
            ):
                ids, length = (inputs[name][1] for name in names)
                assert list(ids[:length]) == tokenizer(prompt).input_ids

    def test_a_lora_in_the_original_names_changes_both_networks_as_in_pytorch(
        self, reference, engine, folder
    ):
        self.assert_lora_is_pytorchs(reference, engine, folder / "brush.safetensors")

    def test_a_tokenizer_with_more_tokens_than_the_conditioner_is_refused(
        self, reference, folder, tmp_path
    ):
        for part in (folder / "model").iterdir():
            (tmp_path / part.name).symlink_to(part)
        (tmp_path / "text_conditioner").unlink()
        (tmp_path / "text_conditioner").mkdir()
        config = (folder / "model" / "text_conditioner" / "config.json").read_text()
        (tmp_path / "text_conditioner" / "config.json").write_text(config.replace("32128", "32000"))
        with pytest.raises(CheckpointError, match="text_conditioner knows 32000"):
            Checkpoint.open(tmp_path)
