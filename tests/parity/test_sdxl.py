"""Stable Diffusion XL and models of few steps against PyTorch's pipelines, from the same noise."""

import copy
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.schedulers import scheduling_lcm
from jaxtyping import PyTree
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sd_tpu import BUNDLED_MODEL, FlaxStableDiffusionPipeline
from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion_xl import StableDiffusionXL
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.runtime.programs import Programs, TextEncoder
from sd_tpu.runtime.slots import SlotInputs, advance_slots, empty_slots
from sd_tpu.sampling.samplers import default_sampler, make_table
from sd_tpu.sampling.schedule import NoiseSchedule
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from tests.support import tiny
from tests.support.parity import assert_agrees
from tests.support.published import PUBLISHED

PROMPTS = ["a cat on a mat", "two dogs, watercolour"]
SIZE = (96, 32)
COMMON = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
EULER = partial(diffusers.EulerDiscreteScheduler, **COMMON)
LIGHTNING = EULER(timestep_spacing="trailing")
CASES = {  # scheduler, steps, guidance, negative prompt; None is that nobody wrote one
    "guidance, a negative prompt": (EULER(timestep_spacing="leading"), 8, 5.0, "fog"),
    "guidance, no negative prompt": (EULER(timestep_spacing="leading"), 8, 5.0, None),
    "guidance 1": (EULER(timestep_spacing="leading"), 8, 1.0, None),
    "v prediction, zero SNR (NoobAI)": (
        EULER(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
        8,
        4.0,
        "fog",
    ),
    "1 step, guidance 0 (Turbo)": (
        diffusers.EulerAncestralDiscreteScheduler(**COMMON, timestep_spacing="trailing"),
        1,
        0.0,
        None,
    ),
    "4 steps (Lightning)": (LIGHTNING, 4, 0.0, None),
}


def make_unet(**options) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        norm_num_groups=8,
        layers_per_block=1,
        attention_head_dim=2,
        **{
            "cross_attention_dim": 192,
            "use_linear_projection": True,
            "block_out_channels": (16,),
            "transformer_layers_per_block": (2,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "up_block_types": ("CrossAttnUpBlock2D",),
            **options,
        },
    )


def make_vae() -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        scaling_factor=0.13025,
        force_upcast=True,
    )


