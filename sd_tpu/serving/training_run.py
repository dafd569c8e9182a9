"""A run of training that somebody has begun on the page: what was asked for, and how far it is.

It has a folder of its own, from which it goes on after a restart: pictures and captions, the state
of the training, and what was drawn with it. The pictures go when it is over.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sd_tpu.pictures.inputs import Input
from sd_tpu.sentence import Sentence
from sd_tpu.training.factors import replace_file
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import Example, bucket, captioned

WAITING, PREPARING, TRAINING = "waiting", "preparing", "training"
STOPPED, FAILED, DONE = "stopped", "failed", "done"
ACTIVE = (WAITING, PREPARING, TRAINING)
MAX_POINTS = 200  # of the loss's curve


@dataclasses.dataclass
class TrainingRun:
    """A run, as its folder has it.

    Attributes:
        folder: of its files.
        owner: the browser that began it.
        address: the network that it was begun from, which is not written; "" if it does not count.
        model: by the name that the catalog has for it.
        name: of what is taught, and of the LoRA.
        kind: of it.
        steps: in all.
        rank: of the factors.
        size: height and width of the area at which pictures are looked at.
        captions: of the pictures, in their order.
        prompts: that are drawn with each kept state.
        seed: of these, by which they run on.
        status: one of the words above.
        message: why it failed.
        batch: pictures that are looked at together, on all devices.
        step: how many have been taken.
        losses: (step, smoothed loss), for a curve.
        kept: the steps whose LoRAs are there.
        seconds: until it is over, if that is known.
        memory: bytes on each device, beside the model, once that is known.
    """

    folder: Path
    owner: str
    model: str
    name: str
    kind: str
    steps: int
    rank: int
    size: tuple[int, int]
    captions: list[str]
    prompts: list[str]
    seed: int
    status: str = WAITING
    message: str = ""
    batch: int = 1
    step: int = 0
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    memory: int | None = None
    address: str = ""

    @property
    def id(self) -> str:
        """The name of its folder, by which the page calls it."""
        return self.folder.name

    @property
    def is_active(self) -> bool:
        """Whether it is, or will be, trained on."""
        return self.status in ACTIVE

    @property
    def state(self) -> Path:
        """The file from which the training goes on."""
        return self.folder / "state.safetensors"

    def file(self, step: int | None = None) -> str:
        """Return the name of the LoRA's file after a step, or of the finished one."""
        return f"{self.name}.safetensors" if step is None else f"{self.name}-{step}.safetensors"

    @property
    def pictures_bytes(self) -> int:
        """Bytes of what was handed in, as long as it is kept."""
        folder = self.folder / "pictures"
        return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0

    def is_near(self, other: Self) -> bool:
        """Whether another run is of the same browser or network."""
        return other.owner == self.owner or self.address == other.address != ""

    def options(self) -> Options:
        """Return the options of the training."""
        return Options(
            name=self.name, kind=self.kind, steps=self.steps, rank=self.rank, batch=self.batch
        )

    def note(self, loss: float) -> None:
        """Add a point to the loss's curve, unless it would be too near to the one before."""
        if self.step % -(-self.steps // MAX_POINTS) == 0 or self.step in (1, self.steps):
            self.losses.append((self.step, loss))

    # --- files ----------------------------------------------------------------------------------

    @classmethod
    def begin(cls, pictures: Sequence[bytes], **values: Any) -> Self:
        """Write the folder of a new run, with the files of its pictures."""
        run = cls(**values)
        try:
            (run.folder / "pictures").mkdir(parents=True)
            for number, content in enumerate(pictures):
                (run.folder / "pictures" / str(number)).write_bytes(content)
            run.save()
        except BaseException:
            run.forget()
            raise
        return run

    @classmethod
    def restore(cls, folder: Path) -> Self | None:
        """Read a run's folder, after a restart; None if there is none in it.

        One that was going on counts as stopped. A folder that was cut off while it was written is
        removed.
        """
        if folder.is_dir() and not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        try:
            stored: dict[str, Any] = json.loads((folder / "run.json").read_text("utf-8"))
            stored |= {"size": tuple(stored["size"]), "message": _read(stored["message"])}
            run = cls(folder=folder, **stored)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        run.losses = [(int(step), float(loss)) for step, loss in run.losses]
        run.status = STOPPED if run.is_active else run.status
        run.seconds = None
        return run

    def save(self) -> None:
        """Write how far it is."""
        stored = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("folder", "address")
        }
        stored["message"] = _written(self.message)
        replace_file(self.folder / "run.json", json.dumps(stored).encode())

    def examples(self, unit: int) -> list[Example]:
        """Return the pictures with their captions.

        Args:
            unit: pixels of which the model's sides are multiples.
        """
        found = []
        for number, text in enumerate(self.captions):
            given = Input((self.folder / "pictures" / str(number)).read_bytes())
            caption = captioned(text, self.name, self.kind)
            found.append(Example(given, caption, bucket(given.size, self.size, unit)))
        return found

    def forget_pictures(self) -> None:
        """Remove what was handed in, and the state that needs it."""
        shutil.rmtree(self.folder / "pictures", ignore_errors=True)
        self.state.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove all that is kept of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def age(self) -> float:
        """Return the seconds since it was written last."""
        return time.time() - (self.folder / "run.json").stat().st_mtime

    # --- what is drawn with it ------------------------------------------------------------------

    def keep_samples(self, step: int, pictures: Mapping[int, bytes]) -> None:
        """Keep WebP files of its prompts, by their numbers, after a step; 0 is without it."""
        (self.folder / "samples").mkdir(exist_ok=True)
        for index, content in pictures.items():
            replace_file(self._sample(step, index), content)

    def samples(self, step: int) -> dict[int, bytes]:
        """Return what was drawn after a step, by the numbers of the prompts."""
        return {index: self._sample(step, index).read_bytes() for index in self.drawn(step)}

    def drawn(self, step: int) -> list[int]:
        """Return the numbers of the prompts that were drawn after a step."""
        numbers = range(len(self.prompts))
        return [index for index in numbers if self._sample(step, index).is_file()]

    def _sample(self, step: int, index: int) -> Path:
        return self.folder / "samples" / f"{step}-{index}.webp"


def _written(value: Any) -> Any:
    """Return a sentence, or a fact of one, as JSON keeps it: it can be translated later."""
    if isinstance(value, Sentence):
        facts = {name: _written(fact) for name, fact in value.facts.items()}
        return {"template": value.template, "facts": facts}
    return value if isinstance(value, int | float | str) else str(value)


def _read(value: Any) -> Any:
    """Return what `_written` was given."""
    if isinstance(value, dict):
        text, facts = value["template"], value["facts"]
        return Sentence(text, **{name: _read(fact) for name, fact in facts.items()})
    return value
