"""The device mesh and where arrays live on it.

One axis, `data`: slots and training batches are split over it, weights are on every device.
"""

import contextlib
import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
SPLIT = PartitionSpec(AXIS)
REPLICATED = PartitionSpec()
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # bytes, where Linux bounds those of a container


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
    """Return the memory of each device for what stays there; the rest is for programs.

    The devices of a CPU share its memory with the system.
    """
    stats = mesh.devices.flat[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(0.8 * stats["bytes_limit"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(CONTAINER.read_text(encoding="ascii")))
    return int(0.5 * memory) // mesh.size


def split(mesh: Mesh) -> NamedSharding:
    """Placement of arrays whose leading axis is divided over the devices."""
    return NamedSharding(mesh, SPLIT)


def replicated(mesh: Mesh) -> NamedSharding:
    """Placement of arrays that every device holds whole."""
    return NamedSharding(mesh, REPLICATED)
