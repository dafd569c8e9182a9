"""Finished pictures as files in the folder that Gradio serves and prunes.

The page shows WebP, which is small; what is downloaded is PNG and carries its settings.
"""

import base64
import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import gradio as gr
import numpy as np
from gradio.processing_utils import save_bytes_to_cache
from PIL import Image

from sd_tpu.images import make_grid, read_png, to_webp, to_zip, with_labels
from sd_tpu.page.labels import named, words
from sd_tpu.page.texts import ENGLISH
from sd_tpu.request import Request

SMALL = 256  # pixels: smaller pictures are enlarged as they are, so each pixel must be right
QUALITY = 92  # of the WebP of larger ones
MAX_THUMBNAILS = 1024  # kept in memory, of some kilobytes each


@dataclasses.dataclass(frozen=True)
class Picture:
    """A finished picture's two files: paths of the PNG and of what the page shows."""

    png: str
    shown: str


class Files:
    """Writes pictures under names that nobody can guess, their folders being salted hashes."""

    def __init__(self, page: gr.Blocks, to_png: Callable[[np.ndarray, Request], bytes]):
        """Gradio prunes them in the name of the page; `to_png` is the engine's."""
        self._folder, self._to_png = page.GRADIO_CACHE, to_png
        self._names = _Names()
        page.temp_file_sets.append(self._names)

    def add(self, request: Request, place: int, pixels: np.ndarray) -> Picture:
        """Writes the picture uint8 [H, W, 3] at `place`, with its settings."""
        alone = request.only(place)
        name = _name(alone)
        quality = None if max(pixels.shape) < SMALL else QUALITY
        return Picture(
            png=self._save(self._to_png(pixels, alone), f"{name}.png"),
            shown=self._save(to_webp(pixels, quality), f"{name}.webp"),
        )

    def archive(self, pictures: Mapping[int, Picture]) -> str:
        """Writes a ZIP of pictures by their places; returns its path. Raises OSError."""
        pngs = {place: Path(picture.png) for place, picture in pictures.items()}
        return self._save(to_zip({f"{place + 1}-{png.name}": png.read_bytes()
                                  for place, png in pngs.items()}), "pictures.zip")

    def grid(self, request: Request, pictures: Mapping[int, Picture]) -> str:
        """Writes the pictures side by side, with all their prompts; returns the PNG's path.

        Where settings set them apart, each stands above its label, which is English: it is drawn
        in Latin letters.

        Raises:
            OSError: the pictures have been pruned.
        """
        cells: list[np.ndarray | None] = [None] * len(request.prompts)
        labels = [""] * len(cells)
        for place, picture in pictures.items():
            with Image.open(picture.png) as image:
                cells[place] = np.asarray(image)
            labels[place] = words(named(request, place), ENGLISH)
        grid = make_grid(with_labels(cells, labels) if any(labels) else cells)
        return self._save(self._to_png(grid, request), f"{request.seed}-grid.png")

    def copy(self, png: Path) -> str:
        """Writes a picture of ours once more, byte for byte, to be served; returns its path.

        Raises:
            OSError: there is no such file any more.
            RequestError: it carries no settings to be named by.
        """
        data = png.read_bytes()
        return self._save(data, f"{_name(read_png(data))}.png")

    def _save(self, data: bytes, name: str) -> str:
        path = save_bytes_to_cache(data, name, self._folder)
        self._names.add(path)
        return path


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


def url(path: str) -> str:
    """Where Gradio serves a file of its cache, relative to the page, which may lie in a folder."""
    return f"gradio_api/file={quote(path)}"


def data_url(pixels: np.ndarray) -> str:
    """Pixels [H, W, 3] uint8 as a small picture inside the page, needing no request of its own."""
    return f"data:image/webp;base64,{base64.b64encode(to_webp(pixels, 70)).decode()}"


@lru_cache(MAX_THUMBNAILS)
def thumbnail(file: Path) -> str:
    """A picture's file as a small picture inside the page. Raises OSError."""
    with Image.open(file) as image:
        image.thumbnail((SMALL, SMALL))
        return data_url(np.asarray(image))


def _name(alone: Request) -> str:
    return f"{alone.seed}-{_words(alone.prompts[0])}"


def _words(prompt: str) -> str:
    return re.sub(r"\W+", "-", prompt.lower())[:40].strip("-") or "picture"
