"""The status of a run in sentences: what it waits for, how far it is, how it ended."""

import dataclasses

from sd_tpu.sentence import Sentence, SentenceError
from sd_tpu.serving.job import COMPILING, WAITING
from sd_tpu.serving.scheduler import Busy


@dataclasses.dataclass(frozen=True)
class StatusLine:
    """The status of a run, translated for each subscriber.

    Attributes:
        text: the sentence.
        kind: busy, over or wrong; idle where nothing was asked for.
        share: of the work that is done.
        aloud: whether a screen reader reads its end out.
        single: whether only single pictures are drawn again.
    """

    text: str = Sentence("Ready")
    kind: str = "idle"
    share: float = 0.0
    aloud: bool = True
    single: bool = False


STARTING = StatusLine(Sentence("Starting…"), "busy")


def ready(numbers: list[int]) -> list[Sentence]:
    """Return the news that the pictures with these numbers are finished, if there are any."""
    if len(numbers) == 1:
        return [Sentence("Picture {places} is ready.", places=numbers)]
    return [Sentence("Pictures {places} are ready.", places=numbers)] if numbers else []


def queued(position: int, reason: str, wait: float | None) -> str:
    """Return what a run waits for, and how many seconds if that is known.

    Number 1 is not mentioned: it may be the only one.
    """
    turn = STARTING.text
    if position > 1:
        turn = (
            Sentence(
                "Queued as number {position}, about {time} until it starts",
                position=position,
                time=duration(wait),
            )
            if wait
            else Sentence("Queued as number {position}", position=position)
        )
    elif wait:
        turn = Sentence("Starting in about {time}…", time=duration(wait))
    if reason == WAITING:
        return turn
    what = (
        Sentence("Compiling for the first time…")
        if reason == COMPILING
        else Sentence("Loading the model…")
    )
    return what if turn is STARTING.text else Sentence("{what} {turn}", what=what, turn=turn)


def refusal(error: SentenceError) -> Sentence:
    """Return why a request is not served, and when there is room for it if that is all."""
    if isinstance(error, Busy):
        return Sentence(
            "{reason} There should be room in about {time}.",
            reason=error.sentence,
            time=duration(error.retry_after),
        )
    return error.sentence


def duration(seconds: float) -> Sentence:
    """Round an estimated time."""
    if seconds < 90:
        return Sentence("{count} s", count=max(1, round(seconds)))
    return Sentence("{count} min", count=round(seconds / 60))


def at_step(step: int, steps: int, left: float | None) -> Sentence:
    """Return how far a run is, and how many seconds are left if that is known."""
    if left is None or step >= steps:
        return Sentence("Step {step} of {steps}", step=step, steps=steps)
    return Sentence(
        "Step {step} of {steps}, about {time} left", step=step, steps=steps, time=duration(left)
    )
