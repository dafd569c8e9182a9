"""Pictures drawn by tiles, as they are too large to be drawn at once."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from benchmarks.report import count_compilations
from sd_tpu.pictures.images import blurred
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import NOT_YET, Request, larger
from sd_tpu.runtime.slots import gaussian
from sd_tpu.serving import latency
from sd_tpu.serving import tiling as tilings
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Done, ImageReady, Job, Progress
from sd_tpu.serving.scheduler import Busy
from sd_tpu.serving.tiling import Tiling
from sd_tpu.settings import LARGER_STRENGTH, Picture, RequestError
from tests.support.asking import make_request

TALL = Tiling.of(100, 40, (40, 40), 4)
RNG = np.random.default_rng(0)


def gradient(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([40 + 150 * x, 90 + 60 * y, 200 - 120 * x], -1).round().astype(np.uint8)


@pytest.mark.parametrize(
    "height, width, size, count",
    [
        (512, 512, (128, 128), 25),
        (4096, 4096, (1024, 1024), 25),
        (1024, 1024, (768, 1024), 2),
        (520, 64, (64, 64), 11),
        (64, 72, (64, 64), 2),
        (64, 64, (64, 64), 1),
        (132, 64, (64, 64), 3),
    ],
)
def test_tiles_cover_a_picture_share_a_quarter_and_what_all_have_is_what_it_has(
    height, width, size, count
):
    tiling, whole = (
        Tiling.of(height, width, size, 8 if height % 8 == 0 else 4),
        gradient(height, width),
    )
    tiles = {number: tiling.part(number, whole) for number in range(len(tiling))}
    assert len(tiling) == count and {tile.shape[:2] for tile in tiles.values()} == {size}
    for starts, side in zip((tiling.rows, tiling.columns), size, strict=True):
        assert all(0 < step <= side - side // 4 + 4 for step in np.diff(starts))
    assert np.array_equal(tiling.blended(tiles), whole)
    assert np.array_equal(tiling.part(count - 1, whole[::4, ::4], 4), tiles[count - 1][::4, ::4])


def test_tiles_that_differ_in_brightness_run_into_each_other():
    tiles = {number: np.full((40, 40, 3), 60 * number, np.uint8) for number in range(len(TALL))}
    lines = TALL.blended(tiles)[:, 0, 0].astype(int)
    assert len(TALL) == 3 and (lines[0], lines[-1]) == (0, 120)
    assert np.diff(lines).min() >= 0 and np.diff(lines).max() <= 60 / 8 + 1


# --- a job --------------------------------------------------------------------------------------


def make_job(cancel=None) -> Job:
    """Of two pictures, the second of which is drawn by three tiles."""
    return Job(make_request(prompts=("a cat", "a dog")), 1, "", cancel, tilings={1: TALL})


def test_a_picture_is_told_of_when_all_its_tiles_are_there():
    job, tile = make_job(), np.full((40, 40, 3), 9, np.uint8)
    whole = np.zeros((4, 4, 3), np.uint8)
    for event in (
        ImageReady(5, tile),
        ImageReady(1, tile),
        ImageReady(0, whole),
        ImageReady(3, tile, True),
        Done(1.0),
    ):
        job.put(event)
    first, second, done = job.events()
    assert (first.index, first.unsafe) == (0, False)
    assert (second.index, second.unsafe, second.pixels.shape) == (1, True, (100, 40, 3))
    assert np.all(second.pixels == 9) and done == Done(1.0)


def test_a_whole_picture_is_blurred_where_one_of_its_tiles_is_not_safe():
    job, tiles = make_job(), [RNG.integers(0, 256, (40, 40, 3), np.uint8) for _ in range(3)]
    for number, tile in enumerate(tiles):
        job.put(ImageReady(1 + 2 * number, tile, number == 2))
    shown = next(job.events())
    assert shown.unsafe
    assert np.array_equal(shown.pixels, blurred(TALL.blended(dict(enumerate(tiles)))))


def test_a_picture_is_given_up_with_all_its_tiles():
    cancelled = []
    job = make_job(lambda _, index: cancelled.append(index))
    job.cancel(0)
    job.cancel(1)
    job.cancel()
    assert cancelled == [0, 1, 3, 5, None]


# --- an engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    """Of the bundled model, which draws 256x256 at once."""
    engine = Engine.open(devices=1)
    yield engine
    engine.close()


def asked(
    engine: Engine, height: int, width: int = 1024, **values
) -> tuple[Request, dict[str, Input]]:
    """A gradient to be drawn again so large."""
    start = Input.of_pixels(gradient(256, 256))
    (picture,) = Request.check(
        {"prompts": ["a red to blue background"], "seed": 1, "steps": 8, **values}, engine.catalog
    ).pictures
    picture = dataclasses.replace(
        larger(picture, width, height, LARGER_STRENGTH), init_image=start.name
    )
    return Request((picture,)), {start.name: start}


def drawn(engine: Engine, request: Request, given: dict[str, Input]) -> list[np.ndarray]:
    return [
        event.pixels
        for event in engine.submit(request, inputs=given).events()
        if isinstance(event, ImageReady)
    ]


def seams(image: np.ndarray, tiling: Tiling) -> list[float]:
    """The steps from one line to the next in the middle of what tiles share, beside the mean steps
    around them."""
    found = []
    for axis, (starts, side) in enumerate(
        zip((tiling.rows, tiling.columns), tiling.size, strict=True)
    ):
        steps = np.abs(np.diff(image.astype(float), axis=axis)).mean(axis=(1 - axis, 2))
        middles = [(start + before + side) // 2 - 1 for before, start in itertools.pairwise(starts)]
        found += [steps[middle] / steps[middle - 18 : middle + 19].mean() for middle in middles]
    return found


@pytest.mark.slow("draws dozens of tiles")
def test_a_gradient_four_times_as_wide_has_no_seams_and_wants_no_program_of_its_own(
    engine, monkeypatch
):
    request, given = asked(engine, 320)
    tiling = engine.catalog.tiling(request.pictures[0])
    engine.ready.wait()
    traces = dict(engine.programs.traces)
    (large,) = drawn(engine, request, given)
    assert large.shape == (320, 1024, 3) and len(tiling) == 10
    assert {batch.height for batch in engine.worker._programs} == {256}
    assert engine.programs.traces == traces
    weights, compiled = tilings.weights, count_compilations()
    monkeypatch.setattr(tilings, "weights", lambda *of: (weights(*of) > 0.5).astype(np.float32))
    (cut,) = drawn(engine, request, given)
    assert compiled() == 0
    blended, apart = (np.asarray(seams(image, tiling)) for image in (large, cut))
    assert blended.mean() < 3 < 9 < apart.min() and np.all(blended < 0.6 * apart)


@pytest.mark.slow("draws many tiles")
def test_a_whole_picture_is_shown_as_it_forms_and_tiles_beside_it_are_not(engine, monkeypatch):
    request, given = asked(engine, 320)
    (alone,) = Request.check({"prompts": ["a cat"], "steps": 8}, engine.catalog).pictures
    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)  # a row at a time
    planned, schedule = [], engine.scheduler.schedule
    monkeypatch.setattr(
        engine.scheduler, "schedule", lambda now: planned.append(schedule(now)) or planned[-1]
    )
    job = engine.submit(Request((*request.pictures, alone)), inputs=given)
    shown = {
        index for event in job.events() if isinstance(event, Progress) for index in event.previews
    }
    assert shown == {1} and sum(len(plan.enter) for plan in planned) == 11
    assert sum(len(plan.preview) for plan in planned) <= 8, "tiles are drawn for nobody"


def test_neighbours_begin_with_the_same_where_they_overlap(engine):
    request, given = asked(engine, 1024)
    tiling, picture = engine.catalog.tiling(request.pictures[0]), request.pictures[0]
    resolved = engine.resolver.resolve(request, given).pictures[0]
    canvas = resolved.canvas
    assert (resolved.batch.height, resolved.batch.width) == (256, 256)
    unit = engine.checkpoint.model.downscale
    whole = np.asarray(
        gaussian(jax.random.PRNGKey(1), engine.checkpoint.model.latent_shape(1024, 1024))
    )
    for number, slot_inputs in enumerate(resolved.slots):
        assert slot_inputs.key.tolist() == [number, picture.seed]
        assert np.array_equal(slot_inputs.noise, tiling.part(number, whole, unit))
        assert np.array_equal(slot_inputs.pictures["start"], tiling.part(number, canvas.pixels))
    latents = RNG.standard_normal(slot_inputs.noise.shape).astype(np.float32)
    encoded = slot_inputs.encoded({"start": latents})
    assert encoded.spread == 0 and encoded.noise is None
    np.testing.assert_allclose(
        encoded.start,
        slot_inputs.start * latents + slot_inputs.spread * slot_inputs.noise,
        rtol=1e-6,
    )


def test_more_tiles_than_may_wait_are_refused_and_not_told_to_wait(engine):
    request, given = asked(engine, 2048, 2048)
    with pytest.raises(RequestError, match="by 968 tiles, and at most 800 may wait") as refused:
        engine.submit(Request(request.pictures * 8), inputs=given)
    assert not isinstance(refused.value, Busy)


def test_how_long_tiles_take_is_told_by_their_number(engine):
    list(engine.submit(Request.check({"prompts": ["a"], "steps": 2}, engine.catalog)).events())
    (alone,) = Request.check({"prompts": ["a"], "steps": 2}, engine.catalog).pictures
    large = dataclasses.replace(
        larger(alone, 1024, 1024, LARGER_STRENGTH), init_image=NOT_YET, strength=0.99
    )
    assert engine.seconds(large) > 10 * engine.seconds(alone) > 0


@pytest.mark.parametrize(
    "values, tiles",
    [
        (dict(width=512, height=512), 0),
        (dict(width=1024, height=320), 10),
        (dict(width=2048, height=2048), 121),
    ],
)
def test_by_tiles_is_drawn_what_is_too_large_to_be_drawn_at_once(engine, values, tiles):
    picture = Picture(init_image=NOT_YET, strength=0.4, **values)
    engine.catalog.check(picture)
    assert len(engine.catalog.tiling(picture) or ()) == tiles


@pytest.mark.parametrize(
    "values", [dict(init_image=""), dict(mask=NOT_YET), dict(strength=1.0), dict(width=2112)]
)
def test_what_tiles_cannot_draw_alike_or_too_many_would_have_to_is_refused(engine, values):
    with pytest.raises(RequestError, match="is too large: here pictures have at most"):
        engine.catalog.check(
            Picture(
                **{"init_image": NOT_YET, "strength": 0.4, "width": 2048, "height": 2048, **values}
            )
        )
