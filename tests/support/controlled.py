"""Pictures drawn with networks beside the model."""

import diffusers
import numpy as np

from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from tests.support import tiny

SIDE = 32
ASKED = dict(prompts=["a cat"], seed=3, steps=6, guidance=4.0, negative_prompt="fog")
RNG = np.random.default_rng(0)
LINES = RNG.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
CONTROL = Input.of_pixels(LINES)
GIVEN = {CONTROL.name: CONTROL}


def make_pipeline(layout: str, **changes) -> diffusers.DiffusionPipeline:
    """Return a tiny pipeline whose pictures owe enough to what its UNet says, which `changes` are
    of."""
    made = tiny.make_pipeline(layout, **{**tiny.SHALLOW.get(layout, {}), **changes})
    made.unet.conv_out.weight.data *= 8
    return made


def within_2(ours, theirs) -> float:
    return np.mean(np.abs(np.asarray(ours, int) - np.asarray(theirs, int)) <= 2)


def drawn_with(given, engine: Engine, **values) -> list[np.ndarray]:
    """Return the pictures that an engine draws, with these handed in."""
    job = engine.submit(Request.check({**ASKED, **values}, engine.catalog), inputs=given)
    pictures = {e.index: e.pixels for e in job.events() if isinstance(e, ImageReady)}
    return [pictures[index] for index in sorted(pictures)]


def programs_of(engine: Engine) -> dict[str, dict]:
    """How often each program of each batch was traced."""
    return {
        batch.architecture: dict(programs.traces)
        for batch, programs in engine.worker._programs.items()
    }


ONCE = {"encode": 1, "advance": 1, "decode": 1}
