"""Which dtype a platform is fastest in."""

import re
import time
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sd_tpu.runtime.compiler import compiler_options

CPUINFO = Path("/proc/cpuinfo")
# As Linux names them: of x86 (AVX-512 and AMX) and of ARM.
INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
ROWS, WIDTH = 1024, 1280  # of the products that are timed, such as SD 1.4 has
# Products are only a part of a step: a smaller gain than this one would not be felt.
WORTH = 0.8


def chosen_dtype(dtype: str | None, platform: str) -> str:
    """Return "bfloat16" or "float32" for what is asked for: either, "auto" for what the platform
    is fastest in, or None for float32 on a CPU and bfloat16 elsewhere."""
    if dtype == "auto":
        return fastest_dtype(platform)
    return dtype or ("float32" if platform == "cpu" else "bfloat16")


def fastest_dtype(platform: str) -> str:
    """Return "bfloat16" or "float32": on a CPU by its instructions and the time of products."""
    if platform != "cpu":
        return "bfloat16"
    if not has_bfloat16():
        return "float32"
    seconds = {dtype: seconds_of_product(dtype) for dtype in ("bfloat16", "float32")}
    return "bfloat16" if seconds["bfloat16"] < WORTH * seconds["float32"] else "float32"


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16; not where Linux does not say so."""
    try:
        text = CPUINFO.read_text("utf-8")
    except OSError:
        return False
    return any(
        INSTRUCTIONS & {*found.split()}
        for found in re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.M)
    )


@cache
def seconds_of_product(dtype: str) -> float:
    """Return the seconds that a product takes on the CPU: the least of a few."""

    def product(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    with jax.default_device(jax.devices("cpu")[0]):
        a, b = jnp.ones((ROWS, WIDTH), dtype), jnp.ones((WIDTH, WIDTH), dtype)
        compiled = jax.jit(product, compiler_options=compiler_options("cpu", jnp.dtype(dtype)))
        jax.block_until_ready(compiled(a, b))
        timings = []
        for _ in range(5):
            begun = time.perf_counter()
            jax.block_until_ready(compiled(a, b))
            timings.append(time.perf_counter() - begun)
    return min(timings)
