"""What whoever made a job is told, whatever the engine does."""

from types import SimpleNamespace

import pytest

from sd_tpu.job import Cancelled, Done, Failed, Job, Progress, Queued
from sd_tpu.request import Own, Request


def make_job(*rows: int, withdrawn=None) -> Job:
    """A job of pictures whose tables have so many rows."""
    own = tuple(Own(steps=count) for count in rows)
    request = Request(prompts=("a cat",) * len(rows), own=own)
    arrivals = {place: SimpleNamespace(table=SimpleNamespace(rows=range(count)))
                for place, count in enumerate(rows)}

    def withdraw(job: Job, places) -> None:
        withdrawn.append([*places])

    return Job(request, 1, arrivals, withdraw, previews=True)


@pytest.mark.parametrize("end", [Done(1.0), Cancelled(), Failed("It broke.")])
def test_nothing_is_told_after_the_end(end):
    job = make_job(4)
    for event in (Queued(1, "a reason"), end, Progress(1, 4, {}), Done(2.0)):
        job.tell(event)
    assert list(job.events()) == [Queued(1, "a reason"), end]
    assert list(job.events()) == [], "each event is told once"


def test_a_position_is_told_when_it_changes():
    job = make_job(4)
    for position in ((2, "a"), (2, "a"), (1, "a"), (1, "b")):
        job.tell_position(*position)
    job.tell(Cancelled())
    assert list(job.events())[:-1] == [Queued(2, "a"), Queued(1, "a"), Queued(1, "b")]


def test_progress_is_the_share_of_all_rows_that_are_still_wanted():
    job = make_job(10, 40)
    job.rows_left.update({0: 5, 1: 40})
    assert (job.progress({}).step, job.progress({}).steps) == (40 * 5 // 50, 40)
    job.unwanted.add(1)
    assert job.progress({}).step == 20
    job.unwanted.add(0)
    assert job.progress({}).step == 40 * 5 // 50, "of a job that is cancelled, of all of it"


def test_a_job_is_cancelled_once_none_of_its_pictures_is_wanted():
    withdrawn = []
    job = make_job(4, 4, withdrawn=withdrawn)
    job.cancel(1)
    job.cancel()
    assert withdrawn == [[1], [0, 1]]
    assert not job.cancelled
    job.unwanted.update((0, 1))
    assert job.cancelled
