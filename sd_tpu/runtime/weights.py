"""Which parameters lie on which replica, and merging adapters into them.

Programs are compiled for an architecture, and each replica may hold other checkpoints of it, or
several. JAX has no name for an array that differs from replica to replica but for one that is
divided over them: each replica's copy leads with an axis of 1, and all of them together with one of
the replicas. Over the chips of a replica, arrays are divided or whole.

Adapters are merged by small compiled programs. The parameters they are merged into are left alone,
and what no adapter touches is shared with them: taking adapters out is to use those again.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sd_tpu.checkpoint.adapters import Delta, Hadamard, LowRank, difference
from sd_tpu.checkpoint.division import WHOLE, Division, undivided
from sd_tpu.checkpoint.weights import LEAVES, SCALE, Params
from sd_tpu.runtime.mesh import MESH_AXES, REPLICA, REPLICATED, replicas

# Component -> a parameter's name in a checkpoint -> differences, each with its strength.
Deltas = Mapping[str, Mapping[str, Sequence[tuple[Delta, float]]]]


MAX_TOGETHER = 16  # trees that are kept assembled; to do it anew takes some milliseconds


class ReplicaWeights:
    """The parameters on each replica of a mesh, by any names."""

    def __init__(self, mesh: Mesh):
        """Begin with no parameters anywhere."""
        self._mesh = mesh
        self._placed: list[dict[Hashable, Params]] = [{} for _ in range(replicas(mesh))]
        self._together: dict[tuple[Hashable, ...], Params] = {}

    def on(self, numbers: Sequence[int]) -> NamedSharding:
        """Return the sharding of arrays that all chips of these replicas, by number, hold whole."""
        return NamedSharding(Mesh(self._mesh.devices[list(numbers)], MESH_AXES), REPLICATED)

    def numbers(self, sharding: NamedSharding) -> list[int]:
        """Return the numbers of the replicas of a sharding that `on` made."""
        order = {chips[0]: number for number, chips in enumerate(self._mesh.devices)}
        return [order[chips[0]] for chips in sharding.mesh.devices]

    def spread(self, sharding: NamedSharding, copies: Sequence[Params]) -> Params:
        """Join equal copies, one on each replica of a sharding from `on`, into arrays [1, ...]."""
        return jax.tree.map(
            lambda *leaves: _joined(
                leaves[0].shape, NamedSharding(sharding.mesh, leaves[0].sharding.spec), leaves
            ),
            *copies,
        )

    def put(
        self, replica: int, name: Hashable, params: Params, divisions: Params | None = None
    ) -> None:
        """Copy parameters to a replica, in place of those that it holds under that name.

        Args:
            replica: from 0.
            name: by which they are found.
            params: arrays of NumPy, or of JAX wherever they lie. They travel one by one.
            divisions: theirs over the chips; by default they are whole.
        """
        self.drop(replica, name)
        everywhere = self.on([replica])

        def placed(x: Any, division: Division) -> jax.Array:
            return jax.device_put(
                division.in_order(np.asarray(x))[None], division.sharding(everywhere, lead=1)
            )

        placed_params = jax.tree.map(placed, params, divisions or undivided(params))
        self.record(replica, name, placed_params)

    def record(self, replica: int, name: Hashable, params: Params) -> None:
        """Record parameters that lie on a replica already.

        Args:
            replica: from 0.
            name: by which they are found.
            params: arrays of JAX [1, ...], over the chips of this replica and perhaps of others.
        """
        self.drop(replica, name)
        mesh = self.on([replica]).mesh
        self._placed[replica][name] = jax.tree.map(
            lambda x: _joined(x.shape, NamedSharding(mesh, x.sharding.spec), [x]), params
        )

    def drop(self, replica: int, name: Hashable) -> None:
        """Drop the parameters that a replica holds under this name, if there are any."""
        self._placed[replica].pop(name, None)
        self._together = {
            names: params for names, params in self._together.items() if names[replica] != name
        }

    def of(self, replica: int, name: Hashable) -> Any:
        """Return the parameters [1, ...] that a replica holds under this name, or None."""
        return self._placed[replica].get(name)

    def names(self, replica: int) -> list[Any]:
        """Return the names of a replica's parameters, the oldest first."""
        return list(self._placed[replica])

    def together(self, names: Sequence[Hashable]) -> Params:
        """Return the tree for `Programs(stacked=True)`: arrays [R, ...], assembled without a copy.

        Args:
            names: of what each replica is to use, by its number; all of one architecture.

        Raises:
            ValueError: a replica holds nothing under its name.
        """
        names = tuple(names)
        if names not in self._together:
            copies = [self.of(replica, name) for replica, name in enumerate(names)]
            if empty := [replica for replica, copy in enumerate(copies) if copy is None]:
                raise ValueError(f"The replicas {empty} hold no parameters.")
            while len(self._together) >= MAX_TOGETHER:  # of which there are as many as combinations
                self._together.pop(next(iter(self._together)))
            self._together[names] = jax.tree.map(self._assemble, *copies)
        return self._together[names]

    def _assemble(self, *copies: jax.Array) -> jax.Array:
        _, *shape = copies[0].shape
        sharding: Any = copies[0].sharding
        _, *spec = sharding.spec or [None]
        where = NamedSharding(self._mesh, PartitionSpec(REPLICA, *spec))
        return _joined((len(copies), *shape), where, copies)


