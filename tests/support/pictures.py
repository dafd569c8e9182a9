"""Pictures that begin with another, and PyTorch's of the same."""

import shutil

import diffusers
import numpy as np
import torch

from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady, Job
from tests.support import tiny

SIDE = 32
ASKED = dict(prompts=["a cat"], seed=3, steps=6, guidance=4.0, negative_prompt="fog")
PARTS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet", "scheduler")
RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[8:24, 4:21] = 255
START, HOLE = Input.of_pixels(PHOTO), Input.of_pixels(np.stack([MASK] * 3, axis=-1))
GIVEN = {each.name: each for each in (START, HOLE)}


def pipelines(layout: str, channels: int = 4) -> diffusers.DiffusionPipeline:
    """Return a tiny pipeline; with more channels it fills in pictures."""
    made = tiny.make_pipeline(layout, **tiny.SHALLOW.get(layout, {}))
    if channels == 4:
        return made
    torch.manual_seed(1)
    unet = diffusers.UNet2DConditionModel.from_config(made.unet.config, in_channels=channels)
    for parameter in unet.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return as_kind(made, "Inpaint", unet=unet)


def as_kind(made: diffusers.DiffusionPipeline, kind: str, **other):
    """Another pipeline of the same parts."""
    xl = "XL" if "text_encoder_2" in made.components else ""
    parts = {name: part for name, part in made.components.items() if name in PARTS} | other
    extra = (
        {}
        if xl
        else dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    )
    return getattr(diffusers, f"StableDiffusion{xl}{kind}Pipeline")(**parts, **extra)


def opened(reference, folder, **options):
    reference.save_pretrained(folder)
    engine = Engine.open(folder, devices=1, size=(SIDE, SIDE), **options)
    yield reference, engine
    engine.close()
    shutil.rmtree(folder)


def drawn(engine: Engine, given=GIVEN, asked=ASKED, **values) -> list[np.ndarray]:
    job = engine.submit(Request.check({**asked, **values}, engine.catalog), inputs=given)
    pictures = pictures_of(job)
    return [pictures[index] for index in sorted(pictures)]


def assert_alike(ours: np.ndarray, reference: np.ndarray) -> None:
    assert ours.std() > 2
    assert np.mean(np.abs(ours.astype(int) - reference) <= 2) >= 0.995


def pictures_of(job: Job) -> dict[int, np.ndarray]:
    """Wait for a job's pictures, uint8 [H, W, 3] by index."""
    return {e.index: e.pixels for e in job.events() if isinstance(e, ImageReady)}
