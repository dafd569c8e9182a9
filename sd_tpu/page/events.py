"""Requests of page.js, and `RunStream`, which shows how a run goes."""

import asyncio
import dataclasses
import logging
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, Self
from weakref import WeakValueDictionary

import gradio as gr
import pydantic
from anyio.to_thread import run_sync
from gradio.components import Component

from sd_tpu.gallery.history import HistoryError
from sd_tpu.gallery.run import BLANK, Card, Run
from sd_tpu.gallery.runs import Runs
from sd_tpu.http.access import visitor_network
from sd_tpu.language import Language, language_of
from sd_tpu.page import form, schema
from sd_tpu.page.form import GARBLED
from sd_tpu.page.layout import View
from sd_tpu.page.parts import part
from sd_tpu.request import finished
from sd_tpu.serving.catalog import Catalog
from sd_tpu.settings import MAX_PROMPTS, Picture, RequestError

log = logging.getLogger(__name__)

# What page.js asks for that reads, makes or packs pictures.
WITH_FILES = frozenset(
    (
        "again around before change extend grid large larger link movie paint read styles take zip"
    ).split()
)

Updates = dict[Component, Any]


@dataclasses.dataclass(frozen=True)
class ActionRequest:
    """A request of the page's script: a message of `schema`, as its fields by name."""

    data: Mapping[str, Any]
    address: str  # that it comes from

    @classmethod
    def of(cls, data: Any, visitor: gr.Request) -> Self:
        """Return the request of a visitor's page; a message that fits no schema keeps its language
        alone."""
        address = visitor_network(visitor)
        try:
            return cls(schema.read(data), address)
        except pydantic.ValidationError as error:
            log.info("a message of %s was refused, with %d faults", address, error.error_count())
            return cls({"lang": data.get("lang")} if isinstance(data, dict) else {}, address)

    @property
    def has_files(self) -> bool:
        """Whether it reads, makes or packs pictures, which can take a core for seconds."""
        return self.data.get("do") in WITH_FILES or self.data.get("act") in ("add", "run", "start")

    @property
    def language(self) -> Language:
        """Language of the page."""
        return language_of(self.data.get("lang"))

    @property
    def browser(self) -> str:
        """The browser's name for itself, which nobody else can guess; a new one if it has none."""
        name = str(self.data.get("browser"))
        return name if re.fullmatch("[0-9a-f]{32}", name) else secrets.token_hex(16)

    @property
    def index(self) -> int:
        """The card that it is about; raises RequestError if there is none such."""
        index = self.data.get("index")
        if isinstance(index, int) and 0 <= index < MAX_PROMPTS:
            return index
        raise RequestError(GARBLED.template)

    @property
    def indices(self) -> list[int]:
        """The cards that it is about, each once."""
        return [*dict.fromkeys(self.data["indices"])]

    def filled(self) -> dict[str, Any]:
        """Return the values that are filled in, as `form.read` returns them."""
        return form.read(self.data.get("form"))

    def kept(self) -> set[int]:
        """Return the indices of the cards that are kept."""
        marks = self.data["form"].get("keep") or []
        return {index for index, keep in enumerate(marks) if keep is True}


LATE = 10  # s after which a stream is taken for one whose tab has gone, which Gradio never resumes


class RunStream:
    """Changes of the page as a run goes on."""

    def __init__(self, runs: Runs, view: View):
        """Show runs in a view."""
        self.runs, self.view = runs, view
        # Whether Gradio has sent what was yielded last, by session.
        self._sent: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    async def stream(self, asked: ActionRequest, session: str) -> AsyncIterator[Updates]:
        """Yield the changes of the page with the run that a session asks for.

        They begin after the version that it has `seen`. With `before`, the end of the run is not
        announced again. The session is subscribed before anything is yielded, so that of its
        streams the one that began last goes on.
        """
        if run := self.runs.find(asked.data.get("run")):
            async for updates in self._changes(run, asked, session):
                yield updates
        # At the end Gradio sends the last updates again, when another run may be shown already; and
        # where nothing comes at all, it empties all outputs.
        yield {self.view.line: gr.skip()}

    async def _changes(
        self, run: Run, asked: ActionRequest, session: str
    ) -> AsyncIterator[Updates]:
        seen, quiet = asked.data.get("seen", 0), run.over and asked.data.get("before")
        collection = {self.view.collection: part("collection", asked.language, run)}
        async for snapshot in self.runs.stream(run, session, seen):
            cards = await run_sync(self._cards, snapshot.cards, run, asked)  # asks the history
            updates, collection = collection | cards, {}
            if not quiet:
                updates[self.view.line] = part(
                    "progress", asked.language, snapshot.line, run.key, snapshot.version
                )
                if news := " ".join(map(asked.language.translate, snapshot.news)):
                    updates[self.view.news] = escape(news)
            if before := self._sent.get(session):  # or these might be sent before those
                with suppress(TimeoutError):
                    async with asyncio.timeout(LATE):
                        await before.wait()
            if not run.is_streamed_to(session):  # another run is shown by now
                return
            self._sent[session] = sent = asyncio.Event()
            yield updates
            sent.set()

    def _cards(self, cards: Sequence[Card], run: Run, asked: ActionRequest) -> Updates:
        """Return the gallery where cards have changed."""
        view, history, stars = self.view, self.runs.backend.history, {}
        cards = [
            card if not card.picture or card.picture.there else BLANK[card.index] for card in cards
        ]
        with suppress(HistoryError):  # of which something has been said already
            if history and (kept := [card.kept for card in cards if card.kept]):
                stars = history.favourites(asked.browser, kept)
        updates: Updates = {
            view.figures[card.index]: part(
                "figure",
                asked.language,
                card,
                view.size,
                stars.get(card.kept),
                bool(card.picture) and self._edits(card.asked.model),
                card.picture and finish(card, self.runs.backend.engine.catalog),
            )
            for card in cards
        }
        if any(card.picture or card.state == "blank" for card in cards):
            updates[view.collection] = part("collection", asked.language, run)
        return updates

    def _edits(self, model: str) -> bool:
        """Return whether a picture's model edits; one that is there no more does not."""
        with suppress(RequestError):
            return self.runs.backend.engine.catalog.edits(model)
        return False


def finish(card: Card, catalog: Catalog) -> Picture | None:
    """Return the settings that finish a card's picture; None if it is no draft, or the model has
    gone."""
    with suppress(RequestError):
        return finished(card.asked, catalog.defaults(card.asked.model).steps)
    return None
