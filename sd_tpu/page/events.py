"""What happens on the page: what page.js asks for, and what the server does about it.

What lasts, a run above all, is told as it happens (`Streams`). All else is answered at once
(`Answers`): with texts, files, and forms to fill in, which page.js shows.
"""

import dataclasses
import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component

from sd_tpu.language import ENGLISH, Language, language_of
from sd_tpu.page import form, layout
from sd_tpu.page import history as panel
from sd_tpu.page.compare import comparison, read_comparison
from sd_tpu.page.files import Files, uploaded, url
from sd_tpu.page.form import GARBLED, read_link
from sd_tpu.page.layout import View
from sd_tpu.page.parts import labels, part
from sd_tpu.page.run import Card, Line, Run, Snapshot, duration
from sd_tpu.page.runs import Runs
from sd_tpu.pictures.history import History, HistoryError
from sd_tpu.pictures.images import (
    MAX_FILE_BYTES,
    data_url,
    parse_parameters,
    parse_token_downsampling,
    read_parameters,
    read_png,
)
from sd_tpu.pictures.inputs import Canvas, Input, find_input
from sd_tpu.pictures.uploads import Inputs, painted, to_paint_on
from sd_tpu.request import LARGER, Request, larger
from sd_tpu.sentence import Sentence
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.scheduler import Busy
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
)

log = logging.getLogger(__name__)

NEAR = 0.8  # of the model's tokens: from there on their count is shown
MAX_KNOWN = 5000  # names and words that a page is told
MAX_SECONDS = 3.0  # that a picture of Live may take: who waits longer has lost the thread
GONE = Sentence("The pictures are no longer on the server.")
FORGOTTEN = Sentence("This picture is no longer in your history.")

Updates = dict[Component, Any]


def refusal(error: RequestError) -> Sentence:
    """Why a request is not served, and when there is room for it if that is all."""
    if isinstance(error, Busy):
        return Sentence("{reason} There should be room in about {time}.", reason=error.sentence,
                        time=duration(error.retry_after))
    return error.sentence


@dataclasses.dataclass(frozen=True)
class Asked:
    """What page.js asks for: `data` is whatever a browser has sent."""

    data: Mapping[str, Any]

    @property
    def language(self) -> Language:
        """That of the page."""
        return language_of(self.data.get("lang"))

    @property
    def browser(self) -> str:
        """The browser's name for itself, which nobody else can guess; a new one if it has none."""
        name = str(self.data.get("browser"))
        return name if re.fullmatch("[0-9a-f]{32}", name) else secrets.token_hex(16)

    @property
    def place(self) -> int:
        """The card that it is about; raises RequestError if there is none such."""
        place = self.data.get("place")
        if isinstance(place, int) and 0 <= place < MAX_PROMPTS:
            return place
        raise RequestError(GARBLED.template)

    def filled(self) -> dict[str, Any]:
        """What is filled in, as `form.read` returns it."""
        return form.read(self.data.get("form"))

    def kept(self) -> set[int]:
        """The places of the cards that are kept."""
        return form.kept(self.data["form"])


