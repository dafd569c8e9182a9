"""The device mesh and where arrays live on it.

It has two axes. Slots and training batches are split over `replica`; over the chips of a replica,
which lie along `model`, weights are divided where one chip cannot hold them
(`sd_tpu/checkpoint/division.py`), and everything else is on each of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sd_tpu.checkpoint.division import MODEL
from sd_tpu.memory import machine_memory

REPLICA = "replica"
MESH_AXES = (REPLICA, MODEL)
SPLIT = PartitionSpec(REPLICA)
REPLICATED = PartitionSpec()


def make_mesh(devices: int | None = None, tensor_parallel: int = 1) -> Mesh:
    """Return a mesh of this process's first `devices` devices, or of all of them.

    Each `tensor_parallel` of them are a replica.

    Raises:
        ValueError: there are fewer devices than asked for, or they do not make up whole replicas.
    """
    present = jax.local_devices()
    if devices is not None and not 1 <= devices <= len(present):
        raise ValueError(f"{devices} devices were asked for and {len(present)} are here.")
    used = present[:devices]
    if tensor_parallel < 1 or len(used) % tensor_parallel:
        raise ValueError(f"{len(used)} devices do not make up replicas of {tensor_parallel} each.")
    return mesh_of(used, tensor_parallel)


def mesh_of(devices: Sequence[Any], tensor_parallel: int = 1) -> Mesh:
    """Return the mesh of these devices, each `tensor_parallel` of which are a replica."""
    return Mesh(np.asarray(devices).reshape(-1, tensor_parallel), MESH_AXES)


def set_host_devices(count: int) -> None:
    """Have a CPU count as `count` devices, before anything else asks JAX for devices."""
    jax.config.update("jax_num_cpu_devices", count)


def device_bytes(mesh: Mesh) -> int:
    """Return the memory of each device for what stays there; the rest is for programs."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    return bytes_to_keep(stats.get("bytes_limit"), mesh.size)


def bytes_to_keep(memory: int | None, devices: int) -> int:
    """Return how much of a device's memory is for what stays there.

    Args:
        memory: the device's own, in bytes; None for one of a CPU, which share the machine's with
            the system.
        devices: how many there are.
    """
    if memory is not None:
        return int(0.8 * memory)
    return int(0.5 * machine_memory()) // devices


def split(mesh: Mesh) -> NamedSharding:
    """Placement of arrays whose leading axis is divided over the replicas."""
    return NamedSharding(mesh, SPLIT)


def replicas(mesh: Mesh) -> int:
    """Return how many replicas a mesh has."""
    return mesh.shape[REPLICA]


def replicated(mesh: Mesh) -> NamedSharding:
    """Placement of arrays that every device holds whole."""
    return NamedSharding(mesh, REPLICATED)
