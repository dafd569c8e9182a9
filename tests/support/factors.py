"""Differences that LoRAs add to weights."""

import numpy as np

from sd_tpu.checkpoint.adapters import Delta, Hadamard, LowRank


def difference_by_numpy(delta: Delta) -> np.ndarray:
    """Return what `adapters.difference` does, without a program for each shape."""
    if isinstance(delta, Hadamard):
        return difference_by_numpy(delta.first) * difference_by_numpy(delta.second)
    left, right = (np.asarray(factor, np.float32) for factor in delta[:2])
    return delta.scale * (left @ right if isinstance(delta, LowRank) else np.kron(left, right))
