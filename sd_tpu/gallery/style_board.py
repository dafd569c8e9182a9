"""Styles as pictures: each is drawn once for a model, while nobody waits for others."""

import dataclasses
import hashlib
import logging
import math
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from sd_tpu.checkpoint.card import GUIDE_PROMPTS
from sd_tpu.folders import keep_within
from sd_tpu.pictures.images import to_webp
from sd_tpu.request import Request
from sd_tpu.sentence import SentenceError
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.job import ImageReady
from sd_tpu.serving.scheduler import Busy
from sd_tpu.settings import Picture

log = logging.getLogger(__name__)

SEED = 7
DRAFT = 0.5  # of a model's own steps
SIDE = 192  # pixels, at most
QUALITY = 80  # of WebP
MAX_BYTES = 1 << 28  # of all pictures, of some kilobytes each
WATCHED_SECONDS = 5.0  # for which one look at the board has pictures drawn
PAUSE_SECONDS = 0.2  # between looks whether the engine is idle
FAILURE_SECONDS = 300.0  # for which nothing is drawn after a failure, such as of a full disk
MAX_REFUSED = 10_000  # pictures that cannot be drawn, which are known


class StyleBoard:
    """Small pictures of styles, in a folder, by all that they are drawn from.

    They have the lowest turn: one is begun when the engine has nothing else to do, with a model
    that lies on the devices anyway, and left when somebody asks for something; and only as long
    as somebody looks at the board.
    """

    def __init__(self, engine: EngineClient, folder: Path):
        """Draw with the engine, and keep what is drawn in the folder, which is made when needed."""
        self._engine, self._folder = engine, folder
        self._lock = threading.Lock()  # guards the rest
        self._watched: dict[str, float] = {}  # by model, until when
        self._refused: set[Path] = set()  # what cannot be drawn
        self._failed = -math.inf  # when something failed
        self._drawing = False

    def look(self, model: str) -> tuple[dict[str, Path | None], bool]:
        """Return each style's picture, or None until it is drawn, and whether others may come.

        "" stands first, for no style.

        Raises:
            RequestError: there is no such model.
        """
        files, now = self._files(model), time.monotonic()
        lacking = any(self._lacks(file) for _, file in files.values())
        if lacking and now - self._failed > FAILURE_SECONDS:
            with self._lock:
                self._watched[model] = now + WATCHED_SECONDS
                if not self._drawing:
                    self._drawing = True
                    threading.Thread(target=self._draw, name="styles", daemon=True).start()
        shown = {name: file if file.is_file() else None for name, (_, file) in files.items()}
        return shown, lacking

    def _files(self, model: str) -> dict[str, tuple[Picture, Path]]:
        """Return the picture of each style, and its file."""
        catalog = self._engine.catalog
        opened = catalog.open(model)
        plain = dataclasses.replace(
            opened.defaults,
            prompt=next(iter(opened.checkpoint.card.prompts), GUIDE_PROMPTS[0]),
            seed=SEED,
            steps=max(1, round(DRAFT * opened.defaults.steps)),
        )
        templates = catalog.styles.templates()
        source = opened.checkpoint.parameters.source, opened.written

        def file(picture: Picture) -> Path:
            of = repr((source, templates.get(picture.style), picture))
            name = hashlib.blake2b(of.encode(), digest_size=20).hexdigest()
            return self._folder / f"{name}.webp"

        pictures = {name: dataclasses.replace(plain, style=name) for name in ("", *templates)}
        return {name: (picture, file(picture)) for name, picture in pictures.items()}

    def _lacks(self, file: Path) -> bool:
        return file not in self._refused and not file.is_file()

    def _draw(self) -> None:
        """Draw what lacks while somebody looks at it."""
        try:
            while (model := self._next_model()) is not None:
                with suppress(SentenceError):  # the model has gone
                    if not self._is_idle(model):
                        time.sleep(PAUSE_SECONDS)
                        continue
                    lacking = [each for each in self._files(model).values() if self._lacks(each[1])]
                    if lacking:
                        self._draw_one(model, *lacking[0])
                        continue
                with self._lock:
                    self._watched.pop(model, None)
        except Exception:  # a disk that is full, say: the names are there
            log.exception("no pictures of styles are drawn")
            with self._lock:
                self._failed, self._drawing = time.monotonic(), False

    def _next_model(self) -> str | None:
        """Return a model whose board is looked at; without one, say that nothing is drawn."""
        with self._lock:
            now = time.monotonic()
            rests = now - self._failed < FAILURE_SECONDS
            watched = {model: end for model, end in self._watched.items() if end > now}
            self._watched = {} if rests else watched
            self._drawing = bool(self._watched)
            return next(iter(self._watched), None)

    def _is_idle(self, model: str, own: int = 0) -> bool:
        """Whether the engine holds a model, teaches none, and has no jobs but so many of ours."""
        status = self._engine.status()
        held = self._engine.catalog.open(model).weights in status.held
        return status.taking and held and not status.training and status.jobs <= own

    def _draw_one(self, model: str, picture: Picture, file: Path) -> None:
        """Draw a picture of a model into its file, unless somebody else comes."""
        pixels, left = None, False
        try:
            job = self._engine.submit(Request((picture,)), previews=False, client="styles")
            for event in job.events():
                if isinstance(event, ImageReady):
                    pixels = event.pixels
                elif not left and not self._is_idle(model, own=1):
                    left = True
                    job.cancel()
        except Busy:
            left = True
        except SentenceError as error:
            log.info("a style is not drawn: %s", error)
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused.add(file)
            return
        if pixels is not None:
            self._save(pixels, file)
        elif not left:
            self._failed = time.monotonic()  # of which the engine has said why

    def _save(self, pixels: np.ndarray, file: Path) -> None:
        image = Image.fromarray(pixels)
        image.thumbnail((SIDE, SIDE))
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(secrets.token_hex(8))
        unfinished.write_bytes(to_webp(np.asarray(image), QUALITY))
        os.replace(unfinished, file)
        keep_within(self._folder, MAX_BYTES, "*.webp")
