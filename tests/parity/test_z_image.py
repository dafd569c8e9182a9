"""Z-Image: the language model and pictures against PyTorch's, files, and what is refused."""

import dataclasses
import functools
import importlib
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image
from safetensors.torch import save_file

from benchmarks.report import count_compilations
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, Qwen3Config
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.qwen_tokenizer import QwenTokenizer
from sd_tpu.families.z_image import ZImage
from sd_tpu.models import Qwen3Model
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import RequestError
from tests.support import pictures
from tests.support.pictures import HOLE, MASK, PHOTO, SIDE, START, assert_alike, pictures_of
from tests.support.prompts import PROMPTS as MANY_PROMPTS
from tests.support.z_image import make_pipeline

PROMPTS = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
ASKED = dict(prompts=PROMPTS, seed=3, steps=5, guidance=0.0, negative_prompt="fog")
drawn = functools.partial(pictures.drawn, asked=ASKED)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model)."""
    folder = tmp_path_factory.mktemp("z")
    reference = make_pipeline(folder / "words")
    reference.save_pretrained(folder / "model")
    _write_lora(reference, folder / "ink.safetensors")
    engine = Engine.open(folder / "model", devices=1, size=(SIDE, SIDE), lora_dir=folder)
    yield reference, engine
    engine.close()


def _write_lora(reference, file) -> None:
    torch.manual_seed(5)
    tensors = {}
    for module in ("attention.to_q", "attention.to_out.0", "feed_forward.w1"):
        linear = reference.transformer.get_submodule(f"layers.0.{module}")
        name = f"transformer.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, linear.in_features) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(linear.out_features, 4) / 4
    save_file(tensors, file)
    # as the original code has them
    other = {
        f"diffusion_model.layers.0.attention.qkv.lora_{each}.weight": torch.ones(4, 4)
        for each in "AB"
    }
    save_file(other, file.with_name("kohya.safetensors"))


def theirs(
    reference, engine, monkeypatch, index=0, kind="", size=(SIDE, SIDE), guidance=0.0, **values
):
    """PyTorch's picture of the same noise, with the encoder's mode: uint8 [H, W, 3]."""
    made = getattr(diffusers, f"ZImage{kind}Pipeline")(**reference.components)
    module = importlib.import_module(type(made).__module__)
    h, w, channels = engine.checkpoint.model.latent_shape(*size)
    key = jax.random.PRNGKey(ASKED["seed"] + index)
    noise = torch.tensor(np.array(jax.random.normal(key, (1, channels, h, w))))
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: noise)
    if kind:
        monkeypatch.setattr(module, "retrieve_latents", lambda found, **_: found.latent_dist.mode())
        values |= {"image": Image.fromarray(PHOTO)}
    made.set_progress_bar_config(disable=True)
    images = made(
        **{
            "prompt": PROMPTS[index],
            "negative_prompt": ASKED["negative_prompt"],
            "guidance_scale": guidance,
            "height": size[0],
            "width": size[1],
            "num_inference_steps": ASKED["steps"],
            "output_type": "np",
            **values,
        }
    ).images
    return np.round(images[0] * 255).astype(int)


def test_the_language_models_states_are_those_of_transformers(loaded):
    reference, engine = loaded
    folder = engine.checkpoint.parameters.source / "text_encoder"
    config = Qwen3Config.from_dict(json.loads((folder / "config.json").read_text()))
    assert config.rope_theta == 1e6
    graph, expected = weights.architecture(Qwen3Model, config, dtype=jnp.float32)
    params = weights.load([folder / "model.safetensors"], expected)
    ids = np.random.default_rng(0).integers(0, 259, (2, 50)).astype(np.int32)
    found = reference.text_encoder(torch.tensor(ids).long(), output_hidden_states=True)
    taken = (1, 2)
    states = nnx.merge(graph, params).states(jnp.asarray(ids), taken)
    for layers, ours in zip(taken, map(np.asarray, states), strict=True):
        expected = found.hidden_states[layers].detach().numpy()
        assert np.linalg.norm(ours - expected) <= 1e-5 * np.linalg.norm(expected)


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


def test_ids_are_those_of_the_chat_template(loaded):
    reference, engine = loaded
    tokenizer = engine.checkpoint.tokenizers["tokenizer"]
    for prompt in (*PROMPTS, "", "two\nlines", "<|im_end|>"):
        text = reference.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        assert tokenizer.turn(prompt, thinking=True) == reference.tokenizer(text).input_ids


def test_without_a_tokenizer_json_it_is_qwens_own(tmp_path):
    ours = QwenTokenizer.from_folder(tmp_path)
    assert ours.turn("", thinking=True) == [151644, 872, 198, 151645, 198, 151644, 77091, 198]
    ours.save(tmp_path)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for prompt in MANY_PROMPTS:
        turn = ours.turn(prompt, thinking=False)
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert turn == saved(f"{text}<think>\n\n</think>\n\n").input_ids


def test_a_tokenizer_with_more_tokens_than_the_language_model_is_refused(loaded, tmp_path):
    reference, _ = loaded
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has 151669 tokens, and text_encoder knows"):
        Checkpoint.open(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    with pytest.raises(CheckpointError, match="is not that of Qwen"):
        QwenTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_two_prompts_of_different_lengths_are_drawn_as_by_pytorch(loaded, guidance, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, guidance=guidance)
    for index, picture in enumerate(ours):
        expected = theirs(reference, engine, monkeypatch, index, guidance=guidance)
        assert_alike(picture, expected)
    assert not np.array_equal(*ours)


@pytest.mark.slow("compiles another size")
def test_a_picture_that_is_not_square_is_that_of_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, height=24, width=48, prompts=PROMPTS[:1])
    assert_alike(ours[0], theirs(reference, engine, monkeypatch, size=(24, 48)))


@pytest.mark.slow("compiles the longer bucket")
def test_a_long_prompt_is_drawn_as_by_pytorch_and_what_does_not_fit_is_cut(loaded, monkeypatch):
    reference, engine = loaded
    for words in (60, 200):
        prompt = " ".join(words * ["a fox"])
        ours = drawn(engine, prompts=[prompt])
        assert_alike(ours[0], theirs(reference, engine, monkeypatch, prompt=prompt))
    count = engine.count(prompt)
    assert (count.tokens, count.limit) == (len(prompt) + 19, 512)
    assert prompt.endswith(count.lost) and len(count.lost) == len(prompt) + 6 - 512
    assert engine.count("a fox").lost == ""


@pytest.mark.parametrize("sampler", ["euler", "unipc", "lcm"])
def test_each_sampler_that_its_pipeline_takes_is_that_of_pytorch(loaded, sampler, monkeypatch):
    reference, engine = loaded
    scheduler = getattr(diffusers, FLOW_SAMPLERS[sampler].scheduler)
    before = reference.scheduler
    flow = {}
    if "FlowMatch" not in scheduler.__name__:
        flow = dict(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    steps = 1 if FLOW_SAMPLERS[sampler].stochastic else ASKED["steps"]  # whose noise is ours alone
    try:
        reference.scheduler = scheduler.from_config(before.config, **flow)
        sigmas = np.linspace(
            1, 1 / steps, steps
        )  # the pipeline's own are a list, which UniPC is not
        expected = theirs(reference, engine, monkeypatch, num_inference_steps=steps, sigmas=sigmas)
    finally:
        reference.scheduler = before
    ours = drawn(engine, sampler=sampler, steps=steps, prompts=PROMPTS[:1])
    assert_alike(ours[0], expected)


def test_a_picture_that_begins_with_another_is_that_of_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, init_image=START.name, strength=0.6, prompts=PROMPTS[:1])
    expected = theirs(reference, engine, monkeypatch, kind="Img2Img", strength=0.6)
    assert_alike(ours[0], expected)


def test_slots_of_a_batch_do_not_tell_that_others_are_there(loaded):
    _, engine = loaded
    samplers = [*FLOW_SAMPLERS, *FLOW_SAMPLERS][:8]
    own = [
        {"sampler": sampler, "steps": 3 + index, "guidance": 2.0 + index}
        for index, sampler in enumerate(samplers)
    ]
    prompts = [f"{word} {PROMPTS[index % 2]}" for index, word in enumerate("abcdefgh")]
    request = Request.check({**ASKED, "prompts": prompts, "own": own}, engine.catalog)
    together, compiled = pictures_of(engine.submit(request)), count_compilations()
    for index in (0, 4, 7):
        assert np.array_equal(together[index], pictures_of(engine.submit(request.only(index)))[0])
    assert compiled() == 0


def test_a_lora_of_peft_changes_the_picture_as_in_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    (plain,) = drawn(engine, prompts=PROMPTS[:1])
    (ours,) = drawn(engine, prompts=[f"{PROMPTS[0]} <lora:ink:0.7>"])
    file = engine.checkpoint.parameters.source.parent / "ink.safetensors"
    reference.load_lora_weights(file, adapter_name="ink")
    try:
        reference.set_adapters(["ink"], [0.7])
        expected = theirs(reference, engine, monkeypatch)
    finally:
        reference.unload_lora_weights()
    assert_alike(ours, expected)
    assert np.abs(ours.astype(int) - plain).mean() > 1


def test_what_it_does_not_have_is_refused_by_name(loaded):
    _, engine = loaded
    for values, sentence in (
        (dict(sampler="ddim"), "DDIM is not for this model"),
        (dict(prompts=["a <lora:kohya:1>"]), "does not fit this model.*in the names of PEFT"),
        (dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads"),
        (dict(height=1024, width=32), "at most 512x512"),
    ):
        with pytest.raises(RequestError, match=sentence):
            drawn(engine, **values)
    configs = engine.checkpoint.configs
    changed = {**configs, "text_encoder": {**configs["text_encoder"], "hidden_size": 64}}
    with pytest.raises(CheckpointError, match="states of 64, the transformer takes 48"):
        ZImage.build(changed, np.float32)
    with pytest.raises(CheckpointError, match="Token downsampling"):
        ZImage.build(configs, np.float32, token_downsampling=2)
    few = {**configs["transformer"], "axes_lens": [512, 64, 64]}
    with pytest.raises(CheckpointError, match="positions for 512 tokens of text"):
        ZImage.build({**configs, "transformer": few}, np.float32)


def test_a_scheduler_for_another_kind_of_noise_is_refused(loaded):
    _, engine = loaded
    there = engine.checkpoint
    noise = {"_class_name": "DDIMScheduler", "beta_start": 0.1, "beta_end": 0.2}
    configs = {**there.configs, "scheduler": {**noise, "beta_schedule": "linear"}}
    with pytest.raises(CheckpointError, match=r"'DDIMScheduler' does not fit.*by flow matching"):
        Checkpoint(there.model, there.tokenizers, configs, there.card)


def test_a_link_of_another_models_picture_says_what_is_not_for_this_one(loaded):
    _, engine = loaded
    request = Request.check(ASKED, engine.catalog)
    for changes in ({"sampler": "ddim"}, {"spacing": "karras"}):
        picture = dataclasses.replace(request.picture(0), **changes)
        with pytest.raises(RequestError, match="trained by flow matching"):
            engine.as_drawn(Request((picture,)))


def test_what_is_saved_is_read_again_here_and_by_pytorch(loaded, tmp_path):
    reference, engine = loaded
    checkpoint, params = Checkpoint.from_pretrained(engine.checkpoint.parameters.source)
    assert (checkpoint.card.steps, checkpoint.card.guidance) == (9, 0.0)
    assert checkpoint.default_size == (512, 512)
    checkpoint.save_pretrained(tmp_path, params)
    again = diffusers.ZImagePipeline.from_pretrained(tmp_path)
    for name in ("transformer", "vae", "text_encoder"):
        states = getattr(again, name).state_dict(), getattr(reference, name).state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("shift, steps, guidance", [(3.0, 9, 0.0), (6.0, 50, 4.0)])
def test_the_distilled_model_and_the_other_begin_with_their_own_settings(shift, steps, guidance):
    defaults = ZImage.defaults({"scheduler": {"shift": shift}})
    assert defaults == {"steps": steps, "guidance": guidance, "larger_strength": 0.25}


def test_a_mask_keeps_what_is_black(loaded):
    _, engine = loaded
    ours = drawn(engine, init_image=START.name, mask=HOLE.name, mask_blur=0, prompts=PROMPTS[:1])[0]
    assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0])
    assert not np.array_equal(ours[MASK > 0], PHOTO[MASK > 0])
