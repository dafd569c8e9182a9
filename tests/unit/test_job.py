"""What whoever made a job is told, and whether anybody listens."""

import asyncio
import json
import logging
import threading
import time

import numpy as np
import pytest

from sd_tpu.pictures.inputs import Canvas
from sd_tpu.sentence import Sentence
from sd_tpu.serving import journal
from sd_tpu.serving.job import Cancelled, Done, Failed, ImageReady, Job, Progress, Queued
from tests.support.asking import make_request


def make_job(cancel=None) -> Job:
    return Job(make_request(prompts=("a cat",)), 1, "", cancel)


@pytest.mark.parametrize("end", [Done(1.0), Cancelled(), Failed("It broke.")])
def test_nothing_is_told_after_the_end(end):
    job = make_job()
    for event in (Queued(1, "a reason"), end, Progress(1, 4, {}), Done(2.0)):
        job.put(event)
    assert list(job.events()) == [Queued(1, "a reason"), end]
    assert list(job.events()) == [], "each event is told once"
    assert job.end == end


def test_an_event_loop_hears_of_each_event_once_and_no_thread_waits_for_it():
    jobs = [make_job() for _ in range(50)]
    before = threading.active_count()

    async def hear(job):
        return [event async for event in job.events_async()]

    async def hear_all():
        heard = [asyncio.create_task(hear(job)) for job in jobs]
        while not all(job.idle_seconds() == 0 for job in jobs):
            await asyncio.sleep(0)
        waiting = threading.active_count()
        for job in jobs:
            job.put(Queued(1, "a reason"))
        ends = threading.Thread(target=lambda: [job.put(Done(1.0)) for job in jobs])
        ends.start()
        return waiting, await asyncio.gather(*heard)

    waiting, heard = asyncio.run(hear_all())
    assert waiting == before and heard == [[Queued(1, "a reason"), Done(1.0)]] * 50
    assert all(list(job.events()) == [] for job in jobs)


def test_who_is_slow_with_events_that_are_there_still_takes_them():
    job = make_job()
    for event in (Queued(1, "a reason"), Queued(2, "a reason"), Done(1.0)):
        job.put(event)

    async def take_slowly():
        events = job.events_async()
        for _ in range(2):
            await anext(events)
            assert job.idle_seconds() < 0.1
            await asyncio.sleep(0.2)
        await anext(events)
        assert job.idle_seconds() < 0.1

    asyncio.run(take_slowly())


def test_what_is_kept_of_a_start_picture_is_put_in_by_whoever_takes_the_events():
    kept = np.full((4, 4, 3), 9, np.uint8)
    job = Job(
        make_request(prompts=("a cat",)),
        1,
        "",
        None,
        {0: Canvas(kept, np.zeros((4, 4), np.float32))},
    )
    job.put(Progress(1, 4, {0: np.ones((3, 3, 3), np.uint8)}))  # of a size that cannot be
    job.put(ImageReady(0, np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(ValueError):
        next(job.events())
    assert np.array_equal(next(job.events()).pixels, kept)


def test_cancelling_says_which_job_and_which_of_its_pictures():
    cancelled = []
    job = make_job(lambda *which: cancelled.append(which))
    job.cancel(3)
    job.cancel()
    assert cancelled == [(1, 3), (1, None)]


def test_a_job_is_unheard_while_nobody_takes_or_awaits_its_events():
    job = make_job()
    time.sleep(0.02)
    assert job.idle_seconds() >= 0.02
    listener = threading.Thread(target=list, args=[job.events()])
    listener.start()
    deadline = time.monotonic() + 60
    while job.idle_seconds():
        assert time.monotonic() < deadline, "nobody waits for its events"
        time.sleep(0.01)
    before = time.monotonic()
    job.put(Done(1.0))
    listener.join()
    assert job.idle_seconds() <= time.monotonic() - before


@pytest.fixture
def kept():
    """Leaves the journal as it was before."""
    before = journal.log.handlers.copy()
    yield
    for handler in set(journal.log.handlers) - set(before):
        journal.log.removeHandler(handler)
        handler.close()
    journal.log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("prompts", [False, True])
def test_a_job_is_written_down_without_its_prompts_unless_they_are_asked_for(
    tmp_path, kept, prompts
):
    journal.keep(tmp_path / "log", prompts=prompts)
    for end in (Done(0.25), Failed(Sentence("The reason."))):
        job = Job(make_request(["a secret", "", "two"], steps=3), 7, "a browser's name", None)
        job.put(end)
        journal.note(job)
    journal.log.handlers[-1].close()
    text = (tmp_path / "log").read_text()
    done, failed = map(json.loads, text.splitlines())
    assert (done["end"], done["pictures"], done["steps"], done["size"]) == (
        "done",
        2,
        [3, 3],
        "512x512",
    )
    assert failed["end"] == "failed" and failed["reason"] == "The reason."
    assert "browser" not in text and ("a secret" in text) is prompts


def test_whoever_notes_a_job_does_not_wait_for_the_disk(tmp_path, kept, monkeypatch):
    disk, emit = threading.Event(), logging.FileHandler.emit
    monkeypatch.setattr(logging.FileHandler, "emit", lambda *given: disk.wait(60) and emit(*given))
    journal.keep(tmp_path / "log", prompts=False)
    job = make_job()
    job.put(Done(1.0))
    journal.note(job)
    assert not (tmp_path / "log").read_text()
    disk.set()
    journal.log.handlers[-1].close()
    assert len((tmp_path / "log").read_text().splitlines()) == 1
