"""How long things take, as far as it is known: the only estimates there are.

What is measured is that of a row of a group of slots, of decoding a picture, of compiling a batch
and of bringing weights to a device. All else follows from these and from what is asked for.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sd_tpu.runtime.slots import ALONE, ALONE_SHALLOW, GUIDED, GUIDED_SHALLOW
from sd_tpu.serving.plan import Batch, Compiled, Weights

CALL_SECONDS = 0.2  # aimed at for one call of `advance`: what a cancellation may have to wait for


class BatchLatency:
    """What a batch takes on devices that step `group` guided slots together.

    `row_seconds` [2] are those of one row of such a group: a whole evaluation, and a shallow one;
    `decode_seconds` those of one picture.
    """

    def __init__(self, group: int):
        """Knows nothing yet."""
        self.known = False
        self._group = group
        self.row_seconds = np.full(2, CALL_SECONDS)
        self.decode_seconds = 0.0

    def measured(self, compiled: Compiled) -> None:
        """Takes down what was measured when the batch was compiled."""
        self.row_seconds = np.array(compiled.row_seconds)
        self.decode_seconds, self.known = compiled.decode_seconds, True

    def of_picture(self, kinds: np.ndarray) -> float:
        """Seconds of a picture whose rows are of these kinds [R] while no other is made."""
        return self.alone(self.evaluations(kinds))

    def alone(self, counts: np.ndarray) -> float:
        """Seconds of so many rows [2], whole and shallow, that share no group with others."""
        return float(counts @ self.row_seconds) + self.decode_seconds

    def in_crowd(self, lanes: np.ndarray) -> float:
        """Seconds that so many lanes [2] of `lanes_left` add to what a device has to do, in groups
        that are full."""
        return self.alone(lanes / (2 * self._group))

    def evaluations(self, kinds: np.ndarray) -> np.ndarray:
        """How often a device evaluates the whole model, and the shallow part of it [2], for all
        rows of slots whose kinds are [S, R], or [R] of a single one."""
        return self._rounds(np.atleast_2d(kinds)).sum(axis=1)

    def next_rows(self, kinds: Sequence[np.ndarray]) -> tuple[int, np.ndarray]:
        """How many rows to take so that a call lasts about CALL_SECONDS, of the R that none of its
        pictures ends before; at least one.

        Args:
            kinds: of each device's slots with a picture, those of their next R rows [S, R].

        Returns:
            The rows, and how often the device with most to do then evaluates the whole model and
            the shallow part of it [2].
        """
        rounds = [np.cumsum(self._rounds(of_device), axis=1) for of_device in kinds]
        seconds = np.stack([self.row_seconds @ of_device for of_device in rounds])
        rows = max(1, int(np.sum(seconds.max(axis=0) <= CALL_SECONDS)))
        return rows, rounds[seconds[:, rows - 1].argmax()][:, rows - 1]

    def learn(self, evaluations: np.ndarray, seconds: float) -> None:
        """Takes down how long so many evaluations [2] took: the mean with what was known, as a
        single call may have been held up by something else."""
        ratio = seconds / (evaluations @ self.row_seconds)
        self.row_seconds[evaluations > 0] *= (1 + ratio) / 2

    def _rounds(self, kinds: np.ndarray) -> np.ndarray:
        """How often a device evaluates the whole model, and the shallow part of it, in each row of
        its slots: [2, R] of kinds [S, R], by the packing of `advance_slots`.
        """
        count = {kind: np.sum(kinds == kind, axis=0)
                 for kind in (ALONE, GUIDED, ALONE_SHALLOW, GUIDED_SHALLOW)}
        return np.stack([-(-count[guided] // self._group) - (-count[alone] // (2 * self._group))
                         for alone, guided in ((ALONE, GUIDED), (ALONE_SHALLOW, GUIDED_SHALLOW))])


class LatencyModel:
    """What is known of every batch and of weights."""

    def __init__(self):
        """Knows nothing yet."""
        self._batches: dict[Batch, BatchLatency] = {}
        self._compile_seconds: float | None = None
        self._seconds_per_byte = 0.0

    def of(self, batch: Batch) -> BatchLatency:
        """What is known of a batch."""
        return self._batches.setdefault(batch, BatchLatency(batch.group))

    def compiled(self, batch: Batch, result: Compiled) -> None:
        """Takes down what compiling a batch took, and what it takes since."""
        self.of(batch).measured(result)
        self._compile_seconds = result.seconds

    def of_compiling(self) -> float | None:
        """Seconds, by the last batch that was compiled; None before any was."""
        return self._compile_seconds

    def brought(self, weights: Weights, seconds: float) -> None:
        """Takes down what bringing weights to a device took."""
        self._seconds_per_byte = seconds / max(weights.memory, 1)

    def of_bringing(self, weights: Weights) -> float:
        """Seconds until weights are on a device, by the last that were brought."""
        return weights.memory * self._seconds_per_byte


def rows_left(kinds: np.ndarray) -> np.ndarray:
    """Of a picture with rows of these kinds [R], how many are whole and how many are shallow among
    the last r: [R + 1, 2]."""
    shallow = np.isin(kinds, (ALONE_SHALLOW, GUIDED_SHALLOW))
    return _summed_from_the_end(np.stack([~shallow, shallow], axis=1))


def lanes_left(kinds: np.ndarray) -> np.ndarray:
    """The same, counting the evaluations that they take: a guided row takes two."""
    guided = np.isin(kinds, (GUIDED, GUIDED_SHALLOW))
    shallow = np.isin(kinds, (ALONE_SHALLOW, GUIDED_SHALLOW))
    return _summed_from_the_end(np.stack([~shallow, shallow], axis=1) * (1 + guided)[:, None])


def _summed_from_the_end(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((1, 2), int), np.cumsum(rows[::-1], axis=0)])


def in_turns(mine: float, others: Mapping[str, float]) -> float:
    """Seconds until a client has had `mine` while devices are shared fairly with other clients,
    who want so many seconds each: nobody gets more than they want, nor more than `mine` before.
    """
    return mine + sum(min(theirs, mine) for theirs in others.values())
