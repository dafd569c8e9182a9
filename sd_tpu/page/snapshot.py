"""What whoever follows a run is told: the places of the gallery, and what happens."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sd_tpu.job import COMPILING
from sd_tpu.page.files import Picture
from sd_tpu.page.texts import Phrase, duration
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the gallery.

    `state` is blank (nothing asked for), waiting, forming, done or stopped; `preview` is the
    address of how it looks until it is done: as it forms, or as it was before it is drawn again.
    `picture` is there when it is done. `named` are the settings that its label names.
    """

    place: int
    state: str = "blank"
    prompt: str = ""
    seed: int = 0
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    preview: str = ""
    picture: Picture | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """What happens, to be said to each follower in his language; `share` of the work is done,
    `kind` is busy, over or wrong; `aloud` is whether its end is read out.
    """

    text: Phrase | Sentence
    kind: str = "busy"
    share: float = 0.0
    aloud: bool = True


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a follower is told: the cells that have changed, the line, and what to read aloud.

    The run is `over` if nothing will change any more, unless a picture is drawn again.
    """

    cells: tuple[Cell, ...]
    line: Line
    news: tuple[Phrase | Sentence, ...]
    over: bool


def making(request: Request) -> Phrase:
    """That a run begins."""
    count = len(request.places())
    pictures = Phrase("one_picture") if count == 1 else Phrase("pictures", count=count)
    return Phrase("making", count=pictures)


def ready(numbers: list[int]) -> list[Phrase]:
    """That the pictures with these numbers are finished, if there are any."""
    if not numbers:
        return []
    return [Phrase("picture_ready" if len(numbers) == 1 else "pictures_ready", places=numbers)]


def queued(position: int, reason: str, wait: float | None) -> Phrase:
    """What a run waits for, and how many seconds if that is known."""
    if reason == COMPILING:
        return Phrase("compiling_queued" if position > 1 else "compiling", position=position)
    if not wait:
        return Phrase("queued", position=position)
    return Phrase("queued_wait", position=position, time=duration(wait))


def at_step(step: int, steps: int, left: float | None) -> Phrase:
    """How far a run is, and how many seconds are left if that is known."""
    if left is None or step >= steps:
        return Phrase("step", step=step, steps=steps)
    return Phrase("step_left", step=step, steps=steps, time=duration(left))
