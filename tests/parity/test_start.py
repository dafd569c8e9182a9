"""Pictures that begin with another: against PyTorch's pipelines from the same noise, and beside one
another in a batch."""

import dataclasses
import importlib
import threading

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.report import count_compilations
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request, larger
from sd_tpu.serving import engine as engines
from sd_tpu.serving import latency
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Failed, Job, Progress
from sd_tpu.serving.plan import Compiled
from sd_tpu.serving.scheduler import Busy, Limits
from sd_tpu.settings import LARGER_STRENGTH, RequestError
from tests.support.pictures import (
    ASKED,
    GIVEN,
    HOLE,
    MASK,
    PHOTO,
    SIDE,
    START,
    as_kind,
    assert_alike,
    drawn,
    opened,
    pipelines,
)


@pytest.fixture(scope="module")
def of_sd1(tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model) of SD 1, with room for two guided
    pictures at a time."""
    yield from opened(pipelines("sd1"), tmp_path_factory.mktemp("sd1"), group=2)


@pytest.fixture(scope="module")
def engine(of_sd1) -> Engine:
    return of_sd1[1]


@pytest.fixture(scope="module", params=["sd1", "sdxl"])
def loaded(request, tmp_path_factory):
    """PyTorch's pipeline and an engine, as `of_sd1`, of each layout in turn."""
    if request.param == "sd1":
        yield request.getfixturevalue("of_sd1")
        return
    yield from opened(pipelines(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def filling(tmp_path_factory):
    """PyTorch's pipeline and an engine, as `of_sd1`, of an SDXL that fills in pictures."""
    yield from opened(pipelines("sdxl", 9), tmp_path_factory.mktemp("filling"))


def theirs(reference, kind: str, engine: Engine, monkeypatch, photo=PHOTO, **values) -> np.ndarray:
    """PyTorch's picture of the same noise, with the encoder's mode: uint8 [H, W, 3]."""
    pipeline = as_kind(reference, kind)
    module = importlib.import_module(type(pipeline).__module__)
    h, w, channels = engine.checkpoint.model.latent_shape(*photo.shape[:2])
    noise = np.array(jax.random.normal(jax.random.PRNGKey(ASKED["seed"]), (1, channels, h, w)))
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(noise))
    monkeypatch.setattr(
        module, "retrieve_latents", lambda found, **_: found.latent_dist.mode(), raising=bool(kind)
    )
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        ASKED["prompts"][0],
        negative_prompt=ASKED["negative_prompt"],
        num_inference_steps=ASKED["steps"],
        guidance_scale=ASKED["guidance"],
        **({"image": Image.fromarray(photo)} if kind else {}),
        output_type="np",
        **values,
    ).images
    return np.round(images[0] * 255).astype(int)


@pytest.mark.parametrize("strength", [0.35, 0.7, 1.0])
@pytest.mark.slow("compiles an encoder for each model")
def test_a_picture_that_begins_with_another_is_that_of_pytorch(loaded, strength, monkeypatch):
    reference, engine = loaded
    (ours,) = drawn(engine, init_image=START.name, strength=strength)
    assert_alike(ours, theirs(reference, "Img2Img", engine, monkeypatch, strength=strength))


@pytest.mark.slow("compiles two sizes")
def test_a_picture_that_is_drawn_again_larger_is_that_of_pytorch(of_sd1, monkeypatch):
    reference, engine = of_sd1
    small = Input.of_pixels(drawn(engine)[0])
    asked = larger(
        Request.check(ASKED, engine.catalog).pictures[0], 2 * SIDE, 2 * SIDE, LARGER_STRENGTH
    )
    (ours,) = drawn(
        engine,
        {small.name: small},
        **{name: value for name, value in vars(asked).items() if name not in ("prompt", "model")}
        | {"init_image": small.name},
    )
    expected = theirs(reference, "", engine, monkeypatch).astype(np.uint8)
    enlarged = Image.fromarray(expected).resize((2 * SIDE,) * 2, Image.Resampling.LANCZOS)
    assert ours.shape == (2 * SIDE, 2 * SIDE, 3)
    assert_alike(
        ours,
        theirs(
            reference,
            "Img2Img",
            engine,
            monkeypatch,
            np.asarray(enlarged),
            strength=LARGER_STRENGTH,
        ),
    )


@pytest.mark.parametrize("strength", [0.7, 1.0])
def test_a_picture_with_a_mask_is_that_of_pytorch_where_it_is_white(loaded, strength, monkeypatch):
    assert_filled_in(loaded, strength, monkeypatch)


@pytest.mark.parametrize("strength", [0.7, 1.0])
@pytest.mark.slow("compiles an inpainting model")
def test_a_model_that_fills_in_pictures_does_it_as_in_pytorch(filling, strength, monkeypatch):
    assert_filled_in(filling, strength, monkeypatch)


