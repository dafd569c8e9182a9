"""What the page says, in the language of whoever reads it; the strings are in `languages`.

Labels of Gradio's components (`label`) and what is rendered once (`Translations`) are looked up by
the browser. Everything else is said here (`Language.say`), in the language that the visitor's
browser asks for.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.i18n import I18nData

from sd_tpu.page.languages import ar, en, ko, zh
from sd_tpu.sentence import Sentence


class Phrase:
    """Something to be said as soon as it is known in which language."""

    def __init__(self, key: str, /, **facts: Any):
        """A string of the page, and the facts it speaks of, which may be phrases too."""
        self.key, self.facts = key, facts


@dataclasses.dataclass(frozen=True)
class Language:
    """A language of the page: `tag` and `direction` are what HTML calls `lang` and `dir`."""

    tag: str
    direction: str
    texts: dict[str, str]
    sentences: dict[str, str]

    def say(self, key: str, **facts: Any) -> str:
        """The string, with the facts it speaks of."""
        return self._filled(self.texts[key], facts)

    def translate(self, text: Phrase | str) -> str:
        """What was to be said, or a sentence; other texts, such as a disk's, stay as they are."""
        if isinstance(text, Phrase):
            return self.say(text.key, **text.facts)
        if isinstance(text, Sentence):
            return self._filled(self.sentences.get(text.template, text.template), text.facts)
        return text

    def _filled(self, template: str, facts: dict[str, Any]) -> str:
        return template.format(**{name: self._fact(value) for name, value in facts.items()})

    def _fact(self, value: Any) -> Any:
        match value:
            case Phrase() | Sentence():
                return self.translate(value)
            case list():
                return self.texts["comma"].join(str(self._fact(each)) for each in value)
            case str() if value and self.direction == "rtl":
                return f"\u2068{value}\u2069"  # in its own direction, whatever stands around it
        return value


ENGLISH = Language("en", "ltr", en.TEXTS, {})
LANGUAGES = {  # by what Gradio's frontend calls them; "zh" is where its zh-CN and zh-TW look too
    "en": ENGLISH,
    "ko": Language("ko", "ltr", ko.TEXTS, ko.SENTENCES),
    "zh": Language("zh-Hans", "ltr", zh.TEXTS, zh.SENTENCES),
    "ar": Language("ar", "rtl", ar.TEXTS, ar.SENTENCES),
}


def language_of(visitor: gr.Request) -> Language:
    """The language that the visitor's browser asks for."""
    return match_language(visitor.headers.get("accept-language", ""))


def match_language(header: str) -> Language:
    """The best of the languages that an Accept-Language header names; else English."""
    ranges = [_range(part) for part in header.split(",")]
    for tag, quality in sorted(ranges, key=lambda each: -each[1]):
        if quality > 0 and tag in LANGUAGES:
            return LANGUAGES[tag]
    return ENGLISH


def _range(part: str) -> tuple[str, float]:
    """The language that a part of the header names, without its region, and how much it is liked;
    not at all if that cannot be told.
    """
    tag, _, quality = part.lower().replace(" ", "").partition(";q=")
    try:
        return tag.split("-")[0], float(quality or 1)
    except ValueError:
        return "", 0.0


SHOWN = ("label", "info", "placeholder", "value")  # of a component, where its texts stand
MARKER = re.compile('__i18n__{[^}]*"key": "([^"]*)"}')  # as I18nData writes itself


class Translations(gr.I18n):
    """What the browser shows in its own language, from the first moment on."""

    def __init__(self):
        """Holds the strings without facts, which are labels."""
        super().__init__(**{name: {key: text for key, text in language.texts.items()
                                   if "{" not in text} for name, language in LANGUAGES.items()})
        self._rendered = 0

    def render(self, make: Callable[[Language], str]) -> str:
        """Something of the page in all languages, of which the browser takes its own."""
        self._rendered += 1
        key = f"rendered {self._rendered}"
        for name, language in LANGUAGES.items():
            # In Gradio's messages braces stand for facts; in HTML they can be written otherwise.
            self.translations[name][key] = (
                make(language).replace("{", "&#123;").replace("}", "&#125;"))
        return str(self(key))

    def updates(self, page: gr.Blocks, language: Language) -> dict[Component, dict[str, Any]]:
        """What the page's components show of the strings, in a language that the server chose.

        Gradio's frontend knows only the first language of a browser, and not each one's regions:
        where it takes another one, this puts it right.
        """
        name = next(name for name, known in LANGUAGES.items() if known is language)
        shown = {component: {key: self._said(text, name) for key, text in vars(component).items()
                             if key in SHOWN and MARKER.search(str(text))}
                 for component in page.blocks.values() if isinstance(component, Component)}
        return {component: gr.update(**texts) for component, texts in shown.items() if texts}

    def _said(self, text: I18nData | str, name: str) -> str:
        return MARKER.sub(lambda found: self.translations[name][found[1]], str(text))


def label(key: str) -> I18nData:
    """The string for a component of Gradio's, which the browser shows in its language."""
    return I18nData(key)


def duration(seconds: float) -> Phrase:
    """A time that is only an estimate."""
    if seconds < 90:
        return Phrase("seconds", count=max(1, round(seconds)))
    return Phrase("minutes", count=round(seconds / 60))
