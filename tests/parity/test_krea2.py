"""Krea 2: pictures against PyTorch's, files, and what is refused."""

import inspect
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from diffusers import Krea2Pipeline
from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift

from sd_tpu.checkpoint.config import CheckpointError, Qwen3Config, Qwen3VLTextConfig
from sd_tpu.checkpoint.layouts import KLEIN, KREA2, Z_IMAGE, named
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.krea2 import Krea2
from sd_tpu.families.qwen_tokenizer import QwenTokenizer
from tests.support import krea2
from tests.support.parity import assert_agrees
from tests.support.pictures import assert_alike
from tests.support.transformer_pictures import HEIGHT, WIDTH, Kind, TransformerPictureTests

PUBLISHED = Krea2.taken


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    with krea2.few_layers():
        yield


class TestKrea2(TransformerPictureTests):
    family = Krea2
    kinds = {"base": Kind(dict(), 28, 4.5, 0.25)}
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

    @pytest.mark.slow("compiles for another size, without guidance")
    def test_a_square_picture_of_a_distilled_model_is_that_of_pytorch(
        self, reference, engine, monkeypatch
    ):
        """Whose sigmas are its own. Its networks are those of the other."""
        configs = engine.checkpoint.configs
        index = {**configs["model_index"], "is_distilled": True}
        defaults = {"steps": 8, "guidance": 0.0, "larger_strength": 0.25}
        assert Krea2.defaults({"model_index": index}) == defaults
        distilled, _ = Krea2.build({**configs, "model_index": index}, np.float32)
        monkeypatch.setattr(Krea2, "schedule_of", distilled.schedule_of)
        reference.register_to_config(is_distilled=True)
        try:
            expected = self.theirs(reference, engine, height=WIDTH, guidance_scale=0.0)
        finally:
            reference.register_to_config(is_distilled=False)
        assert_alike(self.drawn(engine, height=WIDTH, width=WIDTH, guidance=0.0)[0], expected)

    def test_what_a_long_prompt_becomes_is_that_of_pytorch(self, reference, engine):
        """It is cut before the end of its turn; what fills up the other is in another place."""
        checkpoint, texts = engine.checkpoint, ["fog", " ".join(200 * ["a fox"])]
        inputs = checkpoint.prompt_inputs(texts[1], texts[0])
        encode = checkpoint.model.for_inputs(inputs).encode_text
        found = jax.jit(encode)(checkpoint.texts.load(), inputs)
        states, mask = reference.encode_prompt(texts)
        lengths = [sum(row).item() for row in mask]
        assert found["lengths"].tolist() == lengths == [8, 512]
        for number, length in enumerate(lengths):
            theirs = states[number, mask[number]].flatten(1).detach()
            assert_agrees(f"Krea 2's text, {length}", found["text"][number, :length], theirs)
        count = engine.count(texts[1])
        assert (count.tokens, count.limit) == (len(texts[1]) + 5, 512)
        assert texts[1].endswith(count.lost) and len(count.lost) == len(texts[1]) + 5 - 512
        assert engine.count("a fox").lost == ""

    def test_sigmas_are_shifted_by_the_size_as_by_pytorch(self, reference, engine):
        checkpoint, scheduler = engine.checkpoint, reference.scheduler
        config = scheduler.config
        sizes = config.base_image_seq_len, config.max_image_seq_len
        for side in (64, 512, 1024):
            ours = checkpoint.model.schedule_of(checkpoint.schedule, side, 2 * side, 4)
            tokens = 2 * side**2 // checkpoint.model.size_unit**2
            mu = calculate_shift(tokens, *sizes, config.base_shift, config.max_shift)
            scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
            found = ours.shifted(np.array([1.0, 0.75, 0.5, 0.25]))
            np.testing.assert_allclose(found, scheduler.sigmas[:-1], rtol=1e-6)

    def test_layers_that_nothing_depends_on_are_not_read(self, folder, engine):
        text = Checkpoint.open(folder / "model").parameters.shapes["text_encoder"]
        assert len(text["layers"]) == krea2.FEW[-1] and text.keys() == {"embed_tokens", "layers"}

    def test_ids_are_those_of_the_pipeline_but_for_what_fills_them_up(self, reference, engine):
        told, states = {}, SimpleNamespace(hidden_states=5 * [torch.zeros(1, 50, 2)])
        asked = SimpleNamespace(
            tokenizer=reference.tokenizer,
            text_encoder=lambda **values: told.update(values) or states,
            text_encoder_select_layers=krea2.FEW,
            **{name: value for name, value in vars(reference).items() if "template" in name},
        )
        prompts = [*self.prompts, "", " two\nlines ", "<|im_end|>", "a " * 300]
        Krea2Pipeline.get_text_hidden_states(asked, prompts, 512, "cpu")
        rows = zip(prompts, told["input_ids"], told["attention_mask"], strict=True)
        for prompt, ids, mask in rows:
            inputs = engine.checkpoint.prompt_inputs(prompt, "fog")
            assert inputs["ids"][1, : inputs["lengths"][1]].tolist() == ids[mask].tolist()


def test_as_many_of_qwens_own_tokens_are_before_a_prompt_as_are_dropped(tmp_path):
    words, template = QwenTokenizer.from_folder(tmp_path), Krea2.template
    alone = template._replace(after="")
    assert len(words.turn("", alone)) == template.dropped == 34
    assert len(words.turn("", template)) == 34 + 5


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
    config = Qwen3VLTextConfig.from_dict({"model_type": "qwen3_vl", "text_config": text})
    assert config == Qwen3VLTextConfig.from_dict({"hidden_size": 64, "rope_theta": 5e6})
    with pytest.raises(CheckpointError, match="rope_type='yarn' is not supported"):
        changed = {**text, "rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}
        Qwen3VLTextConfig.from_dict({"text_config": changed})


def test_other_families_refuse_the_language_model_of_one_that_sees():
    with pytest.raises(CheckpointError, match="model_type='qwen3_vl_text' is not supported"):
        Qwen3Config.from_dict({"model_type": "qwen3_vl_text"})


@pytest.mark.parametrize(
    "layout, stem, distilled",
    [
        (KREA2, "krea2_turbo_fp8_scaled", True),
        (KREA2, "Krea-2-Raw", False),
        (KREA2, "krea2_base_bf16", False),
        (KLEIN, "flux-2-klein-raw-photos", True),
        (KLEIN, "flux-2-klein-base-4b", False),
    ],
)
def test_the_name_of_a_file_tells_whether_it_is_distilled(layout, stem, distilled):
    assert named(layout, stem)["model_index"]["is_distilled"] == distilled


def test_a_name_with_raw_says_nothing_of_z_image():
    assert named(Z_IMAGE, "realism-raw-zimage") == {}
