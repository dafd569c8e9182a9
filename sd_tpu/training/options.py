"""Options of teaching, and their bounds."""

import dataclasses
from typing import Any, Self

from sd_tpu.settings import Number, RequestError
from sd_tpu.training.pictures import KINDS, check_name

OPTIMIZERS = {"adamw": 1e-4, "prodigy": 1.0}  # and their learning rates by default
BOUNDS = {
    "steps": Number(int, 1, 100_000),
    "rank": Number(int, 4, 128),
    "batch": Number(int, 1, 256),
    "accumulate": Number(int, 1, 256),
    "seed": Number(int, 0, 2**32 - 1),
    "learning_rate": Number(float, 0, 10),
    "caption_dropout": Number(float, 0, 0.9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run, on which its result depends beside the model and the pictures.

    Attributes:
        name: of what is taught: a word in captions and prompts.
        kind: of it, one of KINDS.
        steps: changes of the factors.
        rank: of the factors, from 4.
        learning_rate: at its highest; None is the optimizer's own.
        optimizer: one of OPTIMIZERS.
        batch: pictures that are looked at together, on all devices.
        accumulate: batches that make a step.
        caption_dropout: how often there is no caption, so that guidance goes on to work.
        feed_forward: whether feed-forward layers are trained as well as attention.
        text_encoders: whether the CLIP text encoders are trained as well.
        seed: of everything random.
    """

    name: str
    kind: str = "thing"
    steps: int = 1000
    rank: int = 16
    learning_rate: float | None = None
    optimizer: str = "adamw"
    batch: int = 1
    accumulate: int = 1
    caption_dropout: float = 0.05
    feed_forward: bool = False
    text_encoders: bool = False
    seed: int = 0

    @property
    def highest_rate(self) -> float:
        """The learning rate at its highest."""
        return OPTIMIZERS[self.optimizer] if self.learning_rate is None else self.learning_rate

    def of_model(self, rate: float | None) -> Self:
        """Return the options with a model's own learning rate, if it has one and none is given."""
        takes = self.learning_rate is None and self.optimizer == "adamw"
        return dataclasses.replace(self, learning_rate=rate) if takes else self

    @property
    def items(self) -> int:
        """Pictures that make a step."""
        return self.batch * self.accumulate

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It warms up over a tenth of the run, 100 steps at most, and falls over the last quarter.
        """
        warmup = max(1, min(100, self.steps // 10))
        left = (self.steps - step) / max(1, self.steps // 4)
        return self.highest_rate * min(1, (step + 1) / warmup, left)

    def check(self) -> None:
        """Raise RequestError for a value that is not possible."""
        check_name(self.name)
        _one_of("kind", self.kind, KINDS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        values = {**dataclasses.asdict(self), "learning_rate": self.highest_rate}
        for name, number in BOUNDS.items():
            number.check(values[name], name.replace("_", " "))


def _one_of(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise RequestError(
            "There is no {name} {value}; there are {known}.",
            name=name,
            value=repr(value),
            known=", ".join(known),
        )
