"""The model in assets/: PyTorch reads it too, and it draws what the page's sample prompts say."""

from html import escape

import diffusers
import jax
import numpy as np
import pytest
import torch

from sd_tpu import BUNDLED_MODEL, FlaxStableDiffusionPipeline
from sd_tpu.language import LANGUAGES
from sd_tpu.page.parts import part
from training.captions import BACKGROUNDS


@pytest.fixture(scope="module")
def bundled():
    return FlaxStableDiffusionPipeline.from_pretrained(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def latents(bundled) -> np.ndarray:
    pipeline, _ = bundled
    height, width = (side // pipeline.vae_scale_factor for side in pipeline.default_size)
    shape = len(pipeline.card.prompts), pipeline.unet.config.in_channels, height, width
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def pictures(bundled, latents) -> np.ndarray:
    """The page's sample prompts at its default settings, float [8, H, W, 3]."""
    pipeline, params = bundled
    card = pipeline.card
    return np.asarray(
        pipeline(
            pipeline.prepare_inputs(card.prompts),
            params,
            jax.random.key(0),
            card.steps,
            guidance_scale=card.guidance,
            latents=latents,
        ).images
    )


def test_it_draws_256_pixels_from_8x8_latents(latents, pictures):
    assert pictures.shape == (8, 256, 256, 3) and latents.shape == (8, 32, 8, 8)


def test_pytorchs_pipeline_draws_the_same_pictures_from_the_same_files(bundled, latents, pictures):
    card, few = bundled[0].card, slice(2)  # the others would tell the same again
    reference = diffusers.StableDiffusionPipeline.from_pretrained(
        BUNDLED_MODEL, torch_dtype=torch.float32, safety_checker=None
    )
    reference.set_progress_bar_config(disable=True)
    theirs = reference(
        list(card.prompts[few]),
        num_inference_steps=card.steps,
        output_type="np",
        guidance_scale=card.guidance,
        latents=torch.tensor(latents[few]),
    ).images
    off = np.abs(np.round(theirs * 255) - np.round(pictures[few] * 255)) > 1
    assert off.mean() <= 0.001


def test_the_backgrounds_are_of_the_colours_that_were_asked_for(bundled, pictures):
    for prompt, picture in zip(bundled[0].card.prompts, pictures, strict=True):
        words = prompt.partition(" on a ")[2].removesuffix(" background")
        corner = picture[:4, :4].mean((0, 1)) * 255
        distance = {name: np.linalg.norm(corner - colour) for name, colour in BACKGROUNDS.items()}
        assert min(distance, key=distance.get) == (words or "white"), prompt


def test_different_things_are_different_pictures(pictures):
    middles = pictures[:, 8:-8, 8:-8].reshape(8, -1)
    distances = np.linalg.norm(middles[:, None] - middles[None], axis=-1) / middles.shape[1] ** 0.5
    assert np.all(distances + np.eye(8) > 0.1)


def test_the_sample_prompts_hold_no_word_that_the_model_was_never_shown(bundled):
    card = bundled[0].card
    assert card.words and card.unknown_words("a wizard") == ["wizard"]
    assert not [
        word
        for prompt in (*card.prompts, *card.more_prompts)
        for word in card.unknown_words(prompt)
    ]


def test_the_model_tells_what_it_draws_in_every_language_of_the_page(bundled):
    card = bundled[0].card
    for language in LANGUAGES.values():
        for name in ("hint", "details"):
            text, spoken = card.translated(name, language.tag)
            assert spoken == language.tag and escape(text) in part("drawable", language, card)
        assert "french fries, pear" in text, "what is to be written is English"


def test_the_weights_stay_small_enough_for_a_repository():
    size = sum(file.stat().st_size for file in BUNDLED_MODEL.rglob("*.safetensors"))
    assert size < 60e6
