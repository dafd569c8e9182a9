"""How fast the devices are, as far as is known, and what follows for calls and previews."""

from collections.abc import Sequence

import numpy as np

from sd_tpu.denoise import ALONE, ALONE_SHALLOW, GUIDED, GUIDED_SHALLOW

CALL_SECONDS = 0.2  # aimed at for one call of `advance`: what a cancellation may have to wait for
PREVIEW_SECONDS = 0.4  # least time between two previews of a job
PREVIEW_SHARE = 0.1  # most of the time that previews may take


class Pace:
    """What was measured of devices that step `group` guided slots together.

    `row_seconds` [2] are those of one row of such a group: a whole evaluation, and a shallow one;
    `decode_seconds` those of one picture.
    """

    def __init__(self, group: int):
        """Knows nothing yet."""
        self._group = group
        self.row_seconds = np.full(2, CALL_SECONDS)
        self.decode_seconds = 0.0

    def of_picture(self, kinds: np.ndarray) -> float:
        """Seconds of a picture whose rows are of these kinds [R] while no other is made."""
        counts = self._evaluations(kinds[None]).sum(axis=1)
        return float(counts @ self.row_seconds) + self.decode_seconds

    def next_rows(self, kinds: Sequence[np.ndarray]) -> tuple[int, np.ndarray]:
        """How many rows to take so that a call lasts about CALL_SECONDS, of the R that none of its
        pictures ends before; at least one.

        Args:
            kinds: of each device's slots with a picture, those of their next R rows [S, R].

        Returns:
            The rows, and how often the device with most to do then evaluates the whole model and
            the shallow part of it [2].
        """
        rounds = [np.cumsum(self._evaluations(of_device), axis=1) for of_device in kinds]
        seconds = np.stack([self.row_seconds @ of_device for of_device in rounds])
        rows = max(1, int(np.sum(seconds.max(axis=0) <= CALL_SECONDS)))
        return rows, rounds[seconds[:, rows - 1].argmax()][:, rows - 1]

    def learn(self, evaluations: np.ndarray, seconds: float) -> None:
        """Takes down how long so many evaluations [2] took: the mean with what was known, as a
        single call may have been held up by something else."""
        pace = seconds / (evaluations @ self.row_seconds)
        self.row_seconds[evaluations > 0] *= (1 + pace) / 2

    def preview_pause(self, pictures: int) -> float:
        """Seconds to go without previews before a device draws so many."""
        return max(PREVIEW_SECONDS, self.decode_seconds * pictures / PREVIEW_SHARE)

    def _evaluations(self, kinds: np.ndarray) -> np.ndarray:
        """How often a device evaluates the whole model, and the shallow part of it, in each row of
        its slots: [2, R] of kinds [S, R], by the packing of `advance_slots`.
        """
        count = {kind: np.sum(kinds == kind, axis=0)
                 for kind in (ALONE, GUIDED, ALONE_SHALLOW, GUIDED_SHALLOW)}
        return np.stack([-(-count[guided] // self._group) - (-count[alone] // (2 * self._group))
                         for alone, guided in ((ALONE, GUIDED), (ALONE_SHALLOW, GUIDED_SHALLOW))])
