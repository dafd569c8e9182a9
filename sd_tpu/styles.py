"""Styles: what a picture's prompts are put into, from a list in a file as A1111 keeps it.

name,prompt,negative_prompt
Watercolour,"watercolour painting of {prompt}, soft edges",photo
Sharp,"sharp focus, highly detailed",blurry
"""

import contextlib
import csv
import dataclasses
import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from sd_tpu.reading import composed, read_text
from sd_tpu.settings import SETTINGS, Picture, RequestError, of_prompt, shortened

PLACE = "{prompt}"  # where a prompt goes; it stands before a style that says nothing of it
MAX_NAMED = 10  # in a sentence

Templates = Mapping[str, tuple[str, str]]  # name -> what the prompt and the negative prompt become


class Styles:
    """The styles of a server."""

    def __init__(self, file: Path | None = None):
        """Read the styles' file, if there is one; raises ValueError or OSError if that fails."""
        self._file = file
        self._known = self._read() if file else {}

    def templates(self) -> Templates:
        """Return the styles by name: as the file has them now, or had while it could be read."""
        if self._file:
            with contextlib.suppress(OSError, ValueError):  # somebody is at it
                self._known = self._read()
        return self._known

    def endings(self) -> list[str]:
        """Return what styles put behind prompts."""
        prompts = (prompt for prompt, _ in self.templates().values())
        return [*filter(None, (prompt.split(PLACE)[-1].strip(" ,") for prompt in prompts))]

    def applied(self, picture: Picture, index: int | None = None) -> Picture:
        """Return the picture with its style applied to its prompts, and no style.

        Raises:
            RequestError: there is no such style, or a text becomes too long.
        """
        if not picture.style:
            return picture
        known = self.templates()
        if not self._file:
            raise RequestError(
                "The style {value}{of} was asked for, but no list of styles was given.",
                setting="style",
                index=index,
                of=of_prompt(index),
                value=shortened(picture.style),
            )
        if (style := composed(picture.style)) not in known:
            more = "…" if len(known) > MAX_NAMED else ""
            raise RequestError(
                "{name} {value}{of} is unknown; there are {known}.",
                setting="style",
                index=index,
                of=of_prompt(index),
                name=SETTINGS["style"].label,
                value=shortened(picture.style),
                known=", ".join(list(known)[:MAX_NAMED]) + more or "–",
            )
        texts = zip(("prompt", "negative_prompt"), known[style], strict=True)
        put = {
            name: SETTINGS[name].check(_put(getattr(picture, name), style), index)
            for name, style in texts
        }
        return dataclasses.replace(picture, style="", **put)

    def _read(self) -> Templates:
        assert self._file is not None
        state = self._file.stat()
        return _read(self._file, state.st_mtime_ns, state.st_size)


def _put(text: str, style: str) -> str:
    if PLACE in style:
        return style.replace(PLACE, text)
    return ", ".join(filter(None, (text, style)))


@lru_cache(4)
def _read(file: Path, *_state: int) -> Templates:
    try:
        rows = csv.DictReader(io.StringIO(read_text(file), newline=""))
        if not {"name", "prompt"} <= set(rows.fieldnames or ()):
            raise ValueError(
                f"{str(file)!r} is not a list of styles: its first line should be "
                "name,prompt,negative_prompt."
            )
        return {
            composed(row["name"].strip()): (
                (row["prompt"] or "").strip(),
                (row.get("negative_prompt") or "").strip(),
            )
            for row in rows
            if (row["name"] or "").strip()
        }
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{str(file)!r} is not a list of styles: {error}.") from None