@dataclasses.dataclass(frozen=True)
class Streams:
    """What is told as it happens; each returns what changes on the page, again and again."""

    engine: EngineClient
    view: View
    runs: Runs
    inputs: Inputs
    history: History | None
    beginning: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def act(self, event: gr.EventData, visitor: gr.Request) -> Iterator[Updates]:
        """Does what page.js asks for."""
        asked = Asked(event._data if isinstance(event._data, dict) else {})
        yield {self.view.line: gr.skip()}  # where nothing comes at all, Gradio empties all outputs
        begin = {"generate": self._generate, "compare": self._compare, "vary": self._vary,
                 "larger": self._larger, "redraw": self._redraw, "live": self._redraw,
                 "show": self._show, "back": self._back}.get(asked.data.get("do"))
        try:
            if begin:
                yield from begin(asked, visitor)
        except RequestError as error:
            told = asked.language.translate(refusal(error))
            yield {**self._say(Line(told, "wrong"), asked.language),
                   **self._without_stopped(self.runs.find(asked.data.get("run")))}

    # --- runs -----------------------------------------------------------------------------------

    def _generate(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        filled = asked.filled()
        seed = drawn_seed(filled["seed"])
        request = Request.check({**filled, "seed": seed}, self.engine.offer)
        yield from self._draw(request, asked, visitor, int(seed), keep=asked.kept())

    def _compare(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        filled = asked.filled()
        filled["seed"] = drawn_seed(filled["seed"])
        former = self.runs.find(asked.data.get("run"))
        if former and former.request.compares:  # its values are no box's own
            names = former.request.labelled(former.request.places()[0])
            filled["own"] = [{name: value for name, value in box.items() if name not in names}
                             for box in filled["own"]]
        request = Request.check(filled, self.engine.offer)
        compared = comparison(request, *read_comparison(asked.data))
        for picture in compared.pictures:
            self.engine.offer.check(picture)
        common = self._for_all(filled)
        yield from self._draw(compared, asked, visitor, filled=lambda drawn: drawn.values(common))

    def _for_all(self, filled: Mapping[str, Any]) -> Picture:
        """What is filled in for all boxes."""
        request = Request.check({**filled, "prompts": ["any"], "own": []}, self.engine.offer)
        return dataclasses.replace(request.pictures[0], prompt="")

    def _vary(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        """Draws a picture's prompt with new seeds, wherever no picture is kept."""
        former = self.runs.find(asked.data.get("run"))
        finished = former and former.finished(asked.place)
        if not finished:
            raise RequestError(GONE.template)
        picture, keep = finished[1], asked.kept() | {asked.place}
        filled, seed = asked.filled(), drawn_seed(RANDOM)
        request = Request(tuple(
            dataclasses.replace(picture, seed=(seed + place) % (MAX_SEED + 1))
            for place in range(MAX_PROMPTS))).replaced(asked.place, picture)
        common = self._for_all({**filled, "seed": seed})

        def shown(drawn: Request) -> dict[str, Any]:
            values = drawn.values(common)
            if filled["seed"] == RANDOM:  # as it stays
                values["seed"] = RANDOM
                for box in filter(None, values["own"]):
                    box.pop("seed", None)
            return values

        yield from self._draw(request, asked, visitor, keep=keep, filled=shown)

    def _larger(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        """Draws a picture again at LARGER times its size, from what it is; the others stay."""
        former = self.runs.find(asked.data.get("run"))
        finished = former and former.finished(asked.place)
        if not (finished and finished[0].picture.there):
            raise RequestError(GONE.template)
        card, picture = finished
        picture = larger(picture, LARGER * picture.width, LARGER * picture.height)
        self.engine.offer.check(picture)
        start = self.inputs.add(asked.browser, Input(Path(card.picture.png).read_bytes()))
        request = former.request.replaced(
            asked.place, dataclasses.replace(picture, init_image=start))
        for stopped in former.cards("stopped"):
            request = request.replaced(stopped.place, None)
        keep = {*range(MAX_PROMPTS)} - {asked.place}
        yield from self._draw(request, asked, visitor, former.seed, keep=keep)

    def _draw(self, request: Request, asked: Asked, visitor: gr.Request, seed: int | None = None,
              *, keep: set[int] = frozenset(),
              filled: Callable[[Request], Mapping[str, Any]] | None = None) -> Iterator[Updates]:
        """Begins a run, in place of the one that is shown, and shows it; `filled` tells what the
        boxes are filled with, of the request that is drawn."""
        former = self.runs.find(asked.data.get("run"))
        # What its page has not been told of yet is shown as well.
        given_up = {former, self.runs.shown(visitor.session_hash)} - {None}
        run = self.runs.start(request, browser=asked.browser, address=visitor.client.host,
                              seed=seed, former=former, keep=keep)
        if run is None:
            told = Sentence("All pictures are there already, as they are asked for.")
            yield self._say(Line(told, "over"), asked.language)
            return
        for each in given_up:  # single pictures may be on their way
            each.leave(visitor.session_hash)
            each.stop_if_lonely()  # another tab may look at it
        yield from self._follow(run, asked, visitor, filled=filled)

    def _show(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        """Shows a former run's pictures again, in place of one that is given up."""
        run, present = map(self.runs.find, (asked.data.get("shown"), asked.data.get("run")))
        if run:
            if present and present is not run:
                present.leave(visitor.session_hash)
                present.stop_if_lonely()
            yield from self._follow(run, asked, visitor)

    def _back(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        """Shows what this browser began last; how it ended is old news, unless it went on when its
        page was left."""
        run = self.runs.latest(asked.browser)
        if run and run.over and not asked.data.get("busy"):
            for snapshot in self.runs.follow(run, visitor.session_hash):
                yield self._shown(run, snapshot, asked)
        elif run:
            yield from self._follow(run, asked, visitor)

    # --- single pictures ------------------------------------------------------------------------

    def _redraw(self, asked: Asked, visitor: gr.Request) -> Iterator[Updates]:
        """Draws one picture as its box asks now: with a new seed, or, while somebody types, with
        the seed of what is there."""
        place, session, live = asked.place, visitor.session_hash, asked.data["do"] == "live"
        filled = asked.filled()
        wanted = bool(str(filled["prompts"][place]).strip())
        with self.beginning:  # of two redraws that a page sends at once only one begins a run
            run = self.runs.shown(session) or self.runs.find(asked.data.get("run"))
            begins = wanted and not run
            if begins:
                picture = self._soon(filled, place) if live else self._anew(filled, place)
                run = self.runs.start(Request((*[None] * place, picture)), live=True,
                                      browser=asked.browser, address=visitor.client.host)
                self.runs.show(session, run)
        seen = 0
        if not begins and run:
            if not live:
                picture = (self._anew(filled, place) if wanted
                           else _reseeded(run.request.pictures[place]))
                seen = run.redraw(place, picture, session)
            elif wanted:
                seen = run.redraw(place, self._soon(filled, place, run), session, live=True)
            else:
                seen = run.blank(place, session)
        if run and seen is not None:
            yield from self._follow(run, asked, visitor, seen)
        else:  # what was wrong before is right again
            yield {self.view.line: part("progress", asked.language, run.line if run else Line())}

    def _anew(self, filled: Mapping[str, Any], place: int) -> Picture:
        return _reseeded(alone(filled, place, self.engine))

    def _soon(self, filled: Mapping[str, Any], place: int, run: Run | None = None) -> Picture:
        """What the box at `place` asks for, whatever is in the others; with the seed of what `run`
        shows there if the seed is left open.

        Raises:
            RequestError: it cannot be served, or not soon enough.
        """
        picture = alone(filled, place, self.engine, run.seed_at(place) if run else RANDOM)
        if slow := too_slow(self.engine, picture):
            raise slow
        return picture

    # --- showing --------------------------------------------------------------------------------

    def _follow(self, run: Run, asked: Asked, visitor: gr.Request, seen: int = 0, *,
                filled: Callable[[Request], Mapping[str, Any]] | None = None
                ) -> Iterator[Updates]:
        """Shows a run, or what has changed in it since `seen`, until it is over."""
        language = asked.language
        shown = form.show(filled(run.request), self.engine.offer) if filled else None
        first = {self.view.collection: part("collection", language, run, shown)}
        for snapshot in self.runs.follow(run, visitor.session_hash, seen):
            updates = self._shown(run, snapshot, asked)
            news = " ".join(map(language.translate, snapshot.news))
            aloud = {self.view.news: escape(news)} if news else {}
            line = {self.view.line: part("progress", language, snapshot.line)}
            yield {**updates, **first, **line, **aloud}
            first = {}

    def _shown(self, run: Run, snapshot: Snapshot, asked: Asked) -> Updates:
        """The gallery where the snapshot says that it has changed."""
        view, stars = self.view, {}
        cards = [card if not card.picture or card.picture.there else Card(card.place)
                 for card in snapshot.cards]
        with suppress(HistoryError):  # of which something has been said already
            if self.history and (kept := [card.kept for card in cards if card.kept]):
                stars = self.history.favourites(asked.browser, kept)
        updates = {view.figures[card.place]: part("figure", asked.language, card, view.size,
                                                  stars.get(card.kept)) for card in cards}
        if any(card.picture or card.state == "blank" for card in cards):
            updates[view.collection] = part("collection", asked.language, run)
        return updates

    def _say(self, line: Line, language: Language) -> Updates:
        """Says something that is not about a run, aloud as well; it may hold words of whoever made
        a link."""
        return {self.view.line: part("progress", language, line),
                self.view.news: escape(language.translate(line.text))}

    def _without_stopped(self, run: Run | None) -> Updates:
        """Takes unfinished pictures away, which would look like an answer to what was refused."""
        view = self.view
        return {view.figures[card.place]: part("figure", ENGLISH, Card(card.place), view.size)
                for card in (run.cards("stopped") if run else [])}


def alone(filled: Mapping[str, Any], place: int, engine: EngineClient,
          seed: int = RANDOM) -> Picture:
    """The picture that the box at `place` asks for; with this seed where that is left open.

    Raises:
        RequestError: it cannot be served.
    """
    if seed != RANDOM:
        seed = (seed - place) % (MAX_SEED + 1)  # seeds run on
    seed = drawn_seed(seed if filled["seed"] == RANDOM else filled["seed"])
    own = filled["own"][place] if place < len(filled["own"]) else {}
    request = Request.check({**filled, "seed": seed,
                             "prompts": [*[""] * place, filled["prompts"][place]],
                             "own": [*[None] * place, own]}, engine.offer)
    return request.pictures[place]


def _reseeded(picture: Picture) -> Picture:
    return dataclasses.replace(picture, seed=drawn_seed(RANDOM))


def too_slow(engine: EngineClient, picture: Picture) -> RequestError | None:
    """Why no picture is drawn with these settings while somebody types, if there is a reason; until
    it is known there is none."""
    seconds = engine.seconds(picture) or 0.0
    if seconds <= MAX_SECONDS:
        return None
    return RequestError(
        "With these settings a picture takes about {seconds} s here; Live is for pictures that "
        "take {limit} s at most.", seconds=math.ceil(seconds), limit=round(MAX_SECONDS))


@dataclasses.dataclass(frozen=True)
class Answers:
    """What is answered at once: each returns what page.js shows, `told` in the progress line."""

    engine: EngineClient
    runs: Runs
    files: Files
    inputs: Inputs
    history: History | None

    def answer(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Answers what page.js asks."""
        asked = Asked(data if isinstance(data, dict) else {})
        answers = {"look": self._look, "model": self._model, "link": self._link,
                   "again": self._again, "read": self._read, "stop": self._stop,
                   "take": self._take, "paint": self._paint, "before": self._before,
                   "zip": self._pack, "grid": self._pack, "large": self._large,
                   "about": self._about, "known": self._known,
                   "history": self._history}
        try:
            return answers[asked.data.get("do")](asked)
        except FileNotFoundError:
            return self._wrong(GONE, asked)
        except (RequestError, HistoryError) as error:
            return self._wrong(error.sentence, asked)
        except (KeyError, TypeError, ValueError, AttributeError):  # what no page of ours asks
            log.exception("a page asked for what cannot be read")
            return self._wrong(GARBLED, asked)

    def _wrong(self, sentence: Sentence, asked: Asked) -> dict[str, Any]:
        return {"told": asked.language.translate(sentence), "kind": "wrong"}

    # --- the boxes ------------------------------------------------------------------------------

    def _look(self, asked: Asked) -> dict[str, Any]:
        """What is to be said of what is filled in: of each box, of all, whether Live is possible,
        and which field is wrong."""
        filled, language, refused = asked.filled(), asked.language, {}
        own = [*filled["own"], *[{}] * MAX_PROMPTS][:MAX_PROMPTS]
        prompts = filled["prompts"][:MAX_PROMPTS]
        values = [prompt.strip() for prompt in prompts]
        seed = 0 if filled["seed"] == RANDOM else filled["seed"]
        try:
            values = Request.check({**filled, "seed": seed}, self.engine.offer).prompts
        except RequestError as error:
            refused = {"wrong": language.translate(error.sentence), "culprit": error.culprit}
        run = self.runs.find(asked.data.get("run"))
        faster = {name: value for name, value in filled.items()
                  if name in OVERRIDABLE and OVERRIDABLE[name].section == FASTER
                  and value != OVERRIDABLE[name].default}
        return {
            "told_of": [part("remark", language, *remark(prompt, value, self.engine,
                                                         filled.get("model", "")))
                        for prompt, value in zip(prompts, values, strict=True)],
            "own": [part("summary", language, box, place) for place, box in enumerate(own)],
            "faster": part("summary", language, faster),
            "inputs": self._shown(filled, asked.browser),
            "slow": self._slow(filled, language),
            "line": part("progress", language,
                         run.line if run and run.line.kind != "wrong" else Line()),
            **self._offered(filled),
            **refused,
        }

    def _shown(self, filled: Mapping[str, Any], browser: str) -> dict[str, str]:
        """The pictures that are filled in, small, by name."""
        return self.inputs.shown(browser, {each.get(name) for each in (filled, *filled["own"])
                                           for name in UPLOADS})

    def _offered(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """The steps of the presets and the sizes of the model that is filled in, if there is one.
        """
        try:
            own = self.engine.offer.defaults(filled.get("model", ""))
        except RequestError:
            return {}
        return {"presets": layout.preset_steps(own.steps),
                "sizes": form.sizes(own.model, self.engine.offer)}

    def _slow(self, filled: Mapping[str, Any], language: Language) -> str:
        """Why Live is not possible with what is filled in for all boxes."""
        common = {name: value for name, value in filled.items() if name not in ("own", "seed")}
        try:
            picture = Request.check({**common, "prompts": ["any"]}, self.engine.offer).pictures[0]
        except RequestError:
            picture = self.engine.defaults
        slow = too_slow(self.engine, picture)
        return language.translate(slow.sentence) if slow else ""

    def _model(self, asked: Asked) -> dict[str, Any]:
        """What another model brings along, but for texts."""
        name = str(asked.data.get("model"))
        brought = form.show_settings(vars(self.engine.offer.defaults(name)), self.engine.offer)
        left = {"negative_prompt", "style", *(name for name, each in SETTINGS.items()
                                              if each.of_upload)}
        brought = {name: text for name, text in brought.items() if name not in left}
        return {"form": {"settings": brought, "sizes": form.sizes(name, self.engine.offer)}}

    def _link(self, asked: Asked) -> dict[str, Any]:
        request = Request.check(read_link(str(asked.data.get("link"))), self.engine.offer)
        return self._filled(request, Sentence(
            "The link's prompts, seed and settings are in the boxes."), asked)

    def _again(self, asked: Asked) -> dict[str, Any]:
        told = Sentence("Prompt, seed and settings of the picture are in the boxes.")
        return self._put(self._picture(asked, asked.data.get("place")), told, asked)

    def _here(self, request: Request, asked: Asked) -> tuple[Request, list[str]]:
        """The request as far as it can be made here, and what is to be said of the rest."""
        request = request.known(self.engine.offer.models())
        if not request.inputs() - self.inputs.of(asked.browser).keys():
            return request, []
        return request.without_inputs(), [
            asked.language.say("What it was made from is no longer on this server.")]

    def _filled(self, request: Request, told: str, asked: Asked) -> dict[str, Any]:
        return {"form": {**form.show(request.values(), self.engine.offer), "keep": []},
                "told": asked.language.translate(told)}

    def _take(self, asked: Asked) -> dict[str, Any]:
        """Takes a picture in: one of a card or of the history, or a file that has been uploaded;
        from one of these the settings are read instead if that is asked for and it has any."""
        if asked.data.keys() & {"id", "of"}:
            file = self._picture(asked, asked.data.get("of"))
        else:
            file = uploaded(asked.data.get("file"))
            if asked.data.get("or_read"):
                with suppress(RequestError):  # it has none
                    return self._read(asked)
        with file.open("rb") as opened:
            given = Input(opened.read(MAX_FILE_BYTES + 1))
        if asked.data.get("mask_of"):
            given = painted(given, self._handed_in(asked, "mask_of"))
        return {"input": self.inputs.add(asked.browser, given)}

    def _before(self, asked: Asked) -> dict[str, Any]:
        """What a picture began with, as it was put under it; nothing if it is not there any more.
        """
        with suppress(RequestError, HistoryError, OSError):
            made = read_png(self._picture(asked, asked.data.get("of")))
            canvas = Canvas.of(made.pictures[0], self.inputs.of(asked.browser))
            return {"before": data_url(canvas.pixels)} if canvas else {}
        return {}

    def _paint(self, asked: Asked) -> dict[str, Any]:
        return {"view": to_paint_on(self._handed_in(asked, "input"))}

    def _handed_in(self, asked: Asked, key: str) -> Input:
        name = str(asked.data.get(key))
        return find_input(self.inputs.of(asked.browser, {name}), name)

    def _read(self, asked: Asked) -> dict[str, Any]:
        """Reads a PNG that has been uploaded."""
        file = uploaded(asked.data.get("file"))
        return self._put(file, Sentence(
            "The prompts, the seed and the settings of {file} are in the boxes.", file=file.name),
            asked)

    def _put(self, file: Path, told: Sentence, asked: Asked) -> dict[str, Any]:
        """The form of what a PNG was made from, and what of it is otherwise here.

        Raises:
            RequestError: the file carries no settings, or bad ones.
        """
        text, offer, say = read_parameters(file), self.engine.offer, asked.language.say
        request, lost = self._here(parse_parameters(text), asked)
        here, there, values = offer.defaults(request.common.model), request.common, request.values()
        said = [asked.language.translate(told), *lost]
        try:
            offer.check(dataclasses.replace(there, model=here.model))
        except RequestError:
            values |= {"width": here.width, "height": here.height}
            said.append(say("It was made at {width}×{height}; here pictures are "
                            "{here_width}×{here_height}.", width=there.width, height=there.height,
                            here_width=here.width, here_height=here.height))
        tokens = parse_token_downsampling(text)
        tokens_here = self.engine.pipeline.model.token_downsampling
        if tokens != tokens_here:
            said.append(say("It was drawn with token downsampling {there}, which is set when a "
                            "page is started; here it is {here}.", there=tokens, here=tokens_here))
        return {"form": {**form.show(values, offer), "keep": []}, "told": " ".join(said)}

    # --- runs -----------------------------------------------------------------------------------

    def _known(self, asked: Asked) -> dict[str, Any]:
        """What prompts can say here beside plain words, and the words of a model that has few."""
        offer, adapters = self.engine.offer, self.engine.adapters
        card = offer.open(asked.filled().get("model", "")).checkpoint.card
        loras = (f"<lora:{name}:1>" for name in adapters.loras())
        wildcards = (f"__{name}__" for name in offer.wildcards.names())
        return {"known": [*adapters.embeddings(), *loras, *wildcards, *card.words][:MAX_KNOWN]}

    def _stop(self, asked: Asked) -> dict[str, Any]:
        if run := self.runs.find(asked.data.get("run")):
            run.stop()
        return {}

    def _pack(self, asked: Asked) -> dict[str, Any]:
        run = self.runs.find(asked.data.get("run"))
        made = run.pictures() if run else {}
        pictures = {place: picture for place, picture in made.items() if picture.there}
        if not pictures:
            return self._wrong(GONE, asked)
        if asked.data["do"] == "zip":
            return {"file": url(self.files.archive(pictures))}
        return {"file": url(self.files.grid(run.request, pictures, labels(run.request)))}

    def _large(self, asked: Asked) -> dict[str, Any]:
        """A picture enlarged."""
        return {"file": url(self.files.large(
                self._picture(asked, asked.data.get("place")), asked.browser))}

    def _picture(self, asked: Asked, place: Any) -> Path:
        """The file of a picture: of the history by its name, else of a card.

        Raises:
            RequestError: there is none any more.
        """
        name = asked.data.get("id")
        if name and self.history:
            file = self.history.picture(asked.browser, str(name))
        else:
            run = self.runs.find(asked.data.get("run"))
            picture = run and run.pictures().get(place)
            file = picture and Path(picture.png)
        if not (file and file.is_file()):
            raise RequestError(FORGOTTEN.template) if name else RequestError(GONE.template)
        return file

    def _about(self, asked: Asked) -> dict[str, Any]:
        return {"about": layout.about(self.engine, asked.language)}

    # --- the history ----------------------------------------------------------------------------

    def _history(self, asked: Asked) -> dict[str, Any]:
        """Does what a button of the history asks for, and shows what there is then."""
        data, owner, say, news = asked.data, asked.browser, asked.language.say, ""
        name = str(data.get("id"))
        match data.get("act"):
            case "save" | "view" as act:
                served = self.files.copy(self._picture(asked, None), owner)
                return {"view" if act == "view" else "file": url(served)}
            case "run":
                return self._use_run(owner, name, asked)
            case "favourite":
                known = self.history.set_favourite(owner, name, data.get("to") == "true")
            case "delete" | "clear" as act:
                known = self.history.delete(owner, name if act == "delete" else None)
                for file in known:
                    self.files.forget(file, owner)
                news = say("The picture is deleted.")
                if act == "clear":
                    known, news = True, say("All but the favourites are deleted.")
            case "restore":
                known = self.history.restore(owner)
                news = say("The deleted pictures are back.")
            case _:
                known = True
        shown = {"history": panel.contents(self.history, owner, data, asked.language)}
        if not known:
            return {**shown, **self._wrong(FORGOTTEN, asked)}
        return {**shown, "news": news}

    def _use_run(self, owner: str, name: str, asked: Asked) -> dict[str, Any]:
        entries = self.history.entries(owner, run=name)
        if not entries:
            return self._wrong(FORGOTTEN, asked)
        request, lost = self._here(panel.request_of(entries), asked)
        told = asked.language.say("Prompts, seeds and settings of the run are in the boxes.")
        return self._filled(request, " ".join([told, *lost]), asked)


def remark(prompt: str, value: str, engine: EngineClient, model: str) -> tuple[str, Sentence | str]:
    """What is worth saying of a prompt, and of what kind it is: one of its values where it stands
    for several, that it is near the model's limit or beyond it, which words mean nothing to the
    model; mostly nothing."""
    if value != prompt.strip():
        return "such", Sentence("Such as “{prompt}”", prompt=value)
    if len(prompt) > MAX_PROMPT_LENGTH:
        return "over", Sentence("{count} of at most {limit} characters", count=len(prompt),
                                limit=MAX_PROMPT_LENGTH)
    if not prompt.strip():
        return "", ""
    try:
        told = engine.count(prompt, model)
        unknown = engine.offer.open(model).checkpoint.card.unknown_words(prompt)
    except RequestError as error:
        return "over", error.sentence
    tokens = Sentence("{count} / {limit} tokens", count=told.tokens, limit=told.limit)
    if told.lost:
        return "over", Sentence("{tokens}, cut off: “{lost}”", tokens=tokens, lost=told.lost)
    if unknown:
        return "unknown", Sentence("Unknown: “{words}”", words=list(unknown))
    return "", tokens if told.tokens >= NEAR * told.limit else ""
