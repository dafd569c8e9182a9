"""Previews that need no decoder."""

import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from sd_tpu import BUNDLED_MODEL
from sd_tpu.request import Request
from sd_tpu.runtime.previews import LatentPreview, sample_latents
from sd_tpu.serving import latency
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady, Progress


def test_samples_are_of_unit_variance_smooth_and_always_the_same():
    latents = sample_latents(8, (16, 24, 3))
    assert latents.shape == (8, 16, 24, 3) and latents.dtype == np.float32
    assert 0.7 < latents.std() < 1.3
    assert np.corrcoef(latents[:, :-1].ravel(), latents[:, 1:].ravel())[0, 1] > 0.5
    np.testing.assert_array_equal(latents, sample_latents(8, (16, 24, 3)))


@pytest.mark.parametrize("downscale, side", [(2, 1), (8, 2), (16, 4)])
def test_a_decoder_that_is_linear_is_followed(downscale, side):
    """One that draws slopes from each latent to the next below, in the first latent's brightness
    and the second's redness."""

    def decode(latents):
        steps = (np.arange(downscale) + 0.5) / downscale
        below = np.concatenate([latents[:, 1:], latents[:, -1:]], 1)[:, :, None]
        sloped = latents[:, :, None] * (1 - steps[:, None, None]) + below * steps[:, None, None]
        tall = sloped.reshape(len(latents), -1, *latents.shape[2:]).repeat(downscale, 2)
        bright, red = tall[..., :1], tall[..., 1:]
        return (128 + 20 * bright + 20 * red * [1, 0, 0]).clip(0, 255).round().astype(np.uint8)

    samples = sample_latents(5, (12, 10, 2))
    preview = LatentPreview.fit(samples[:4], decode(samples[:4]))(samples[4])
    assert preview.shape == (12 * side, 10 * side, 3)
    small = np.asarray(
        Image.fromarray(decode(samples[4:])[0]).resize(
            (10 * side, 12 * side), Image.Resampling.BOX
        ),
        float,
    )
    assert np.abs(preview - small).mean() < 2 < small.std()


def test_what_is_no_number_is_black():
    samples = sample_latents(4, (8, 8, 4))
    preview = LatentPreview.fit(samples, np.full((4, 16, 16, 3), 99, np.uint8))
    assert (preview(np.full((8, 8, 4), np.nan, np.float32)) == 0).all()


@pytest.fixture(scope="module", autouse=True)
def a_row_at_a_time():
    """However fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "CALL_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def engine():
    engine = Engine.open(BUNDLED_MODEL, devices=1)
    yield engine
    engine.close()


@pytest.mark.slow("draws with the bundled model")
def test_the_last_preview_is_close_to_the_picture(engine):
    """The bundled model's, all but finished."""
    prompts = ["a red apple", "a blue fish"]
    request = Request.check({"prompts": prompts, "steps": 8, "seed": 3}, engine.catalog)
    previews, pictures = {}, {}
    for event in engine.submit(request).events():
        if isinstance(event, Progress):
            previews |= event.previews
        if isinstance(event, ImageReady):
            pictures[event.index] = event.pixels
    assert previews.keys() == pictures.keys() == {0, 1}
    small = [
        np.asarray(
            Image.fromarray(pictures[index]).resize(
                previews[index].shape[1::-1], Image.Resampling.BOX
            ),
            float,
        )
        for index in range(2)
    ]
    found = np.corrcoef(np.ravel(small), np.ravel([previews[index] for index in range(2)]))[0, 1]
    print(f"previews | correlation with the pictures | {found:.3f}")
    assert previews[0].shape == (64, 64, 3) and found > 0.85


def test_it_is_fitted_when_first_shown_if_its_parameters_came_after_the_programs(engine):
    worker = engine.worker
    ((key, fitted),) = worker._previews.items()
    worker._previews.clear()
    request = Request.check({"prompts": ["a cat"], "steps": 4}, engine.catalog)
    assert any(
        event.previews for event in engine.submit(request).events() if isinstance(event, Progress)
    )
    latents = sample_latents(1, engine.programs.latent_shape)[0]
    again = worker._previews[key]
    np.testing.assert_allclose(again(latents).astype(int), fitted(latents).astype(int), atol=1)


@pytest.mark.slow("opens another checkpoint and fits its map")
def test_a_fine_tune_with_another_autoencoder_has_a_map_of_its_own(checkpoints, tmp_path):
    """And those with the same one share theirs, also with other weights beside it."""
    for name, part in (("a", "unet"), ("b", "unet"), ("c", "vae")):
        shutil.copytree(checkpoints["sd1"], tmp_path / name)
        file = tmp_path / name / part / "diffusion_pytorch_model.safetensors"
        save_file(
            {
                key: values
                * np.float32(
                    0.5 if name != "a" and key.startswith(("conv_out.", "decoder.conv_out.")) else 1
                )
                for key, values in load_file(file).items()
            },
            file,
            metadata={"format": "pt"},
        )
    engine = Engine.open(tmp_path / "a", models=tmp_path, devices=1)
    maps = []
    for name in "abc":
        request = Request.check({"prompts": ["a cat"], "steps": 4, "model": name}, engine.catalog)
        assert any(
            event.previews
            for event in engine.submit(request).events()
            if isinstance(event, Progress)
        )
        maps.append([*engine.worker._previews.values()])
    engine.close()
    assert [len(each) for each in maps] == [1, 1, 2]
    assert engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}
    latents = sample_latents(1, engine.programs.latent_shape)[0]
    first, other = (preview(latents).astype(float) for preview in maps[-1])
    assert other.std() < 0.6 * first.std(), "half as much contrast"
