"""Stable Diffusion 3 and 3.5: pictures against PyTorch's, files, and what is refused."""

import functools
import importlib
import json
import shutil

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.report import count_compilations
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion_3 import StableDiffusion3
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import RequestError
from tests.support import pictures
from tests.support.pictures import HOLE, MASK, PHOTO, SIDE, START, assert_alike, pictures_of
from tests.support.sd3 import make_pipeline

PROMPTS = ["a cat", "a red fox on the left of a very small house, at night, in the style of Klee"]
ASKED = dict(prompts=PROMPTS, seed=3, steps=6, guidance=4.0, negative_prompt="fog")
drawn = functools.partial(pictures.drawn, asked=ASKED)
CASES = {
    "SD 3 without T5": ("SD 3", False),
    "SD 3.5 medium without T5": ("SD 3.5 medium", False),
    "SD 3 with T5": ("SD 3", True),
}


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model) of each kind in turn."""
    folder = tmp_path_factory.mktemp("sd3")
    kind, t5 = CASES[request.param]
    reference = make_pipeline(folder / "words", kind, t5=t5)
    reference.save_pretrained(folder / "model")
    _write_lora(reference, folder / "ink.safetensors")
    engine = Engine.open(folder / "model", devices=1, size=(SIDE, SIDE), lora_dir=folder)
    yield reference, engine
    engine.close()


def _write_lora(reference, file) -> None:
    torch.manual_seed(5)
    tensors = {}
    for module in ("attn.to_q", "attn.add_k_proj", "ff.net.0.proj"):
        linear = reference.transformer.get_submodule(f"transformer_blocks.0.{module}")
        name = f"transformer.transformer_blocks.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, linear.in_features) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(linear.out_features, 4) / 4
    save_file(tensors, file)


def theirs(reference, engine, monkeypatch, index=0, kind="", size=(SIDE, SIDE), **values):
    """PyTorch's picture of the same noise, with the encoder's mode: uint8 [H, W, 3]."""
    made = getattr(diffusers, f"StableDiffusion3{kind}Pipeline")(**reference.components)
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
        PROMPTS[index],
        negative_prompt=ASKED["negative_prompt"],
        guidance_scale=ASKED["guidance"],
        height=size[0],
        width=size[1],
        output_type="np",
        **{"num_inference_steps": ASKED["steps"], **values},
    ).images
    return np.round(images[0] * 255).astype(int)


def test_two_prompts_of_different_lengths_are_drawn_as_by_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine)
    for index, picture in enumerate(ours):
        assert_alike(picture, theirs(reference, engine, monkeypatch, index))
    assert not np.array_equal(*ours)


@pytest.mark.slow("compiles another size of each model")
def test_a_picture_that_is_not_square_is_that_of_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, height=24, width=48, prompts=PROMPTS[:1])
    assert_alike(ours[0], theirs(reference, engine, monkeypatch, size=(24, 48)))


@pytest.mark.parametrize("sampler", FLOW_SAMPLERS)
def test_each_sampler_is_that_of_pytorch(loaded, sampler, monkeypatch):
    reference, engine = loaded
    scheduler = getattr(diffusers, FLOW_SAMPLERS[sampler].scheduler)
    before = reference.scheduler
    flow = (
        {}
        if "FlowMatch" in scheduler.__name__
        else dict(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    )
    steps = 1 if FLOW_SAMPLERS[sampler].stochastic else ASKED["steps"]  # whose noise is ours alone
    try:
        reference.scheduler = scheduler.from_config(before.config, **flow)
        expected = theirs(reference, engine, monkeypatch, num_inference_steps=steps)
    finally:
        reference.scheduler = before
    assert_alike(drawn(engine, sampler=sampler, steps=steps, prompts=PROMPTS[:1])[0], expected)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_picture_that_begins_with_another_is_that_of_pytorch(loaded, strength, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, init_image=START.name, strength=strength, prompts=PROMPTS[:1])
    expected = theirs(reference, engine, monkeypatch, kind="Img2Img", strength=strength)
    assert_alike(ours[0], expected)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_picture_with_a_mask_is_that_of_pytorch_where_it_is_white(loaded, strength, monkeypatch):
    reference, engine = loaded
    decode, shift = reference.vae.decode, reference.vae.config.shift_factor
    # diffusers' other pipelines of SD 3 add the shift before they decode, this one forgets it.
    monkeypatch.setattr(reference.vae, "decode", lambda z, **rest: decode(z + shift, **rest))
    ours = drawn(
        engine,
        init_image=START.name,
        mask=HOLE.name,
        mask_blur=0,
        strength=strength,
        prompts=PROMPTS[:1],
    )[0]
    mask = Image.fromarray(MASK)
    expected = theirs(
        reference, engine, monkeypatch, kind="Inpaint", strength=strength, mask_image=mask
    )
    white = MASK > 0
    assert_alike(ours[white], expected[white])
    assert np.array_equal(ours[~white], PHOTO[~white])


def test_slots_of_a_batch_do_not_tell_that_others_are_there(loaded):
    _, engine = loaded
    samplers = [*FLOW_SAMPLERS, *FLOW_SAMPLERS][:8]
    overrides = [
        {"sampler": sampler, "steps": 3 + index, "guidance": 2.0 + index}
        for index, sampler in enumerate(samplers)
    ]
    prompts = [f"{word} {PROMPTS[index % 2]}" for index, word in enumerate("abcdefgh")]
    request = Request.check({**ASKED, "prompts": prompts, "own": overrides}, engine.catalog)
    together, compiled = pictures_of(engine.submit(request)), count_compilations()
    for index in (0, 4, 7):
        alone = pictures_of(engine.submit(request.only(index)))
        assert np.array_equal(together[index], alone[0])
    assert compiled() == 0


def test_what_it_does_not_have_is_refused_by_name(loaded):
    _, engine = loaded
    with pytest.raises(RequestError, match="DDIM is not for this model"):
        drawn(engine, sampler="ddim")
    with pytest.raises(RequestError, match="at most 64x64"):
        drawn(engine, height=72, width=32)
    with pytest.raises(RequestError, match="no karras spacing"):
        drawn(engine, spacing="karras")


def test_what_is_saved_is_read_again_here_and_by_pytorch(loaded, tmp_path):
    reference, engine = loaded
    checkpoint, params = Checkpoint.from_pretrained(engine.checkpoint.parameters.source)
    assert isinstance(checkpoint.model, StableDiffusion3)
    assert (checkpoint.card.steps, checkpoint.card.guidance) == (28, 7.0)
    checkpoint.save_pretrained(tmp_path, params)
    absent = [name for name, part in reference.components.items() if part is None]
    again = diffusers.StableDiffusion3Pipeline.from_pretrained(
        tmp_path,
        **dict.fromkeys(absent),  # it wants to be told so
    )
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        ours, expected = getattr(again, name), getattr(reference, name)
        assert (ours is None) == (expected is None)
        if ours is not None:
            states = ours.state_dict(), expected.state_dict()
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_lora_of_peft_changes_the_picture_as_in_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    folder = engine.checkpoint.parameters.source.parent
    (plain,) = drawn(engine, prompts=PROMPTS[:1])
    (ours,) = drawn(engine, prompts=[f"{PROMPTS[0]}<lora:ink:0.7>"])
    reference.load_lora_weights(folder / "ink.safetensors", adapter_name="ink")
    try:
        reference.set_adapters(["ink"], [0.7])
        expected = theirs(reference, engine, monkeypatch)
    finally:
        reference.unload_lora_weights()
    assert_alike(ours, expected)
    assert np.abs(ours.astype(int) - plain).mean() > 1


def test_a_shift_by_size_is_refused_when_the_checkpoint_is_opened(loaded, tmp_path):
    _, engine = loaded
    shutil.copytree(engine.checkpoint.parameters.source, tmp_path / "model")
    file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text()) | {"use_dynamic_shifting": True}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="use_dynamic_shifting=true is not supported"):
        Checkpoint.open(tmp_path / "model")


def test_parts_that_do_not_fit_are_refused_by_what_differs(loaded):
    _, engine = loaded
    configs = engine.checkpoint.configs
    for part, change, sentence in (
        ("transformer", {"pooled_projection_dim": 81}, "pooled texts of 80.*224 and 81"),
        ("vae", {"latent_channels": 4}, "16 channels.*latents have 4"),
    ):
        changed = {**configs, part: {**configs[part], **change}}
        with pytest.raises(CheckpointError, match=sentence):
            StableDiffusion3.build(changed, np.float32)
    with pytest.raises(CheckpointError, match="Token downsampling"):
        StableDiffusion3.build(configs, np.float32, token_downsampling=2)
