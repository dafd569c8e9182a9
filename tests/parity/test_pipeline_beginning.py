"""The Flax pipelines that begin with a picture, against PyTorch's from the same noise."""

import importlib
import json
import shutil
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from PIL import Image

from sd_tpu import (
    CheckpointError,
    FlaxDiffusionPipeline,
    FlaxPNDMScheduler,
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
    FlaxStableDiffusionPipeline,
)
from tests.support.processes import told_by

PROMPTS = ["a cat on a mat", "two dogs"]
RNG = np.random.default_rng(0)
PHOTOS = [
    Image.fromarray(RNG.integers(0, 256, (16, 16, 3), np.uint8).repeat(2, 0).repeat(2, 1))
    for _ in PROMPTS
]
HOLE = np.zeros((32, 32), np.uint8)
HOLE[8:24, 4:20] = 255
NOISE = RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)


def theirs(kind: str, parts: dict, monkeypatch, **values) -> np.ndarray:
    """PyTorch's pictures of NOISE, with the encoder's mode: [B, H, W, 3]."""
    pipeline = getattr(diffusers, f"StableDiffusion{kind}Pipeline")(
        **{"image_encoder": None, **parts}, requires_safety_checker=False
    )
    module = importlib.import_module(type(pipeline).__module__)
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(NOISE))
    monkeypatch.setattr(module, "retrieve_latents", lambda found, **_: found.latent_dist.mode())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS,
        image=PHOTOS,
        negative_prompt=["ugly"] * 2,
        num_inference_steps=8,
        guidance_scale=4.0,
        output_type="np",
        **values,
    ).images


def levels(images) -> np.ndarray:
    return (np.asarray(images) * 255).round().astype(int)


def assert_alike(ours, reference) -> None:
    assert np.std(levels(reference)) > 10
    assert np.mean(np.abs(levels(ours) - levels(reference)) > 2) <= 0.005


@pytest.fixture(scope="module")
def both(checkpoints):
    """(pipeline, params) of each layout."""
    return {
        layout: FlaxStableDiffusionImg2ImgPipeline.from_pretrained(folder)
        for layout, folder in checkpoints.items()
    }


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_pictures_begin_with_others_as_in_pytorch(
    layout, both, torch_pipelines, strength, monkeypatch
):
    pipeline, params = both[layout]
    ids, images = pipeline.prepare_inputs(PROMPTS, PHOTOS)
    ours = pipeline(
        ids,
        images,
        params,
        jax.random.PRNGKey(0),
        strength,
        8,
        guidance_scale=4.0,
        noise=NOISE,
        neg_prompt_ids=pipeline.prepare_inputs(["ugly"] * 2, PHOTOS)[0],
    )
    assert_alike(
        ours.images,
        theirs("Img2Img", torch_pipelines[layout].components, monkeypatch, strength=strength),
    )


@pytest.fixture(scope="module")
def img2img(least):
    """(pipeline, params) of the least model, for what is around its networks."""
    return FlaxStableDiffusionImg2ImgPipeline.from_pretrained(least)


@pytest.mark.slow("compiles a pipeline for each kind of parameters")
def test_sharded_pictures_are_those_of_flat_ones_and_of_the_noise_of_their_keys(img2img):
    pipeline, params = img2img
    ids, images = pipeline.prepare_inputs(PROMPTS * 4, PHOTOS * 4)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    flat = pipeline(ids, images, params, keys, 0.5, 4).images
    sharded = pipeline(
        shard(ids), shard(images), replicate(params), keys, 0.5, 4, jit=True, return_dict=False
    )[0]
    assert sharded.shape == (8, 1, 32, 32, 3) and np.array_equal(sharded[:, 0], flat)
    noise = np.stack([jax.random.normal(key, (4, 8, 8)) for key in keys])
    given = pipeline(ids, images, params, keys, 0.5, 4, noise=noise).images
    assert np.mean(np.abs(levels(given) - levels(flat)) > 1) <= 0.001
    assert len({picture.tobytes() for picture in flat}) == 8


