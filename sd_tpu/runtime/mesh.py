"""The device mesh and where arrays live on it.

One axis, `data`: slots and training batches are split over it, weights are on every device.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sd_tpu.memory import machine_memory

AXIS = "data"
SPLIT = PartitionSpec(AXIS)
REPLICATED = PartitionSpec()


def make_mesh(devices: int | None = None) -> Mesh:
    """Return a mesh of this process's first `devices` devices, or of all of them.

    Raises:
        ValueError: there are fewer devices than asked for.
    """
    present = jax.local_devices()
    if devices is not None and not 1 <= devices <= len(present):
        raise ValueError(f"{devices} devices were asked for and {len(present)} are here.")
    return Mesh(np.asarray(present[:devices]), (AXIS,))


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
    """Placement of arrays whose leading axis is divided over the devices."""
    return NamedSharding(mesh, SPLIT)


def replicated(mesh: Mesh) -> NamedSharding:
    """Placement of arrays that every device holds whole."""
    return NamedSharding(mesh, REPLICATED)
