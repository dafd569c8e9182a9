"""Sentences for people: English by themselves, and still to be said in another language.

What is told is found by its template, as gettext does it: here nobody knows any other language,
and whoever shows a sentence has the translations (the page, those of `sd_tpu/locale`).
"""

from typing import Any, Self


class Sentence(str):
    """A text in English that knows its template and the facts it speaks of.

    A fact may be a Sentence too, such as the name of what a sentence is about.
    """

    template: str
    facts: dict[str, Any]

    def __new__(cls, template: str, /, **facts: Any) -> Self:
        """Format the template with the facts, as `str.format` does."""
        sentence = super().__new__(cls, template.format(**facts))
        sentence.template, sentence.facts = template, facts
        return sentence

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """Return the arguments by which pickle makes a copy."""
        return (self.template,), self.facts


class SentenceError(ValueError):
    """Something that cannot be done; the message is a Sentence for the person who wanted it."""

    def __init__(self, template: str, /, **facts: Any):
        """Format the message as a Sentence does."""
        super().__init__(Sentence(template, **facts))

    def __reduce__(self) -> tuple:
        """Pickle the error with its message, which is not formatted again."""
        return Exception.__new__, (type(self), *self.args), self.__dict__

    @property
    def sentence(self) -> Sentence:
        """The message."""
        return self.args[0]
