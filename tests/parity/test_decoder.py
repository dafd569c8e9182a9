"""A tiny autoencoder that draws previews, or pictures as well, in place of a checkpoint's own."""

import contextlib
import shutil

import diffusers
import jax
import numpy as np
import pytest
import torch

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.decoder import STEM, TinyDecoder, _families_of
from sd_tpu.families.flux import Flux
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.families.stable_diffusion_xl import StableDiffusionXL
from sd_tpu.families.z_image import ZImage
from sd_tpu.pictures.images import read_parameters
from sd_tpu.request import Request
from sd_tpu.serving import latency
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady, Progress
from tests.support.networks import make_tiny

STEPS = 3


@pytest.fixture(scope="module")
def tiny() -> diffusers.AutoencoderTiny:
    """Of the shape of the tiny checkpoints' latents."""
    return make_tiny()


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The same as people have it."""
    folder = tmp_path_factory.mktemp("decoders") / "TAESD"
    tiny.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def beside(least, folder, tmp_path_factory):
    """An engine with the decoder beside the model's own, and where it lies."""
    place = shutil.copytree(folder, tmp_path_factory.mktemp("private") / "decoders" / "TAESD")
    with contextlib.closing(Engine.open(least, devices=1, decoder=place)) as engine:
        yield engine, place


def decoded(tiny, latents: np.ndarray) -> np.ndarray:
    """PyTorch's pictures [n, H, W, 3] in [0, 255] of latents [n, h, w, C]."""
    with torch.no_grad():
        images = tiny.decode(torch.tensor(latents.transpose(0, 3, 1, 2))).sample
    return 255 * (images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def drawn(engine, **settings) -> tuple[list[dict], dict]:
    """The previews by index, one after the other, and the pictures."""
    request = Request.check(
        {
            "prompts": ["a cat", "", "a dog"],
            "seed": 5,
            "steps": STEPS,
            "sampler": "ddim",
            "guidance": 3.0,
            **settings,
        },
        engine.catalog,
    )
    events = list(engine.submit(request).events())
    pictures = {event.index: event for event in events if isinstance(event, ImageReady)}
    return (
        [event.previews for event in events if isinstance(event, Progress) and event.previews],
        {index: event.pixels for index, event in pictures.items()},
    )


def reference(pipeline, vae) -> np.ndarray:
    """What PyTorch draws with this autoencoder where `drawn` does, [2, H, W, 3] in [0, 255]."""
    scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    pipeline = type(pipeline)(
        **{**pipeline.components, "vae": vae, "scheduler": scheduler}, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = [jax.random.normal(jax.random.PRNGKey(seed), (4, 8, 8)) for seed in (5, 7)]
    return (
        pipeline(
            ["a cat", "a dog"],
            num_inference_steps=STEPS,
            guidance_scale=3.0,
            latents=torch.tensor(np.stack(noise)),
            output_type="np",
        ).images
        * 255
    )


def assert_alike(ours, theirs, case: str) -> None:
    off = np.abs(np.stack(list(ours)) - theirs)
    print(f"parity | {case} | {np.mean(off <= 2):.2%} within 2 | deviation {theirs.std():.0f}")
    assert off.shape == theirs.shape and theirs.std() > 10
    assert np.mean(off <= 2) >= 0.995


def test_previews_are_those_of_pytorch_and_the_pictures_stay_the_models(
    least, least_pipeline, tiny, beside, monkeypatch
):
    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)  # a row at a time
    shown, (engine, _) = [], beside
    preview = engine.programs.preview
    monkeypatch.setattr(
        engine.programs,
        "preview",
        lambda params, latents, wanted: (
            shown.append(np.asarray(latents[wanted])) or preview(params, latents, wanted)
        ),
    )
    previews, pictures = drawn(engine)
    assert previews[-1].keys() == pictures.keys() == {0, 2}
    small = decoded(tiny, shown[-1]).reshape(2, 16, 2, 16, 2, 3).mean((2, 4))
    assert_alike(previews[-1].values(), small, "previews by a tiny decoder")
    pipeline = least_pipeline
    assert_alike(pictures.values(), reference(pipeline, pipeline.vae), "beside a tiny decoder")
    plain = Checkpoint.open(least).drawing.memory
    assert engine.weights.memory == plain + 4 * sum(each.numel() for each in tiny.parameters())


def test_pictures_are_those_of_pytorch_with_the_same_decoder(least, least_pipeline, tiny, folder):
    opened = Engine.open(least, devices=1, decoder=folder, decoder_for="pictures")
    with contextlib.closing(opened) as engine:
        _, pictures = drawn(engine)
        request = Request.check({"prompts": ["a cat"]}, engine.catalog)
        assert ", VAE: TAESD, " in read_parameters(engine.to_png(pictures[0], request))
    assert_alike(pictures.values(), reference(least_pipeline, tiny), "by a tiny decoder")


@pytest.mark.parametrize(
    "name, families",
    [
        ("madebyollin/taesd", (StableDiffusion,)),
        ("madebyollin/taesdxl", (StableDiffusionXL,)),
        ("TAESD-XL v1.1", (StableDiffusionXL,)),
        ("madebyollin/taef1", (ZImage, Flux)),
        ("my decoder", ()),
    ],
)
def test_whose_latents_it_decodes_is_told_by_its_name(name, families):
    assert _families_of(name) == families


def test_a_decoder_that_has_gone_is_told_without_where_it_was(beside):
    engine, place = beside
    shutil.rmtree(place)
    with pytest.raises(CheckpointError, match="TAESD has no") as told:
        engine._read(engine.weights, engine.worker.weights.on([0]))
    assert str(place.parent) not in str(told.value) and "private" not in str(told.value)


def test_one_of_another_family_is_left_out_or_refused(least, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "taesdxl")
    other = TinyDecoder.open(tmp_path / "taesdxl", pictures=True)
    plain = Checkpoint.open(least)
    assert Checkpoint.open(least, decoder=other).model == plain.model
    name = least.name
    refusal = f"taesdxl is for StableDiffusionXLPipeline; {name} is anot"
    with pytest.raises(ValueError, match=refusal):
        Engine.open(least, devices=1, decoder=tmp_path / "taesdxl")


def test_what_is_no_decoder_of_the_model_is_one_sentence(least, folder, tmp_path):
    with pytest.raises(CheckpointError, match="is AutoencoderKL; AutoencoderTiny, such as TAESD"):
        TinyDecoder.open(least / "vae", pictures=True)
    make_tiny(levels=4).save_pretrained(tmp_path / "large")
    large = TinyDecoder.open(tmp_path / "large", pictures=True)
    with pytest.raises(CheckpointError, match=r"of 4 channels at 1/8 of .* have 4 at 1/4"):
        Checkpoint.open(least, decoder=large)
    shutil.copytree(folder, tmp_path / "empty")
    (tmp_path / "empty" / f"{STEM}.safetensors").unlink()
    empty = TinyDecoder.open(tmp_path / "empty", pictures=False)
    with pytest.raises(CheckpointError, match="empty has no safetensors weights"):
        Checkpoint.open(least, decoder=empty).parameters.load()
