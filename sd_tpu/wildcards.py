"""Prompts that stand for several: `a {red|green} fox`, and `__animal__`, a line of a file.

The signs are those of A1111's extension Dynamic Prompts; the values may hold such signs themselves.
Its library reads more than that, but drops what follows a `#`, fails on a `$`, takes part of
`<lora:a__b__c:1>` for a file, and only logs a file that is not there.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random

from sd_tpu.sentence import Sentence
from sd_tpu.settings import MAX_PROMPT_LENGTH, SETTINGS, RequestError, shortened

MAX_DEPTH = 20  # of values within values; a file may name itself
MAX_FILE_BYTES = 1 << 24
TRIES = 20  # for a value that is not there yet
SIGN = re.compile(r"<lora:[^<>{}|]*>"  # whose names may hold anything
                  r"|(?<![^\W_])__(?P<name>(?![\s_])[^{}|<>:\x00-\x1f]+?(?<!\s))__(?![^\W_])"
                  r"|[{|}]")
# What Dynamic Prompts says before a value: how often it is drawn, how many are drawn together.
UNKNOWN = re.compile(r"\s*[\d.~@!-]+(::|\$\$)")


class Wildcards:
    """The values of prompts, from braces and from the text files in a folder."""

    def __init__(self, folder: Path | None = None):
        """Without a folder there are braces alone; raises ValueError where there is none such."""
        if folder is not None and not folder.is_dir():
            raise ValueError(f"There is no folder {str(folder)!r} with wildcards.")
        self._folder = folder and folder.resolve()

    def names(self) -> list[str]:
        """What can stand between `__` and `__`: the files' paths in the folder, without suffix."""
        files = self._folder.rglob("*.txt") if self._folder else ()
        names = (file.relative_to(self._folder).with_suffix("").as_posix() for file in files
                 if file.resolve().is_relative_to(self._folder))
        return sorted(name for name in names if SIGN.fullmatch(f"__{name}__"))

    def fill(self, prompts: Sequence[str], seed: int) -> list[str]:
        """The prompts with a value each.

        What stands for several fills the empty places that follow it as well. If all its values
        fit there, each of them comes once, in order; otherwise they are drawn by the seed.

        Raises:
            RequestError: there are no such values, or they are too long, or empty.
        """
        filled, places, above = list(prompts), {}, ""
        for place, prompt in enumerate(prompts):
            above = prompt or above
            places.setdefault(above, []).append(place)
        for text, taken in places.items():
            of = Sentence("Prompt {number}", number=taken[0] + 1)
            if not any(not isinstance(piece, str) for piece in self._pieces(text, of)):
                continue
            values = self._first(text, len(taken) + 1, of)
            if len(values) > len(taken):
                values = self._drawn(text, seed, taken, of)
            if not all(value.strip() for value in values):
                raise RequestError("{name} stands for nothing: one of its values is empty.",
                                   name=of)
            for number, place in enumerate(taken):
                if prompts[place] or number < len(values):
                    filled[place] = values[number % len(values)].strip()
        return filled

    def value(self, text: str, seed: int, of: Sentence) -> str:
        """A text with a value, drawn by the seed; raises RequestError as `fill`, of what it is."""
        return self._any(text, Random(f"{seed} 0"), of).strip()

    def _drawn(self, text: str, seed: int, places: Sequence[int], of: Sentence) -> list[str]:
        """A value for each place, of which no two are alike if that is easily had."""
        values: list[str] = []
        for place in places:
            random = Random(f"{seed} {place}")
            tries = (self._any(text, random, of) for _ in range(TRIES))
            values.append(next((value for value in tries if value not in values), None)
                          or self._any(text, random, of))
        return values

    def _first(self, text: str, most: int, of: Sentence, depth: int = 0) -> list[str]:
        """The first values of a text, in order."""
        found = [""]
        for piece in self._pieces(text, of, depth):
            if isinstance(piece, str):
                values = [piece]
            else:
                values = []
                for option in piece:
                    values += self._first(option, most - len(values), of, depth + 1)
                    if len(values) == most:
                        break
            found = [_checked(before + value, of) for before in found for value in values][:most]
        return found

    def _any(self, text: str, random: Random, of: Sentence, depth: int = 0) -> str:
        """A value of a text by chance; `random.random` alone is the same in every Python."""
        value = ""
        for piece in self._pieces(text, of, depth):
            if not isinstance(piece, str):
                option = piece[int(random.random() * len(piece))]
                piece = self._any(option, random, of, depth + 1)
            value = _checked(value + piece, of)
        return value

    def _pieces(self, text: str, of: Sentence, depth: int = 0) -> list[str | Sequence[str]]:
        """The text as plain pieces, and in place of signs the values to choose from, which may hold
        signs themselves."""
        if depth > MAX_DEPTH:
            raise RequestError("{name} has wildcards within wildcards without end.", name=of)
        if depth and (sign := UNKNOWN.match(text)):
            raise RequestError("{name} has a sign that is not known here: {sign}", name=of,
                               sign=sign[0])
        return [self._of_file(piece.name, of) if isinstance(piece, _File) else piece
                for piece in _split(text)]

    def _of_file(self, name: str, of: Sentence) -> Sequence[str]:
        if self._folder is None:
            raise RequestError("{name} asks for a value of {wildcard}, but no folder of wildcards "
                               "was given.", name=of, wildcard=shortened(name))
        try:
            file = (self._folder / f"{name}.txt").resolve()
            state = file.stat()
            inside = file.is_relative_to(self._folder) and state.st_size <= MAX_FILE_BYTES
            values = _lines(file, state.st_mtime_ns, state.st_size) if inside else ()
        except UnicodeDecodeError:
            raise RequestError("{name} asks for a value of {wildcard}, whose file is not in UTF-8.",
                               name=of, wildcard=shortened(name)) from None
        except (OSError, ValueError):
            values = ()
        if not values:
            raise RequestError("{name} asks for a value of {wildcard}, of which there is none "
                               "here.", name=of, wildcard=shortened(name))
        return values


def _checked(text: str, of: Sentence) -> str:
    return SETTINGS["prompt"].kind.check(text, of) if len(text) > MAX_PROMPT_LENGTH else text


@dataclasses.dataclass(frozen=True)
class _File:
    """A value of the file of this name."""

    name: str


@lru_cache(256)
def _split(text: str) -> tuple[str | tuple[str, ...] | _File, ...]:
    """The text as plain pieces, the values of its outermost braces, and files. Braces without a
    bar, or that are not closed, are text."""
    opened: list[list[int]] = []  # where each brace that waits is, and its bars
    found: list[tuple[int, int, tuple[str, ...] | _File]] = []  # begin and end of each
    for sign in SIGN.finditer(text):
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
            values = tuple(text[a + 1:b] for a, b in pairwise(cuts))
            found.append((cuts[0], end, values))
    pieces, last = [], 0
    for begin, end, values in found:
        pieces += [text[last:begin], values]
        last = end
    return tuple(piece for piece in (*pieces, text[last:]) if piece)


@lru_cache(64)
def _lines(file: Path, *_state: int) -> tuple[str, ...]:
    """The values in a file of this state: its lines, but for empty ones and comments."""
    lines = (line.strip() for line in file.read_text("utf-8-sig").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
