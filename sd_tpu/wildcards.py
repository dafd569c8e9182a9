"""Prompts that stand for several: `a {red|green} fox`, and `__animal__`, a line of a file.

The signs are those of A1111's extension Dynamic Prompts; the values may hold such signs themselves.
Its library reads more than that, but drops what follows a `#`, fails on a `$`, takes part of
`<lora:a__b__c:1>` for a file, and only logs a file that is not there.
"""

import dataclasses
import difflib
import errno
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from sd_tpu.reading import composed, find_inside, read_text
from sd_tpu.sentence import Sentence
from sd_tpu.settings import MAX_PROMPT_LENGTH, SETTINGS, RequestError, about, shortened

MAX_DEPTH = 20  # of values within values; a file may name itself
MAX_WORK = 1 << 15  # of a prompt: texts joined, and 16 characters of them searched for signs
MAX_FILE_BYTES = 1 << 24
TRIES = 20  # for a value that is not there yet
# Between underscores; a backslash is a slash of Windows' where it escapes nothing.
FILE = r"__(?P<name>(?![\s_])(?:[^{}|<>:\\\x00-\x1f]|\\(?=[^\W_])){1,512}?(?<!\s))__"
SIGN = re.compile(
    r"\\."  # which the prompt grammar makes text
    r"|<lora:[^<>{}|]*>"  # whose names may hold anything
    rf"|{FILE}|[{{|}}]",
    re.DOTALL,
)
ALONE = re.compile(rf"(?<![^\W_]){FILE}(?![^\W_])")  # with no letter beside it
# What can only be meant as a file's name; `^, =` of `^__^, =__=` is one if there is such a file.
NAME = re.compile(r"[~@./]*\w([\w ./\\*-]*[\w*])?")
# What Dynamic Prompts says before a value: how often it is drawn, how many are drawn together.
UNKNOWN = re.compile(r"\s*[\d.~@!-]+(::|\$\$)")


