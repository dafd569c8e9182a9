"""Jobs of many people on one batch of slots: events, sharing, cancelling, failing."""

import dataclasses
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from sd_tpu.cli.generate import notes
from sd_tpu.pictures.images import read_png
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import SAMPLERS, make_table
from sd_tpu.serving import engine as engines
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Cancelled, Done, Failed, ImageReady, Progress, Queued
from sd_tpu.serving.plan import Report
from sd_tpu.serving.resolve import ResolvedRequest
from sd_tpu.serving.scheduler import Limits
from sd_tpu.settings import RequestError

EIGHT = [f"{n} cats" for n in range(8)]
LONG = 200  # steps: long enough to be interrupted


@pytest.fixture(scope="module")
def engine(checkpoints):
    """An engine for 32x32 pictures on one device."""
    engine = Engine.open(checkpoints["sd1"], devices=1)
    yield engine
    engine.close()


def ask(engine: Engine, prompts, **values) -> Request:
    return Request.check({"prompts": prompts, "steps": 4, **values}, engine.catalog)


def pictures(job) -> dict[int, np.ndarray]:
    return {e.index: e.pixels for e in job.events() if isinstance(e, ImageReady)}


def first(job, kind):
    return next(event for event in job.events() if isinstance(event, kind))


@pytest.mark.slow("draws many steps")
def test_a_job_tells_its_place_its_steps_its_pictures_and_its_end(engine):
    events = list(engine.submit(ask(engine, ["a cat", "", "a dog"], steps=30)).events())
    assert isinstance(events[0], Queued) and events[0].position == 1
    assert isinstance(events[-1], Done) and events[-1].seconds > 0
    steps = [event.step for event in events if isinstance(event, Progress)]
    assert steps == sorted(steps) and steps[-1] < 30
    images = [event for event in events if isinstance(event, ImageReady)]
    assert [event.index for event in images] == [0, 2]
    assert images[0].pixels.shape == (32, 32, 3) and images[0].pixels.dtype == np.uint8


def test_a_picture_can_be_made_again_alone_from_its_own_seed(engine):
    request = ask(engine, EIGHT, seed=41, sampler="euler_ancestral")
    made = pictures(engine.submit(request))
    assert list(made) == list(range(8))
    again = pictures(engine.submit(request.only(5)))
    assert request.pictures[5].seed == 46
    assert np.array_equal(again[0], made[5])


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1])
def test_a_seed_means_what_it_means_to_jax(engine, seed):
    job = engine.submit(ask(engine, ["a cat"], seed=seed))
    assert np.array_equal(
        engine.resolver.resolve(job.request).pictures[0].slots[0].key, jax.random.PRNGKey(seed)
    )
    assert len(pictures(job)) == 1


def test_events_end_for_good_and_previews_can_be_left_out(engine):
    job = engine.submit(ask(engine, ["a cat"], steps=40), previews=False)
    assert not any(event.previews for event in job.events() if isinstance(event, Progress))
    assert list(job.events()) == []


def test_previews_come_from_places_that_are_on_their_way(engine):
    job = engine.submit(ask(engine, ["a cat", "", "a dog"], steps=LONG))
    previews = [event.previews for event in job.events() if isinstance(event, Progress)]
    assert previews and set(previews[-1]) == {0, 2}
    assert previews[-1][0].shape == (8, 8, 3) and previews[-1][0].std() > 0


def test_jobs_share_the_batch_so_a_short_one_is_not_kept_waiting(engine):
    long = engine.submit(ask(engine, ["a slow cat"], steps=LONG))
    assert isinstance(first(long, Progress), Progress)
    short = engine.submit(ask(engine, ["a quick cat"]))
    assert len(pictures(short)) == 1
    rest = list(long.events())
    assert any(isinstance(event, Progress) for event in rest)
    assert isinstance(rest[-1], Done)