@partial(jax.jit, static_argnames="dtype")
def cast(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda params: {**params, "vae": cast(params["vae"], jnp.bfloat16)},
        lambda params: {**params, "unet": cast(params["unet"], jnp.float16)},
        lambda params: cast(cast(params, jnp.bfloat16), jnp.float32),
        lambda params: replicate(cast(params, jnp.bfloat16)),
        jax.jit(lambda params: jax.tree.map(lambda x: jnp.stack([x] * 8), params)),
        jax.device_get,
    ],
    ids=["vae", "unet", "back", "replicated", "stacked", "numpy"],
)
@pytest.mark.slow("compiles a pipeline for each kind of parameters")
def test_parameters_that_a_program_cast_are_compiled_for(img2img, change):
    pipeline, params = img2img
    ids, images = pipeline.prepare_inputs(PROMPTS * 4, PHOTOS * 4)
    whole, other = (
        pipeline(ids, images, each, jax.random.PRNGKey(0), 0.5, 4).images
        for each in (params, change(params))
    )
    assert np.std(levels(whole)) > 10 and np.mean(np.abs(other - whole)) < 0.005


def test_prepared_pictures_have_sides_of_whole_units_and_lie_around_zero(img2img):
    pipeline, _ = img2img
    ids, images = pipeline.prepare_inputs("a cat", Image.new("RGBA", (70, 40), "white"))
    assert ids.shape == (1, 77) and images.shape == (1, 3, 32, 64) and np.all(images == 1)


def test_the_steps_that_are_left_out_are_those_that_pytorch_leaves_out(img2img, least_pipeline):
    reference = diffusers.StableDiffusionImg2ImgPipeline(**least_pipeline.components)
    for steps, strength in ((50, 0.75), (8, 0.4), (3, 1.0)):
        reference.scheduler.set_timesteps(steps)
        timesteps, _ = reference.get_timesteps(steps, strength, "cpu")
        begin = img2img[0].get_timestep_start(steps, strength)
        assert timesteps.tolist() == reference.scheduler.timesteps[begin:].tolist()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (dict(strength=0.1), "at least one of 4 steps, which 0.1 does not"),
        (dict(strength=1.2), "strength should be at most 1 "),
        (dict(height=64), "image should be 2 of 64x32"),
        (dict(noise=NOISE[:1]), "noise should be"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(img2img, values, complaint):
    pipeline, params = img2img
    ids, images = pipeline.prepare_inputs(PROMPTS, PHOTOS)
    with pytest.raises(ValueError, match=complaint):
        pipeline(ids, images, params, jax.random.key(0), num_inference_steps=4, **values)


def test_a_scheduler_that_alone_knows_its_steps_cannot_begin_with_a_picture(img2img):
    pipeline, params = img2img
    ids, images = pipeline.prepare_inputs(PROMPTS, PHOTOS)
    pipeline = FlaxStableDiffusionImg2ImgPipeline(
        **{**pipeline.components, "scheduler": FlaxPNDMScheduler(skip_prk_steps=False)}
    )
    with pytest.raises(CheckpointError, match="give the pipeline another"):
        pipeline(ids, images, {**params, "scheduler": None}, jax.random.key(0))


@pytest.fixture(scope="module")
def filling(least_pipeline, tmp_path_factory):
    """(PyTorch's parts, their folder) of a checkpoint that fills in pictures."""
    parts = least_pipeline.components
    torch.manual_seed(1)
    unet = diffusers.UNet2DConditionModel.from_config(parts["unet"].config, in_channels=9)
    parts = {**parts, "unet": unet.eval()}
    folder = tmp_path_factory.mktemp("filling")
    diffusers.StableDiffusionInpaintPipeline(
        **parts, requires_safety_checker=False
    ).save_pretrained(folder)
    return parts, folder


@pytest.mark.slow("compiles a pipeline for each kind of parameters")
def test_what_is_white_in_a_mask_is_drawn_as_in_pytorch(filling, monkeypatch, tmp_path):
    parts, folder = filling
    pipeline, params = FlaxStableDiffusionInpaintPipeline.from_pretrained(folder)
    ids, kept, masks = pipeline.prepare_inputs(PROMPTS, PHOTOS, [Image.fromarray(HOLE)] * 2)
    assert kept.shape == (2, 3, 32, 32) and np.array_equal(masks[0, 0], HOLE / 255)
    assert np.all(kept[:, :, HOLE > 0] == 0)
    ours = pipeline(
        ids,
        masks,
        kept,
        params,
        jax.random.PRNGKey(0),
        8,
        guidance_scale=4.0,
        latents=NOISE,
        neg_prompt_ids=pipeline.prepare_inputs(["ugly"] * 2, PHOTOS, PHOTOS)[0],
    ).images
    reference = theirs(
        "Inpaint",
        parts,
        monkeypatch,
        mask_image=Image.fromarray(HOLE),
        strength=1.0,
        height=32,
        width=32,
    )
    assert_alike(ours, reference)
    pipeline.save_pretrained(tmp_path, params)
    assert type(diffusers.DiffusionPipeline.from_pretrained(tmp_path)) is (
        diffusers.StableDiffusionInpaintPipeline
    )


def test_a_unet_is_used_by_the_pipeline_that_knows_what_it_is_told(filling, least):
    _, folder = filling
    with pytest.raises(CheckpointError, match="fills in pictures; FlaxStableDiffusionPipeline"):
        FlaxStableDiffusionPipeline.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="takes no mask; FlaxStableDiffusionInpaint"):
        FlaxStableDiffusionInpaintPipeline.from_pretrained(least)


