"""Turns of the page's own work, which no scheduler counts: files that are read, made and packed."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from sd_tpu.serving.scheduler import Busy

RETRY_SECONDS = 10  # after which somebody who asked for too much may ask again


class Turns:
    """Threads that call functions, a few at a time, by turns of those who ask.

    They serve one event loop.
    """

    def __init__(self, *, parallel: int, most: int):
        """Begin with nothing to do.

        Args:
            parallel: calls at a time.
            most: calls of one who asks, that wait or go on.
        """
        self._free, self._most = parallel, most
        self._threads = CapacityLimiter(parallel)  # or the page's other work would lack some
        self._asked: Counter[str] = Counter()  # calls that are not over
        self._waiting: OrderedDict[str, deque[asyncio.Future]] = OrderedDict()

    async def call(self, whose: str, function: Callable, *values: Any) -> Any:
        """Call a function when it is somebody's turn; return its result.

        Raises:
            Busy: somebody has asked for too much at once.
        """
        if self._asked[whose] >= self._most:
            raise Busy(
                "Too much is asked for from your network; please try again in a minute.",
                RETRY_SECONDS,
            )
        self._asked[whose] += 1
        try:
            await self._turn(whose)
            try:
                return await run_sync(function, *values, limiter=self._threads)
            finally:
                self._pass_on()
        finally:
            self._asked[whose] -= 1
            if not self._asked[whose]:
                del self._asked[whose]

    async def _turn(self, whose: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it had just come
            raise

    def _pass_on(self) -> None:
        """Give a turn to whoever has waited longest since the last one."""
        while self._waiting:
            whose, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[whose] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