def test_more_images_than_slots_wait_and_are_told_their_place(engine):
    running = engine.submit(ask(engine, EIGHT, steps=LONG))
    first(running, Progress)
    second, third = (engine.submit(ask(engine, ["a dog"])) for _ in range(2))
    assert first(second, Queued).position == 1
    assert first(third, Queued).position == 2
    second.cancel()
    assert isinstance(list(second.events())[-1], Cancelled)
    assert first(third, Queued).position == 1
    running.cancel()
    assert len(pictures(third)) == 1


def test_cancelling_frees_the_slots_for_the_next(engine):
    job = engine.submit(ask(engine, EIGHT, steps=LONG))
    first(job, Progress)
    job.cancel()
    events = list(job.events())
    assert isinstance(events[-1], Cancelled)
    assert not any(isinstance(event, ImageReady) for event in events)
    assert len(pictures(engine.submit(ask(engine, EIGHT)))) == 8


def test_one_picture_of_a_job_is_cancelled_and_makes_room_for_the_next(engine):
    job = engine.submit(ask(engine, EIGHT, steps=LONG))
    first(job, Progress)
    waiting = engine.submit(ask(engine, ["a dog"]))
    assert isinstance(first(waiting, Queued), Queued)
    for index in range(1, 8):
        job.cancel(index)
    assert len(pictures(waiting)) == 1 and not job.end, "it waited for the other's end"
    events = list(job.events())
    assert isinstance(events[-1], Done)
    assert [e.index for e in events if isinstance(e, ImageReady)] == [0]
    steps = [event.step for event in events if isinstance(event, Progress)]
    assert steps == sorted(steps) and steps[0] < LONG / 2, "what is cancelled is not done"


def test_a_job_that_is_cancelled_is_not_said_to_be_done(engine):
    job = engine.submit(ask(engine, EIGHT, steps=LONG))
    first(job, Progress)
    job.cancel()
    assert all(event.step < LONG / 2 for event in job.events() if isinstance(event, Progress))


def test_a_job_all_of_whose_pictures_are_cancelled_is_cancelled(engine):
    running, waiting = (engine.submit(ask(engine, EIGHT, steps=LONG)) for _ in range(2))
    first(running, Progress)
    for job in (waiting, running):
        for index in range(8):
            assert not job.end
            job.cancel(index)
        assert isinstance(list(job.events())[-1], Cancelled)


def test_cancelling_what_is_over_does_nothing(engine):
    job = engine.submit(ask(engine, ["a cat"]))
    assert isinstance(list(job.events())[-1], Done)
    job.cancel()
    assert len(pictures(engine.submit(ask(engine, ["a dog"])))) == 1