@pytest.fixture(scope="module")
def reference() -> diffusers.StableDiffusionXLPipeline:
    """A tiny SDXL of random weights; its second tokenizer fills up with another token."""
    torch.manual_seed(0)
    tokenizers = [
        CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer", **options)
        for options in ({}, {"pad_token": "!"})
    ]
    pipeline = diffusers.StableDiffusionXLPipeline(
        unet=make_unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=96 + 6 * 8,
        ),
        vae=make_vae(),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        scheduler=LIGHTNING,
        text_encoder=tiny.text_encoder(CLIPTextModel, 64, "quick_gelu"),
        text_encoder_2=tiny.text_encoder(
            CLIPTextModelWithProjection, 128, "gelu", projection_dim=96
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """The same as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("sdxl")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder) -> tuple[Checkpoint, PyTree]:
    """The same, read, on one device."""
    return Checkpoint.from_pretrained(folder)


@pytest.fixture(scope="module")
def adapters(reference, tmp_path_factory):
    """A folder with a LoRA for all three networks and an embedding for either encoder."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, reference)
    return folder


@pytest.fixture(scope="module")
def engine(folder, adapters) -> Iterator[Engine]:
    """Compiled once; what the schedulers differ in is no part of its programs."""
    options = dict(lora_dir=adapters, embedding_dir=adapters)
    with Engine.open(folder, devices=1, size=SIZE, **options) as engine:
        assert engine.ready.wait(300)
        yield engine


def draw(
    programs: Programs,
    checkpoint: Checkpoint,
    params,
    scheduler,
    steps: int,
    guidance: float,
    negative: str | None,
    latents: np.ndarray,
    texts: TextEncoder | None = None,
) -> np.ndarray:
    """Pictures [2, H, W, 3] of PROMPTS, uint8; texts are encoded by the programs' own encoder if
    no other is given."""
    config = json.loads(scheduler.to_json_string())
    sampler, spacing = default_sampler(config)
    table = make_table(sampler, NoiseSchedule.from_config(config), steps, spacing=spacing)
    height, width = (side * checkpoint.model.downscale for side in latents.shape[2:])
    model = checkpoint.model
    entering = {
        i: SlotInputs.of(
            table,
            checkpoint.prompt_inputs(
                prompt, negative or "", height=height, width=width, guidance=guidance
            ),
            guidance=model.cfg_scale(guidance),
            key=np.zeros(2, np.uint32),
            latents=latents[i].transpose(1, 2, 0),
        )
        for i, prompt in enumerate(PROMPTS)
    }
    encoder = texts or programs.texts
    made = encoder.encode(params, [each.inputs for each in entering.values()])
    entering = {i: each.with_texts(made[i]) for i, each in entering.items()}
    slots = programs.encode(params, programs.empty(), entering)
    slots = programs.advance(params, slots, len(table.rows))
    return np.asarray(programs.decode(params, slots.latents, np.arange(programs.slots) < 2))[:2]


def levels(images) -> np.ndarray:
    return (np.asarray(images) * 255).round().astype(int)


def assert_alike(ours: np.ndarray, theirs: np.ndarray, case: str) -> None:
    differences = np.abs(ours.astype(int) - levels(theirs))
    print(
        f"parity | {case} | {np.mean(differences <= 2):.2%} within 2, at most "
        f"{differences.max()} | deviation {levels(theirs).std():.0f}"
    )
    assert ours.shape == theirs.shape and levels(theirs).std() > 10
    assert np.mean(differences <= 2) >= 0.995


@pytest.mark.parametrize("case", CASES)
def test_from_the_same_noise_pictures_are_those_of_pytorch(reference, engine, case):
    scheduler, steps, guidance, negative = CASES[case]
    reference.scheduler = scheduler
    h, w, channels = engine.programs.latent_shape
    latents = np.random.default_rng(0).standard_normal((2, channels, h, w)).astype(np.float32)
    theirs = reference(
        PROMPTS,
        num_inference_steps=steps,
        guidance_scale=guidance,
        negative_prompt=negative and [negative] * 2,
        height=4 * h,
        width=4 * w,
        latents=torch.tensor(latents),
        output_type="np",
    ).images
    texts = engine.worker._text_encoders[engine.reader]
    asked = scheduler, steps, guidance, negative
    ours = draw(engine.programs, engine.checkpoint, engine.params, *asked, latents, texts)
    assert_alike(ours, theirs, f"SDXL {4 * w}x{4 * h}, {case}")


def test_no_negative_prompt_is_the_empty_text_where_the_model_wants_no_zeros(reference, loaded):
    checkpoint, params = loaded
    reference.scheduler = LIGHTNING
    encode = jax.jit(checkpoint.model.encode_prompt)
    for force_zeros in (True, False):
        reference.register_to_config(force_zeros_for_empty_prompt=force_zeros)
        model = dataclasses.replace(checkpoint.model, force_zeros=force_zeros)
        inputs = model.prompt_inputs(checkpoint.tokenizers, PROMPTS[0], height=64, width=64)
        cond = encode(params, inputs)
        with torch.no_grad():
            text, no_text, pooled, no_pooled = reference.encode_prompt(PROMPTS[0])
        for ours, theirs in (
            (cond["text"], torch.cat([no_text, text])),
            (cond["text_embeds"], torch.cat([no_pooled, pooled])),
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(theirs.abs().max()))
        assert bool(np.any(cond["text"][0])) != force_zeros
    reference.register_to_config(force_zeros_for_empty_prompt=True)


def test_emphasis_is_each_encoders_own_and_the_pooled_text_is_the_first_chunks(reference, loaded):
    """Each encoder's output times its weights, with the mean that the chunk had."""
    checkpoint, params = loaded
    inputs = checkpoint.prompt_inputs("a cat BREAK a (red:1.4) hat", "ugly")
    cond = jax.jit(checkpoint.model.for_inputs(inputs).encode_prompt)(params, inputs)

    def encoded(text: str) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            words, _, pooled, _ = reference.encode_prompt(text, do_classifier_free_guidance=False)
        return words[0].numpy(), pooled[0].numpy()

    cat, hat, ugly, empty = map(encoded, ("a cat", "a red hat", "ugly", ""))
    weights = np.ones((77, 1), np.float32)
    weights[2] = 1.4
    width = checkpoint.model.text_widths["text_encoder"]
    parts = np.split(hat[0], [width], axis=-1)
    emphasized = np.concatenate(
        [part * weights * (part.mean() / (part * weights).mean()) for part in parts], axis=-1
    )
    for got, want in (
        (cond["text"][0], np.concatenate([ugly[0], empty[0]])),
        (cond["text"][1], np.concatenate([cat[0], emphasized])),
        (cond["text_embeds"], np.stack([ugly[1], cat[1]])),
    ):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_clip_skip_begins_with_the_layer_that_the_model_was_trained_on(reference, loaded):
    checkpoint, params = loaded
    encode = jax.jit(checkpoint.model.encode_prompt)
    for skip, theirs in ((1, None), (2, None), (3, 1)):
        found = encode(params, checkpoint.prompt_inputs("a cat", "ugly", clip_skip=skip))
        for words, text, pooled in zip(
            ("ugly", "a cat"), found["text"], found["text_embeds"], strict=True
        ):
            with torch.no_grad():
                want, _, want_pooled, _ = reference.encode_prompt(
                    words, do_classifier_free_guidance=False, clip_skip=theirs
                )
            np.testing.assert_allclose(text, want[0], atol=1e-5 * float(want.abs().max()))
            np.testing.assert_allclose(pooled, want_pooled[0], atol=1e-4)


def test_the_autoencoder_is_float32_where_it_must_be_and_the_rest_is_not(folder):
    checkpoint, params = Checkpoint.from_pretrained(folder, dtype=jnp.bfloat16)
    types = {part: {leaf.dtype.name for leaf in jax.tree.leaves(params[part])} for part in params}
    assert types == {
        "text_encoder": {"bfloat16"},
        "text_encoder_2": {"bfloat16"},
        "unet": {"bfloat16"},
        "vae": {"float32"},
    }
    vae = {**checkpoint.configs["vae"], "force_upcast": False}
    _, shapes = StableDiffusionXL.build({**checkpoint.configs, "vae": vae}, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes["vae"])} == {jnp.dtype(jnp.bfloat16)}


