"""Actions of the history."""

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

from sd_tpu.gallery.history import History, request_of
from sd_tpu.language import Language
from sd_tpu.page.answers import FORGOTTEN, named
from sd_tpu.page.boxes import BoxActions
from sd_tpu.page.events import ActionRequest
from sd_tpu.page.files import url
from sd_tpu.page.parts import part
from sd_tpu.sentence import Sentence
from sd_tpu.settings import RequestError

RUNS = 6  # on a page of the history; earlier ones come below
MAX_PAGES = 1000
BOARD_ACTS = frozenset(("boards", "make", "rename", "unmake", "put", "take_off"))


class HistoryActions(BoxActions):
    """Actions on the pictures that a browser keeps, whose settings go back into its boxes."""

    def _do_history(self, asked: ActionRequest) -> dict[str, Any]:
        """Carry out a button of the history, and show what there is then."""
        data, owner, say, news = asked.data, asked.browser, asked.language.say, ""
        history = self._kept()
        name = str(data.get("id"))
        if data.get("act") in BOARD_ACTS:
            return self._on_boards(history, asked)
        match data.get("act"):
            case "save" | "view" as act:
                served = self.files.copy(self._file(asked), owner)
                return {"view" if act == "view" else "file": url(served)}
            case "run":
                return self._use_run(owner, name, asked)
            case "favourite":
                known = history.set_favourite(owner, name, data.get("to") == "true")
            case "delete" | "clear" as act:
                known = history.delete(owner, name if act == "delete" else None)
                for file in history.unshared(owner, known):
                    self.files.forget(file, owner)
                news = say("The picture is deleted.")
                if act == "clear":
                    known = True
                    news = say("All but the favourites and what is on boards are deleted.")
            case "restore":
                known = self.runs.restore(owner)
                news = say("The deleted pictures are back.")
            case _:
                known = True
        shown = {"history": contents(history, owner, data, asked.language)}
        if not known:
            return {**shown, **self._wrong(FORGOTTEN, asked)}
        return {**shown, "news": news}

    def _on_boards(self, history: History, asked: ActionRequest) -> dict[str, Any]:
        """Make, rename or delete a board, or change what is on it; show what there is then."""
        data, owner, say = asked.data, asked.browser, asked.language.say
        board, ids = data.get("name", ""), data.get("ids", [])
        shown, news, gone = data.get("board", ""), "", []
        match data["act"]:
            case "make":
                history.make_board(owner, board, ids)
            case "rename":
                shown = history.rename_board(owner, board, str(data.get("to")))
            case "unmake":
                gone, shown = history.delete_board(owner, board), ""
                news = say("The board “{name}” is deleted; its pictures stay.", name=board)
            case "put":
                if not history.put_on_board(owner, board, ids):
                    raise RequestError(FORGOTTEN.template)
                news = say("On the board “{name}”.", name=board)
            case "take_off":
                history.take_off_board(owner, board, ids)
        look = {**data, "board": shown}
        marked = history.boards_with(owner, ids[0]) if ids else set()
        return {
            "history": contents(history, owner, look, asked.language),
            "boards": part("boards", asked.language, history.boards(owner), marked),
            "board": shown,
            "gone": gone,
            "news": news,
        }

    def _kept(self) -> History:
        if self.history is None:
            raise RequestError(FORGOTTEN.template)
        return self.history

    def _use_run(self, owner: str, name: str, asked: ActionRequest) -> dict[str, Any]:
        entries = self._kept().entries(owner, run=name)
        if not entries:
            raise RequestError(FORGOTTEN.template)
        run = self.runs.bring_out(entries, owner, asked.address)
        return named(run) | self._fill(
            request_of(entries),
            asked,
            Sentence("Prompts, seeds and settings of the run are in the boxes."),
        )


def contents(history: History, owner: str, look: Mapping[str, Any], language: Language) -> str:
    """Render the newest runs, as many `pages` of them as are asked for.

    They have all their pictures, or those that are `favourites`, on the `board`, or have the
    `words` in their prompts.
    """
    only, said = bool(look.get("favourites")), str(look.get("words") or "")
    boards, board = history.boards(owner), str(look.get("board") or "")
    if board not in boards:  # another tab has deleted it
        board = ""
    limit = RUNS * max(1, min(int(look.get("pages") or 1), MAX_PAGES))
    entries = history.entries(owner, runs=limit + 1, favourites_only=only, words=said, board=board)
    runs = [[*of] for _, of in groupby(entries, attrgetter("run"))]
    shown = [(request_of(run), run) for run in runs[:limit]]
    return part("history", language, shown, len(runs) > limit, only, said, boards, board)