def test_a_failure_is_told_and_the_next_job_is_served(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory\nwith a long story")

    monkeypatch.setattr(engine.programs, "advance", fail)
    job = engine.submit(ask(engine, EIGHT))
    failed = list(job.events())[-1]
    assert isinstance(failed, Failed)
    assert failed.message.endswith("RuntimeError: out of memory")
    monkeypatch.undo()
    assert len(pictures(engine.submit(ask(engine, ["a dog"])))) == 1


def test_one_batch_that_fails_later_does_not_end_the_service(engine):
    assert engine.ready.wait(300)
    engine._note_compiled(Report(failed={engine.batch: "out of memory"}))
    assert engine.status().taking and not engine.failure


def test_settings_that_only_the_sampler_can_judge_are_refused_when_submitted(engine):
    with pytest.raises(RequestError, match=r"LCM takes|too many|steps"):
        engine.submit(ask(engine, ["a cat"], sampler="lcm", steps=150))


def test_a_queue_that_is_full_refuses_politely(engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "limits", Limits(jobs=0))
    with pytest.raises(RequestError, match="Too many people are waiting"):
        engine.submit(ask(engine, ["a cat"]))


def test_a_file_names_the_spacing_that_was_left_to_the_model(engine):
    pixels = np.zeros((8, 8, 3), np.uint8)
    for sampler in SAMPLERS:
        request = ask(engine, ["a cat"], sampler=sampler, spacing="")
        (asked,) = read_png(engine.to_png(pixels, request)).pictures
        tables = [
            make_table(sampler, engine.checkpoint.schedule, 9, spacing=spacing).rows
            for spacing in (None, asked.spacing)
        ]
        assert asked.spacing in SAMPLERS[sampler].spacings
        assert np.array_equal(*tables)


def noted(engine, request: Request) -> list[str]:
    """What the command line remarks about a request, whose LoRAs need not be there."""
    named = engine.resolver.named(request)
    pictures = {
        index: SimpleNamespace(remarks=engine.resolver.remarks(named.picture(index)))
        for index in named.indices()
    }
    return notes(ResolvedRequest(named, pictures))  # ty: ignore[invalid-argument-type]


def test_words_beyond_the_last_chunk_are_named(engine):
    request = ask(engine, ["a cat", "very " * 225 + "Tall Ship"], negative_prompt="not " * 226)
    prompt, negative = noted(engine, request)
    assert prompt.startswith("Prompt 2 is too long") and prompt.endswith("“Tall Ship”")
    assert negative.startswith("The negative prompt is") and negative.endswith("“not”")


def test_words_that_the_model_was_never_shown_are_named(engine, monkeypatch):
    request = ask(engine, ["(a:1.3) wizard <lora:x:1>", "", "a BREAK cat"])
    assert noted(engine, request) == [], "a model that lists no words is taken to know them all"
    card = engine.checkpoint.card.model_copy(update={"words": ("a", "cat")})
    monkeypatch.setattr(engine.checkpoint, "card", card)
    (note,) = noted(engine, request)
    assert note.startswith("The model was never shown") and note.endswith("“wizard”")


def test_a_long_negative_prompt_is_told_by_whose_it_is_and_only_if_it_is_used(engine):
    long = {"negative_prompt": "not " * 226}
    other = [{"negative_prompt": "short"}, {"negative_prompt": "no " * 226}]
    shared, own = (
        noted(engine, ask(engine, ["a", "b"], overrides=each, **long))
        for each in ([None, long], other)
    )
    assert [note.split(" is ")[0] for note in shared] == ["The negative prompt"]
    assert [note.split(" is ")[0] for note in own] == ["The negative prompt of prompt 2"]


def differing(engine, seed: int, count: int) -> Request:
    """A request whose pictures have different settings, exact ones and others."""
    samplers = [*SAMPLERS, *SAMPLERS][seed : seed + count]
    own = [
        dict(
            sampler=sampler,
            steps=2 + index,
            guidance=0.5 * index,
            seed=100 * index + seed,
            negative_prompt="fog " * index,
            guidance_start=0.1 * (index % 3),
            guidance_stop=1 - 0.2 * (index % 4),
            cache_interval=1 + index % 3,
            clip_skip=1 + index % 2,
        )
        for index, sampler in enumerate(samplers)
    ]
    return ask(engine, EIGHT[:count], seed=seed, overrides=own)


@pytest.mark.slow("draws each picture of eight twice")
def test_each_picture_of_a_request_with_own_settings_is_that_of_the_same_request_alone(engine):
    for seed in (0, 8):
        request = differing(engine, seed, 8)
        made = pictures(engine.submit(request))
        assert len({pixels.tobytes() for pixels in made.values()}) == 8
        for index in request.indices():
            alone = pictures(engine.submit(request.only(index)))
            assert np.array_equal(alone[0], made[index])
    assert engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}


@pytest.mark.parametrize(
    "name, value",
    [
        ("steps", 9),
        ("guidance", 2.0),
        ("sampler", "heun"),
        ("spacing", "trailing"),
        ("seed", 9),
        ("negative_prompt", "fog"),
        ("guidance_start", 0.3),
        ("guidance_stop", 0.7),
        ("cache_interval", 2),
        ("clip_skip", 2),
    ],
)
def test_each_own_setting_changes_its_picture_and_no_other(engine, name, value):
    common = pictures(engine.submit(ask(engine, ["a cat"] * 2)))
    made = pictures(engine.submit(ask(engine, ["a cat"] * 2, overrides=[None, {name: value}])))
    assert np.array_equal(made[0], common[0])
    assert not np.array_equal(made[1], common[1])


