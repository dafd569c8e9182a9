"""Has pictures drawn for handlers that run on an event loop, and hold no thread while they wait."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import fastapi
import numpy as np
import pydantic
from anyio.to_thread import run_sync

from sd_tpu.http.access import visitor_network
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.serving.client import Closing, EngineClient
from sd_tpu.serving.job import DrawingError, Event, Failed, Interrupted, Job
from sd_tpu.settings import shortened

NOTHING = (None, False, "", [], {})  # what changes no picture, whatever is called so
_FLAG = pydantic.TypeAdapter(bool)


def flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read a flag of a request, also where pydantic takes a text or a number for one.

    Raises:
        ParameterError: it is anything else.
    """
    value = given.get(name)
    try:
        return default if value is None else _FLAG.validate_python(value)
    except pydantic.ValidationError:
        raise ParameterError(
            "{name} should be true or false, not {value}.", name=name, value=shortened(value)
        ) from None


def refuse(names: Iterable[Any], of: str = "") -> None:
    """Raise ParameterError for what is asked for by these names, if there are any.

    Args:
        names: of what this server does not have.
        of: what they are, as ", of controlnet".
    """
    if asked := [shortened(name)[1:-1] for name in names]:
        raise ParameterError(
            "This server does not have{of}: {names}.", of=of, names=", ".join(asked)
        )


async def drawn(
    engine: EngineClient,
    request: Request,
    visitor: fastapi.Request,
    client: str,
    *,
    inputs: Iterable[Input] = (),
    previews: bool = False,
    begun: Callable[[Job], None] = lambda _: None,
) -> AsyncIterator[Event]:
    """Submit a request and yield its events, up to Done or Cancelled.

    The job is cancelled if whoever asked goes away.

    Args:
        engine: draws.
        request: to be drawn.
        visitor: waits for it.
        client: the name under which it takes its turn.
        inputs: the pictures that the request names.
        previews: whether previews are made.
        begun: called with the job.

    Raises:
        RequestError: as `EngineClient.submit`.
        DrawingError: the reason is the server's.
    """
    job = await run_sync(
        partial(
            engine.submit,
            request,
            previews=previews,
            client=client,
            address=visitor_network(visitor),
            inputs={each.name: each for each in inputs},
        )
    )
    begun(job)
    watch = asyncio.create_task(_cancel_if_gone(job, visitor))
    try:
        async for event in job.events_async():
            match event:
                case Interrupted(message):
                    raise Closing("{reason}", reason=message)
                case Failed(message):
                    raise DrawingError(message)
            yield event
    finally:
        watch.cancel()
        job.cancel()  # changes nothing once it is over


async def png_of(
    engine: EngineClient,
    pixels: np.ndarray,
    request: Request,
    index: int,
    first_size: tuple[int, int] | None = None,
) -> bytes:
    """Return the PNG file of the picture uint8 [H, W, 3] at `index` of a request.

    Args:
        engine: that drew it.
        pixels: of the picture.
        request: of the job.
        index: of the picture.
        first_size: as `to_png` takes it.
    """
    return await run_sync(
        partial(engine.to_png, pixels, request.only(index), first_size=first_size)
    )


async def _cancel_if_gone(job: Job, visitor: fastapi.Request) -> None:
    while (await visitor.receive())["type"] != "http.disconnect":
        pass
    job.cancel()