class Wildcards:
    """The values of prompts, from braces and from the text files in a folder."""

    def __init__(self, folder: Path | None = None):
        """Take the folder of files, if there is one; raises ValueError where it is missing."""
        if folder is not None and not folder.is_dir():
            raise ValueError(f"There is no folder {str(folder)!r} with wildcards.")
        self._folder = folder and folder.resolve()

    def names(self) -> list[str]:
        """Return the names that may stand between `__` and `__`: paths without a suffix."""
        folder, listings = self._folder, {}
        if folder is None:
            return []
        names = {
            composed(file.relative_to(folder).with_suffix("").as_posix())
            for file in folder.rglob("*.txt")
        }
        return sorted(
            name
            for name in names
            if SIGN.fullmatch(f"__{name}__") and find_inside(folder, f"{name}.txt", listings)
        )

    def fill(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Replace each prompt by a value of it.

        A prompt that stands for several fills the empty boxes that follow it as well. If all its
        values fit there, each comes once, in order; otherwise they are drawn by the seed.

        Raises:
            RequestError: there are no such values, or they are too long, or empty.
        """
        filled, indices, above = list(prompts), {}, ""
        for index, prompt in enumerate(prompts):
            above = prompt or above
            indices.setdefault(above, []).append(index)
        for text, filled_indices in indices.items():
            with about("prompt", filled_indices[0]):
                values = self._of_prompt(text, seed, filled_indices)
            if values is None:
                continue
            for number, index in enumerate(filled_indices):
                if prompts[index] or number < len(values):
                    filled[index] = values[number % len(values)].strip()
        return filled

    def _of_prompt(self, text: str, seed: int, indices: Sequence[int]) -> list[str] | None:
        """Return the values of a prompt that fills these indices; None if it stands for itself."""
        of = Sentence("Prompt {number}", number=indices[0] + 1)
        values_of = _Values(self._folder, of)
        if all(isinstance(piece, str) for piece in values_of.pieces(text)):
            return None
        values = values_of.first(text, len(indices) + 1)
        if len(values) > len(indices):
            values = values_of.drawn(text, seed, indices)
        if not all(value.strip() for value in values):
            raise RequestError("{name} stands for nothing: one of its values is empty.", name=of)
        return values

    def value(self, text: str, seed: int, of: Sentence) -> str:
        """Return a value of the text, drawn by the seed; raises RequestError about `of`."""
        return _Values(self._folder, of).any(text, Random(f"{seed} 0")).strip()


class _Values:
    """Values of one prompt, within the work that it may take.

    Each method raises RequestError beyond that, and for all that `Wildcards.fill` refuses.
    """

    def __init__(self, folder: Path | None, of: Sentence):
        self._folder, self._of = folder, of
        self._work, self._pieces, self._files, self._listings = 0, {}, {}, {}

    def drawn(self, text: str, seed: int, indices: Sequence[int]) -> list[str]:
        """Draw a value for each index, all different if that is easily had."""
        values: list[str] = []
        for index in indices:
            random = Random(f"{seed} {index}")
            tries = (self.any(text, random) for _ in range(TRIES))
            values.append(
                next((value for value in tries if value not in values), None)
                or self.any(text, random)
            )
        return values

    def first(self, text: str, most: int, depth: int = 0) -> list[str]:
        """Return the first values of a text, in order."""
        values_found = [""]
        for piece in self.pieces(text, depth):
            if isinstance(piece, str):
                values = [piece]
            else:
                values = []
                for option in piece:
                    values += self.first(option, most - len(values), depth + 1)
                    if len(values) == most:
                        break
            values_found = [
                self._joined(before, value) for before in values_found for value in values
            ][:most]
        return values_found

    def any(self, text: str, random: Random, depth: int = 0) -> str:
        """Draw a value of a text by `random.random` alone, which is the same in every Python."""
        value = ""
        for piece in self.pieces(text, depth):
            if not isinstance(piece, str):
                option = piece[int(random.random() * len(piece))]
                piece = self.any(option, random, depth + 1)
            value = self._joined(value, piece)
        return value

    def pieces(self, text: str, depth: int = 0) -> list[str | Sequence[str]]:
        """Split a text into plain pieces and, for each sign, the values to choose from.

        These values may hold signs themselves.
        """
        if depth > MAX_DEPTH:
            raise RequestError("{name} has wildcards within wildcards without end.", name=self._of)
        if depth and (sign := UNKNOWN.match(text)):
            raise RequestError(
                "{name} has a sign that is not known here: {sign}", name=self._of, sign=sign[0]
            )
        if text not in self._pieces:
            self._spend(1 + len(text) // 16)
            self._pieces[text] = [
                self._of_file(piece.name) if isinstance(piece, _File) else piece
                for piece in _split(text, self._signs(text))
            ]
        return self._pieces[text]

    def _signs(self, text: str) -> Iterator[re.Match]:
        """Yield the signs in a text, leaving out underscores that name no file."""
        begin = 0
        while sign := SIGN.search(text, begin):
            if found := self._meant(sign) if sign["name"] else sign:
                yield found
            # `^__^, __animal__` has a file behind the first two.
            begin = found.end() if found else sign.start() + 2

    def _meant(self, sign: re.Match) -> re.Match | None:
        """Return the sign that begins where this one does and names a file, existing or not.

        `__a__s` names a file only if it exists.
        """
        alone = ALONE.match(sign.string, sign.start())
        for found in filter(None, (alone, sign)):
            if self._file(found["name"]):
                return found
        return alone if alone and NAME.fullmatch(alone["name"]) else None

    def _file(self, name: str) -> Path | None:
        """Return the file of this name in the folder, if there is one."""
        if self._folder and name not in self._files:
            self._spend(1)
            self._files[name] = find_inside(self._folder, f"{name}.txt", self._listings)
        return self._files.get(name)

    def _of_file(self, name: str) -> Sequence[str]:
        refused: dict[str, Any] = dict(name=self._of, wildcard=shortened(name))
        if self._folder is None:
            raise RequestError(
                "{name} asks for a value of {wildcard}, but no folder of wildcards "
                "was given. A \\ before its __ makes them text.",
                **refused,
            )
        values: Sequence[str] = ()
        try:
            if file := self._file(name):
                state = file.stat()
                values = _lines(file, state.st_mtime_ns, state.st_size)
        except UnicodeDecodeError:
            raise RequestError(
                "{name} asks for a value of {wildcard}, whose file is not in UTF-8.", **refused
            ) from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise RequestError(
                    "{name} asks for a value of {wildcard}, whose file is larger than {limit} MiB.",
                    **refused,
                    limit=MAX_FILE_BYTES >> 20,
                ) from None
        if not values:
            near = difflib.get_close_matches(name, Wildcards(self._folder).names())
            raise RequestError(
                "{name} asks for a value of {wildcard}, of which there is none "
                "here; the nearest are {known}. A \\ before its __ makes them "
                "text.",
                **refused,
                known=", ".join(near) or "–",
            )
        return values

    def _joined(self, before: str, value: str) -> str:
        self._spend(1)
        text = before + value
        fits = len(text) <= MAX_PROMPT_LENGTH
        return text if fits else SETTINGS["prompt"].kind.check(text, self._of)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise RequestError(
                "{name} has more wildcards within wildcards than are looked up for a prompt.",
                name=self._of,
            )


@dataclasses.dataclass(frozen=True)
class _File:
    """A value of the file of this name."""

    name: str


def _split(text: str, signs: Iterator[re.Match]) -> tuple[str | tuple[str, ...] | _File, ...]:
    """Split a text into plain pieces, the values of its outermost braces, and files.

    Braces without a bar, or that are not closed, are text.
    """
    opened: list[list[int]] = []  # where each brace that waits is, and its bars
    found: list[tuple[int, int, tuple[str, ...] | _File]] = []  # begin and end of each
    for sign in signs:
        begin, end = sign.span()
        if sign["name"]:
            found.append((begin, end, _File(sign["name"])))
        elif sign[0] == "{":
            opened.append([begin])
        elif opened and sign[0] == "|":
            opened[-1].append(begin)
        elif opened and sign[0] == "}" and len(cuts := [*opened.pop(), begin]) > 2:
            while found and found[-1][0] > cuts[0]:  # it is within these
                found.pop()
            values = tuple(text[a + 1 : b] for a, b in pairwise(cuts))
            found.append((cuts[0], end, values))
    pieces, last = [], 0
    for begin, end, values in found:
        pieces += [text[last:begin], values]
        last = end
    return tuple(piece for piece in (*pieces, text[last:]) if piece)


@lru_cache(16)
def _lines(file: Path, *_state: int) -> tuple[str, ...]:
    """Return the values in a file of this state: its lines without empty ones and comments."""
    lines = (line.strip() for line in read_text(file, MAX_FILE_BYTES).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
