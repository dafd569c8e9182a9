"""How Ray Serve sends orders to hosts, and how many hosts it keeps."""

import math
from collections import Counter, OrderedDict

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from deploy.orders import Host, Order, ranked

MAX_CLIENTS = 4096  # whose last host is remembered


class ByWeights(RequestRouter):
    """Ray Serve's router for handles of `Drawing`: sends orders as `ranked` says."""

    def initialize_state(self) -> None:  # ty: ignore[incompatible-method-override]
        """Begin with nothing sent."""
        self._sent: dict[str, tuple[ReplicaID, int]] = {}  # rows by request, until it is over
        self._last: OrderedDict[str, ReplicaID] = OrderedDict()  # by client

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best first; requests that are no orders go to any."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where none takes it
        order = _order(pending_request)
        if order is None:
            return [candidate_replicas]
        rows = Counter()
        for replica_id, sent in self._sent.values():
            rows[replica_id] += sent
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        last = self._last.get(order.client) if order.client else None
        hosts = {
            name: Host(rows[name], replica.routing_stats.get("held", ()), name == last)
            for name, replica in replicas.items()
        }
        return [[replicas[name]] for name in ranked(hosts, order.resolved.weights)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Record where an order went."""
        order = _order(pending_request)
        if order is None:
            return
        self._sent[pending_request.metadata.internal_request_id] = replica_id, order.rows
        self._last[order.client] = replica_id
        self._last.move_to_end(order.client)
        if len(self._last) > MAX_CLIENTS:
            self._last.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that an order is over."""
        self._sent.pop(internal_request_id, None)


def _order(pending: PendingRequest) -> Order | None:
    return next((each for each in pending.args if isinstance(each, Order)), None)


class ByRows:
    """Ray Serve's autoscaling policy: as many hosts as the rows that are left to be drawn are
    worth. Bounds and delays are Serve's, as the deployment's `autoscaling_config` has them."""

    def __init__(self, rows: float):
        """Take the number of rows that one host may have before it."""
        self._rows = rows

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict]:
        """Return how many hosts there should be; no state."""
        left = sum((context.aggregated_metrics or {}).get("rows", {}).values())
        return math.ceil(left / self._rows), {}
