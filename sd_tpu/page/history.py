"""The history on the page: what this browser has made, run by run, each in the gallery's order."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Any

from sd_tpu.language import Language
from sd_tpu.page.files import thumbnail
from sd_tpu.page.parts import all_words, part, words
from sd_tpu.pictures.history import Entry, History
from sd_tpu.request import Request
from sd_tpu.settings import MAX_PROMPTS

RUNS = 6  # on a page of it; earlier ones come below
MAX_PAGES = 1000


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A picture of a run: `source` shows it, `apart` is what sets it apart from the others there,
    `told` how it was made."""

    entry: Entry
    source: str
    apart: str
    told: str


@dataclasses.dataclass(frozen=True)
class _Run:
    """Pictures that were made together: `prompt` is theirs if they have only one, `told` what most
    of them share."""

    name: str
    made_at: datetime
    prompt: str
    told: str
    kept: list[_Kept]


def contents(history: History, owner: str, look: Mapping[str, Any], language: Language) -> str:
    """The newest runs, as many `pages` of them as are asked for: with all their pictures, or with
    those that are `favourites` or have the `words` in their prompts."""
    only, said = bool(look.get("favourites")), str(look.get("words") or "")
    limit = RUNS * max(1, min(int(look.get("pages") or 1), MAX_PAGES))
    entries = history.entries(owner, runs=limit + 1, favourites_only=only, words=said)
    runs = [_run(list(of), language) for _, of in groupby(entries, attrgetter("run"))]
    return part("history", language, runs[:limit], len(runs) > limit, only, said)


def request_of(entries: Sequence[Entry]) -> Request:
    """What makes a run again: where a card was drawn again, what was there last."""
    latest = {entry.place: entry.picture for entry in entries if 0 <= entry.place < MAX_PROMPTS}
    return Request(tuple(map(latest.get, range(max(latest) + 1))))


def _run(entries: list[Entry], language: Language) -> _Run:
    request, prompts = request_of(entries), {entry.picture.prompt for entry in entries}
    kept = []
    for entry in entries:
        apart = request.replaced(entry.place, entry.picture).overrides(entry.place)
        kept.append(_Kept(entry, _source(entry), words(language, apart),
                          all_words(entry.picture, language)))
    return _Run(entries[0].run, datetime.fromtimestamp(entries[0].made_at, UTC),
                prompts.pop() if len(prompts) == 1 and len(entries) > 1 else "",
                all_words(request.common, language), kept)


def _source(entry: Entry) -> str:
    """The picture inside the page; nothing if its file is gone or broken, so that only its prompt
    is shown."""
    try:
        return thumbnail(entry.file)
    except (OSError, SyntaxError):  # the latter is Pillow's for some broken PNGs
        return ""