def assert_filled_in(loaded, strength, monkeypatch):
    reference, engine = loaded
    (ours,) = drawn(engine, init_image=START.name, mask=HOLE.name, strength=strength, mask_blur=0)
    expected = theirs(
        reference,
        "Inpaint",
        engine,
        monkeypatch,
        strength=strength,
        mask_image=Image.fromarray(MASK),
        height=SIDE,
        width=SIDE,
    )
    assert_alike(ours[MASK > 0], expected[MASK > 0])
    assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0])


def test_a_model_that_fills_in_pictures_draws_all_of_one_that_begins_with_nothing(
    filling, monkeypatch
):
    reference, engine = filling
    (ours,) = drawn(engine)
    white = Image.new("L", (SIDE, SIDE), 255)  # whatever lies below it
    assert_alike(
        ours,
        theirs(
            reference,
            "Inpaint",
            engine,
            monkeypatch,
            strength=1.0,
            mask_image=white,
            height=SIDE,
            width=SIDE,
        ),
    )


@pytest.mark.parametrize("layout", ["sd1", "sdxl"])
def test_a_checkpoint_that_fills_in_pictures_is_written_as_one(layout, tmp_path):
    pipelines(layout, 9).save_pretrained(tmp_path / "theirs")
    checkpoint, params = Checkpoint.from_pretrained(tmp_path / "theirs")
    checkpoint.save_pretrained(tmp_path / "ours", params)
    found = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert found.unet.config.in_channels == 9
    assert type(Checkpoint.open(tmp_path / "ours").model) is type(checkpoint.model)


# --- a batch ------------------------------------------------------------------------------------


def test_eight_starts_masks_and_strengths_in_one_batch_give_the_bytes_that_each_gives_alone(engine):
    photos = [Input.of_pixels(np.roll(PHOTO, 5 * i, axis=0)) for i in range(8)]
    holes = [
        Input.of_pixels(np.roll(np.stack([MASK] * 3, axis=-1), 4 * i, axis=1)) for i in range(8)
    ]
    given = {each.name: each for each in (*photos, *holes)}
    samplers = ["ddim", "euler", "heun", "dpmpp_2m", "pndm", "euler_ancestral", "unipc", "ddim"]
    own = [
        {
            "init_image": photos[i].name,
            "strength": 0.3 + 0.1 * i,
            "sampler": samplers[i],
            **({"mask": holes[i].name, "mask_blur": i} if i % 2 else {}),
        }
        for i in range(7)
    ]
    own.append({"sampler": samplers[7]})
    prompts = [f"{i} cats" for i in range(8)]
    together = drawn(engine, given, prompts=prompts, overrides=own)
    traces, compiled = dict(engine.programs.traces), count_compilations()
    for i in range(8):
        (alone,) = drawn(
            engine, given, prompts=[*[""] * i, prompts[i]], overrides=[*[None] * i, own[i]]
        )
        assert np.array_equal(alone, together[i]), own[i]
    assert engine.programs.traces == traces == {"encode": 1, "advance": 1, "decode": 1}
    assert compiled() == 0
    assert np.array_equal(
        together[7], drawn(engine, {}, prompts=prompts[7:], seed=10, sampler="ddim")[0]
    )


def test_while_an_encoder_is_compiled_others_draw_and_if_that_fails_it_is_tried_again(
    engine, monkeypatch
):
    begun, go_on, tries = threading.Event(), threading.Event(), []

    def failing(*_, **sizes):
        tries.append(sizes["width"])
        begun.set()
        assert go_on.wait(120)
        raise MemoryError("too little")

    drawn(engine, init_image=START.name)  # what encodes this size is there
    monkeypatch.setattr(engines, "ImageEncoder", failing)
    # No other program of this size is compiled: nothing draws it, here or in another test.
    quickly = Compiled(seconds=1.0, row_seconds=1.0, decode_seconds=1.0)
    monkeypatch.setattr(engine.worker, "_compile_batch", lambda batch: quickly)
    wide = dict(init_image=START.name, width=3 * SIDE)

    def submitted() -> Job:
        return engine.submit(Request.check({**ASKED, **wide}, engine.catalog), inputs=GIVEN)

    both = [submitted() for _ in range(2)]
    assert begun.wait(120)
    assert drawn(engine, init_image=START.name)
    assert tries == [3 * SIDE] and not any(each.end for each in both)
    go_on.set()
    for each in both:
        *_, end = each.events()
        assert end == Failed("Compiling failed: MemoryError: too little")
    tried = len(tries)
    *_, end = submitted().events()
    assert isinstance(end, Failed) and len(tries) == tried + 1


