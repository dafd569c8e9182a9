"""Events of the page: requests of page.js, and the server's answers.

`Actions` answers at once: with texts, files, forms to fill in, and runs, which page.js shows.
`RunStream` shows how a run goes.
"""

import asyncio
import dataclasses
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import count, cycle, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import gradio as gr
import numpy as np
import pydantic
from anyio.to_thread import run_sync
from gradio.components import Component

from sd_tpu.folders import data_folder
from sd_tpu.gallery import files
from sd_tpu.gallery.history import History, HistoryError, request_of
from sd_tpu.gallery.run import BLANK, BROKEN, Card, Run
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.status import StatusLine, refusal
from sd_tpu.gallery.style_board import StyleBoard
from sd_tpu.gallery.uploads import SIDE, painted, to_paint_on
from sd_tpu.http.access import visitor_network
from sd_tpu.language import Language, language_of
from sd_tpu.links import read_link
from sd_tpu.page import form, layout, schema
from sd_tpu.page.compare import comparison, read_comparison
from sd_tpu.page.files import uploaded, url
from sd_tpu.page.form import GARBLED
from sd_tpu.page.layout import View
from sd_tpu.page.parts import part
from sd_tpu.page.teach import TeachPanel
from sd_tpu.pictures.images import (
    MAX_FILE_BYTES,
    carries_settings,
    data_url,
    parse_token_downsampling,
    parse_usable,
    read_parameters,
    read_png,
)
from sd_tpu.pictures.inputs import Canvas, Input, extension, find_input
from sd_tpu.request import (
    LARGER,
    NOT_YET,
    AnyModelCatalog,
    Request,
    extended,
    finished,
    for_all,
    journey,
    larger,
    preset_steps,
    reworded,
    varied,
)
from sd_tpu.sentence import Sentence, SentenceError
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.resolve import as_request_errors
from sd_tpu.serving.teaching import Teaching
from sd_tpu.settings import (
    FASTER,
    MAX_PROMPT_LENGTH,
    MAX_PROMPTS,
    MAX_SEED,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    UPLOADS,
    Picture,
    RequestError,
    drawn_seed,
    short_seed,
)

log = logging.getLogger(__name__)

NEAR = 0.8  # of the model's tokens: from there on their count is shown
MAX_KNOWN = 5000  # names and words that a page is told
# What page.js asks for that reads, makes or packs pictures.
WITH_FILES = frozenset(
    (
        "again around before change extend grid large larger link movie paint read styles take zip"
    ).split()
)
VARIANTS = 4  # under a card
MAX_STYLES = 40  # pictures of styles in one answer
RUNS = 6  # on a page of the history; earlier ones come below
MAX_PAGES = 1000
BOARD_ACTS = frozenset(("boards", "make", "rename", "unmake", "put", "take_off"))
MAX_SECONDS = 3.0  # that a picture of Live may take: who waits longer has lost the thread
GONE = Sentence("The pictures are no longer on the server.")
FORGOTTEN = Sentence("This picture is no longer in your history.")

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
        return self.data.get("do") in WITH_FILES or self.data.get("act") in ("add", "start")

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
                card.picture and _finished(card, self.runs.backend.engine.catalog),
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


