"""The guide's API against PyTorch's pipeline, and the forms its arguments may have."""

import jax
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from flax.training.common_utils import shard

from sd_tpu import FlaxStableDiffusionPipeline

PROMPTS = ["a cat on a mat", "two dogs", "", "a castle in the clouds, watercolour"]
EIGHT = [*PROMPTS, "a red house", "a blue house", "a ship", "the moon over water"]


@pytest.fixture(scope="module")
def loaded(checkpoints, layout):
    """(pipeline, params) of each layout in turn, float32, on all eight devices."""
    return FlaxStableDiffusionPipeline.from_pretrained(checkpoints[layout])


@pytest.fixture(scope="module")
def sd1(least):
    """(pipeline, params) of the least model of the SD 1.x layout."""
    return FlaxStableDiffusionPipeline.from_pretrained(least)


def levels(images) -> np.ndarray:
    return (np.asarray(images) * 255).round().astype(int)


@pytest.mark.parametrize("guidance", [5.0, 1.0, 0.5])
def test_given_the_same_latents_the_pictures_are_those_of_pytorch(
    layout, torch_pipelines, loaded, guidance
):
    reference, (pipeline, params) = torch_pipelines[layout], loaded
    latents = np.random.default_rng(0).standard_normal((4, 4, 8, 8)).astype(np.float32)
    reference.set_progress_bar_config(disable=True)
    theirs = reference(
        PROMPTS,
        num_inference_steps=12,
        guidance_scale=guidance,
        output_type="np",
        negative_prompt=["ugly"] * 4,
        latents=torch.tensor(latents),
    ).images
    ours = pipeline(
        pipeline.prepare_inputs(PROMPTS),
        params,
        jax.random.PRNGKey(0),
        12,
        guidance_scale=guidance,
        latents=latents,
        neg_prompt_ids=pipeline.prepare_inputs(["ugly"] * 4),
    ).images
    assert ours.shape == (4, 32, 32, 3)
    assert np.std(theirs) > 0.01
    assert np.mean(np.abs(levels(ours) - levels(theirs)) > 1) <= 0.001


@pytest.fixture(scope="module")
def eight(sd1) -> np.ndarray:
    """Eight pictures, one key each, from flat ids and plain parameters."""
    pipeline, params = sd1
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    return pipeline(pipeline.prepare_inputs(EIGHT), params, keys, 4).images


@pytest.mark.slow("compiles for eight devices")
def test_sharded_ids_and_replicated_params_give_the_same_pictures(sd1, eight):
    pipeline, params = sd1
    ids = shard(pipeline.prepare_inputs(EIGHT))
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    output = pipeline(ids, replicate(params), keys, 4, jit=True)
    assert output[0] is output.images
    assert output.images.shape == (8, 1, 32, 32, 3)
    assert np.array_equal(output.images[:, 0], eight)


def test_one_key_for_all_is_split_among_the_pictures(sd1, eight):
    pipeline, params = sd1
    images = pipeline(pipeline.prepare_inputs(EIGHT), params, jax.random.key(0), 4).images
    assert np.array_equal(images, eight)


def test_the_given_latents_are_what_the_key_would_have_drawn(sd1, eight):
    pipeline, params = sd1
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    latents = np.stack([jax.random.normal(key, (4, 8, 8)) for key in keys])
    others = jax.random.split(jax.random.PRNGKey(1), 8)
    images = pipeline(
        pipeline.prepare_inputs(EIGHT), params, others, 4, latents=latents, return_dict=False
    )[0]
    assert np.mean(images != eight) < 0.001 and np.max(np.abs(images - eight)) < 1.5 / 255


def test_guidance_may_differ_from_picture_to_picture(sd1, eight):
    pipeline, params = sd1
    guidance = [7.5] * 7 + [1.0]
    images = pipeline(
        pipeline.prepare_inputs(EIGHT), params, jax.random.key(0), 4, guidance_scale=guidance
    ).images
    assert np.array_equal(images[:7], eight[:7])
    assert not np.array_equal(images[7], eight[7])


@pytest.mark.slow("compiles for eight devices")
def test_two_images_a_device_keep_the_sharded_shape(sd1):
    pipeline, params = sd1
    ids = shard(pipeline.prepare_inputs(EIGHT * 2))
    images = pipeline(ids, params, jax.random.split(jax.random.key(0), 8), 2).images
    assert images.shape == (8, 2, 32, 32, 3)
    flat = np.asarray(images).reshape(16, -1)
    assert len({image.tobytes() for image in flat}) == 16


def test_what_does_not_fit_is_refused_in_a_sentence(sd1):
    pipeline, params = sd1
    ids = pipeline.prepare_inputs(EIGHT)
    with pytest.raises(ValueError, match=r"prompt_ids should be \[B, 77\]"):
        pipeline(ids[:, :50], params, jax.random.key(0), 4)
    with pytest.raises(ValueError, match="3 keys cannot be divided over 8 pictures"):
        pipeline(ids, params, jax.random.split(jax.random.key(0), 3), 4)
    with pytest.raises(ValueError, match="latents should be"):
        pipeline(ids, params, jax.random.key(0), 4, latents=np.zeros((8, 4, 4, 4)))
    with pytest.raises(ValueError, match="takes 1 to 1000 steps, not 0"):
        pipeline(ids, params, jax.random.key(0), 0)


def test_pictures_become_pil_images_of_the_same_levels(eight):
    pictures = FlaxStableDiffusionPipeline.numpy_to_pil(eight)
    assert len(pictures) == 8
    assert np.array_equal(np.asarray(pictures[3]), levels(eight[3]))


def test_compiled_programs_are_kept_in_the_users_cache_unless_told_where(
    least, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    try:
        for told, expected in ((None, str(tmp_path / "sd_tpu" / "compiled")), ("here", "here")):
            jax.config.update("jax_compilation_cache_dir", told)
            FlaxStableDiffusionPipeline.from_pretrained(least)
            assert jax.config.jax_compilation_cache_dir == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
