"""Parts of the page as HTML, and captions: what its people read, in the language of each.

A picture lives in a card of its own, so its place never moves while others come and go. Cards are
HTML instead of Gradio's images because the file offered must be the PNG with its settings, byte for
byte, and because a preview must turn into the picture without a flicker.
"""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2

from sd_tpu.gallery.files import thumbnail
from sd_tpu.language import Language
from sd_tpu.links import write_link
from sd_tpu.page.files import url
from sd_tpu.page.form import COMMON
from sd_tpu.sentence import Sentence
from sd_tpu.settings import (
    HANDED_IN,
    MAX_PROMPTS,
    OVERRIDABLE,
    SETTINGS,
    SIDES,
    Choice,
    Picture,
    Setting,
    Text,
    captions,
)
from sd_tpu.training.options import BOUNDS, Options
from sd_tpu.training.pictures import FEWEST, MOST, PICTURE_SIDES

STATES = {
    "example": Sentence("Example"),
    "waiting": Sentence("Waiting"),
    "forming": Sentence("Forming"),
    "stopped": Sentence("Stopped early"),
}


TAUGHT = {  # what can be chosen for a training
    "fewest": FEWEST,
    "most": MOST,
    "steps": Options.steps,
    "rank": Options.rank,
    "most_rank": BOUNDS["rank"].most,
    "sides": {str(side): f"{side:.0%}" for side in PICTURE_SIDES},
}


def part(name: str, language: Language, *facts: Any) -> str:
    """Render the macro of this name in page.html with the facts."""
    return str(getattr(_parts(language), name)(*facts))


@cache
def _parts(language: Language) -> Any:
    return _PAGE.make_module(
        dict(
            language=language,
            say=language.say,
            translate=language.translate,
            words=partial(words, language),
            all_words=partial(all_words, language),
        )
    )


def _kind_of(setting: Setting) -> str:
    return type(setting.kind).__name__.lower()


def _allowed(kind: Choice) -> str:
    """Return the options that go with each value of the setting they depend on, for page.js."""
    return json.dumps(
        {
            "of": kind.per,
            "allowed": {key: kind.allowed_keys(key) for key in OVERRIDABLE[kind.per].kind.options},  # ty: ignore[missing-union-attribute]
        }
    )


def differences(first: Picture, second: Picture) -> list[tuple[Sentence | str, ...]]:
    """Return what sets two pictures apart: a setting's label, and its value in each."""
    return [
        (setting.label, *(setting.kind.shown(getattr(each, name)) for each in (first, second)))
        for name, setting in SETTINGS.items()
        if getattr(first, name) != getattr(second, name)
    ]


_PAGE = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
).get_template(
    "page.html",
    globals=dict(
        url=url,
        write_link=write_link,
        thumbnail=thumbnail,
        now=time.monotonic_ns,
        date=partial(datetime.fromtimestamp, tz=UTC),
        kind_of=_kind_of,
        allowed=_allowed,
        common=COMMON,
        no_style=SETTINGS["style"].caption_of(""),
        overridable=OVERRIDABLE,
        states=STATES,
        handed_in=HANDED_IN,
        taught=TAUGHT,
        max_prompts=MAX_PROMPTS,
        differences=differences,
    ),
)


# --- captions -----------------------------------------------------------------------------------


def words(language: Language, values: Mapping[str, Any]) -> str:
    """Return settings, given by name, as a label: `Euler · 20 steps · 512×768`."""
    return " · ".join(map(language.translate, captions(values)))


def all_words(language: Language, picture: Picture) -> str:
    """Return all settings of the picture as a label.

    Settings for experts and a negative prompt are left out at their defaults.
    """
    quiet = {
        name
        for name, setting in OVERRIDABLE.items()
        if setting.expert or isinstance(setting.kind, Text)
    }
    return words(
        language,
        {
            name: value
            for name, value in vars(picture).items()
            if name in OVERRIDABLE.keys() - SIDES
            and (name not in quiet or value != SETTINGS[name].default)
        },
    )
