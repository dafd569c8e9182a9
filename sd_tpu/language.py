"""Texts for people, in the language of whoever reads them.

Texts stand in the code in English, and by that are found in the gettext catalogues of
`sd_tpu/locale`.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from babel.messages.pofile import read_po

from sd_tpu.sentence import Sentence

LOCALE = Path(__file__).parent / "locale"


@dataclasses.dataclass(frozen=True, eq=False)
class Language:
    """A language of the page.

    Attributes:
        tag: what HTML calls `lang`.
        direction: what HTML calls `dir`.
        name: what its readers call it.
        folder: of its catalogue in LOCALE; "" is the language of the code.
    """

    tag: str
    direction: str
    name: str
    folder: str = ""

    @functools.cached_property
    def messages(self) -> Mapping[str, str]:
        """Translations by their English texts, read when they are first needed."""
        if not self.folder:
            return {}
        with (LOCALE / self.folder / "LC_MESSAGES" / "sd_tpu.po").open("rb") as file:
            return {str(each.id): str(each.string) for each in read_po(file) if each.id}

    def say(self, text: str, /, **facts: Any) -> str:
        """Translate an English text, with the facts it speaks of."""
        formatted = {name: self._fact(value) for name, value in facts.items()}
        return self.messages.get(text, text).format(**formatted)

    def translate(self, text: str) -> str:
        """Translate a Sentence; other texts, such as a disk's, stay as they are."""
        return self.say(text.template, **text.facts) if isinstance(text, Sentence) else text

    def _fact(self, value: Any) -> Any:
        match value:
            case Sentence():
                return self.translate(value)
            case list():
                return self.messages.get(", ", ", ").join(str(self._fact(each)) for each in value)
            case str() if value and self.direction == "rtl":
                return f"\u2068{value}\u2069"  # in its own direction, whatever stands around it
        return value


ENGLISH = Language("en", "ltr", "English")
LANGUAGES = {  # by the first part of what browsers call them, as zh-CN and zh-TW
    "en": ENGLISH,
    "ko": Language("ko", "ltr", "한국어", "ko"),
    "zh": Language("zh-Hans", "ltr", "中文", "zh_Hans"),
    "ar": Language("ar", "rtl", "العربية", "ar"),
}


def language_of(*tags: Any) -> Language:
    """Return the first language that the page speaks by tags such as browsers send; else English.

    "zh-TW;q=0.8" is one, and whatever is no text asks for none.
    """
    names = (re.split("[-;]", str(tag).strip().lower())[0] for tag in tags)
    return next((LANGUAGES[name] for name in names if name in LANGUAGES), ENGLISH)
