"""Actions that draw."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from sd_tpu.gallery.run import Card, Run
from sd_tpu.gallery.uploads import SIDE
from sd_tpu.page import form
from sd_tpu.page.answers import GONE, Answers, named
from sd_tpu.page.compare import comparison, read_comparison
from sd_tpu.page.events import ActionRequest, finish
from sd_tpu.pictures.inputs import Input, extension
from sd_tpu.request import LARGER, NOT_YET, Request, extended, for_all, journey, larger, varied
from sd_tpu.sentence import Sentence
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.client import EngineClient
from sd_tpu.settings import (
    MAX_PROMPTS,
    MAX_SEED,
    RANDOM,
    UPLOADS,
    Picture,
    RequestError,
    drawn_seed,
    short_seed,
)

VARIANTS = 4  # under a card
MAX_SECONDS = 3.0  # that a picture of Live may take: who waits longer has lost the thread


class DrawingActions(Answers):
    """Actions that draw, each of which answers with its run."""

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
                return answer | {**named(run), "news": ""} | self.refuse(error, asked)
            begun += VARIANTS
        return answer | _making(run, begun, asked)

    def _do_choose(self, asked: ActionRequest) -> dict[str, Any]:
        """Take a variant of a card's picture into the card and its settings into its box, or take
        the variants away."""
        run, index, number = self._shown(asked), asked.index, asked.data["variant"]
        if number is None:
            run.close_strip(index)
            return named(run)
        variants = {each.index: each for each in run.cards[index].variants if each.picture}
        if not (variant := variants.get(number)):  # one has been taken already
            return named(run)
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
        return named(there) | self._filled_with(
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
            answer = named(self.runs.swap(run, *places))
        news = Sentence("Moved to place {number}.", number=places[1] + 1)
        filled = form.swapped(boxes, *places)
        return answer | {"filled": filled, "news": asked.language.translate(news)}

    def _do_finish(self, asked: ActionRequest) -> dict[str, Any]:
        """Draw drafts again, finely and from the same noise, and have their boxes ask for that."""
        cards = [self._card(asked, index) for index in asked.indices]
        anew = {card.index: finish(card, self.engine.catalog) for card in cards}
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
        return named(run)

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
            answer = Sentence("These pictures are here already: choose a new seed to draw others.")
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
            return named(run) if run.redraw(asked.index, picture, live=live) else {}
        if not picture:
            return {}
        return named(
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
        return named(run)

    def _do_stop(self, asked: ActionRequest) -> dict[str, Any]:
        if run := self._run(asked):
            run.stop()
        return {}


def _making(run: Run, count: int, asked: ActionRequest) -> dict[str, Any]:
    """Return a run as `named`, and the news that so many pictures are on their way."""
    pictures = Sentence("1 picture") if count == 1 else Sentence("{count} pictures", count=count)
    return {**named(run), "news": asked.language.say("Making {count}.", count=pictures)}


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
