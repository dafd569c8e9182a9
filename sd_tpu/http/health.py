"""Whether the server lives and draws, and what it has done, for those who watch over it."""

from collections.abc import Iterator

import fastapi
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sd_tpu.http.access import Access
from sd_tpu.serving.client import EngineClient


def make_router(engine: EngineClient, access: Access) -> fastapi.APIRouter:
    """Return the routes for an engine; `access` admits readers of its figures."""
    router, registry = fastapi.APIRouter(), CollectorRegistry()
    registry.register(_Figures(engine))
    ProcessCollector(registry=registry)

    @router.get("/healthz")
    async def healthz() -> PlainTextResponse:
        """Answer 200 as long as the server answers."""
        return PlainTextResponse("The server is here.\n")

    @router.get("/readyz")
    async def readyz() -> PlainTextResponse:
        """Answer 200 as long as it draws; 503 while it compiles, and once it is about to end."""
        if engine.status().taking:
            return PlainTextResponse("The server draws.\n")
        return PlainTextResponse("The server does not draw now.\n", 503)

    @router.get("/metrics", dependencies=[fastapi.Depends(access.admit)])
    def metrics() -> Response:
        """Return the figures as Prometheus collects them."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


class _Figures(Collector):
    """An engine's, as they are when somebody asks."""

    def __init__(self, engine: EngineClient):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        status = self._engine.status()
        tally = status.tally
        yield GaugeMetricFamily("sd_tpu_devices", "Devices that draw.", len(status.devices))
        yield GaugeMetricFamily("sd_tpu_jobs", "Requests that are not over.", status.jobs)
        yield GaugeMetricFamily(
            "sd_tpu_pictures_waiting", "Pictures without a slot.", status.waiting
        )
        yield GaugeMetricFamily(
            "sd_tpu_slots_occupied", "Pictures that are drawn.", status.occupied
        )
        yield CounterMetricFamily("sd_tpu_pictures", "Pictures that were finished.", tally.pictures)
        yield CounterMetricFamily(
            "sd_tpu_rows", "Steps of slots, those of forecasts too.", tally.rows
        )
        yield CounterMetricFamily(
            "sd_tpu_refusals", "Requests for which there was no room.", tally.refused
        )
        ended = CounterMetricFamily(
            "sd_tpu_jobs_ended", "Requests that are over, by how.", labels=["how"]
        )
        for how in ("done", "cancelled", "failed", "interrupted"):
            ended.add_metric([how], tally.ended[how])
        yield ended
        seconds = CounterMetricFamily(
            "sd_tpu_seconds", "Of the engine's time, by what it did.", labels=["kind"]
        )
        for kind in ("encode", "advance", "decode", "preview", "train", "compile", "load"):
            seconds.add_metric([kind], tally.seconds[kind])
        yield seconds
