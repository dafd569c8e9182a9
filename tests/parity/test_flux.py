"""FLUX.1: pictures against PyTorch's, files, and what is refused."""

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
from sd_tpu.families.flux import Flux
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import RequestError
from tests.support import pictures
from tests.support.flux import make_pipeline
from tests.support.pictures import HOLE, MASK, PHOTO, SIDE, START, assert_alike, pictures_of

PROMPTS = ["a cat", "a red fox (with [brackets] and 1:1.5) on the left of a very small house"]
ASKED = dict(prompts=PROMPTS, seed=3, steps=4, guidance=3.0)
TOKENS = {"schnell": 256, "dev": 512}
drawn = functools.partial(pictures.drawn, asked=ASKED)


@pytest.fixture(scope="module", params=TOKENS)
def loaded(request, tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model) of each kind in turn."""
    folder = tmp_path_factory.mktemp("flux")
    reference = make_pipeline(folder / "words", dev=request.param == "dev")
    reference.save_pretrained(folder / "model")
    _write_lora(reference, folder / "ink.safetensors")
    engine = Engine.open(folder / "model", devices=1, size=(SIDE, SIDE), lora_dir=folder)
    yield reference, engine
    engine.close()


def _write_lora(reference, file) -> None:
    torch.manual_seed(5)
    tensors = {}
    for module in (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.ff.net.0.proj",
        "single_transformer_blocks.1.proj_out",
    ):
        linear = reference.transformer.get_submodule(module)
        name = f"transformer.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, linear.in_features) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(linear.out_features, 4) / 4
    save_file(tensors, file)


def is_dev(reference) -> bool:
    return reference.transformer.config.guidance_embeds


def theirs(reference, engine, monkeypatch, index=0, kind="", size=(SIDE, SIDE), **values):
    """PyTorch's picture of the same noise, with the encoder's mode: uint8 [H, W, 3]."""
    made = getattr(diffusers, f"Flux{kind}Pipeline")(**reference.components)
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
            "guidance_scale": ASKED["guidance"],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": ASKED["steps"],
            "max_sequence_length": TOKENS["dev" if is_dev(reference) else "schnell"],
            "output_type": "np",
            **values,
        }
    ).images
    return np.round(images[0] * 255).astype(int)


def test_two_prompts_of_different_lengths_are_drawn_as_by_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine)
    for index, picture in enumerate(ours):
        assert_alike(picture, theirs(reference, engine, monkeypatch, index))
    assert not np.array_equal(*ours)


@pytest.mark.slow("compiles another size of each kind")
def test_a_picture_that_is_not_square_is_that_of_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, height=24, width=48, prompts=PROMPTS[:1])
    assert_alike(ours[0], theirs(reference, engine, monkeypatch, size=(24, 48)))


def test_a_prompt_that_is_too_long_is_cut_as_by_pytorch_and_said(loaded, monkeypatch):
    reference, engine = loaded
    prompt = " ".join(90 * ["a fox."]) + "end"
    ours = drawn(engine, prompts=[prompt])
    assert_alike(ours[0], theirs(reference, engine, monkeypatch, prompt=prompt))
    count, limit = engine.count(prompt), TOKENS["dev" if is_dev(reference) else "schnell"]
    ids = reference.tokenizer_2(prompt).input_ids
    assert (count.tokens, count.limit) == (len(ids), limit)
    kept = reference.tokenizer_2.decode(ids[: limit - 1])
    assert prompt.replace(" ", "") == (kept + count.lost).replace(" ", "")
    assert engine.count("a fox").lost == ""


def test_guidance_is_told_to_dev_for_each_slot_and_ignored_by_schnell(loaded, monkeypatch):
    reference, engine = loaded
    own = [{"guidance": 1.0}, {"guidance": 6.0}]
    weak, strong = drawn(engine, prompts=2 * PROMPTS[:1], seed=3, own=own)
    assert_alike(weak, theirs(reference, engine, monkeypatch, guidance_scale=1.0))
    expected = theirs(reference, engine, monkeypatch, 1, prompt=PROMPTS[0], guidance_scale=6.0)
    assert_alike(strong, expected)
    (again,) = drawn(engine, prompts=PROMPTS[:1], guidance=6.0)
    assert np.array_equal(again, weak) != is_dev(reference)
    card = engine.checkpoint.card
    defaults = (28, 3.5, 0.25) if is_dev(reference) else (4, 0.0, 0.4)
    assert (card.steps, card.guidance, card.larger_strength) == defaults
    assert engine.checkpoint.default_size == (512, 512)  # 128 latents of a quarter


def test_guidance_and_negative_prompts_compile_nothing(loaded):
    _, engine = loaded
    (plain,) = drawn(engine, prompts=PROMPTS[:1])
    compiled = count_compilations()
    (negated,) = drawn(engine, prompts=PROMPTS[:1], negative_prompt="fog " * 100)
    assert np.array_equal(plain, negated)
    drawn(engine, prompts=PROMPTS[:1], guidance=0.0)
    assert compiled() == 0


@pytest.mark.parametrize(("tokens", "size"), [(4, (16, 16)), (256, (128, 128)), (4096, (512, 512))])
def test_the_shift_is_that_of_the_pipeline(loaded, tokens, size):
    reference, engine = loaded
    module = importlib.import_module(type(reference).__module__)
    schedule = engine.checkpoint.model.schedule_of(engine.checkpoint.schedule, *size, 4)
    shift = np.exp(module.calculate_shift(tokens)) if is_dev(reference) else 1.0
    assert schedule.shift == pytest.approx(shift)


@pytest.mark.parametrize("sampler", FLOW_SAMPLERS)
def test_each_sampler_that_its_pipeline_takes_is_that_of_pytorch(loaded, sampler, monkeypatch):
    reference, engine = loaded
    steps = 1 if FLOW_SAMPLERS[sampler].stochastic else ASKED["steps"]  # whose noise is ours alone
    ours = drawn(engine, sampler=sampler, steps=steps, prompts=PROMPTS[:1])
    assert ours[0].std() > 2
    scheduler = getattr(diffusers, FLOW_SAMPLERS[sampler].scheduler)
    if "FlowMatchEuler" in scheduler.__name__ or "LCM" in scheduler.__name__:
        before = reference.scheduler
        try:
            reference.scheduler = scheduler.from_config(before.config)
            expected = theirs(reference, engine, monkeypatch, num_inference_steps=steps)
        finally:
            reference.scheduler = before
        assert_alike(ours[0], expected)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_picture_that_begins_with_another_is_that_of_pytorch(loaded, strength, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, init_image=START.name, strength=strength, prompts=PROMPTS[:1])
    expected = theirs(reference, engine, monkeypatch, kind="Img2Img", strength=strength)
    assert_alike(ours[0], expected)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_picture_with_a_mask_is_that_of_pytorch_where_it_is_white(loaded, strength, monkeypatch):
    reference, engine = loaded
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


@pytest.mark.slow("compiles the way between two prompts")
def test_a_journey_goes_from_one_prompt_to_another(loaded):
    _, engine = loaded
    begin, end = drawn(engine, seed=3, prompts=[PROMPTS[0]]), drawn(engine, prompts=[PROMPTS[1]])
    ways = [
        drawn(engine, prompts=[PROMPTS[0]], to_prompt=PROMPTS[1], share=share)[0]
        for share in (0.001, 0.5, 1.0)
    ]
    distances = [np.abs(way.astype(int) - end[0]).mean() for way in ways]
    assert_alike(ways[0], begin[0].astype(int))
    assert_alike(ways[2], end[0].astype(int))
    assert distances[0] > distances[2] and distances[1] > 1


def test_arrays_have_the_shapes_that_the_family_tells_of_them(loaded):
    _, engine = loaded
    checkpoint = engine.checkpoint
    inputs = checkpoint.prompt_inputs("a cat", "a dog", guidance=2.0)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), tree)

    assert shapes(inputs) == shapes(checkpoint.model.input_shapes)
    cond = jax.eval_shape(checkpoint.model.encode_prompt, checkpoint.parameters.shapes, inputs)
    assert shapes(cond) == shapes(checkpoint.model.cond_shapes)
    assert checkpoint.model.for_inputs(inputs) == checkpoint.model


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


def test_what_is_saved_is_read_again_here_and_by_pytorch(loaded, tmp_path):
    reference, engine = loaded
    checkpoint, params = Checkpoint.from_pretrained(engine.checkpoint.parameters.source)
    assert isinstance(checkpoint.model, Flux)
    checkpoint.save_pretrained(tmp_path, params)
    again = diffusers.FluxPipeline.from_pretrained(tmp_path)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        states = getattr(again, name).state_dict(), getattr(reference, name).state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_what_it_does_not_have_is_refused_by_name(loaded):
    _, engine = loaded
    for values, sentence in (
        (dict(sampler="ddim"), "DDIM is not for this model"),
        (dict(clip_skip=2), "Clip skip is for models whose prompts CLIP reads"),
        (dict(spacing="karras"), "no karras spacing"),
        (dict(height=28), "sides are multiples of 8"),
    ):
        with pytest.raises(RequestError, match=sentence):
            drawn(engine, **values)


def test_parts_that_do_not_fit_are_refused_by_what_differs(loaded):
    _, engine = loaded
    configs = engine.checkpoint.configs
    for part, change, sentence in (
        ("transformer", {"pooled_projection_dim": 65}, "77 tokens and gives 64.* takes 65, of 77"),
        ("text_encoder", {"max_position_embeddings": 60}, "reads 60 tokens"),
        ("transformer", {"joint_attention_dim": 41}, "T5 gives embeddings of 40.*takes 41"),
        ("vae", {"latent_channels": 4}, "16 channels.*latents have 4"),
        ("transformer", {"in_channels": 384, "out_channels": 64}, "takes 96 .* and gives 16"),
    ):
        changed = {**configs, part: {**configs[part], **change}}
        with pytest.raises(CheckpointError, match=sentence):
            Flux.build(changed, np.float32)
    with pytest.raises(CheckpointError, match="Token downsampling"):
        Flux.build(configs, np.float32, token_downsampling=2)


def test_without_t5_it_says_that_it_needs_it(loaded, tmp_path):
    _, engine = loaded
    source = engine.checkpoint.parameters.source
    with pytest.raises(CheckpointError, match=r"draws nothing without T5.*without --no-t5"):
        Checkpoint.open(source, t5=False)
    shutil.copytree(source, tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    parts = json.loads(index.read_text()) | {"text_encoder_2": [None, None]}
    index.write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match="draws nothing without T5"):
        Checkpoint.open(tmp_path / "model")


def test_sizes_whose_shifts_say_nothing_are_refused_where_sizes_shift(loaded, tmp_path):
    reference, engine = loaded
    shutil.copytree(engine.checkpoint.parameters.source, tmp_path / "model")
    file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_image_seq_len": 4096}))
    if not reference.scheduler.config.use_dynamic_shifting:
        Checkpoint.open(tmp_path / "model")
        return
    with pytest.raises(CheckpointError, match="base_image_seq_len=4096 should not be"):
        Checkpoint.open(tmp_path / "model")
