"""Orders for hosts that draw, and the choice of a host; knows no Ray."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Self

from sd_tpu.serving.plan import Weights
from sd_tpu.serving.resolve import ResolvedRequest

SLACK = 400  # rows by which a host may be busier for the sake of what it holds: 8 pictures of 50


@dataclasses.dataclass(frozen=True)
class Order:
    """A resolved request on its way to a host: plain data.

    Attributes:
        key: what it is called when it is cancelled.
        resolved: what to draw.
        client: for whom.
        address: from where that was asked.
        previews: whether they are wanted.
    """

    key: str
    resolved: ResolvedRequest
    client: str
    address: str
    previews: bool

    @property
    def rows(self) -> int:
        """How much there is to do, about: the steps of all its pictures."""
        return sum(each.picture.steps for each in self.resolved.pictures.values())

    def without(self, index: int) -> Self:
        """Return the rest of the order once the picture at `index` is there."""
        return dataclasses.replace(self, resolved=self.resolved.without(index))


@dataclasses.dataclass(frozen=True)
class Host:
    """A host's state that decides about orders.

    It is the number of rows that it has been sent and not drawn, the weights that it holds, and
    whether it drew last for the client who asks.
    """

    rows: int
    held: Collection[Weights] = ()
    last: bool = False


def ranked(hosts: Mapping[Any, Host], weights: Collection[Weights]) -> list[Any]:
    """Return the hosts' names, the best for an order with these weights first.

    A client keeps its host, where its pictures have fair turns and its start pictures' encoders are
    compiled; others go where their weights lie; else to whoever has least to do. Hosts that have
    SLACK more to do than the least busy one come after the others.
    """
    least = min((host.rows for host in hosts.values()), default=0)

    def key(name: Any) -> tuple:
        host = hosts[name]
        return (host.rows > least + SLACK, not host.last, len({*weights} - {*host.held}), host.rows)

    return sorted(hosts, key=key)
