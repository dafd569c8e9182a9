"""Whose turn it is on the devices."""

import math
from collections.abc import Mapping

HEAD_START = 30.0  # seconds of the devices by which small pictures go before others, at most


class FairShare:
    """Counts what clients have had of the devices, and says whose turn it is.

    Fair queueing by virtual finish times (Demers, Keshav and Shenker 1989): first comes the client
    who would be the first to have a picture done if all were served alike, so a small picture does
    not wait for a large one. Virtual time passes by the share of each of the active clients in what
    is drawn; a newcomer starts there or where the last of the others is, so nobody saves up turns
    while away. Whoever only waits falls so far behind it that all newcomers come later.
    """

    def __init__(self):
        """Begins with no clients."""
        self._time = 0.0
        self._used: dict[str, float] = {}
        self._active: set[str] = set()

    def join(self, client: str) -> None:
        """A client asks for pictures who has none."""
        last = min(map(self.used, self._active), default=self._time)
        start = max(min(last, self._time), self._time - HEAD_START)
        self._used[client] = max(self._used.get(client, -math.inf), start)
        self._active.add(client)

    def leave(self, client: str) -> None:
        """Nothing of the client's is left to be drawn."""
        self._active.discard(client)
        if not self._active:
            self._used.clear()

    def used(self, client: str) -> float:
        """What this active client has had, in virtual time."""
        return max(self._used[client], self._time - 2 * HEAD_START)

    def turn(self, client: str, seconds: float) -> float:
        """The least of these goes first; `seconds` are those of the client's next picture."""
        return self.used(client) + min(seconds, HEAD_START)

    def charge(self, seconds: Mapping[str, float]) -> None:
        """Takes down what a plan took, by the client for whom it was."""
        self._time += sum(seconds.values()) / max(1, len(self._active))
        for client, spent in seconds.items():
            if client in self._active:
                self._used[client] = self.used(client) + spent
        for client, used in list(self._used.items()):
            if client not in self._active and used <= self._time - HEAD_START:
                del self._used[client]
