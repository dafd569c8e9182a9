"""A host that draws: an engine with the host's whole mesh, as a deployment of Ray Serve."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from deploy.orders import Order
from sd_tpu.cli.devices import find_devices
from sd_tpu.serving.client import Status
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Event, Job
from sd_tpu.serving.resolve import ResolvedRequest
from sd_tpu.settings import Picture, RequestError


class Drawing:
    """An engine that takes orders; Serve runs one on each host."""

    def __init__(self, options: dict[str, Any], devices: int | None):
        """Load the model and compile it; only then Serve sends orders.

        Args:
            options: as `Engine.open` takes them.
            devices: how many of the host's devices are used, None for all; a CPU counts as so many.

        Raises:
            ValueError: the model cannot be loaded, or there are too few devices.
            RuntimeError: it cannot be compiled.
        """
        find_devices(devices)
        self._engine = Engine.open(devices=devices, **options)
        self._jobs: dict[str, Job] = {}
        self._engine.ready.wait()
        if self._engine.failure:
            raise RuntimeError(self._engine.failure)

    async def draw(self, order: Order) -> AsyncIterator[RequestError | Event | None]:
        """Yield why an order is refused, or else None and then its events.

        The order is given up when nobody listens any more.
        """
        try:
            job = await asyncio.to_thread(
                partial(
                    self._queue,
                    order.resolved,
                    previews=order.previews,
                    client=order.client,
                    address=order.address,
                )
            )
        except RequestError as error:
            yield error
            return
        self._jobs[order.key] = job
        try:
            yield None
            async for event in job.events_async():
                yield event
        finally:
            del self._jobs[order.key]
            job.cancel()  # changes nothing once it is over

    def _queue(self, resolved: ResolvedRequest, **options: Any) -> Job:
        return self._engine.queue(self._engine.resolver.here(resolved), **options)

    def cancel(self, key: str, index: int | None) -> None:
        """Stop an order, or only its picture at `index`, if it is drawn here."""
        if job := self._jobs.get(key):
            job.cancel(index)

    def seconds(self, *pictures: Picture) -> float | None:
        """Estimate the seconds of pictures, as `Engine.seconds`."""
        return self._engine.seconds(*pictures)

    def status(self) -> Status:
        """Return the load, as `Engine.status`."""
        return self._engine.status()

    # --- what Ray Serve asks for ----------------------------------------------------------------

    def check_health(self) -> None:
        """Raise RuntimeError when nothing is drawn any more: Serve begins anew then."""
        if not self._engine.status().taking:
            raise RuntimeError("The engine has ended.")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the facts about this host for `ByWeights`."""
        return {"held": self._engine.status().held}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures for `ByRows`."""
        return {"rows": float(self._engine.status().rows)}
