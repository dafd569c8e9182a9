"""Jobs whose events are made up."""

import asyncio
import threading
from collections.abc import AsyncIterator


class BlockingEvents:
    """Jobs that have `events`, which may block: a thread of their own waits for them."""

    async def events_async(self) -> AsyncIterator:
        loop, there = asyncio.get_running_loop(), asyncio.Queue()

        def wait():
            for event in self.events():
                loop.call_soon_threadsafe(there.put_nowait, event)
            loop.call_soon_threadsafe(there.put_nowait, None)

        threading.Thread(target=wait, daemon=True).start()
        while (event := await there.get()) is not None:
            yield event


class FakeJob(BlockingEvents):
    """A job whose events have already happened."""

    def __init__(self, *events):
        self._events = events

    def events(self):
        return iter(self._events)

    def cancel(self, index=None):
        pass
