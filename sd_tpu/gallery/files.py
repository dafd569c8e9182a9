"""Finished pictures as files in a folder that a server serves and prunes; it does not outlive it.

What is shown is WebP, which is small; what is downloaded is PNG and carries its settings.
"""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
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
from sd_tpu.pictures.movie import MILLISECONDS, kinds_here, write_movie
from sd_tpu.request import Request
from sd_tpu.settings import Picture, RequestError, shortened

SMALL = 256  # pixels: smaller pictures are shown enlarged, where each fault of a pixel is seen
QUALITY = 92  # of the WebP of larger ones
LARGE, GAP = 1024, 8  # pixels: the least width of what is enlarged, and between pictures of a grid
MAX_THUMBNAILS = 1024  # kept in memory, of some kilobytes each


@dataclasses.dataclass(frozen=True)
class PictureFile:
    """A finished picture's two files: paths of the PNG and of what is shown."""

    png: str
    shown: str

    @property
    def name(self) -> str:
        """Name of the PNG file."""
        return Path(self.png).name

    @property
    def there(self) -> bool:
        """Whether it has been neither pruned nor forgotten."""
        return Path(self.png).is_file()


class Files:
    """Pictures under names that nobody can guess, their folders being salted hashes.

    Attributes:
        names: paths of all that has been written; with what is taken out of it by `-=` goes its
            folder.
    """

    def __init__(self, folder: Path, to_png: Callable[[np.ndarray, Request], bytes]):
        """Write into this folder; `to_png` is the engine's."""
        self.names = _Names()
        self._folder, self._to_png = folder.resolve(), to_png
        self._salt = secrets.token_bytes(32)

    def add(self, request: Request, index: int, pixels: np.ndarray, whose: str = "") -> PictureFile:
        """Write the picture uint8 [H, W, 3] at `index`, with its settings.

        Equal pictures of different browsers get files of their own.
        """
        name, png = _name(request.picture(index)), self._to_png(pixels, request.only(index))
        return PictureFile(
            png=self._save(png, f"{name}.png", whose=whose),
            shown=self._save(_shown(pixels), f"{name}.webp", of=png, whose=whose),
        )

    def add_kept(self, picture: Picture, png: Path, whose: str = "") -> PictureFile:
        """Write a picture of the history once more, unless it is still there as it was added.

        Raises:
            OSError: there is no such file any more.
            SyntaxError: it is broken.
        """
        data, name = png.read_bytes(), _name(picture)
        home = self._home(data, whose)
        file = PictureFile(png=str(home / f"{name}.png"), shown=str(home / f"{name}.webp"))
        if not (file.there and Path(file.shown).is_file()):
            self.bring_back(file, png)
        return file

    def archive(self, pictures: Mapping[int, PictureFile]) -> str:
        """Write a ZIP of pictures by their indices; returns its path. Raises OSError."""
        pngs = {index: Path(picture.png) for index, picture in pictures.items()}
        return self._once(
            pngs,
            "pictures.zip",
            lambda: to_zip(
                {f"{index + 1}-{png.name}": png.read_bytes() for index, png in pngs.items()}
            ),
        )

    def grid(self, request: Request, pictures: Mapping[int, PictureFile]) -> str:
        """Write the pictures of a request side by side, each above its label, with all prompts.

        Together they are at least LARGE pixels wide. Returns the PNG's path.

        Raises:
            OSError: the pictures have been pruned.
        """
        return self._once(
            (request, pictures),
            f"{request.seed}-grid.png",
            lambda: self._to_png(_grid(request, pictures), request),
        )

    def movie(self, pictures: Sequence[PictureFile], kind: str) -> str:
        """Write pictures one after the other as a file of one of `kinds_here`; return its path.

        Raises:
            OSError: the pictures have been pruned, or it cannot be written.
            RequestError: there is no such kind here.
        """
        if kind not in kinds_here():
            raise RequestError(
                "{kind} cannot be written here; there are {known}.",
                kind=shortened(kind),
                known=", ".join(kinds_here()),
            )

        def write(unfinished: Path) -> None:
            write_movie([_pixels(picture) for picture in pictures], unfinished, MILLISECONDS)

        return self._written_once(pictures, f"journey.{kind}", write)

    def copy(self, png: Path, whose: str, least: int = 0) -> str:
        """Write a picture of ours once more, to be served; return its path.

        It is copied byte for byte, or smoothly enlarged to be at least `least` pixels wide.

        Raises:
            OSError: there is no such file any more.
            RequestError: it carries no settings to be named by.
        """
        data = copied = png.read_bytes()
        request = read_png(data)
        name = _name(request.picture(0))
        if least:
            with Image.open(png) as image:
                pixels = enlarged(np.asarray(image), least)
            copied, name = self._to_png(pixels, request), f"{name}-{pixels.shape[1]}"
        return self._save(copied, f"{name}.png", of=data, whose=whose)

    def forget(self, png: Path, whose: str) -> None:
        """Remove all files that were made of a picture of somebody's history, given its file there.

        ZIPs and grids that it is in go with the page's other files.
        """
        with suppress(OSError):  # there is none
            folder = self._home(png.read_bytes(), whose)
            for file in folder.iterdir():
                file.unlink()
                self.names.discard(str(file))
            folder.rmdir()

    def bring_back(self, picture: PictureFile, png: Path) -> None:
        """Write the files of a forgotten picture once more, from the history's; raises OSError."""
        with Image.open(png) as image:
            shown = _shown(np.asarray(image))
        for path, data in ((picture.png, png.read_bytes()), (picture.shown, shown)):
            self._served(Path(path)).write_bytes(data)

    def _once(self, of: Any, name: str, make: Callable[[], bytes]) -> str:
        """Return the path of a file with this content, as `_written_once`."""
        return self._written_once(of, name, lambda unfinished: unfinished.write_bytes(make()))

    def _written_once(self, of: Any, name: str, write: Callable[[Path], object]) -> str:
        """Write a file made of these paths and values unless it is there; return its path."""
        path = self._new(repr(of).encode(), name)
        if not path.is_file():
            unfinished = path.with_stem(secrets.token_hex(8))  # whoever asks meanwhile sees no half
            write(unfinished)
            unfinished.replace(path)
        return str(path)

    def _save(self, data: bytes, name: str, of: bytes | None = None, whose: str = "") -> str:
        path = self._new(data if of is None else of, name, whose)
        path.write_bytes(data)
        return str(path)

    def _new(self, of: bytes, name: str, whose: str = "") -> Path:
        """Return where a file made of this is to be written."""
        return self._served(self._home(of, whose) / name)

    def _served(self, path: Path) -> Path:
        """Return the path of a file that is to be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.names.add(str(path))
        return path

    def _home(self, data: bytes, whose: str) -> Path:
        """Return the folder of a file, and of all that is made of it."""
        return (
            self._folder
            / hashlib.blake2b(whose.encode() + data, digest_size=32, key=self._salt).hexdigest()
        )


class _Names(set):
    """A set that may grow while it is gone through: servers prune in a thread of their own."""

    def __iter__(self):
        return iter(self.copy())

    def __isub__(self, deleted):
        """Remove names, and the folders of deleted files."""
        for path in deleted:
            with suppress(OSError):  # something else is in it
                Path(path).parent.rmdir()
        return super().__isub__(deleted)


def _pixels(picture: PictureFile) -> np.ndarray:
    with Image.open(picture.png) as image:
        return np.asarray(image)


def _grid(request: Request, pictures: Mapping[int, PictureFile]) -> np.ndarray:
    """Pictures side by side, each above its label."""
    cells: list[np.ndarray | None] = [None] * len(request.prompts)
    for index, picture in pictures.items():
        cells[index] = _pixels(picture)
    labels, columns = captions(request), min(len(cells), 4)
    texts = [labels.get(index, "") for index in range(len(cells))]
    return make_grid(with_labels(framed(cells), texts, LARGE // columns), gap=GAP)


def captions(request: Request) -> dict[int, str]:
    """Return the captions below each picture of a grid, by index.

    A caption is what sets a picture apart, else its prompt. A grid's letters are Latin: captions
    are English, and prompts in other letters are left out.
    """

    def latin(prompt: str) -> str:
        return prompt if max(prompt) <= "ÿ" else ""

    return {
        index: " · ".join(settings.captions(request.labelled(index))).replace("×", "x")
        or latin(request.prompts[index])
        for index in request.indices()
    }


def thumbnail(file: Path) -> str:
    """Return a picture's file as a small data URL; "" if it is gone or broken."""
    try:
        return _thumbnail(file)
    except (OSError, SyntaxError):  # the latter is Pillow's for some broken PNGs
        return ""


@lru_cache(MAX_THUMBNAILS)
def _thumbnail(file: Path) -> str:
    with Image.open(file) as image:
        image.thumbnail((SMALL, SMALL))
        return data_url(np.asarray(image))


def _shown(pixels: np.ndarray) -> bytes:
    return to_webp(pixels, None if max(pixels.shape) < SMALL else QUALITY)


def _name(picture: Picture) -> str:
    return f"{picture.seed}-{_words(picture.prompt)}"


def _words(prompt: str) -> str:
    return re.sub(r"\W+", "-", prompt.lower())[:40].strip("-") or "picture"