class Actions:
    """Actions of the page; each returns what page.js shows, `message` in the progress line."""

    def __init__(self, runs: Runs, teaching: Teaching | None = None):
        """Have the actions of runs, and of a teaching where there is one."""
        self.runs, backend = runs, runs.backend
        self.teach = TeachPanel(teaching) if teaching else None
        self.style_board = StyleBoard(backend.engine, data_folder() / "styles")
        self.engine, self.files, self.inputs, self.history = (
            backend.engine,
            backend.files,
            backend.inputs,
            backend.history,
        )

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

    def refuse(self, error: SentenceError, asked: ActionRequest) -> dict[str, Any]:
        """Return the sentence for a request that is refused."""
        return self._wrong(refusal(error), asked)

    def _wrong(self, sentence: Sentence, asked: ActionRequest) -> dict[str, Any]:
        return {"message": asked.language.translate(sentence), "kind": "wrong"}

    # --- runs -----------------------------------------------------------------------------------

    def _do_generate(self, asked: ActionRequest) -> dict[str, Any]:
        filled = asked.filled()
        seed = drawn_seed(filled["seed"])
        request = Request.check({**filled, "seed": seed}, self.engine.catalog)
        return self._draw(request, asked, seed=int(seed), keep=asked.kept())

    def _do_compare(self, asked: ActionRequest) -> dict[str, Any]:
        filled, former = asked.filled(), self._run(asked)
        filled["seed"] = drawn_seed(filled["seed"])
        if former and former.request.compares:  # its values are no box's own
            filled["overrides"] = [
                former.request.beside_compared(index, box)
                for index, box in enumerate(filled["overrides"])
            ]
        request = Request.check(filled, self.engine.catalog)
        compared = comparison(request, *read_comparison(asked.data))
        for picture in filter(None, compared.pictures):
            self.engine.catalog.check(picture)
        common = for_all(filled, self.engine.catalog)
        answer = self._draw(compared, asked, seed=common.seed, common=common)
        if "filled" in answer:  # it has been agreed to: no card is kept
            answer["filled"]["keep"] = []
        return answer

    def _do_vary(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw a picture's prompt with new seeds, wherever no picture is kept."""
        index, filled, seed = asked.index, asked.filled(), drawn_seed(RANDOM)
        picture = self._card(asked, index).asked
        request = Request(
            tuple(
                dataclasses.replace(picture, seed=(seed + number) % (MAX_SEED + 1))
                for number in range(MAX_PROMPTS)
            )
        ).replaced(index, picture)
        return self._draw(
            request,
            asked,
            seed=seed,
            keep={*asked.kept(), index},
            common=for_all({**filled, "seed": seed}, self.engine.catalog),
            any_seed=filled["seed"] == RANDOM,
        )

    def _do_larger(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw a picture again at LARGER times its size, from its pixels; the others stay."""
        before = self._card(asked, asked.index).asked
        picture = larger(
            before,
            LARGER * before.width,
            LARGER * before.height,
            self.engine.catalog.larger_strength(before.model),
        )
        return self._draw_from({asked.index: (asked.index, picture)}, asked)[1]

    def _do_change(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw pictures anew, changed as words say, and fill their boxes in; the others stay."""
        words = asked.data["words"].strip()
        pictures = {index: (index, self._changed(asked, index, words)) for index in asked.indices}
        return self._draw_and_fill(pictures, asked)

    def _changed(self, asked: ActionRequest, index: int, words: str) -> Picture:
        """Return a card's picture, changed as words say."""
        catalog, before = self.engine.catalog, self._card(asked, index).asked
        *_, filled = catalog.fill([*[""] * index, words], before.seed)
        edits = catalog.edits(before.model)
        return reworded(before, filled, asked.data.get("strength"), edits=edits)

    def _do_around(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw pictures from those of cards, with other seeds, and fill their boxes in.

        They come into the free cards, whose boxes are empty, by turns. Those of a picture that gets
        none of these come under its card, to choose from. No other card is touched.
        """
        sources, kept, seed = asked.indices, asked.kept(), int(drawn_seed(RANDOM))
        prompts = self._spelt(asked.filled()["prompts"], self._shown(asked).seed)
        taken = kept.union(sources)
        free = (i for i, prompt in enumerate(prompts) if not prompt.strip() and i not in taken)
        places = dict(zip(free, cycle(sources)))
        seeds = ((seed + number) % (MAX_SEED + 1) for number in count())

        def variant(source: int) -> tuple[int, Picture]:
            before = self._card(asked, source).asked
            return source, varied(before, asked.data["strength"], next(seeds))

        drawn = {index: variant(source) for index, source in places.items()}
        strips = {
            source: self._sourced({n: variant(source) for n in range(VARIANTS)}, asked)
            for source in sources
            if source not in places.values()
        }
        run, answer, begun = self._shown(asked), {}, len(drawn)
        if drawn:
            answer = self._draw_and_fill(drawn, asked)
            run = self.runs.find(answer.get("run")) or run
        for index, request in strips.items():
            try:
                run.draw_strip(index, request)
            except RequestError as error:
                if not begun:
                    raise
                # What has begun goes on, and is shown; it is the refusal that is read aloud.
                return answer | {**_named(run), "news": ""} | self.refuse(error, asked)
            begun += VARIANTS
        return answer | _making(run, begun, asked)

    def _do_choose(self, asked: ActionRequest) -> dict[str, Any]:
        """Take a variant of a card's picture into the card and its settings into its box, or take
        the variants away."""
        run, index, number = self._shown(asked), asked.index, asked.data["variant"]
        if number is None:
            run.close_strip(index)
            return _named(run)
        variants = {each.index: each for each in run.cards[index].variants if each.picture}
        if not (variant := variants.get(number)):  # one has been taken already
            return _named(run)
        if not variant.picture.there:
            raise RequestError(GONE.template)
        request = _without_stopped(run.request, run.cards, [index])
        there = self.runs.start(
            request.replaced(index, variant.asked),
            former=run,
            keep={*range(MAX_PROMPTS)} - {index},
            taken={index: dataclasses.replace(variant, index=index)},
            browser=asked.browser,
            address=asked.address,
            seed=run.seed,
        )
        return _named(there) | self._filled_with(
            Request().replaced(index, variant.asked), [index], asked
        )

    def _do_swap(self, asked: ActionRequest) -> dict[str, Any]:
        """Have two cards change places, with their boxes and all that is theirs."""
        places, filled, run = (asked.index, asked.data["to"]), asked.filled(), self._run(asked)
        boxes, answer = asked.data["form"], {}
        if run:
            if run.draws:
                raise RequestError("Cards change places when nothing is being drawn.")
            seed = run.seed if filled["seed"] == RANDOM else short_seed(filled["seed"])
            boxes = {**boxes, "prompts": self._spelt(filled["prompts"], seed, every=True)}
            answer = _named(self.runs.swap(run, *places))
        news = Sentence("Moved to place {number}.", number=places[1] + 1)
        filled = form.swapped(boxes, *places)
        return answer | {"filled": filled, "news": asked.language.translate(news)}

    def _do_finish(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw drafts again, finely and from the same noise, and have their boxes ask for that."""
        cards = [self._card(asked, index) for index in asked.indices]
        anew = {card.index: _finished(card, self.engine.catalog) for card in cards}
        drafts = {index: (index, picture) for index, picture in anew.items() if picture}
        if not drafts:
            raise RequestError("None of these pictures is a draft.")
        return self._draw_and_fill(drafts, asked)

    def _do_extend(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw what lies beside a card's picture, and fill its box in; the others stay."""
        before, catalog = self._card(asked, asked.index), self.engine.catalog
        unit = catalog.size_unit(before.asked.model)
        picture, sides = extended(before.asked, asked.data["sides"], unit)
        catalog.check(picture)
        if max(picture.width, picture.height) > SIDE:  # it would be made smaller, and not stay
            raise RequestError("A picture is extended to {most} pixels at most.", most=SIDE)
        pixels = np.asarray(Input(Path(before.picture.png).read_bytes()).on_white())
        start, mask = (self.inputs.add(asked.browser, each) for each in extension(pixels, sides))
        picture = dataclasses.replace(picture, init_image=start, mask=mask)
        return self._draw_and_fill({asked.index: (asked.index, picture)}, asked)

    def _draw_and_fill(
        self, pictures: Mapping[int, tuple[int, Picture]], asked: ActionRequest
    ) -> dict[str, Any]:
        """Draw as `_draw_from`, and fill the boxes of these cards in; the others stay."""
        request, answer = self._draw_from(pictures, asked)
        return answer | self._filled_with(request, pictures, asked)

    def _filled_with(
        self, request: Request, indices: Collection[int], asked: ActionRequest
    ) -> dict[str, Any]:
        """Return what is filled in where the boxes of these cards ask for pictures of a request."""
        filled, any_seed = asked.filled(), asked.filled()["seed"] == RANDOM
        seed = self._shown(asked).seed if any_seed else filled["seed"]
        common = for_all({**filled, "seed": seed}, self.engine.catalog)
        shown = self._shown_form(request, common, any_seed=any_seed)
        prompts = self._spelt(filled["prompts"], common.seed)
        overrides = [*asked.data["form"]["overrides"]]
        for index in indices:
            prompts[index : index + 1] = [shown["prompts"][index]]
            overrides[index : index + 1] = [shown["overrides"][index]]
        return {"filled": {"prompts": prompts, "overrides": overrides}}

    def _spelt(self, prompts: Sequence[str], seed: int, *, every: bool = False) -> list[str]:
        """Fill empty boxes with the values that the prompt before them gives them.

        These would be lost once a box between them, or that prompt itself, is written anew. With
        `every`, prompts get their own values as well: elsewhere they would be given others.
        """
        spelt: Sequence[str] = [""] * len(prompts)
        with suppress(RequestError):  # of a box that is not asked for
            spelt = self.engine.catalog.fill([prompt.strip() for prompt in prompts], seed)
        return [
            prompt if prompt.strip() and not every else such or prompt
            for prompt, such in zip(prompts, spelt, strict=True)
        ]

    def _draw_from(
        self, pictures: Mapping[int, tuple[int, Picture]], asked: ActionRequest
    ) -> tuple[Request, dict[str, Any]]:
        """Draw pictures from what others became; the others stay.

        Args:
            pictures: by the index of their card, as `_sourced` takes them.
            asked: the page's request.

        Returns:
            These pictures alone, with the names of those, and the answer.
        """
        former, drawn = self._shown(asked), self._sourced(pictures, asked)
        request = _without_stopped(former.request, former.cards, pictures)
        for index in pictures:
            request = request.replaced(index, drawn.picture(index))
        keep = {*range(MAX_PROMPTS)} - pictures.keys()
        return drawn, self._draw(request, asked, seed=former.seed, keep=keep)

    def _sourced(
        self, pictures: Mapping[int, tuple[int, Picture]], asked: ActionRequest
    ) -> Request:
        """Return pictures with the names of those that they are drawn from, which are handed in.

        Args:
            pictures: by index, each with the index of the card whose picture it is drawn from,
                which it names NOT_YET; it may name another one that is there.
            asked: the page's request.
        """
        drawn, names = Request(), {}
        for index, (source, picture) in pictures.items():
            self.engine.catalog.check(picture)
            if lacking := [each for each in UPLOADS if getattr(picture, each) == NOT_YET]:
                if source not in names:
                    file = Path(self._card(asked, source).picture.png)
                    names[source] = self.inputs.add(asked.browser, Input(file.read_bytes()))
                picture = dataclasses.replace(picture, **dict.fromkeys(lacking, names[source]))
            drawn = drawn.replaced(index, picture)
        return drawn

    def _do_journey(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw the way from a card's picture to another's, or to another seed of its own."""
        first, to = self._card(asked, asked.index).asked, asked.data.get("to")
        other = first if to is None else self._card(asked, to).asked
        seed = drawn_seed(RANDOM) if to is None else other.seed
        run = self._shown(asked)
        run.draw_journey(journey(first, other.prompt, seed, asked.data.get("count")))
        return _named(run)

    def _draw(
        self,
        request: Request,
        asked: ActionRequest,
        *,
        seed: int,
        keep: Collection[int] = (),
        common: Picture | None = None,
        any_seed: bool = False,
    ) -> dict[str, Any]:
        """Begin a run in place of the one that is shown; `seed` is for all its boxes. They are
        filled with what it draws if something is `common` to all of them then; `any_seed` leaves
        theirs open.
        """
        run = self.runs.start(
            request,
            former=self._run(asked),
            keep=keep,
            browser=asked.browser,
            address=asked.address,
            seed=seed,
        )
        if run is None:
            answer = Sentence("All pictures are there already, as they are asked for.")
            return {"message": asked.language.translate(answer), "kind": "over"}
        answer = _making(run, run.count, asked)
        if common:
            answer["filled"] = self._shown_form(run.request, common, any_seed=any_seed)
        return answer

    def _shown_form(self, request: Request, common: Picture, *, any_seed: bool) -> dict[str, Any]:
        """Return a request as a form with settings that are `common`; `any_seed` names no seed."""
        values = request.values(common)
        if any_seed:
            values["seed"] = RANDOM
            for box in filter(None, values["overrides"]):
                box.pop("seed", None)
        return form.show(values, self.engine.catalog)

    def _do_redraw(self, asked: ActionRequest) -> dict[str, Any]:
        return self._redraw(asked, live=False)

    def _do_live(self, asked: ActionRequest) -> dict[str, Any]:
        return self._redraw(asked, live=True)

    def _redraw(self, asked: ActionRequest, *, live: bool) -> dict[str, Any]:
        """Draw one picture as its box asks now."""
        run = self._run(asked)
        picture = self._picture(asked, run, live=live)
        if run:
            return _named(run) if run.redraw(asked.index, picture, live=live) else {}
        if not picture:
            return {}
        return _named(
            self.runs.start(
                Request().replaced(asked.index, picture),
                live=live,
                browser=asked.browser,
                address=asked.address,
            )
        )

    def _picture(self, asked: ActionRequest, run: Run | None, *, live: bool) -> Picture | None:
        """Return the picture of one box: with a new seed, or its present one while somebody types.

        Returns None if nothing is asked for.

        Raises:
            RequestError: it cannot be served, or not soon enough.
        """
        filled, index = asked.filled(), asked.index
        if str(filled["prompts"][index]).strip():
            seed = run.seed_for(index) if run and live else drawn_seed(RANDOM)
            picture = alone(filled, index, seed, self.engine.catalog)
        else:
            picture = run.cards[index].asked if run and not live else None
        if live and picture and (slow := too_slow(self.engine, picture)):
            raise slow
        if live or not picture:
            return picture
        return dataclasses.replace(picture, seed=drawn_seed(RANDOM))

    def _do_show(self, asked: ActionRequest) -> dict[str, Any]:
        """Show a former run, or the one that this browser was shown last."""
        run = (
            self.runs.bring_back(asked.data["shown"])
            if "shown" in asked.data
            else self.runs.latest(asked.browser)
        )
        return _named(run)

    def _do_stop(self, asked: ActionRequest) -> dict[str, Any]:
        if run := self._run(asked):
            run.stop()
        return {}

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

    # --- the boxes ------------------------------------------------------------------------------

    def _do_look(self, asked: ActionRequest) -> dict[str, Any]:
        """Check the values that are filled in, and return remarks about them.

        They are about each box and all of them, whether Live is possible, and which field is wrong;
        a fresh page also gets the models that there are by now.
        """
        filled, language, refused = asked.filled(), asked.language, {}
        run, pictures = self._run(asked), []
        per_picture = [*filled["overrides"], *[{}] * MAX_PROMPTS][:MAX_PROMPTS]
        prompts = filled["prompts"][:MAX_PROMPTS]
        values = [prompt.strip() for prompt in prompts]
        seed = 0 if filled["seed"] == RANDOM else filled["seed"]
        try:
            request = Request.check({**filled, "seed": seed}, self.engine.catalog)
            values = request.prompts
            any_seed = filled["seed"] == RANDOM
            anew = {i for i, box in enumerate(per_picture) if any_seed and "seed" not in box}
            pictures = self.runs.to_draw(request, run, asked.kept(), anew)
        except RequestError as error:
            refused = {
                "wrong": language.translate(error.sentence),
                "culprit": {"setting": error.setting, "index": error.index},
            }
        faster = {
            name: value
            for name, value in filled.items()
            if name in OVERRIDABLE
            and OVERRIDABLE[name].section == FASTER
            and value != OVERRIDABLE[name].default
        }
        return {
            "remarks": [
                part(
                    "remark", language, *remark(prompt, value, self.engine, filled.get("model", ""))
                )
                for prompt, value in zip(prompts, values, strict=True)
            ],
            "summaries": [
                part("summary", language, box, index) for index, box in enumerate(per_picture)
            ],
            "faster": part("summary", language, faster),
            "inputs": self.inputs.shown(
                asked.browser,
                {
                    name
                    for each in (filled, *per_picture)
                    for setting in UPLOADS
                    for name in str(each.get(setting, "")).split()
                },
            ),  # small
            "draw": {"count": len(pictures), "seconds": self._seconds(pictures)},
            "change": self._seconds_of_change(asked),
            "slow": self._slow(filled, language),
            "line": part(
                "progress", language, run.line if run and run.line.kind != "wrong" else StatusLine()
            ),
            **self._model_values(filled),
            **({"models": self.engine.catalog.models()} if asked.data.get("fresh") else {}),
            **refused,
        }

    def _model_values(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the chosen model is offered with, if there is one: the steps of the presets,
        sizes, samplers with their spacings, and how many reference pictures it takes."""
        catalog = self.engine.catalog
        try:
            defaults = catalog.defaults(filled.get("model", ""))
        except RequestError:
            return {}
        presets = preset_steps(defaults.steps)
        values = {"paces": [None] * len(presets), "pace": None}
        with suppress(RequestError):
            picture = for_all({**filled, "seed": 0}, catalog)
            eight = [[dataclasses.replace(picture, steps=steps)] * MAX_PROMPTS for steps in presets]
            values = {
                "paces": [*map(self._seconds, eight)],
                "pace": self._seconds([picture] * MAX_PROMPTS),
            }
        return {
            "presets": presets,
            "sizes": form.sizes(defaults.model, catalog),
            "samplers": catalog.samplers(defaults.model),
            "references": catalog.max_references(defaults.model),
            **values,
        }

    def _seconds(self, pictures: Sequence[Picture]) -> float | None:
        """Return an estimate for pictures, rounded; None if nothing is known, or there are none."""
        seconds = self.engine.seconds(*pictures) if pictures else None
        return None if seconds is None else round(seconds, 2)

    def _seconds_of_change(self, asked: ActionRequest) -> float | None:
        """Return an estimate for a change of the selected pictures, whatever the words."""
        with suppress(RequestError):
            pictures = [self._changed(asked, index, "–") for index in asked.data.get("indices", [])]
            return self._seconds(pictures)
        return None

    def _slow(self, filled: Mapping[str, Any], language: Language) -> str:
        """Return why Live is not possible with the settings for all boxes."""
        try:
            picture = for_all({**filled, "seed": 0}, self.engine.catalog)
        except RequestError:
            picture = self.engine.defaults
        slow = too_slow(self.engine, picture)
        return language.translate(slow.sentence) if slow else ""

    def _do_model(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the settings that another model brings along, except for texts."""
        name = str(asked.data.get("model"))
        brought = form.show_settings(vars(self.engine.catalog.defaults(name)), self.engine.catalog)
        left = {
            "negative_prompt",
            "style",
            *(name for name, each in SETTINGS.items() if each.of_upload),
        }
        brought = {name: text for name, text in brought.items() if name not in left}
        return {"form": {"settings": brought, "sizes": form.sizes(name, self.engine.catalog)}}

    def _do_link(self, asked: ActionRequest) -> dict[str, Any]:
        request = Request.check(read_link(str(asked.data.get("link"))), AnyModelCatalog())
        return self._gathered(request, asked) | self._fill(
            request, asked, Sentence("The link's prompts, seed and settings are in the boxes.")
        )

    def _do_again(self, asked: ActionRequest) -> dict[str, Any]:
        return self._fill_from(
            self._file(asked),
            asked,
            Sentence("Prompt, seed and settings of the picture are in the boxes."),
        )

    def _do_read(self, asked: ActionRequest) -> dict[str, Any]:
        """Read a picture that has been uploaded."""
        file = uploaded(asked.data.get("file"))
        request, _ = parse_usable(read_parameters(file))
        return self._gathered(request, asked) | self._fill_from(
            file,
            asked,
            Sentence(
                "The prompts, the seed and the settings of {file} are in the boxes.", file=file.name
            ),
        )

    def _fill_from(self, file: Path, asked: ActionRequest, said: Sentence) -> dict[str, Any]:
        """Fill the form with the settings of a picture, as `_fill`.

        Raises:
            RequestError: the file carries no settings, or no prompt.
        """
        text = read_parameters(file)
        there = parse_token_downsampling(text)
        here = self.engine.checkpoint.model.token_downsampling
        more = (
            []
            if here == there
            else [
                Sentence(
                    "It was drawn with token downsampling {there}, which is set when a page is "
                    "started; here it is {here}.",
                    there=there,
                    here=here,
                )
            ]
        )
        request, unusable = parse_usable(text)
        if unusable:
            more.append(
                Sentence("{names} of the picture cannot be used here.", names=", ".join(unusable))
            )
        return self._fill(request, asked, said, *more)

    def _fill(self, request: Request, asked: ActionRequest, *texts: Sentence) -> dict[str, Any]:
        """Return the form of a request as far as it can be made here, with remarks on the rest."""
        values, otherwise = self.runs.values_here(request, asked.browser)
        return {
            "form": {**form.show(values, self.engine.catalog), "keep": []},
            "message": " ".join(map(asked.language.translate, (*texts, *otherwise))),
        }

    def _gathered(self, request: Request, asked: ActionRequest) -> dict[str, Any]:
        """Return the pictures of a request, where the browser's runs still have them."""
        return _named(self.runs.gather(request, asked.browser, asked.address))

    def _do_take(self, asked: ActionRequest) -> dict[str, Any]:
        """Take a picture in: one of a card or of the history, or an uploaded file.

        The settings of an uploaded file are read instead if that is asked for and it has any.
        """
        if asked.data.keys() & {"id", "index"}:
            file = self._file(asked)
        else:
            file = uploaded(asked.data.get("file"))
            if asked.data.get("or_read") and carries_settings(file):
                return self._do_read(asked)
        with file.open("rb") as opened:
            uploaded_input = Input(opened.read(MAX_FILE_BYTES + 1))
        if asked.data.get("mask_of"):
            uploaded_input = painted(uploaded_input, self._handed_in(asked, "mask_of"))
        return {"input": self.inputs.add(asked.browser, uploaded_input)}

    def _do_before(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the picture that a card's was made from, as it lies under it; nothing if it is
        gone. It is the start picture, or the only reference picture if that has the same size.

        Of a card's picture there is also the `unit` by which it can be extended.
        """
        unit = {}
        with suppress(RequestError):
            if "index" in asked.data:
                model = self._card(asked, asked.data["index"]).asked.model
                unit = {"unit": self.engine.catalog.size_unit(model)}
        with suppress(RequestError, HistoryError, OSError):
            picture = read_png(self._file(asked)).picture(0)
            inputs = self.inputs.of(asked.browser)
            if canvas := Canvas.of(picture, inputs):
                return {**unit, "before": data_url(canvas.pixels)}
            reference = find_input(inputs, picture.reference)
            alike = reference and reference.size == (picture.width, picture.height)
            if alike and self.engine.catalog.edits(picture.model):
                return {**unit, "before": data_url(np.asarray(reference.on_white()))}
        return unit

    def _do_paint(self, asked: ActionRequest) -> dict[str, Any]:
        return {"view": to_paint_on(self._handed_in(asked, "input"))}

    def _handed_in(self, asked: ActionRequest, key: str) -> Input:
        name = str(asked.data.get(key))
        found = find_input(self.inputs.of(asked.browser, {name}), name)
        if found is None:
            raise RequestError(GONE.template)
        return found

    # --- other actions --------------------------------------------------------------------------

    def _do_known(self, asked: ActionRequest) -> dict[str, Any]:
        """Return names that prompts can use here, the words of a model that has few, and what
        styles put behind prompts."""
        catalog, adapters = self.engine.catalog, self.engine.adapters
        card = catalog.open(asked.filled().get("model", "")).checkpoint.card
        loras = (f"<lora:{name}:1>" for name in adapters.loras())
        wildcards = (f"__{name}__" for name in catalog.wildcards.names())
        return {
            "known": [*adapters.embeddings(), *loras, *wildcards, *card.words][:MAX_KNOWN],
            "endings": catalog.styles.endings()[:MAX_KNOWN],
        }

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

    def _do_teach(self, asked: ActionRequest) -> dict[str, Any]:
        if self.teach is None:
            return self._wrong(GARBLED, asked)
        filled = asked.filled()
        return self.teach.answer(asked.data, filled, asked.browser, asked.address, asked.language)

    def _do_about(self, asked: ActionRequest) -> dict[str, Any]:
        return {"about": layout.about(self.engine, asked.language)}

    # --- the history ----------------------------------------------------------------------------

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
        return self._fill(
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


def _named(run: Run | None) -> dict[str, Any]:
    """Return a run as page.js needs it to show it."""
    return {"run": run.key, "seed": run.seed} if run else {}


def _making(run: Run, count: int, asked: ActionRequest) -> dict[str, Any]:
    """Return a run as `_named`, and the news that so many pictures are on their way."""
    pictures = Sentence("1 picture") if count == 1 else Sentence("{count} pictures", count=count)
    return {**_named(run), "news": asked.language.say("Making {count}.", count=pictures)}


def _finished(card: Card, catalog: Catalog) -> Picture | None:
    """Return the settings that finish a card's picture; None if it is no draft, or the model has
    gone."""
    with suppress(RequestError):
        return finished(card.asked, catalog.defaults(card.asked.model).steps)
    return None


def _without_stopped(request: Request, cards: Sequence[Card], indices: Collection[int]) -> Request:
    """Return a run's request without pictures that were stopped, but at these indices."""
    for card in cards:
        if card.state == "stopped" and card.index not in indices:
            request = request.replaced(card.index, None)
    return request


def alone(filled: Mapping[str, Any], index: int, seed: int, catalog: Catalog) -> Picture:
    """Return the picture that the box at `index` asks for.

    `seed` is that of all pictures where it is left open.

    Raises:
        RequestError: it cannot be served.
    """
    overrides = filled["overrides"][index] if index < len(filled["overrides"]) else {}
    return Request.check(
        {
            **filled,
            "seed": seed if filled["seed"] == RANDOM else filled["seed"],
            "prompts": [*[""] * index, filled["prompts"][index]],
            "overrides": [*[None] * index, overrides],
        },
        catalog,
    ).picture(index)


def too_slow(engine: EngineClient, picture: Picture) -> RequestError | None:
    """Return why no picture is drawn with these settings while somebody types, if so.

    Until it is known there is no reason.
    """
    seconds = engine.seconds(picture) or 0.0
    if seconds <= MAX_SECONDS:
        return None
    return RequestError(
        "With these settings a picture takes about {seconds} s here; Live is for pictures that "
        "take {limit} s at most.",
        seconds=math.ceil(seconds),
        limit=round(MAX_SECONDS),
    )


def remark(prompt: str, value: str, engine: EngineClient, model: str) -> tuple[str, Sentence | str]:
    """Return the kind and the text of a remark under a prompt box, mostly nothing.

    It is one of the prompt's values where it stands for several, or says that the prompt is near
    the model's limit or beyond it, or which words mean nothing to the model.
    """
    if value != prompt.strip():
        return "such", Sentence("Such as “{prompt}”", prompt=value)
    if len(prompt) > MAX_PROMPT_LENGTH:
        return "over", Sentence(
            "{count} of at most {limit} characters", count=len(prompt), limit=MAX_PROMPT_LENGTH
        )
    if not prompt.strip():
        return "", ""
    try:
        with as_request_errors():
            remarks = engine.resolver.remarks(Picture(prompt=prompt, model=model))
    except RequestError as error:
        return "over", error.sentence
    counted = remarks.count
    tokens = Sentence("{count} / {limit} tokens", count=counted.tokens, limit=counted.limit)
    if counted.lost:
        return "over", Sentence("{tokens}, cut off: “{lost}”", tokens=tokens, lost=counted.lost)
    if remarks.unknown:
        return "unknown", Sentence("Unknown: “{words}”", words=list(remarks.unknown))
    return "", tokens if counted.tokens >= NEAR * counted.limit else ""
