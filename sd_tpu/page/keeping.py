"""Where finished pictures go: into files that the page shows, and into the browser's history."""

import logging
from pathlib import Path

import numpy as np

from sd_tpu.history import History, HistoryError
from sd_tpu.page.files import Files, Picture
from sd_tpu.request import Request

log = logging.getLogger(__name__)


class Keeper:
    """Keeps pictures of everybody who shares an engine."""

    def __init__(self, files: Files, history: History | None = None):
        """Pictures go into `files`, and into the history if there is one."""
        self._files, self._history = files, history

    def add(self, request: Request, place: int, pixels: np.ndarray) -> Picture:
        """Writes the files of the picture at `place`; raises OSError."""
        return self._files.add(request, place, pixels)

    def keep(self, browser: str, picture: Picture, request: Request) -> str | None:
        """Adds a browser's finished picture to the history, whose failure costs nobody a run;
        returns its name there.
        """
        if not (browser and self._history):
            return None
        try:
            return self._history.add(browser, Path(picture.png).read_bytes(), request).id
        except (HistoryError, OSError):
            log.exception("a picture is missing from the history")
            return None

    def drop(self, browser: str, name: str | None) -> None:
        """Takes a picture that another has replaced out of the history, unless it has become a
        favourite there.
        """
        if name is None:
            return
        try:
            self._history.delete(browser, name, spare_favourite=True)
        except HistoryError:
            log.exception("a picture is left in the history")
