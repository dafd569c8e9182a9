"""Fair shares of the devices for network addresses, and for clients within each."""

import math
from collections.abc import Mapping
from typing import NamedTuple

HEAD_START = 30.0  # seconds of the devices by which small pictures go before others, at most


class Account(NamedTuple):
    """A client at a network address; both are counted, as names cost nothing and addresses do."""

    address: str
    client: str


class FairShare:
    """Shares that clients have had of the devices, and whose turn it is.

    Fair queueing by virtual finish times (Demers, Keshav and Shenker 1989): first comes the client
    who would be the first to have a picture done if all were served alike, so a small picture does
    not wait for a large one. Virtual time passes by the share of each of the active clients in what
    is drawn; a newcomer starts there or where the last of the others is, so nobody saves up turns
    while away. Whoever only waits falls so far behind it that all newcomers come later.
    """

    def __init__(self):
        """Begin with no clients."""
        self._time = 0.0
        self._used: dict[str, float] = {}
        self._active: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether no client wants anything."""
        return not self._active

    def join(self, client: str) -> None:
        """Add a client who begins to ask for pictures."""
        last = min(map(self.used, self._active), default=self._time)
        start = max(min(last, self._time), self._time - HEAD_START)
        self._used[client] = max(self._used.get(client, -math.inf), start)
        self._active.add(client)

    def leave(self, client: str) -> None:
        """Remove a client of whom nothing is left to be drawn."""
        self._active.discard(client)
        if not self._active:
            self._used.clear()

    def used(self, client: str) -> float:
        """Return the virtual time that this active client has had."""
        return max(self._used[client], self._time - 2 * HEAD_START)

    def turn(self, client: str, seconds: float) -> float:
        """Return the client's rank, the least of which goes first.

        Args:
            client: an active one.
            seconds: those of the client's next picture.
        """
        return self.used(client) + min(seconds, HEAD_START)

    def charge(self, seconds: Mapping[str, float]) -> None:
        """Record the seconds that a plan took, by client."""
        self._time += sum(seconds.values()) / max(1, len(self._active))
        for client, spent in seconds.items():
            if client in self._active:
                self._used[client] = self.used(client) + spent
        for client, used in list(self._used.items()):
            if client not in self._active and used <= self._time - HEAD_START:
                del self._used[client]


class AddressShares:
    """Shares the devices fairly among addresses, and each address's share among its clients.

    Hierarchical fair queueing (Bennett and Zhang 1996): whoever draws names without end has no more
    of the devices than the one address that they come from.
    """

    def __init__(self):
        """Begin with no accounts."""
        self._addresses = FairShare()
        self._clients: dict[str, FairShare] = {}

    def join(self, account: Account) -> None:
        """Add an account that begins to ask for pictures; joining again changes nothing."""
        if account.address not in self._clients:
            self._addresses.join(account.address)
            self._clients[account.address] = FairShare()
        self._clients[account.address].join(account.client)

    def leave(self, account: Account) -> None:
        """Remove an account of which nothing is left to be drawn."""
        clients = self._clients[account.address]
        clients.leave(account.client)
        if clients.idle:
            self._addresses.leave(account.address)
            del self._clients[account.address]

    def used(self, account: Account) -> tuple[float, float]:
        """Return the virtual times of an active account's address, and of the account within it."""
        return (
            self._addresses.used(account.address),
            self._clients[account.address].used(account.client),
        )

    def turns(self, seconds: Mapping[Account, float]) -> dict[Account, tuple[float, float]]:
        """Return the ranks of active accounts, of which the least goes first.

        An address ranks by that client of it who is next.

        Args:
            seconds: those of each account's next picture.
        """
        of_client = {
            account: self._clients[account.address].turn(account.client, each)
            for account, each in seconds.items()
        }
        of_address: dict[str, float] = {}
        for account in sorted(of_client, key=of_client.__getitem__):
            of_address.setdefault(
                account.address, self._addresses.turn(account.address, seconds[account])
            )
        return {account: (of_address[account.address], turn) for account, turn in of_client.items()}

    def charge(self, seconds: Mapping[Account, float]) -> None:
        """Record the seconds that a plan took, by active account."""
        by_address: dict[str, dict[str, float]] = {}
        for account, spent in seconds.items():
            by_address.setdefault(account.address, {})[account.client] = spent
        self._addresses.charge({address: sum(of.values()) for address, of in by_address.items()})
        for address, of in by_address.items():
            self._clients[address].charge(of)
