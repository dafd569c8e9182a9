"""Finished pictures as files in the folder that Gradio serves and prunes; it does not outlive the
server.

The page shows WebP, which is small; what is downloaded is PNG and carries its settings.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import numpy as np
from gradio.processing_utils import hash_bytes
from gradio.utils import get_upload_folder
from PIL import Image

from sd_tpu import settings
from sd_tpu.pictures.images import (
    data_url,
    enlarged,
    framed,
    make_grid,
    read_png,
    to_webp,
    to_zip,
    with_labels,
)
from sd_tpu.request import Request
from sd_tpu.settings import RequestError

SMALL = 256  # pixels: smaller pictures are shown enlarged, where each fault of a pixel is seen
QUALITY = 92  # of the WebP of larger ones
LARGE, GAP = 1024, 8  # pixels: the least width of what is enlarged, and between pictures of a grid
MAX_THUMBNAILS = 1024  # kept in memory, of some kilobytes each


@dataclasses.dataclass(frozen=True)
class Picture:
    """A finished picture's two files: paths of the PNG and of what the page shows."""

    png: str
    shown: str

    @property
    def name(self) -> str:
        """What the PNG is called."""
        return Path(self.png).name

    @property
    def there(self) -> bool:
        """Whether it has been neither pruned nor forgotten."""
        return Path(self.png).is_file()


class Files:
    """Writes pictures under names that nobody can guess, their folders being salted hashes."""

    def __init__(self, page: gr.Blocks, to_png: Callable[[np.ndarray, Request], bytes]):
        """Gradio prunes them in the name of the page; `to_png` is the engine's."""
        self._folder, self._to_png = page.GRADIO_CACHE, to_png
        self._names = _Names()
        page.temp_file_sets.append(self._names)

    def add(self, request: Request, place: int, pixels: np.ndarray, whose: str = "") -> Picture:
        """Writes the picture uint8 [H, W, 3] at `place`, with its settings. What is one browser's
        and what is another's lie apart, also where they are alike."""
        alone, name = request.only(place), _name(request.pictures[place])
        quality, png = None if max(pixels.shape) < SMALL else QUALITY, self._to_png(pixels, alone)
        return Picture(
            png=self._save(png, f"{name}.png", whose=whose),
            shown=self._save(to_webp(pixels, quality), f"{name}.webp", of=png, whose=whose),
        )

    def archive(self, pictures: Mapping[int, Picture]) -> str:
        """Writes a ZIP of pictures by their places; returns its path. Raises OSError."""
        pngs = {place: Path(picture.png) for place, picture in pictures.items()}
        return self._save(to_zip({f"{place + 1}-{png.name}": png.read_bytes()
                                  for place, png in pngs.items()}), "pictures.zip")

    def grid(self, request: Request, pictures: Mapping[int, Picture],
             labels: Mapping[int, str]) -> str:
        """Writes the pictures side by side, each above its label, with all their prompts; returns
        the PNG's path. Together they are at least LARGE pixels wide.

        Raises:
            OSError: the pictures have been pruned.
        """
        cells: list[np.ndarray | None] = [None] * len(request.prompts)
        for place, picture in pictures.items():
            with Image.open(picture.png) as image:
                cells[place] = np.asarray(image)
        told = [labels.get(place, "") for place in range(len(cells))]
        columns = min(len(cells), 4)
        grid = make_grid(with_labels(framed(cells), told, LARGE // columns), gap=GAP)
        return self._save(self._to_png(grid, request), f"{request.seed}-grid.png")

    def copy(self, png: Path, whose: str, least: int = 0) -> str:
        """Writes a picture of ours once more, to be served: byte for byte, or smoothly enlarged to
        be as wide as this at `least`, in pixels; returns its path.

        Raises:
            OSError: there is no such file any more.
            RequestError: it carries no settings to be named by.
        """
        data = copied = png.read_bytes()
        request = read_png(data)
        name = _name(request.pictures[0])
        if least:
            with Image.open(png) as image:
                pixels = enlarged(np.asarray(image), least)
            copied, name = self._to_png(pixels, request), f"{name}-{pixels.shape[1]}"
        return self._save(copied, f"{name}.png", of=data, whose=whose)

    def forget(self, png: Path, whose: str) -> None:
        """Removes all that was made of a picture of somebody's history, by its file there, but for
        the ZIPs and grids that it is in: they go with the page's other files."""
        with suppress(OSError):  # there is none
            folder = self._home(png.read_bytes(), whose)
            for file in folder.iterdir():
                file.unlink()
                self._names.discard(str(file))
            folder.rmdir()

    def _save(self, data: bytes, name: str, of: bytes | None = None, whose: str = "") -> str:
        path = self._home(data if of is None else of, whose) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._names.add(str(path))
        return str(path)

    def _home(self, data: bytes, whose: str) -> Path:
        """Where a file lies, and whatever else is made of it."""
        return Path(self._folder).resolve() / hash_bytes(whose.encode() + data)


class _Names(set):
    """A set that may grow while it is gone through: Gradio prunes in a thread of its own."""

    def __iter__(self):
        return iter(self.copy())

    def __isub__(self, deleted):
        """Takes names out, and away the folder that Gradio gave to each file and leaves behind."""
        for path in deleted:
            with suppress(OSError):  # something else is in it
                Path(path).parent.rmdir()
        return super().__isub__(deleted)


def uploaded(path: Any) -> Path:
    """A file that somebody has handed in; raises RequestError for any other of the server's."""
    file = Path(str(path)).resolve()
    if not file.is_relative_to(Path(get_upload_folder()).resolve()):
        raise RequestError("This file has not been uploaded.")
    return file


def url(path: str) -> str:
    """Where Gradio serves a file of its cache, relative to the page, which may lie in a folder."""
    return f"gradio_api/file={quote(path)}"


def thumbnail(file: Path) -> str:
    """A picture's file as a small picture inside the page; nothing if it is gone or broken."""
    try:
        return _thumbnail(file)
    except (OSError, SyntaxError):  # the latter is Pillow's for some broken PNGs
        return ""


@lru_cache(MAX_THUMBNAILS)
def _thumbnail(file: Path) -> str:
    with Image.open(file) as image:
        image.thumbnail((SMALL, SMALL))
        return data_url(np.asarray(image))


def _name(picture: settings.Picture) -> str:
    return f"{picture.seed}-{_words(picture.prompt)}"


def _words(prompt: str) -> str:
    return re.sub(r"\W+", "-", prompt.lower())[:40].strip("-") or "picture"
