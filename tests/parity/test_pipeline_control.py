"""The Flax pipeline that is steered by a control picture, against PyTorch's from the same noise."""

import inspect

import diffusers
import jax
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from PIL import Image

from sd_tpu import (
    CheckpointError,
    FlaxControlNetModel,
    FlaxStableDiffusionControlNetPipeline,
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
    FlaxStableDiffusionPipeline,
)
from tests.support.networks import make_controlnet

PROMPTS = ["a cat on a mat", "two dogs"]
RNG = np.random.default_rng(0)
LINES = [
    Image.fromarray(RNG.integers(0, 256, (16, 16, 3), np.uint8).repeat(4, 0).repeat(4, 1))
    for _ in PROMPTS
]
NOISE = RNG.standard_normal((2, 4, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def both(least_pipeline, least, tmp_path_factory):
    """(PyTorch's ControlNet, our pipeline, its parameters) of SD 1, as programs join them."""
    theirs = make_controlnet(least_pipeline.unet)
    folder = tmp_path_factory.mktemp("lines")
    theirs.save_pretrained(folder)
    controlnet, own = FlaxControlNetModel.from_pretrained(folder, from_pt=True)
    pipeline, params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        least, controlnet=controlnet, from_pt=True, safety_checker=None
    )
    assert "controlnet" not in params
    params["controlnet"] = own
    return theirs, pipeline, params


@pytest.mark.slow("compiles a pipeline with a ControlNet")
def test_pictures_follow_others_as_in_pytorch(both, least_pipeline):
    theirs, pipeline, params = both
    reference = diffusers.StableDiffusionControlNetPipeline(
        **least_pipeline.components, controlnet=theirs, requires_safety_checker=False
    )
    reference.set_progress_bar_config(disable=True)
    expected = np.round(
        255
        * reference(
            PROMPTS,
            LINES,
            latents=torch.tensor(NOISE),
            negative_prompt=["ugly"] * 2,
            num_inference_steps=4,
            guidance_scale=4.0,
            controlnet_conditioning_scale=0.7,
            output_type="np",
        ).images
    )
    ids, images = pipeline.prepare_text_inputs(PROMPTS), pipeline.prepare_image_inputs(LINES)
    ours = pipeline(
        ids,
        images,
        params,
        jax.random.PRNGKey(0),
        4,
        4.0,
        NOISE,
        pipeline.prepare_text_inputs(["ugly"] * 2),
        0.7,
    ).images
    assert expected.std() > 10
    assert np.mean(np.abs(np.round(255 * ours) - expected) <= 2) >= 0.995


@pytest.mark.slow("compiles a pipeline with a ControlNet")
def test_sharded_pictures_and_mapped_ones_are_those_of_flat_ones(both):
    _, pipeline, params = both
    ids = pipeline.prepare_text_inputs(PROMPTS * 4)
    images = pipeline.prepare_image_inputs(LINES * 4)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    flat = pipeline(ids, images, params, keys, 2).images
    assert len({picture.tobytes() for picture in flat}) == 8
    sharded = pipeline(
        shard(ids), shard(images), replicate(params), keys, 2, jit=True, return_dict=False
    )[0]
    assert sharded.shape == (8, 1, 64, 64, 3) and np.array_equal(sharded[:, 0], flat)
    mapped = jax.pmap(pipeline._generate, static_broadcasted_argnums=4)(
        shard(ids), shard(images), replicate(params), keys, 2
    )
    np.testing.assert_allclose(mapped[:, 0], flat, atol=1e-3)


def test_the_model_is_called_as_it_was(both):
    theirs, pipeline, params = both
    latents, text, picture = (
        RNG.standard_normal(shape).astype(np.float32)
        for shape in ((2, 4, 16, 16), (2, 77, 32), (2, 3, 64, 64))
    )
    down, middle = jax.jit(
        lambda params: pipeline.controlnet.apply(
            {"params": params},
            latents,
            7,
            encoder_hidden_states=text,
            controlnet_cond=picture,
            conditioning_scale=0.5,
            return_dict=False,
        )
    )(params["controlnet"])
    with torch.no_grad():
        expected = theirs(
            *map(torch.tensor, (latents,)),
            7,
            torch.tensor(text),
            torch.tensor(picture),
            conditioning_scale=0.5,
        )
    for ours, other in zip(
        [*down, middle],
        [*expected.down_block_res_samples, expected.mid_block_res_sample],
        strict=True,
    ):
        np.testing.assert_allclose(
            np.moveaxis(np.asarray(ours), -1, 1),
            other,
            rtol=1e-3,
            atol=1e-4 * float(other.abs().max()),
        )


def test_prepared_pictures_have_sides_of_whole_units(both):
    _, pipeline, _ = both
    images = pipeline.prepare_image_inputs(Image.new("L", (150, 70), 255))
    assert images.shape == (1, 3, 64, 128) and np.all(images == 1)
    for wrong in (np.zeros((64, 64, 3)), "a.png"):
        with pytest.raises(ValueError, match="PIL image"):
            pipeline.prepare_image_inputs(wrong)
    with pytest.raises(ValueError, match="text or a list"):
        pipeline.prepare_text_inputs(3)


@pytest.mark.parametrize(
    "images, complaint",
    [
        (np.zeros((2, 3, 32, 64)), "multiples of 64, not 32 and 64"),
        (np.zeros((1, 3, 64, 64)), "image should be 2 of 3 channels"),
        (np.zeros((2, 64, 64, 3)), "image should be 2 of 3 channels"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(both, images, complaint):
    _, pipeline, params = both
    ids = pipeline.prepare_text_inputs(PROMPTS)
    with pytest.raises(ValueError, match=complaint):
        pipeline(ids, images, params, jax.random.key(0), 2)


def test_a_controlnet_of_another_model_is_refused(both):
    _, pipeline, _ = both
    other = FlaxControlNetModel(cross_attention_dim=1024)
    with pytest.raises(CheckpointError, match=r"The ControlNet takes texts of 1024 .* be 32\.$"):
        FlaxStableDiffusionControlNetPipeline(**{**pipeline.components, "controlnet": other})


@pytest.mark.parametrize(
    "function, needed, optional",
    [
        (
            FlaxStableDiffusionControlNetPipeline.__call__,
            "prompt_ids image params prng_seed",
            dict(
                num_inference_steps=50,
                guidance_scale=7.5,
                latents=None,
                neg_prompt_ids=None,
                controlnet_conditioning_scale=1.0,
                return_dict=True,
                jit=False,
            ),
        ),
        (
            FlaxStableDiffusionImg2ImgPipeline.__call__,
            "prompt_ids image params prng_seed",
            dict(
                strength=0.8,
                num_inference_steps=50,
                height=None,
                width=None,
                guidance_scale=7.5,
                noise=None,
                neg_prompt_ids=None,
                return_dict=True,
                jit=False,
            ),
        ),
        (
            FlaxStableDiffusionInpaintPipeline.__call__,
            "prompt_ids mask masked_image params prng_seed",
            dict(
                num_inference_steps=50,
                height=None,
                width=None,
                guidance_scale=7.5,
                latents=None,
                neg_prompt_ids=None,
                return_dict=True,
                jit=False,
            ),
        ),
        (
            FlaxControlNetModel.__call__,
            "sample timesteps encoder_hidden_states controlnet_cond",
            dict(conditioning_scale=1.0, return_dict=True, train=False),
        ),
        (FlaxStableDiffusionControlNetPipeline.prepare_text_inputs, "prompt", {}),
        (FlaxStableDiffusionControlNetPipeline.prepare_image_inputs, "image", {}),
        (FlaxStableDiffusionImg2ImgPipeline.prepare_inputs, "prompt image", {}),
        (FlaxStableDiffusionInpaintPipeline.prepare_inputs, "prompt image mask", {}),
    ],
)
def test_what_is_called_takes_what_it_took_in_diffusers_0_35_in_that_order(
    function, needed, optional
):
    _, *taken = inspect.signature(function).parameters.values()
    assert [each.name for each in taken] == [*needed.split(), *optional]
    assert {each.name: each.default for each in taken if each.default is not each.empty} == optional


def test_several_controlnets_are_refused_in_a_sentence(both):
    _, pipeline, _ = both
    several = {**pipeline.components, "controlnet": [pipeline.controlnet] * 2}
    with pytest.raises(CheckpointError, match=r"follows one ControlNet: .* not list\.$"):
        FlaxStableDiffusionControlNetPipeline(**several)


@pytest.mark.slow("compiles a pipeline with a ControlNet")
def test_it_is_saved_as_pytorchs_pipeline_reads_it(both, tmp_path):
    theirs, pipeline, params = both
    pipeline.save_pretrained(tmp_path, params)
    read = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert type(read) is diffusers.StableDiffusionControlNetPipeline
    for name, value in theirs.state_dict().items():
        assert torch.equal(read.controlnet.state_dict()[name], value)
    again, found = FlaxStableDiffusionControlNetPipeline.from_pretrained(tmp_path)
    assert type(again.controlnet) is FlaxControlNetModel and "controlnet" in found
    plain, _ = FlaxStableDiffusionPipeline.from_pretrained(tmp_path)
    assert not hasattr(plain, "controlnet")
