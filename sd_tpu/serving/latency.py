"""Estimates of how long things take: the only ones there are.

Measured are a row of a group of slots, decoding a picture, compiling a program and loading weights
onto a replica. All else follows from these and from the requests.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sd_tpu.runtime.slots import ALONE, FORECAST, GUIDED, lanes_of
from sd_tpu.serving.fairness import Account
from sd_tpu.serving.plan import Batch, Compiled, Program, Weights

CALL_SECONDS = 0.2  # goal for one call of `advance`, after which a cancellation takes effect


class BatchLatency:
    """Latencies of a batch on replicas that step `group` slots together, `guided` ones among them.

    `row_seconds` are those of an evaluation for such a group, `decode_seconds` those of a picture.
    A forecast row takes no time to speak of.
    """

    def __init__(self, group: int, guided: bool = True):
        """Begin without measurements."""
        self.is_measured = False
        self._group, self._lanes = group, lanes_of(group, guided)
        self.row_seconds = CALL_SECONDS
        self.decode_seconds = 0.0

    def record_compiled(self, compiled: Compiled) -> None:
        """Record the measurements made when the batch was compiled."""
        self.row_seconds, self.decode_seconds = compiled.row_seconds, compiled.decode_seconds
        self.is_measured = True

    def of_picture(self, kinds: np.ndarray) -> float:
        """Seconds of a picture whose rows are of these kinds [R] while no other is made."""
        return self.alone(self.evaluations(kinds))

    def alone(self, count: float) -> float:
        """Seconds of a picture with so many evaluations that share no group with others."""
        return float(count * self.row_seconds) + self.decode_seconds

    def in_crowd(self, lanes: int) -> float:
        """Return the seconds that `lanes` evaluations add to a replica's work, in full groups."""
        return self.alone(lanes / self._lanes)

    def evaluations(self, kinds: np.ndarray) -> int:
        """Return how often a replica evaluates the model for slots with rows of kinds [S, R].

        Kinds [R] are those of a single slot.
        """
        return int(self._rounds(np.atleast_2d(kinds)).sum())

    def next_rows(self, kinds: Sequence[np.ndarray]) -> tuple[int, int]:
        """Return the rows to take, at least one, so that a call lasts about CALL_SECONDS.

        Args:
            kinds: for each replica, those of its pictures' next R rows [S, R]; no picture ends
                before.

        Returns:
            The rows, and how often the replica with most to do then evaluates the model.
        """
        rounds = np.max([np.cumsum(self._rounds(of_replica)) for of_replica in kinds], axis=0)
        rows = max(1, int(np.sum(rounds * self.row_seconds <= CALL_SECONDS)))
        return rows, int(rounds[rows - 1])

    def record_rows(self, evaluations: int, seconds: float) -> None:
        """Record how long so many evaluations took.

        The mean with the former value is kept, as a single call may have been held up by something
        else.
        """
        if evaluations:
            self.row_seconds = (self.row_seconds + seconds / evaluations) / 2

    def _rounds(self, kinds: np.ndarray) -> np.ndarray:
        """Return how often a replica evaluates the model in each row: [R] of kinds [S, R].

        The packing is that of `advance_slots`.
        """
        alone, guided = (np.sum(kinds == kind, axis=0) for kind in (ALONE, GUIDED))
        return -(-guided // self._group) - (-alone // self._lanes)


class LatencyModel:
    """Latencies of every batch, and of loading weights."""

    def __init__(self):
        """Begin without measurements."""
        self._batches: dict[Batch, BatchLatency] = {}
        self._compile_seconds: dict[type[Program], float] = {}
        self._seconds_per_byte = 0.0

    def of(self, batch: Batch) -> BatchLatency:
        """Return the latencies of a batch."""
        if batch not in self._batches:
            self._batches[batch] = BatchLatency(batch.group, batch.guided)
        return self._batches[batch]

    def measured(self, batch: Batch) -> BatchLatency | None:
        """Return the latencies of a batch that was compiled, else None."""
        latency = self._batches.get(batch)
        return latency if latency and latency.is_measured else None

    def record_compiled(self, program: Program, result: Compiled) -> None:
        """Record what compiling a program took, and what a batch's programs take."""
        if isinstance(program, Batch):
            self.of(program).record_compiled(result)
        self._compile_seconds[type(program)] = result.seconds

    def compile_seconds(self, kind: type[Program] = Batch) -> float | None:
        """Seconds, by the last program of the kind that was compiled; None before any was."""
        return self._compile_seconds.get(kind)

    def record_loaded(self, weights: Weights, seconds: float) -> None:
        """Record the seconds of loading weights onto a replica.

        Weights on top of others are made from small files, which tells nothing about the rest.
        """
        if not weights.base:
            self._seconds_per_byte = seconds / max(weights.memory, 1)

    def load_seconds(self, weights: Weights) -> float:
        """Seconds until weights are on a replica, by the last that were brought."""
        return weights.memory * self._seconds_per_byte


def rows_left(kinds: np.ndarray) -> np.ndarray:
    """Count the evaluated rows among the last r rows of a picture of kinds [R]: [R + 1]."""
    return _summed_from_the_end(kinds != FORECAST)


def lanes_left(kinds: np.ndarray) -> np.ndarray:
    """Count the evaluations of the last r rows of a picture whose kinds are [R]: [R + 1].

    A guided row takes two.
    """
    return _summed_from_the_end((kinds == ALONE) + 2 * (kinds == GUIDED))


def _summed_from_the_end(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(rows[::-1])])


def in_turns(mine: float, account: Account, others: Mapping[Account, float]) -> float:
    """Seconds until an account has had `mine` while replicas are shared fairly: within its address
    with the clients there, then as one of the addresses. Nobody gets more than they want, nor more
    than `mine` before.

    Args:
        mine: seconds of the replicas.
        account: whose these are.
        others: how many the others want.
    """
    near = [wanted for other, wanted in others.items() if other.address == account.address]
    far: defaultdict[str, float] = defaultdict(float)
    for other, wanted in others.items():
        if other.address != account.address:
            far[other.address] += wanted
    return _beside(_beside(mine, near), far.values())


def _beside(mine: float, others: Iterable[float]) -> float:
    return mine + sum(min(wanted, mine) for wanted in others)
