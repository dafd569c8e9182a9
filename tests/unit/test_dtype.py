"""On a CPU the faster dtype is bfloat16 where it has the instructions and products gain by them."""

import jax.numpy as jnp
import pytest

from sd_tpu.runtime import dtype
from sd_tpu.runtime.compiler import compiler_options
from sd_tpu.serving import engine


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("flags\t\t: fpu avx512f\nbugs\t\t: bf16\n", False),
        (None, False),
    ],
)
def test_linux_says_whether_a_cpu_multiplies_bfloat16(monkeypatch, tmp_path, cpuinfo, has):
    monkeypatch.setattr(dtype, "CPUINFO", tmp_path / "cpuinfo")
    if cpuinfo is not None:
        dtype.CPUINFO.write_text(cpuinfo)
    assert dtype.has_bfloat16() == has


@pytest.mark.parametrize(
    ("platform", "has", "taken", "fastest"),
    [
        ("cpu", True, 0.5, "bfloat16"),
        ("cpu", True, 0.9, "float32"),
        ("cpu", False, 0.5, "float32"),
        ("tpu", False, 0.9, "bfloat16"),
    ],
)
def test_the_faster_dtype_is_by_instructions_and_by_time(
    monkeypatch, platform, has, taken, fastest
):
    monkeypatch.setattr(dtype, "has_bfloat16", lambda: has)
    monkeypatch.setattr(dtype, "seconds_of_product", {"float32": 1.0, "bfloat16": taken}.get)
    assert dtype.fastest_dtype(platform) == fastest


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_product_takes_time(name):
    assert dtype.seconds_of_product(name) > 0


@pytest.mark.parametrize(
    ("asked", "taken"), [("auto", "bfloat16"), (None, "float32"), ("float32", "float32")]
)
def test_an_engine_takes_the_faster_dtype_where_it_is_asked_to(monkeypatch, asked, taken):
    def opened(model, *, dtype, **_):
        raise LookupError(dtype)

    monkeypatch.setattr(dtype, "fastest_dtype", lambda platform: "bfloat16")
    monkeypatch.setattr(engine, "open_models", opened)
    with pytest.raises(LookupError, match=taken):
        engine.Engine.open(dtype=asked)


def test_the_compiler_is_told_the_same_of_a_dtype_and_of_its_name():
    assert compiler_options("cpu", "bfloat16") == compiler_options("cpu", jnp.bfloat16)
    assert compiler_options("cpu", "bfloat16") != compiler_options("cpu", "float32")