def _joined(
    shape: Sequence[int], sharding: NamedSharding, arrays: Sequence[jax.Array]
) -> jax.Array:
    """Join what lies on the devices of a sharding into one array, without a copy."""
    there = {shard.device: shard.data for array in arrays for shard in array.addressable_shards}
    joined = jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [there[device] for device in sharding.mesh.devices.flat]
    )
    # Listed before other threads have it: one that asks while JAX makes the list gets a part of it.
    shards = joined.addressable_shards
    assert len(shards) == len(sharding.device_set)
    return joined


def merge(params: Params, deltas: Deltas, divisions: Params | None = None) -> Params:
    """Parameters with adapters.

    Args:
        params: by component, arrays [1, ...] as `ReplicaWeights` holds them.
        deltas: of any of them. The sum is taken in float32 and rounded once; to int8 where the
            parameters are.
        divisions: of the parameters over the chips of a replica; by default they are whole.

    Returns:
        Like `params`, on the same devices.
    """

    def layer(
        named: Mapping[str, Sequence[tuple[Delta, float]]],
        leaves: Mapping[Any, Any],
        divided: Mapping[Any, Any],
        name: str,
    ) -> dict[Any, Any]:
        result = {}
        for key, leaf in leaves.items():
            if isinstance(leaf, dict):
                result[key] = layer(named, leaf, divided[key], f"{name}{key}.")
            elif key not in result:  # or it is a scale that its kernel has brought
                added = named.get(name + LEAVES[key, leaf.ndim - 1][0], ())
                scale = leaves.get(SCALE) if key == "kernel" else None
                arguments = (
                    [_padded(delta) for delta, _ in added],
                    np.asarray([strength for _, strength in added], np.float32),
                )
                division = divided[key]
                whole = division == WHOLE
                if not added:
                    result[key] = leaf
                elif scale is None:
                    where = None if whole else leaf.sharding
                    result[key] = _merged(leaf, *arguments, division, where)
                else:
                    where = None if whole else (leaf.sharding, scale.sharding)
                    result[key], result[SCALE] = _merged_int8(
                        leaf, scale, *arguments, division, where
                    )
        return {key: result[key] for key in leaves}

    divisions = divisions or undivided(params)
    return {
        part: layer(deltas.get(part, {}), of, divisions[part], "") for part, of in params.items()
    }


@partial(jax.jit, static_argnames=("division", "where"))
def _merged(
    weight: jax.Array,
    deltas: list[Delta],
    strengths: jax.Array,
    division: Division,
    where: Sharding | None,
) -> jax.Array:
    merged = _sum(weight, deltas, strengths, division).astype(weight.dtype)
    return merged if where is None else lax.with_sharding_constraint(merged, where)


@partial(jax.jit, static_argnames=("division", "where"))
def _merged_int8(
    kernel: jax.Array,
    scale: jax.Array,
    deltas: list[Delta],
    strengths: jax.Array,
    division: Division,
    where: tuple[Sharding, Sharding] | None,
) -> tuple[jax.Array, jax.Array]:
    total = _sum(kernel * scale[:, None], deltas, strengths, division)
    scale = jnp.abs(total).max(axis=1) / 127
    multiples = total / jnp.where(scale, scale, 1)[:, None]
    merged = jnp.rint(multiples).astype(kernel.dtype), scale
    return merged if where is None else lax.with_sharding_constraint(merged, where)


def _sum(
    weight: jax.Array, deltas: list[Delta], strengths: jax.Array, division: Division
) -> jax.Array:
    total = weight[0].astype(jnp.float32)
    for number, delta in enumerate(deltas):
        total += strengths[number] * division.in_order(difference(delta))
    return total[None]


def _padded(delta: Delta) -> Delta:
    """Return float32 factors with a rank padded to a power of two, from 4.

    Zeros change nothing, and LoRAs of like ranks share their programs.
    """
    if isinstance(delta, Hadamard):
        return Hadamard(*map(_padded, delta))  # ty: ignore[invalid-argument-type]
    left, right = (np.asarray(factor, np.float32) for factor in delta[:2])
    if isinstance(delta, LowRank):
        more = max(4, 1 << (len(right) - 1).bit_length()) - len(right)
        left = np.pad(left, [(0, 0)] * (left.ndim - 1) + [(0, more)])
        right = np.pad(right, [(0, more), (0, 0)])
    return delta._replace(left=left, right=right)


def digest(params: Params) -> str:
    """Return the SHA-256 of parameters with their names, types and shapes, wherever they lie."""
    hasher = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        hasher.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} ".encode())
        hasher.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return hasher.hexdigest()
