"""What the maker of a job is told while the engine works on it."""

import dataclasses

import numpy as np

from sd_tpu.sentence import Sentence

COMPILING = "compiling for the first time"  # what a job may wait for


@dataclasses.dataclass(frozen=True)
class Queued:
    """Waiting for a slot: number `position` in the queue, from 1; `reason` says what for."""

    position: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Progress:
    """Step `step` of `steps`; previews uint8 [H, W, 3] by place.

    `steps` are those of the image that takes most, and `step` is as far along them as the job is
    with all its work: the evaluations of the model for all its images that are still wanted, of
    which Heun's steps take two. For images that are alike it is the mean of their steps.
    """

    step: int
    steps: int
    previews: dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ImageReady:
    """The finished picture at `place`: uint8 [H, W, 3]."""

    place: int
    pixels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Done:
    """All pictures that are still wanted are there; `seconds` since the first entered a slot."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Cancelled:
    """The job was cancelled; no more events follow."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The job failed for a reason that is not in the request."""

    message: Sentence


Event = Queued | Progress | ImageReady | Done | Cancelled | Failed