def test_a_saved_checkpoint_is_that_of_pytorch_and_is_read_back(loaded, tmp_path):
    checkpoint, params = loaded
    params = jax.tree.map(lambda leaf: np.asarray(leaf) * 1.1, params)  # no longer what was read
    checkpoint.save_pretrained(tmp_path, params)
    again, params_again = Checkpoint.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params_again, params)
    assert again.model == checkpoint.model
    card = json.loads((tmp_path / "sd_tpu.json").read_text("utf-8"))
    assert list(card) == list(ModelCard.model_fields), "a page shows what it lists in its order"
    theirs = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    assert theirs.config.force_zeros_for_empty_prompt is True
    kernel = params["text_encoder_2"]["text_projection"]["kernel"]
    np.testing.assert_array_equal(theirs.text_encoder_2.text_projection.weight.detach(), kernel.T)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        ids = getattr(theirs, tokenizer)("a cat", padding="max_length", max_length=77).input_ids
        assert checkpoint.tokenizers[tokenizer](["a cat"])[0].tolist() == ids


@pytest.mark.parametrize(
    "part, values, complaint",
    [
        ("unet", dict(in_channels=8), "InstructPix2Pix"),
        ("unet", dict(projection_class_embeddings_input_dim=96 + 5 * 8), "The refiner of SDXL"),
        (
            "unet",
            dict(cross_attention_dim=128),
            "give 77 embeddings of 192, the UNet takes 77 of 128",
        ),
        ("unet", dict(addition_embed_type=None), "takes no sizes and no pooled text"),
        ("vae", dict(_class_name="AutoencoderDC"), "AutoencoderDC is not supported"),
    ],
)
def test_parts_that_are_not_of_sdxl_are_refused_by_what_they_are(loaded, part, values, complaint):
    configs = loaded[0].configs
    with pytest.raises(CheckpointError, match=complaint):
        StableDiffusionXL.build({**configs, part: {**configs[part], **values}}, jnp.float32)


