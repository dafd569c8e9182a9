"""Merges adapters into a device's copy of parameters, by small compiled programs.

The parameters they are merged into are left alone, and what no adapter touches is shared with them:
taking adapters out is to use those again.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.checkpoint.adapters import Delta, Hadamard, LowRank, difference
from sd_tpu.checkpoint.weights import Params, map_named

# Component -> a parameter's name in a checkpoint -> what is added to it, each with its strength.
Deltas = Mapping[str, Mapping[str, Sequence[tuple[Delta, float]]]]


def merge(params: Params, deltas: Deltas) -> Params:
    """Parameters with adapters.

    Args:
        params: by component, arrays [1, ...] as `DeviceWeights` holds them.
        deltas: of any of them. The sum is taken in float32 and rounded once.

    Returns:
        Like `params`, on the same devices.
    """
    def one(named: Mapping[str, Sequence[tuple[Delta, float]]], name: str,
            weight: jax.Array) -> jax.Array:
        if not (added := named.get(name)):
            return weight
        return _merged(weight, [_padded(delta) for delta, _ in added],
                       np.float32([strength for _, strength in added]))

    return {part: map_named(lambda name, leaf, part=part: one(deltas.get(part, {}), name, leaf),
                            of, leading=1)
            for part, of in params.items()}


@jax.jit
def _merged(weight: jax.Array, deltas: list[Delta], strengths: jax.Array) -> jax.Array:
    total = weight[0].astype(jnp.float32)
    for number, delta in enumerate(deltas):
        total += strengths[number] * difference(delta)
    return total[None].astype(weight.dtype)


def _padded(delta: Delta) -> Delta:
    """With float32 factors of a rank that is a power of two, from 4: zeros change nothing, and
    LoRAs of like ranks share their programs."""
    if isinstance(delta, Hadamard):
        return Hadamard(*map(_padded, delta))
    left, right = (np.asarray(factor, np.float32) for factor in delta[:2])
    if isinstance(delta, LowRank):
        more = max(4, 1 << (len(right) - 1).bit_length()) - len(right)
        left = np.pad(left, [(0, 0)] * (left.ndim - 1) + [(0, more)])
        right = np.pad(right, [(0, more), (0, 0)])
    return delta._replace(left=left, right=right)
