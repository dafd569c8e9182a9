"""Lookups that all actions of the page share: runs, cards and their files."""

from pathlib import Path
from typing import Any

from sd_tpu.gallery.run import Card, Run
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.status import refusal
from sd_tpu.page.events import ActionRequest
from sd_tpu.pictures.inputs import Input, find_input
from sd_tpu.request import reworded
from sd_tpu.sentence import Sentence, SentenceError
from sd_tpu.settings import MAX_PROMPTS, Picture, RequestError

GONE = Sentence("The pictures are no longer on the server.")
FORGOTTEN = Sentence("This picture is no longer in your history.")


class Answers:
    """Answers to requests of the page about its runs."""

    def __init__(self, runs: Runs):
        """Have the answers about these runs."""
        self.runs, backend = runs, runs.backend
        self.engine, self.files, self.inputs, self.history = (
            backend.engine,
            backend.files,
            backend.inputs,
            backend.history,
        )

    def refuse(self, error: SentenceError, asked: ActionRequest) -> dict[str, Any]:
        """Return the sentence for a request that is refused."""
        return self._wrong(refusal(error), asked)

    def _wrong(self, sentence: Sentence, asked: ActionRequest) -> dict[str, Any]:
        return {"message": asked.language.translate(sentence), "kind": "wrong"}

    def _run(self, asked: ActionRequest) -> Run | None:
        """Return the run that the page shows, if it is still known."""
        return self.runs.find(asked.data.get("run"))

    def _shown(self, asked: ActionRequest) -> Run:
        """Return the run that the page shows; raise RequestError if it is not known."""
        if run := self._run(asked):
            return run
        raise RequestError(GONE.template)

    def _card(self, asked: ActionRequest, index: Any) -> Card:
        """Return the card with its finished picture; raises RequestError if there is none."""
        run = self._run(asked)
        card = run.cards[index].finished if run and index in range(MAX_PROMPTS) else None
        if card and card.picture.there:
            return card
        raise RequestError(GONE.template)

    def _file(self, asked: ActionRequest) -> Path:
        """Return the file of a request's picture: of the history by its name, else of a card.

        Raises:
            RequestError: there is none any more.
        """
        name = asked.data.get("id")
        if not (name and self.history):
            return Path(self._card(asked, asked.data.get("index")).picture.png)
        file = self.history.picture(asked.browser, str(name))
        if not (file and file.is_file()):
            raise RequestError(FORGOTTEN.template)
        return file

    def _changed(self, asked: ActionRequest, index: int, words: str) -> Picture:
        """Return a card's picture, changed as words say."""
        catalog, before = self.engine.catalog, self._card(asked, index).asked
        *_, filled = catalog.fill([*[""] * index, words], before.seed)
        edits = catalog.edits(before.model)
        return reworded(before, filled, asked.data.get("strength"), edits=edits)

    def _handed_in(self, asked: ActionRequest, key: str) -> Input:
        name = str(asked.data.get(key))
        found = find_input(self.inputs.of(asked.browser, {name}), name)
        if found is None:
            raise RequestError(GONE.template)
        return found


def named(run: Run | None) -> dict[str, Any]:
    """Return a run as page.js needs it to show it."""
    return {"run": run.key, "seed": run.seed} if run else {}
