"""Requests for tests that need no model, and what a run tells of them."""

from collections.abc import Iterator

from anyio.from_thread import start_blocking_portal

from sd_tpu.gallery.run import Run, Snapshot
from sd_tpu.request import Request
from sd_tpu.settings import Picture


def make_request(
    prompts: list[str] | tuple[str, ...],
    *,
    height: int = 512,
    width: int = 512,
    model: str = "m",
    **values,
) -> Request:
    """Return a request to a model that has the table's defaults and makes this size."""
    return Request.check(
        {"prompts": prompts, **values}, Picture(model=model, height=height, width=width)
    )


def following(run: Run, session: str, seen: int = 0) -> Iterator[Snapshot]:
    """Stream a run to a session on an event loop of its own: Playwright's runs in this thread."""
    with start_blocking_portal() as portal:
        told = portal.call(run.stream, session, seen)
        try:
            while snapshot := portal.call(anext, told, None):
                yield snapshot
        finally:
            portal.call(told.aclose)