def write_adapters(folder, pipeline) -> None:
    """A LoRA for all three networks and an embedding of two vectors for each encoder."""
    torch.manual_seed(5)
    tensors = {}
    for part, prefix in (("unet", "unet"), ("text_encoder", "te1"), ("text_encoder_2", "te2")):
        for name, layer in getattr(pipeline, part).named_modules():
            if name.endswith(("to_q", "to_v", "q_proj", "out_proj")):
                outputs, inputs = layer.weight.shape
                if part != "unet" and not name.startswith("text_model"):
                    name = f"text_model.{name}"
                key = f"lora_{prefix}_{name.replace('.', '_')}"
                tensors |= {
                    f"{key}.lora_down.weight": torch.randn(2, inputs) / 2,
                    f"{key}.lora_up.weight": torch.randn(outputs, 2) / 2,
                    f"{key}.alpha": torch.tensor(2.0),
                }
    save_file(tensors, folder / "both.safetensors")
    widths = {"clip_l": pipeline.text_encoder, "clip_g": pipeline.text_encoder_2}
    save_file(
        {name: torch.randn(2, encoder.config.hidden_size) for name, encoder in widths.items()},
        folder / "mystyle.safetensors",
    )


@pytest.mark.slow("compiles SDXL with two text encoders")
def test_the_engine_draws_what_pytorch_draws(engine, reference, adapters):
    """From the noise of the seed; the size, the guidance and the encoders are told of themselves.
    A LoRA and an embedding are only for the picture that names them.
    """
    plain, adapted = PROMPTS[0], f"{PROMPTS[1]}, mystyle"
    request = Request.check(
        {
            "prompts": [plain, f"{adapted} <lora:both:0.7>"],
            "seed": 7,
            "negative_prompt": "fog",
            "steps": 4,
            "guidance": 3.0,
            "sampler": "euler",
        },
        engine.defaults,
    )
    made = [
        event.pixels for event in engine.submit(request).events() if isinstance(event, ImageReady)
    ]
    pipeline = type(reference)(
        **{name: copy.deepcopy(part) for name, part in reference.components.items()}
    )
    pipeline.scheduler = LIGHTNING
    pipeline.set_progress_bar_config(disable=True)

    def drawn(prompt: str, seed: int) -> np.ndarray:
        noise = jax.random.normal(jax.random.PRNGKey(seed), (1, 4, SIZE[0] // 4, SIZE[1] // 4))
        return pipeline(
            prompt,
            num_inference_steps=4,
            guidance_scale=3.0,
            height=SIZE[0],
            width=SIZE[1],
            negative_prompt="fog",
            latents=torch.tensor(np.asarray(noise)),
            output_type="np",
        ).images[0]

    theirs, without = drawn(plain, 7), drawn(PROMPTS[1], 8)
    pipeline.load_lora_weights(str(adapters), weight_name="both.safetensors")
    pipeline.fuse_lora(lora_scale=0.7)
    vectors = load_file(adapters / "mystyle.safetensors")
    for name, which in (("clip_l", ""), ("clip_g", "_2")):
        pipeline.load_textual_inversion(
            vectors[name],
            token="mystyle",
            tokenizer=getattr(pipeline, f"tokenizer{which}"),
            text_encoder=getattr(pipeline, f"text_encoder{which}"),
        )
    # The pooled text is that of the prompt's end, as trainers of embeddings have it. transformers
    # takes the place of the largest id, which would now be the embedding's.
    pipeline.text_encoder_2.text_model.eos_token_id = pipeline.tokenizer_2.eos_token_id
    both = np.stack([theirs, drawn(adapted, 8)])
    assert np.abs(both[1] - without).mean() > 0.01, "they change the picture"
    assert_alike(np.stack(made), both, "SDXL 32x96 through the engine, with a LoRA")


@pytest.mark.slow("compiles SDXL twice")
def test_a_latent_consistency_model_is_told_the_guidance_and_draws_the_prompt_alone(
    tmp_path, monkeypatch
):
    # Both draw the noise of a step from the same key.
    rows = itertools.cycle(range(3))

    def noise(shape, **_):
        key = jax.random.fold_in(jax.random.PRNGKey(0), next(rows))
        return torch.tensor(np.stack([jax.random.normal(key, shape[1:])] * 2))

    monkeypatch.setattr(scheduling_lcm, "randn_tensor", noise)
    torch.manual_seed(1)
    pipeline = diffusers.LatentConsistencyModelPipeline(
        unet=make_unet(time_cond_proj_dim=32, cross_attention_dim=64),
        vae=make_vae(),
        tokenizer=CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer"),
        text_encoder=tiny.text_encoder(CLIPTextModel, 64, "quick_gelu"),
        scheduler=diffusers.LCMScheduler(**COMMON),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(tmp_path)
    checkpoint, params = Checkpoint.from_pretrained(tmp_path)
    programs = Programs(checkpoint.model, make_mesh(1), slots=2, height=32, width=32)
    pipeline.set_progress_bar_config(disable=True)
    latents = np.random.default_rng(0).standard_normal((2, 4, 8, 8)).astype(np.float32)
    flax, flax_params = FlaxStableDiffusionPipeline.from_pretrained(tmp_path)
    ids, keys = flax.prepare_inputs(PROMPTS), jnp.stack([jax.random.PRNGKey(0)] * 2)
    generate = jax.jit(flax._generate, static_argnums=(3, 4, 5))
    drawn = []
    for guidance in (8.5, 1.0):
        theirs = pipeline(
            PROMPTS,
            num_inference_steps=4,
            guidance_scale=guidance,
            height=32,
            width=32,
            latents=torch.tensor(latents),
            output_type="np",
        ).images
        drawn.append(
            draw(programs, checkpoint, params, pipeline.scheduler, 4, guidance, None, latents)
        )
        assert_alike(drawn[-1], theirs, f"LCM, SD 1 shape, 4 steps, guidance {guidance}")
        old = generate(ids, flax_params, keys, 4, 32, 32, guidance, latents)
        assert_alike(levels(old), theirs, f"LCM, _generate, 4 steps, guidance {guidance}")
    assert np.any(drawn[0] != drawn[1])


def test_a_checkpoint_may_have_a_tiny_autoencoder(folder, tmp_path):
    torch.manual_seed(2)
    tiny_vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("vae"))
    tiny_vae.save_pretrained(tmp_path / "model" / "vae")
    checkpoint, params = Checkpoint.from_pretrained(tmp_path / "model")
    latents = np.random.default_rng(0).standard_normal((1, 4, 8, 4)).astype(np.float32)
    ours = jax.jit(checkpoint.model.decode)(params, latents[0].transpose(1, 2, 0))
    with torch.no_grad():
        theirs = tiny_vae.decode(torch.tensor(latents)).sample[0].permute(1, 2, 0).numpy()
    assert ours.shape == (32, 16, 3)
    assert_agrees("AutoencoderTiny of SDXL, decode", ours, theirs)
    checkpoint.save_pretrained(tmp_path / "saved", params)
    again = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path / "saved")
    assert isinstance(again.vae, diffusers.AutoencoderTiny)


# --- full size ----------------------------------------------------------------------------------


def full_size(name: str) -> tuple[StableDiffusionXL, PyTree]:
    """The model with a published UNet, and its parameters' shapes."""
    sd1 = PUBLISHED["sd14"]
    return StableDiffusionXL.build(
        {
            "model_index": {},
            "text_encoder": sd1["text_encoder"],
            "vae": sd1["vae"],
            "text_encoder_2": PUBLISHED["sdxl"]["text_encoder_2"],
            "unet": PUBLISHED[name]["unet"],
        },
        jnp.bfloat16,
    )


@pytest.mark.slow("compiles SDXL at its full size")
def test_sdxl_of_full_size_advances():
    model, params = full_size("sdxl")
    assert model.cond_shapes["text"].shape == (2, 77, 2048)
    slots = jax.eval_shape(partial(empty_slots, model, 1, model.latent_shape(1024, 1024)))
    assert slots.latents.shape == (1, 128, 128, 4)
    cond = jax.eval_shape(model.encode_prompt, params, model.input_shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cond) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.cond_shapes
    )
    after = jax.eval_shape(partial(advance_slots, model, n=1, group=1), params, slots)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, slots)


@pytest.mark.parametrize("name", ["ssd-1b", "vega"])
def test_smaller_unets_of_full_size_denoise(name):
    model, params = full_size(name)
    x = jax.ShapeDtypeStruct((2, *model.latent_shape(1216, 832)), jnp.float32)
    t = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert jax.eval_shape(model.denoise, params, x, t, model.cond_shapes).shape == x.shape
