"""All actions of the page, each of which answers at once; `RunStream` shows the runs."""

import logging
from typing import Any

from sd_tpu.folders import data_folder
from sd_tpu.gallery import files
from sd_tpu.gallery.history import HistoryError
from sd_tpu.gallery.run import BROKEN
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.style_board import StyleBoard
from sd_tpu.page import layout, schema
from sd_tpu.page.answers import GONE
from sd_tpu.page.drawing import DrawingActions
from sd_tpu.page.events import ActionRequest
from sd_tpu.page.files import url
from sd_tpu.page.form import GARBLED
from sd_tpu.page.history import HistoryActions
from sd_tpu.page.parts import part
from sd_tpu.page.teach import TeachPanel
from sd_tpu.serving.teaching import Teaching
from sd_tpu.settings import MAX_PROMPTS, RequestError

log = logging.getLogger(__name__)

MAX_STYLES = 40  # pictures of styles in one answer


class Actions(DrawingActions, HistoryActions):
    """Actions of the page; each returns what page.js shows, `message` in the progress line."""

    def __init__(self, runs: Runs, teaching: Teaching | None = None):
        """Have the actions of runs, and of a teaching where there is one."""
        super().__init__(runs)
        self.teach = TeachPanel(teaching) if teaching else None
        self.style_board = StyleBoard(self.engine, data_folder() / "styles")

    def answer(self, asked: ActionRequest) -> dict[str, Any]:
        """Answer a request of the page's script.

        A fault of ours is logged and raised, and the script says that the server failed.
        """
        action = asked.data.get("do")
        if action not in schema.ACTIONS:
            return self._wrong(GARBLED, asked)
        try:
            return getattr(self, f"_do_{action}")(asked)
        except FileNotFoundError:
            return self._wrong(GONE, asked)
        except OSError:  # a disk that is full, say
            log.exception("a file could not be read or written")
            return self._wrong(BROKEN, asked)
        except (RequestError, HistoryError) as error:
            return self.refuse(error, asked)
        except Exception:
            log.exception("the action %s failed", action)
            raise

    def _do_styles(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the names of styles, "" for none, and pictures of those not `seen` yet."""
        found, more = self.style_board.look(asked.filled().get("model", ""))
        seen = set(asked.data["seen"])
        new = [(name, file) for name, file in found.items() if file and name not in seen]
        return {
            "styles": [*found],
            "more": more or len(new) > MAX_STYLES,
            "looks": {name: files.thumbnail(file) for name, file in new[:MAX_STYLES]},
        }

    def _do_beside(self, asked: ActionRequest) -> dict[str, Any]:
        """Return what sets the pictures of two cards apart, as a table."""
        cards = [self._card(asked, asked.data[key]) for key in ("index", "to")]
        return {"apart": part("apart", asked.language, cards)}

    def _do_zip(self, asked: ActionRequest) -> dict[str, Any]:
        return {"file": url(self.files.archive(self._made(asked)))}

    def _do_grid(self, asked: ActionRequest) -> dict[str, Any]:
        pictures = self._made(asked)
        return {"file": url(self.files.grid(self._shown(asked).request, pictures))}

    def _made(self, asked: ActionRequest) -> dict[int, files.PictureFile]:
        """Return the finished pictures, or those asked for, by index.

        Raises:
            RequestError: there are none.
        """
        run, indices = self._run(asked), asked.data.get("indices") or range(MAX_PROMPTS)
        pictures = {
            index: picture
            for index, picture in (run.pictures() if run else {}).items()
            if picture.there and index in indices
        }
        if not pictures:
            raise RequestError(GONE.template)
        return pictures

    def _do_way(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the pictures of the journey so far, in their places."""
        run = self._run(asked)
        pictures, count = run.way() if run else ({}, 0)
        return {"way": [url(pictures[i].shown) if i in pictures else "" for i in range(count)]}

    def _do_movie(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the last journey, to be looked at or as a file; nothing if there is none."""
        run, kind = self._run(asked), asked.data.get("kind")
        if not (run and run.journey):
            return {}
        if kind == "zip":
            return {"file": url(self.files.archive(dict(enumerate(run.journey))))}
        return {"file" if kind else "view": url(self.files.movie(run.journey, kind or "webp"))}

    def _do_large(self, asked: ActionRequest) -> dict[str, Any]:
        """Return a picture enlarged."""
        return {"file": url(self.files.copy(self._file(asked), asked.browser, files.LARGE))}

    def _do_teach(self, asked: ActionRequest) -> dict[str, Any]:
        if self.teach is None:
            return self._wrong(GARBLED, asked)
        filled = asked.filled()
        return self.teach.answer(asked.data, filled, asked.browser, asked.address, asked.language)

    def _do_about(self, asked: ActionRequest) -> dict[str, Any]:
        return {"about": layout.about(self.engine, asked.language)}
