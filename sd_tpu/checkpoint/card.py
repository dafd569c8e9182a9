"""Model cards: the `sd_tpu.json` of a checkpoint, which the page shows."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field, StringConstraints

from sd_tpu.checkpoint.config import Config, is_file, read_json
from sd_tpu.settings import LARGER_STRENGTH, MAX_MODEL_LENGTH, SETTINGS

GUIDE_PROMPTS = (
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Close-up photograph of young black woman against urban background, high quality, bokeh",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


class ModelCard(Config):
    """A model's texts and defaults for the page: `sd_tpu.json` in the checkpoint, if there.

    `hint` says in a line what to write, `details` what the model can draw, where that is little;
    `translations` has the two for people who read other languages, by their tags in HTML.
    `more_prompts` are what the page's sample prompts go on with, by the eight. No sampler means the
    one that the checkpoint's `scheduler_config.json` asks for. `larger_strength` is how much of a
    picture becomes noise where it is drawn again larger. `words` are those that the captions
    of its training were made of, for a model that was trained on few; `themes` has what of them is
    worth offering, under animals, food, nature, vehicles, things, colours and styles.
    `learning_rate` is that of AdamW where the model is taught: small models take a higher one.
    """

    name: Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_MODEL_LENGTH)
    ]
    hint: str = ""
    prompts: tuple[str, ...] = GUIDE_PROMPTS
    more_prompts: tuple[str, ...] = ()
    steps: Annotated[int, Field(ge=1)] = 20
    guidance: float = 7.5
    larger_strength: float = LARGER_STRENGTH
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    sampler: str | None = None
    spacing: str | None = None
    details: str = ""
    translations: dict[str, dict[str, str]] = Field(default_factory=dict)
    words: tuple[str, ...] = ()
    themes: dict[str, list[str]] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _pictures_can_begin_so(self) -> Self:
        for name in ("steps", "guidance", "sampler", "spacing"):
            if (value := getattr(self, name)) is not None:
                SETTINGS[name].check(value)
        SETTINGS["strength"].kind.check(self.larger_strength, "larger_strength")
        return self

    def translated(self, name: str, tag: str) -> tuple[str, str]:
        """Return `hint` or `details` for readers of a language, and the tag of its language."""
        text = self.translations.get(tag, {}).get(name)
        return (text, tag) if text else (getattr(self, name), "en")

    def unknown_words(self, prompt: str) -> list[str]:
        """Words of the prompt that are not among `words`, each once; none if those are not told."""
        known = set(self.words)
        return [word for word in dict.fromkeys(split_words(prompt)) if known and word not in known]

    @classmethod
    def read(
        cls, folder: Path, name: str, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> Self:
        """Read the card of the checkpoint in `folder`.

        Args:
            folder: where it lies.
            name: what the model is called if nothing there says it.
            defaults: of its family, for what nothing there says.
        """
        file = folder / "sd_tpu.json"
        own = read_json(file) if is_file(file) else {}
        return cls.from_dict({"name": name, **defaults, **own})