def test_progress_counts_the_work_of_all_pictures_along_the_most_steps(engine):
    request = ask(
        engine,
        ["a", "b", "c"],
        steps=3,
        overrides=[None, {"steps": 20, "sampler": "heun"}, {"steps": 40}],
    )
    job = engine.submit(request, previews=False)
    events = [event for event in job.events() if isinstance(event, Progress)]
    assert {event.steps for event in events} == {40}
    steps = [event.step for event in events]
    assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] < 40
    # PNDM evaluates once more, Heun twice in all steps but the last.
    slots = [picture.slots[0] for picture in engine.resolver.resolve(request).pictures.values()]
    assert [len(slot.kinds) for slot in slots] == [4, 39, 41]


def test_what_a_sampler_refuses_is_told_with_the_prompt_it_is_of(engine):
    with pytest.raises(RequestError, match=r"^Prompt 2: LCM takes at most 50 steps here"):
        engine.submit(ask(engine, ["a", "b"], overrides=[None, {"sampler": "lcm", "steps": 150}]))
    with pytest.raises(RequestError, match=r"^LCM takes at most 50 steps here"):
        engine.submit(ask(engine, ["a", "b"], sampler="lcm", steps=150))


def test_what_a_picture_takes_counts_what_is_evaluated(engine):
    engine.ready.wait()
    exact, forecast = (
        engine.seconds(
            dataclasses.replace(engine.defaults, steps=100, sampler="ddim", cache_interval=interval)
        )
        for interval in (1, 4)
    )
    known = engine.latency.of(engine.batch)
    assert known.row_seconds > 0
    assert exact == pytest.approx(100 * known.row_seconds + known.decode_seconds)
    assert forecast == pytest.approx(27 * known.row_seconds + known.decode_seconds)


def test_a_job_of_a_client_ends_when_nobody_takes_its_events(engine, monkeypatch):
    monkeypatch.setattr(engines, "ABANDONED_SECONDS", 0.0)
    of_a_client = engine.submit(ask(engine, ["a cat"], steps=LONG), client="somebody")
    ours = engine.submit(ask(engine, ["a cat"]))
    deadline = time.monotonic() + 120
    while not (of_a_client.end and ours.end):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(of_a_client.end, Cancelled) and isinstance(ours.end, Done)


def test_nothing_was_compiled_again_by_all_this_but_once_for_what_is_not_guided(engine):
    for guidance in (1.0, 0.0):
        pictures(engine.submit(ask(engine, EIGHT, guidance=guidance, sampler="heun")))
    made = engine.worker._programs
    assert sorted(batch.guided for batch in made) == [False, True]
    for programs in (engine.programs, *made.values()):
        assert programs.traces == {"encode": 1, "advance": 1, "decode": 1}


def test_what_waits_is_cancelled_at_once_and_an_engine_that_closes_ends_the_rest(
    checkpoints, monkeypatch
):
    engine = Engine.open(checkpoints["sd1"], devices=1)
    monkeypatch.setattr(engine.scheduler, "limits", Limits(jobs=1))
    unwanted = engine.submit(ask(engine, ["a cat"]))
    unwanted.cancel()
    assert isinstance(list(unwanted.events())[-1], Cancelled)
    job = engine.submit(ask(engine, ["a cat"]))  # for which there is room
    assert "compiling" in first(job, Queued).reason and not engine.ready.is_set()
    engine.close()
    assert isinstance(list(job.events())[-1], Cancelled | Done)
    assert not engine.jobs() and engine.tally.ended.total() == 2, "each is counted and forgotten"
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit(ask(engine, ["a cat"]))


def test_pictures_take_no_less_than_the_longest_and_no_more_than_one_after_the_other(engine):
    engine.ready.wait()
    short, long = (dataclasses.replace(engine.defaults, steps=steps) for steps in (10, 100))
    one = engine.seconds(short)
    assert one <= engine.seconds(*[short] * 8) <= 8 * one * 1.001
    assert engine.seconds(*[short] * 80) == pytest.approx(
        2 * engine.seconds(*[short] * 40), rel=0.01
    )
    assert engine.seconds(long, short) >= engine.seconds(long) > one
    assert engine.seconds(short, dataclasses.replace(short, height=7)) is None
