"""The history on the page: what this browser has made, run by run, each in the gallery's order."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from sd_tpu.language import Language
from sd_tpu.page.parts import part
from sd_tpu.pictures.history import Entry, History
from sd_tpu.request import Request
from sd_tpu.settings import MAX_PROMPTS

RUNS = 6  # on a page of it; earlier ones come below
MAX_PAGES = 1000


def contents(history: History, owner: str, look: Mapping[str, Any], language: Language) -> str:
    """The newest runs, as many `pages` of them as are asked for: with all their pictures, or with
    those that are `favourites` or have the `words` in their prompts."""
    only, said = bool(look.get("favourites")), str(look.get("words") or "")
    limit = RUNS * max(1, min(int(look.get("pages") or 1), MAX_PAGES))
    entries = history.entries(owner, runs=limit + 1, favourites_only=only, words=said)
    runs = [[*of] for _, of in groupby(entries, attrgetter("run"))]
    shown = [(request_of(run), run) for run in runs[:limit]]
    return part("history", language, shown, len(runs) > limit, only, said)


def request_of(entries: Sequence[Entry]) -> Request:
    """What makes a run again: where a card was drawn again, what was there last."""
    latest = {entry.place: entry.picture for entry in entries if 0 <= entry.place < MAX_PROMPTS}
    return Request(tuple(map(latest.get, range(max(latest) + 1))))
