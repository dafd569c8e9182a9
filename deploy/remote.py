"""An engine whose devices are on other hosts, to which it sends orders.

It passes on the events that they answer.
"""

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deploy.orders import Order
from sd_tpu.families.adapters import Adapters
from sd_tpu.sentence import Sentence
from sd_tpu.serving import journal
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.client import ABANDONED_SECONDS, Closing, EngineClient, Status, open_models
from sd_tpu.serving.job import Cancelled, Done, End, Event, Failed, ImageReady, Interrupted, Job
from sd_tpu.serving.resolve import ResolvedRequest
from sd_tpu.serving.tally import Tally
from sd_tpu.settings import Picture, RequestError

log = logging.getLogger(__name__)

STATUS_SECONDS = 2.0  # between two looks at the hosts
ANSWER_SECONDS = 5.0  # that a host may take to say how it is
ESTIMATE_SECONDS = 10.0  # for which an estimate holds
MOST_ESTIMATES = 256


class RemoteEngine(EngineClient):
    """Engine whose pictures are made by the replicas of `Drawing`.

    One event loop takes their answers to all orders. Where a replica is gone, another one makes the
    pictures that it has not finished: they are the same wherever they are drawn.
    """

    def __init__(
        self, replicas: DeploymentHandle, status: Status, catalog: Catalog, adapters: Adapters
    ):
        """Begin without orders; `connect` has them sent.

        Args:
            replicas: a handle of `Drawing`.
            status: of one of them.
            catalog: the models, as the replicas have them.
            adapters: what prompts may use beside them.
        """
        super().__init__(catalog, adapters)
        self._replicas = replicas.options(stream=True)
        self._single = replicas
        self._statuses = [status]
        self._jobs: dict[int, Job] = {}
        self._keys: dict[int, str] = {}
        self._orders: dict[str, Order | None] = {}  # what is left of them; None if given up
        self._estimates: dict[tuple[Picture, ...], tuple[float, float | None]] = {}
        self._lock = threading.Condition()
        self._number = 0
        self._closing = threading.Event()
        # For what may wait for a host, and is asked for where nothing may wait.
        self._pool = ThreadPoolExecutor(thread_name_prefix="cancel")
        self._loop = asyncio.new_event_loop()
        self._passing: dict[int, Future] = {}  # kept: a loop holds what it runs by weak references

    @classmethod
    def connect(cls, replicas: DeploymentHandle, options: Mapping[str, Any]) -> Self:
        """Wait until a replica is there, and open the models without their parameters.

        Args:
            replicas: a handle of `Drawing`.
            options: of the models, as the replicas have them; all hosts find the same files.

        Raises:
            CheckpointError: as `open_models`, like ValueError.
        """
        status: Status = replicas.status.remote().result()
        asked = {**options, "dtype": status.dtype, "tensor_parallel": status.tensor_parallel}
        engine = cls(replicas, status, *open_models(**asked))  # ty: ignore[invalid-argument-type]
        for name, run in (("orders", engine._loop.run_forever), ("watch", engine._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()
        engine.ready.set()
        return engine

    def queue(
        self,
        resolved: ResolvedRequest,
        *,
        previews: bool = True,
        client: str = "",
        address: str = "",
    ) -> Job:
        """Send a resolved request to a host, as `EngineClient.queue`."""
        if self._closing.is_set():
            raise Closing("The server is shutting down.")
        order = Order(uuid.uuid4().hex, resolved, client, address, previews)
        answers = self._answers(order)
        if isinstance(refusal := self._run(_first(answers)).result(), RequestError):
            del self._orders[order.key]
            raise refusal
        with self._lock:
            self._number += 1
            job = self._jobs[self._number] = Job(
                resolved.request, self._number, client, self._cancel, address=address
            )
            self._keys[job.number] = order.key
            self._passing[job.number] = self._run(self._pass_on(job, answers))
        return job

    def seconds(self, *pictures: Picture) -> float | None:
        """Estimate the seconds of pictures by any host, as `EngineClient.seconds`.

        What a host has said lately of the same pictures still holds.
        """
        now = time.monotonic()
        said, seconds = self._estimates.get(pictures, (-math.inf, None))
        if now - said < ESTIMATE_SECONDS:
            return seconds
        try:
            seconds = self._single.seconds.remote(*pictures).result(timeout_s=ANSWER_SECONDS)
        except (RayError, RayServeException, TimeoutError):
            return None
        if len(self._estimates) >= MOST_ESTIMATES:
            self._estimates.clear()
        self._estimates[pictures] = now, seconds
        return seconds

    def status(self) -> Status:
        """Return the load of all hosts together, as they were STATUS_SECONDS ago at most.

        The work of a host that is gone is not counted any more.
        """
        hosts, tally = self._statuses, Tally()
        for host in hosts:
            tally.pictures += host.tally.pictures
            tally.rows += host.tally.rows
            tally.refused += host.tally.refused
            tally.ended += host.tally.ended
            tally.seconds += host.tally.seconds
        return Status(
            taking=any(host.taking for host in hosts) and not self._closing.is_set(),
            devices=tuple(device for host in hosts for device in host.devices),
            dtype=str(self.checkpoint.model.dtype),
            tensor_parallel=max((host.tensor_parallel for host in hosts), default=1),
            jobs=len(self._jobs),
            waiting=sum(host.waiting for host in hosts),
            occupied=sum(host.occupied for host in hosts),
            rows=sum(host.rows for host in hosts),
            held=frozenset().union(*(host.held for host in hosts)),
            tally=tally,
        )

    def drain(self, seconds: float) -> bool:
        """Wait for all jobs and take no others, as `EngineClient.drain`."""
        self._closing.set()
        with self._lock:
            done = self._lock.wait_for(lambda: not self._jobs, seconds)
            for job in self._jobs.values():
                job.put(Interrupted())
            return done

    def close(self) -> None:
        """Cancel everything, as `EngineClient.close`; the hosts are Serve's to end."""
        self._closing.set()
        for job in list(self._jobs.values()):
            job.put(Interrupted())
            job.cancel()
        self._pool.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # --- orders ---------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _answers(self, order: Order) -> AsyncIterator[RequestError | Event | None]:
        """Yield a host's answers to an order, first whether it takes it.

        A second host answers where the first is gone before it is done, or takes nothing new.
        """
        begun, taken, key = time.monotonic(), False, order.key
        self._orders[key] = order
        for _ in range(2):
            try:
                async for answer in self._replicas.draw.remote(self._orders[key]):  # ty: ignore[not-iterable]
                    match answer:
                        case Closing():
                            break  # it is about to end
                        case None if taken:
                            continue
                        case RequestError() if taken:
                            answer = Failed(answer.sentence)
                        case ImageReady(index):
                            self._strike(key, index)
                    taken = True
                    yield answer
                    if isinstance(answer, End | RequestError):
                        return
            except RayTaskError:  # a fault of ours, which another host would have as well
                log.exception("a host failed")
                break
            except (RayError, RayServeException):
                log.warning("a host is gone; what it has not drawn is asked for again")
            if taken and not (left := self._orders[key]):
                yield Cancelled()
                return
            if taken and not left.resolved.pictures:  # ty: ignore[missing-union-attribute]
                yield Done(time.monotonic() - begun)
                return
        failed = Sentence("The server failed; please try again.")
        yield Failed(failed) if taken else RequestError("{reason}", reason=failed)

    async def _pass_on(self, job: Job, answers: AsyncIterator[Any]) -> None:
        try:
            async for event in answers:
                job.put(event)
        except Exception:  # whoever waits is told
            log.exception("a job failed")
            job.put(Failed(Sentence("The server failed; please try again.")))
        journal.note(job)
        with self._lock:
            del self._jobs[job.number], self._orders[self._keys.pop(job.number)]
            del self._passing[job.number]
            self._lock.notify_all()

    def _cancel(self, number: int, index: int | None) -> None:
        job, key = self._jobs.get(number), self._keys.get(number)
        if job and key and job.end is None:
            self._strike(key, index)  # for another host, if this one dies before it answers
            self._pool.submit(self._all, "cancel", key, index)

    def _strike(self, key: str, index: int | None) -> None:
        """Remove a picture from the rest of an order, or all of them."""
        with self._lock:
            if order := self._orders.get(key):
                self._orders[key] = None if index is None else order.without(index)

    # --- hosts ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the hosts from time to time, and end the jobs of clients who have gone."""
        while not self._closing.wait(STATUS_SECONDS):
            self._statuses = [each for each in self._all("status") if isinstance(each, Status)]
            for job in list(self._jobs.values()):
                if job.client and job.idle_seconds() > ABANDONED_SECONDS:
                    job.cancel()

    def _all(self, method: str, *values: Any) -> list[Any]:
        """Return the answers of all hosts; errors for those that do not answer."""
        try:
            return self._single.broadcast(method, *values).results(
                timeout_s=ANSWER_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):  # there is none
            return []


async def _first(
    answers: AsyncIterator[RequestError | Event | None],
) -> RequestError | Event | None:
    return await anext(answers)
