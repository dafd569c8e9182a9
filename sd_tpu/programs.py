"""The three compiled programs, encode, advance and decode: `sd_tpu.denoise` over all devices.

The slots are divided over the devices; weights are on each device whole.
"""

import ctypes
import dataclasses
from collections import Counter
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sd_tpu.denoise import (
    Arrivals,
    Slots,
    advance_slots,
    decode_slots,
    empty_slots,
    encode_slots,
    no_arrivals,
    padded_rows,
    row_kinds,
)
from sd_tpu.networks import Models
from sd_tpu.samplers import Table
from sd_tpu.sharding import REPLICATED, SPLIT, replicated, split
from sd_tpu.weights import Params

# Options of the compiler by platform; it refuses those that it does not know.
#
# XLA leaves a CPU's products, convolutions and reductions to YNNPACK. With this option that gets
# only what it can fuse with a reduction, such as scores with their softmax, and Eigen the rest:
# faster on the processors where it was measured (benchmarks/RESULTS.md).
OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}}
ADVANCE_OPTIONS = {
    # By default XLA transforms the kernels of all the UNet's convolutions early in a step, which
    # takes four times the temporary memory. The decoder would take a quarter more with this.
    "cpu": OPTIONS["cpu"] | {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    # For small batches the TPU compiler cuts the rows of a picture into a larger batch. The
    # decoder's large convolutions are three times as fast so, but the UNet's no faster, and
    # everything between them moves float32 copies (benchmarks/RESULTS.md).
    "tpu": {"xla_tpu_run_space_to_batch": False,
            "xla_tpu_run_space_to_batch_on_new_platforms": False},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One image on its way into a slot, on the host."""

    ids: np.ndarray  # [2, L] int32: the negative prompt and the prompt
    table: Table
    guidance: float
    key: np.ndarray  # [2] uint32
    latents: np.ndarray | None = None  # [h, w, C]: first latents of unit variance instead of noise
    guidance_start: float = 0.0  # these three as `row_kinds` takes them
    guidance_stop: float = 1.0
    cache_interval: int = 1

    @cached_property
    def kinds(self) -> np.ndarray:
        """What each row of the table evaluates, [R] int32."""
        guidance = np.float32(self.guidance)  # as the slots hold it
        return row_kinds(self.table, guidance, start=self.guidance_start,
                         stop=self.guidance_stop, interval=self.cache_interval)


class Programs:
    """encode, advance and decode for one model and one image size, compiled over a mesh.

    `traces` counts how often each was traced: once, whatever changes between calls.
    """

    def __init__(self, models: Models, mesh: Mesh, *, slots: int, height: int, width: int,
                 group: int = 1, stacked: bool = False):
        """Prepares the programs; the first call of each compiles it.

        Args:
            models: the networks.
            mesh: the devices.
            slots: how many, rounded up to a multiple of the devices times `group`.
            height: of the pictures, in pixels.
            width: of the pictures, in pixels.
            group: guided slots that a device steps together, in one doubled batch.
            stacked: parameters lead with a device axis, as flax's `replicate` leaves them.

        Raises:
            ValueError: the model cannot make pictures of this size.
        """
        self.models, self.mesh = models, mesh
        self.latent_shape = models.latent_shape(height, width)
        share = mesh.size * group
        self.slots = -(-slots // share) * share
        self.traces: Counter[str] = Counter()
        params = SPLIT if stacked else REPLICATED
        self._encode = self._compile("encode", encode_slots, (params, SPLIT, SPLIT), donate=1)
        self._advance = self._compile("advance", partial(advance_slots, group=group),
                                      (params, SPLIT, REPLICATED), donate=1,
                                      options=ADVANCE_OPTIONS)
        self._decode = self._compile("decode", decode_slots, (params, SPLIT, SPLIT))
        self.stacked = stacked
        self._empty = jax.jit(partial(empty_slots, models, self.slots, self.latent_shape),
                              out_shardings=split(mesh))

    def _compile(self, name: str, function, specs, donate=(), options=OPTIONS):
        def traced(params, *arguments):
            self.traces[name] += 1
            if self.stacked:
                params = jax.tree.map(lambda x: x[0], params)
            return function(self.models, params, *arguments)

        # Varying-axes checking has no rule for loops whose trip count differs between devices.
        mapped = jax.shard_map(traced, mesh=self.mesh, in_specs=specs, out_specs=SPLIT,
                               check_vma=False)
        return jax.jit(mapped, donate_argnums=donate,
                       compiler_options=options.get(self.mesh.devices.flat[0].platform))

    def _call(self, name: str, *arguments) -> Any:
        before = self.traces[name]
        result = getattr(self, f"_{name}")(*arguments)
        if self.traces[name] > before:
            return_freed_memory()
        return result

    def device(self, slot: int) -> int:
        """The number of the mesh's device that a slot is on."""
        return slot // (self.slots // self.mesh.size)

    def empty(self) -> Slots:
        """Idle slots, divided over the devices."""
        return self._empty()

    def encode(self, params: Params, slots: Slots, arrivals: dict[int, Arrival | None]) -> Slots:
        """Puts images into the slots with these numbers; None vacates one. Donates `slots`."""
        return self._call("encode", params, slots, self._gather(arrivals))

    def advance(self, params: Params, slots: Slots, n: int) -> Slots:
        """Takes up to n rows in every live slot. Donates `slots`."""
        rows = jax.device_put(np.int32(n), replicated(self.mesh))
        return self._call("advance", params, slots, rows)

    def decode(self, params: Params, latents: jax.Array, wanted: np.ndarray) -> jax.Array:
        """uint8 pictures [S, H, W, 3] of latents [S, h, w, C], drawn where `wanted` [S] is true."""
        return self._call("decode", params, latents, jax.device_put(wanted, split(self.mesh)))

    def _gather(self, entering: dict[int, Arrival | None]) -> Arrivals:
        host = no_arrivals(self.slots, self.latent_shape)
        for i, arrival in entering.items():
            host.fresh[i] = True
            if arrival is None:
                continue
            table = arrival.table
            host.ids[i] = arrival.ids
            host.guidance[i] = arrival.guidance
            host.rows[i] = padded_rows(table)
            host.kinds[i, : len(table.rows)] = arrival.kinds
            host.end[i] = len(table.rows)
            host.key[i] = arrival.key
            if arrival.latents is None:
                host.spread[i] = table.init_noise_sigma
            else:
                host.start[i] = arrival.latents * table.init_noise_sigma
        return jax.device_put(host, split(self.mesh))


def return_freed_memory() -> None:
    """Returns to the system what this process has freed and glibc keeps for its next use.

    A compiler leaves much of that, and on a CPU pictures are drawn in the same memory: without it
    the peak of SD 1.4 is 0.3 GB higher. Does nothing with another C library.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
