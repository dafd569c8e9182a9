"""Which parameters lie on which device, and merging adapters into them.

Programs are compiled for an architecture, and each device may hold other checkpoints of it, or
several. JAX has no name for an array that differs from device to device but for one that is divided
over them: each device's copy leads with an axis of 1, and all of them together with one of the
devices.

Adapters are merged by small compiled programs. The parameters they are merged into are left alone,
and what no adapter touches is shared with them: taking adapters out is to use those again.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sd_tpu.checkpoint.adapters import Delta, Hadamard, LowRank, difference
from sd_tpu.checkpoint.weights import LEAVES, SCALE, Params
from sd_tpu.runtime.mesh import AXIS, REPLICATED, split

# Component -> a parameter's name in a checkpoint -> differences, each with its strength.
Deltas = Mapping[str, Mapping[str, Sequence[tuple[Delta, float]]]]


MAX_TOGETHER = 16  # trees that are kept assembled; to do it anew takes some milliseconds


class DeviceWeights:
    """The parameters on each device of a mesh, by any names."""

    def __init__(self, mesh: Mesh):
        """Begin with no parameters anywhere."""
        self._mesh = mesh
        self._placed: list[dict[Hashable, Params]] = [{} for _ in range(mesh.size)]
        self._together: dict[tuple[Hashable, ...], Params] = {}

    def on(self, devices: Sequence[int]) -> NamedSharding:
        """Return the sharding of arrays that each of these devices, by number, holds whole."""
        return NamedSharding(Mesh(self._mesh.devices.flat[list(devices)], (AXIS,)), REPLICATED)

    def numbers(self, sharding: NamedSharding) -> list[int]:
        """Return the numbers of the devices of a sharding that `on` made."""
        order = {device: number for number, device in enumerate(self._mesh.devices.flat)}
        return [order[device] for device in sharding.mesh.devices.flat]

    def spread(self, sharding: NamedSharding, copies: Sequence[Params]) -> Params:
        """Join equal copies, one on each device of a sharding from `on`, into arrays [1, ...]."""
        return jax.tree.map(
            lambda *leaves: jax.make_array_from_single_device_arrays(
                leaves[0].shape, sharding, list(leaves)
            ),
            *copies,
        )

    def put(self, device: int, name: Hashable, params: Params) -> None:
        """Copy parameters to a device, in place of those that it holds under that name.

        Args:
            device: from 0.
            name: by which they are found.
            params: arrays of NumPy, or of JAX wherever they lie. They travel one by one.
        """
        self.drop(device, name)
        target = self._mesh.devices.flat[device]
        self.record(
            device,
            name,
            jax.tree.map(lambda x: jax.device_put(np.asarray(x)[None], target), params),
        )

    def record(self, device: int, name: Hashable, params: Params) -> None:
        """Record parameters that lie on a device already.

        Args:
            device: from 0.
            name: by which they are found.
            params: arrays of JAX [1, ...], on this device and perhaps on others.
        """
        self.drop(device, name)
        target = self._mesh.devices.flat[device]
        self._placed[device][name] = jax.tree.map(
            lambda x: next(s.data for s in x.addressable_shards if s.device == target), params
        )

    def drop(self, device: int, name: Hashable) -> None:
        """Drop the parameters that a device holds under this name, if there are any."""
        self._placed[device].pop(name, None)
        self._together = {
            names: params for names, params in self._together.items() if names[device] != name
        }

    def of(self, device: int, name: Hashable) -> Any:
        """Return the parameters [1, ...] that a device holds under this name, or None."""
        return self._placed[device].get(name)

    def names(self, device: int) -> list[Any]:
        """Return the names of a device's parameters, the oldest first."""
        return list(self._placed[device])

    def together(self, names: Sequence[Hashable]) -> Params:
        """Return the tree for `Programs(stacked=True)`: arrays [D, ...], assembled without a copy.

        Args:
            names: of what each device is to use, by its number; all of one architecture.

        Raises:
            ValueError: a device holds nothing under its name.
        """
        names = tuple(names)
        if names not in self._together:
            copies = [self.of(device, name) for device, name in enumerate(names)]
            if empty := [device for device, copy in enumerate(copies) if copy is None]:
                raise ValueError(f"The devices {empty} hold no parameters.")
            while len(self._together) >= MAX_TOGETHER:  # of which there are as many as combinations
                self._together.pop(next(iter(self._together)))
            self._together[names] = jax.tree.map(self._assemble, *copies)
        return self._together[names]

    def _assemble(self, *copies: jax.Array) -> jax.Array:
        shape = (len(copies), *copies[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, split(self._mesh), list(copies))


def merge(params: Params, deltas: Deltas) -> Params:
    """Parameters with adapters.

    Args:
        params: by component, arrays [1, ...] as `DeviceWeights` holds them.
        deltas: of any of them. The sum is taken in float32 and rounded once; to int8 where the
            parameters are.

    Returns:
        Like `params`, on the same devices.
    """

    def layer(
        named: Mapping[str, Sequence[tuple[Delta, float]]], leaves: Mapping[Any, Any], name: str
    ) -> dict[Any, Any]:
        result = {}
        for key, leaf in leaves.items():
            if isinstance(leaf, dict):
                result[key] = layer(named, leaf, f"{name}{key}.")
            elif key not in result:  # or it is a scale that its kernel has brought
                added = named.get(name + LEAVES[key, leaf.ndim - 1][0], ())
                scale = leaves.get(SCALE) if key == "kernel" else None
                arguments = (
                    [_padded(delta) for delta, _ in added],
                    np.asarray([strength for _, strength in added], np.float32),
                )
                if not added:
                    result[key] = leaf
                elif scale is None:
                    result[key] = _merged(leaf, *arguments)
                else:
                    result[key], result[SCALE] = _merged_int8(leaf, scale, *arguments)
        return {key: result[key] for key in leaves}

    return {part: layer(deltas.get(part, {}), of, "") for part, of in params.items()}


@jax.jit
def _merged(weight: jax.Array, deltas: list[Delta], strengths: jax.Array) -> jax.Array:
    return _sum(weight, deltas, strengths).astype(weight.dtype)


@jax.jit
def _merged_int8(
    kernel: jax.Array, scale: jax.Array, deltas: list[Delta], strengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    total = _sum(kernel * scale[:, None], deltas, strengths)
    scale = jnp.abs(total).max(axis=1) / 127
    multiples = total / jnp.where(scale, scale, 1)[:, None]
    return jnp.rint(multiples).astype(kernel.dtype), scale


def _sum(weight: jax.Array, deltas: list[Delta], strengths: jax.Array) -> jax.Array:
    total = weight[0].astype(jnp.float32)
    for number, delta in enumerate(deltas):
        total += strengths[number] * difference(delta)
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