@pytest.mark.parametrize(
    "name", ["StableDiffusionInpaintPipeline", "FlaxStableDiffusionInpaintPipeline"]
)
def test_a_checkpoint_that_fills_in_is_opened_by_the_class_it_was_made_for(filling, name, tmp_path):
    shutil.copytree(filling[1], tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": name}))
    pipeline, _ = FlaxDiffusionPipeline.from_pretrained(tmp_path)
    assert type(pipeline) is FlaxStableDiffusionInpaintPipeline


@pytest.mark.parametrize(
    "name, kind",
    [
        ("FlaxStableDiffusionImg2ImgPipeline", FlaxStableDiffusionImg2ImgPipeline),
        ("StableDiffusionImg2ImgPipeline", FlaxStableDiffusionImg2ImgPipeline),
        ("StableDiffusionPipeline", FlaxStableDiffusionPipeline),
    ],
)
def test_a_pipeline_is_of_the_class_that_a_checkpoint_names(name, kind):
    assert FlaxDiffusionPipeline._class_for({"_class_name": name}) is kind
    assert FlaxStableDiffusionPipeline._class_for({"_class_name": name}) is (
        FlaxStableDiffusionPipeline
    )


def test_a_pipelines_class_is_found_whatever_was_imported_before():
    program = (
        "from sd_tpu import FlaxDiffusionPipeline\n"
        "for name in ('Inpaint', 'XL', 'ControlNet', ''):\n"
        "    index = {'_class_name': f'StableDiffusion{name}Pipeline'}\n"
        "    print(FlaxDiffusionPipeline._class_for(index).__name__)"
    )
    assert told_by(program).stdout.split() == [
        f"FlaxStableDiffusion{name}Pipeline" for name in ("Inpaint", "XL", "ControlNet", "")
    ]


def test_parameters_of_a_whole_network_that_are_missing_are_a_sentence(img2img):
    pipeline, params = img2img
    ids, images = pipeline.prepare_inputs(PROMPTS, PHOTOS)
    params = {name: tree for name, tree in params.items() if name != "vae"}
    with pytest.raises(CheckpointError, match="parameters are missing: decoder"):
        pipeline(ids, images, params, jax.random.key(0), num_inference_steps=4)
