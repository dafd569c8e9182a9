"""Options of the compiler, by platform and dtype."""

from typing import Any

import jax.numpy as jnp

# Options of the compiler, which refuses those that it does not know.
#
# XLA leaves a CPU's products, convolutions and reductions to YNNPACK. With this option that gets
# only what it can fuse with a reduction, such as scores with their softmax, and Eigen the rest:
# faster on the processors where it was measured (decision 0012). For bfloat16, which Eigen
# would make float32, it gets products as well.
YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
REDUCTIONS, PRODUCTS = "LIBRARY_FUSION_TYPE_REDUCE", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
ADVANCE_OPTIONS = {
    # By default XLA transforms the kernels of all the UNet's convolutions early in a step, which
    # takes four times the temporary memory. The decoder would take a quarter more with this
    # (decision 0013).
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    # For small batches the TPU compiler cuts the rows of a picture into a larger batch. The
    # decoder's large convolutions are three times as fast so, but the UNet's no faster, and
    # everything between them moves float32 copies (decision 0002).
    "tpu": {
        "xla_tpu_run_space_to_batch": False,
        "xla_tpu_run_space_to_batch_on_new_platforms": False,
    },
}


def compiler_options(platform: str, dtype: Any, *, advance: bool = False) -> dict[str, Any]:
    """Return the options for a program of networks in this dtype; `advance` has more of them."""
    options = dict(ADVANCE_OPTIONS.get(platform, {})) if advance else {}
    if platform == "cpu":
        narrow = jnp.dtype(dtype) == jnp.bfloat16
        options[YNNPACK] = f"{PRODUCTS},{REDUCTIONS}" if narrow else REDUCTIONS
    return options