def test_nothing_is_compiled_for_whoever_has_to_wait(engine, monkeypatch):
    monkeypatch.setattr(engines, "ImageEncoder", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setattr(engine.scheduler, "limits", Limits(jobs=0))
    refused = engine.tally.refused
    with pytest.raises(Busy):
        drawn(engine, init_image=START.name, width=2 * SIDE)
    assert engine.tally.refused == refused + 1


def test_pictures_that_begin_with_the_same_share_it(engine, monkeypatch):
    made, entered = [], engine.scheduler.submit
    monkeypatch.setattr(
        engine.scheduler,
        "submit",
        lambda tickets, *args, **values: (made.extend(tickets), entered(tickets, *args, **values)),
    )
    drawn(
        engine,
        prompts=["a", "b", "c"],
        init_image=START.name,
        overrides=[None, None, {"fit": "contain"}],
    )
    first, second, third = (ticket.slot_inputs.pictures["start"] for ticket in made)
    assert first is second and first is not third


@pytest.mark.slow("compiles for several devices")
def test_an_encoder_is_compiled_for_start_pictures_and_each_device_encodes_with_its_own_weights(
    engine, monkeypatch
):
    ours = drawn(engine, prompts=["a", "b", "c"], init_image=START.name, strength=0.5)
    made, kind = [], engines.ImageEncoder
    monkeypatch.setattr(
        engines, "ImageEncoder", lambda *args, **sizes: made.append(sizes) or kind(*args, **sizes)
    )
    folder = engine.checkpoint.parameters.source
    with Engine.open(folder, devices=3, size=(SIDE, SIDE)) as several:
        drawn(several)
        assert not made
        for _ in range(2):
            others = drawn(several, prompts=["a", "b", "c"], init_image=START.name, strength=0.5)
    assert [(each["height"], each["width"]) for each in made] == [(SIDE, SIDE)]
    assert np.abs(np.stack(ours).astype(int) - np.stack(others)).max() <= 1


def test_previews_of_a_picture_with_a_mask_show_what_is_kept(engine, monkeypatch):
    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)  # a row at a time
    request = Request.check({**ASKED, "init_image": START.name, "mask": HOLE.name}, engine.catalog)
    shown = [
        event.previews[0]
        for event in engine.submit(request, inputs=GIVEN).events()
        if isinstance(event, Progress) and event.previews
    ]
    times = SIDE // len(shown[-1])
    assert times > 1, "they are smaller than the picture"
    small, black = (Image.fromarray(image).reduce(times) for image in (PHOTO, 255 - MASK))
    kept = np.asarray(black) == 255
    for preview in shown:
        assert np.abs(preview.astype(int) - np.asarray(small))[kept].max() <= 1


def test_fewer_steps_are_taken_and_told_of_a_picture_that_begins_with_another(engine, monkeypatch):
    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)  # a row at a time, or nothing may be told
    request = Request.check(
        {**ASKED, "steps": 10, "init_image": START.name, "strength": 0.35, "sampler": "ddim"},
        engine.catalog,
    )
    job = engine.submit(request, inputs=GIVEN)
    steps = {event.steps for event in job.events() if hasattr(event, "steps")}
    assert steps == {3} and engine.resolver.resolve(request, GIVEN).pictures[0].slots[0].end == 3


@pytest.mark.parametrize(
    "values, given, complaint",
    [
        ({"init_image": START.name}, {}, "hand it in again"),
        ({"mask": HOLE.name}, GIVEN, "needs a start picture"),
        ({"init_image": START.name, "strength": 0.1}, GIVEN, "leaves none of 6 steps"),
        ({"init_image": "../a.png"}, GIVEN, "name of a picture that was handed in"),
        (
            {"prompts": ["a", "b"], "overrides": [None, {"init_image": START.name}]},
            {},
            "^Prompt 2: The start picture",
        ),
    ],
)
def test_what_a_picture_cannot_begin_with_is_refused_in_a_sentence(
    engine, values, given, complaint
):
    with pytest.raises(RequestError, match=complaint):
        drawn(engine, given, **values)


def test_an_estimate_keeps_nothing_of_what_nobody_draws(engine):
    before = [*engine._batches], len(engine._kinds)
    for number in range(40):
        picture = dataclasses.replace(engine.defaults, prompt="a cat", width=64 + 8 * number)
        engine.seconds(picture)
    assert ([*engine._batches], len(engine._kinds)) == before


def test_sizes_that_are_not_drawn_are_forgotten(engine, monkeypatch):
    monkeypatch.setattr(engines, "MAX_SIZES", 8)
    for number in range(40):
        picture = dataclasses.replace(engine.defaults, prompt="a cat", width=64 + 8 * number)
        engine._batch(engine.resolver.estimated(picture))
    assert len(engine._batches) <= 8 and len(engine._kinds) <= 8
    list(engine.submit(Request.check({"prompts": ["a cat"], "steps": 2}, engine.catalog)).events())
