"""The runs of everybody who shares an engine, and their subscribers."""

import dataclasses
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from sd_tpu.gallery.history import HistoryEntry, request_of
from sd_tpu.gallery.run import BLANK, Backend, Card, Run, Snapshot
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.settings import Picture, RequestError

MAX_KEPT = 256  # runs, for browsers that come back
KEEP_SECONDS = 24 * 3600  # how long its pictures' files are there


class Runs:
    """The runs of everybody who shares an engine; each is private to who has its key."""

    def __init__(self, backend: Backend):
        """Start without runs; `backend` is shared by all."""
        self.backend = backend
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Run] = OrderedDict()  # by key, the latest begun or shown last

    def start(
        self,
        request: Request,
        *,
        former: Run | None = None,
        keep: Collection[int] = (),
        taken: Mapping[int, Card] = MappingProxyType({}),
        live: bool = False,
        **whose: Any,
    ) -> Run | None:
        """Draw a request of a browser or of a program, by their names.

        All requests under one name have one share of the devices. A program's have no previews, and
        end with their subscriber.

        Args:
            request: to be drawn.
            former: the run whose pictures it replaces.
            keep: indices where the finished pictures of `former` stay until new ones come;
                elsewhere they stay if the same is asked for again.
            taken: finished cards by index that take the place of those of `former`.
            live: whether it was begun by typing.
            whose: its `browser` or `program`; the `address` that it comes from; the `seed` that was
                given or drawn for all pictures.

        Returns:
            The run; None if there is nothing to draw, and no card is taken.

        Raises:
            Busy: too much waits already.
            RequestError: it cannot be served.
        """
        cards, strips = [*BLANK], {}
        for there in former.cards if former else []:
            index = there.index
            card = taken.get(index, there.finished)
            if not card:
                continue
            if index in keep and card.picture.there:  # as it is, or with what is on its way there
                request = request.replaced(index, there.asked)
            asked = request.picture_at(index)
            if card.picture.there and card.asked == asked:
                former.accept(index)  # ty: ignore[missing-union-attribute]
                cards[index] = dataclasses.replace(
                    card,
                    named=request.labelled(index) if taken else card.named,
                    live=False,
                    changed=0,
                    ready=0,
                )
                if index not in taken:
                    strips[index] = Request(
                        tuple(None if each.picture else each.asked for each in there.variants)
                    )
            elif asked:
                cards[index] = dataclasses.replace(
                    BLANK[index], before=dataclasses.replace(card, ready=0)
                )
        if not taken and all(cards[index].picture for index in request.indices()):
            return None
        run = Run(self.backend, request, cards, **whose).begin(live=live)
        for index, lacking in strips.items():
            if lacking.indices():
                with suppress(RequestError):  # then the strip has what had come
                    run.draw_strip(index, lacking)
        return self._add(run)

    def swap(self, former: Run, one: int, other: int) -> Run | None:
        """Return a run with the pictures of one that draws nothing, of which two change places.

        Returns None if there is no picture.
        """
        there = [card.finished for card in former.cards]
        there = [card if card and card.picture.there else None for card in there]
        there[one], there[other] = there[other], there[one]
        cards = [
            dataclasses.replace(card, index=index, before=None) if card else BLANK[index]
            for index, card in enumerate(there)
        ]
        return self.start(
            Request(tuple(card.asked for card in cards)),
            former=former,
            taken={card.index: card for card in cards if card.picture},
            browser=former.browser,
            address=former.address,
            seed=former.seed,
        )

    @staticmethod
    def to_draw(
        request: Request,
        former: Run | None = None,
        keep: Collection[int] = (),
        anew: Collection[int] = (),
    ) -> list[Picture]:
        """Return the pictures that `start` would draw, of a request that can be served.

        Args:
            request: to be drawn.
            former: as `start` takes it.
            keep: as `start` takes it.
            anew: indices whose seed is yet to be drawn.
        """

        def is_there(index: int) -> bool:
            card = former.cards[index].finished if former else None
            return bool(
                card
                and card.picture.there
                and (index in keep or (index not in anew and card.asked == request.picture(index)))
            )

        return [request.picture(index) for index in request.indices() if not is_there(index)]

    def gather(self, request: Request, browser: str, address: str) -> Run | None:
        """Return a finished run of the pictures that this browser has drawn of a request.

        Returns None if none of them is there any more, or the request cannot be served.
        """
        catalog = self.backend.engine.catalog
        request = request.with_known_models(catalog.models())
        try:
            for index in request.indices():
                catalog.check(request.picture(index))
        except RequestError:
            return None

        def drawn(picture: Picture) -> Picture | None:
            try:
                return self.backend.engine.as_drawn(Request((picture,))).picture(0)
            except RequestError:  # its style is no longer in the file, for one
                return None

        there = {
            shown: card
            for run in self._all()
            if run.browser == browser
            for card in filter(None, [card.finished for card in run.cards])
            if card.picture.there and (shown := drawn(card.asked))
        }
        found = {
            index: there[picture]
            for index in request.indices()
            if (picture := drawn(request.picture(index))) in there
        }
        return self._of(found, request, browser, address)

    def bring_out(self, entries: Sequence[HistoryEntry], browser: str, address: str) -> Run | None:
        """Return a finished run of pictures that this browser's history keeps.

        Returns None if none of them is there any more. Their model need not be.
        """
        latest = {each.index: each for each in entries if each.index in range(len(BLANK))}
        found = {}
        for entry in latest.values():
            with suppress(OSError, SyntaxError):  # the latter is Pillow's for some broken PNGs
                file = self.backend.files.add_kept(entry.picture, entry.file, whose=browser)
                found[entry.index] = Card(entry.index, state="done", picture=file, kept=entry.id)
        return self._of(found, request_of(entries), browser, address)

    def _of(
        self, found: Mapping[int, Card], request: Request, browser: str, address: str
    ) -> Run | None:
        """Return a finished run of cards that have a request's pictures; None if there are none."""
        if not found:
            return None
        request = Request(
            tuple(
                picture if index in found else None
                for index, picture in enumerate(request.pictures)
            )
        )
        cards = [
            dataclasses.replace(
                found[index],
                index=index,
                before=None,
                ready=0,
                asked=request.picture(index),
                named=request.labelled(index),
            )
            if index in found
            else BLANK[index]
            for index in range(len(BLANK))
        ]
        run = Run(self.backend, request, cards, browser=browser, address=address)
        return self._add(run.begin())

    def values_here(self, request: Request, browser: str) -> tuple[dict[str, Any], list[Sentence]]:
        """Return the values of any server's request as far as it can be made here.

        The sentences beside them say what is different here.
        """
        catalog, said = self.backend.engine.catalog, []
        pictures = [*filter(None, request.pictures)]
        if missing := {picture.model for picture in pictures} - {"", *catalog.models()}:
            said.append(Sentence("It was drawn by {models}, which is not here.", models=[*missing]))
        request = request.with_known_models(catalog.models())
        if missing := {picture.style for picture in pictures} - {"", *catalog.styles.templates()}:
            said.append(
                Sentence(
                    "It was drawn in the style {styles}, which is not here.", styles=[*missing]
                )
            )
            request = Request(
                tuple(
                    picture
                    and dataclasses.replace(
                        picture, style="" if picture.style in missing else picture.style
                    )
                    for picture in request.pictures
                )
            )
        if any(picture.share for picture in pictures):
            said.append(Sentence("It lies on the way to another prompt or seed, which has no box."))
        if request.inputs() - self.backend.inputs.of(browser).keys():
            request = request.without_inputs()
            said.append(Sentence("What it was made from is no longer on this server."))
        here, there = catalog.defaults(request.common.model), request.common
        # What a box began from is no setting for all: prompts to come would begin from it too, of
        # which nothing would be seen in their boxes.
        values = request.values(request.common_without_inputs)
        try:  # nothing but the size: what else is refused is told when it is asked for
            catalog.check(
                dataclasses.replace(
                    there, model=here.model, style="", control_image="", reference=""
                )
            )
        except RequestError:
            values |= {"width": here.width, "height": here.height}
            said.append(
                Sentence(
                    "It was made at {width}×{height}; here pictures are "
                    "{here_width}×{here_height}.",
                    width=there.width,
                    height=there.height,
                    here_width=here.width,
                    here_height=here.height,
                )
            )
        return values, said

    def _add(self, run: Run) -> Run:
        with self._lock:
            self._runs[run.key] = run
            self._forget()
        return run

    def find(self, key: object) -> Run | None:
        """Return the run with this key, if it is still known."""
        return self._runs.get(key) if isinstance(key, str) else None

    def bring_back(self, key: object) -> Run | None:
        """Return the run with this key as its browser's latest, which a reload shows again."""
        with self._lock:
            run = self.find(key)
            if run:
                self._runs.move_to_end(run.key)
        return run

    async def stream(self, run: Run, session: str, seen: int = 0) -> AsyncIterator[Snapshot]:
        """Stream a run to a session as `Run.stream` does, and end the session's other streams.

        Runs that lose their last subscriber by that are stopped.
        """
        for other in self._all():
            if other is not run and other.is_streamed_to(session):
                other.unsubscribe(session)
                other.stop_if_unwatched()
        async for snapshot in run.stream(session, seen):
            yield snapshot

    def latest(self, browser: str) -> Run | None:
        """Return the run that this browser began or went back to last, if its files are there."""
        run = next((run for run in reversed(self._all()) if run.browser == browser), None)
        return run if run and time.time() - run.begun < KEEP_SECONDS else None

    def restore(self, browser: str) -> int:
        """Restore pictures by the history's `restore`, and the cards that had lost them."""
        history = self.backend.history
        assert history is not None
        count = history.restore(browser)
        for card in [
            card.finished for run in self._all() if run.browser == browser for card in run.cards
        ]:
            if card and card.kept and not card.picture.there:
                file = history.picture(browser, card.kept)
                with suppress(OSError):  # a full disk, say: then it is in the history alone
                    if file:
                        self.backend.files.bring_back(card.picture, file)
        return count

    def unsubscribe(self, session: str) -> None:
        """End the streams of a session that is gone."""
        for run in self._all():
            run.unsubscribe(session)

    def _all(self) -> list[Run]:
        with self._lock:
            return [*self._runs.values()]

    def _forget(self) -> None:
        """Forget runs beyond MAX_KEPT, of the network that has most.

        Those that no browser comes back to go first, then the oldest.
        """
        latest = {run.browser: run for run in self._runs.values()}
        over = [run for run in self._runs.values() if run.over]
        while over and len(self._runs) > MAX_KEPT:
            count = Counter(run.address for run in over)
            run = max(over, key=lambda run: (count[run.address], run is not latest[run.browser]))
            over.remove(run)
            del self._runs[run.key]
