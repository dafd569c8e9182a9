"""Traffic of TPU programs read from their text, and the TPU compiler where it is installed."""

import dataclasses
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import hlo, old_flax, tpu_compile
from benchmarks.records import read_all
from benchmarks.report import in_fresh_process
from sd_tpu.runtime.mesh import make_mesh

# Where to install it: pip install --no-deps --target .venv/old_flax diffusers==0.35.2
OLD_FLAX = Path(__file__).parents[2] / ".venv" / "old_flax"
PROGRAM = """\
%fused (p: f32[2,320]) -> f32[2,320] {
  ROOT %inside = f32[2,320]{1,0:T(8,128)} add(%p, %p)
}

%body (arg: (f32[2,320])) -> (f32[2,320]) {
  %arg = (f32[2,320]{1,0:T(8,128)}) parameter(0)
  %far = f32[2,320]{1,0:T(8,128)} get-tuple-element(%arg), index=0
  %near = f32[2,320]{1,0:T(8,128)S(1)} fusion(%far, %far), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/while/body/silu/mul"}, backend_config={"estimated_cycles":"70"}
  %start.1 = ((bf16[256,128]{1,0:T(8,128)(2,1)}), bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) slice-start(%weights)
  %done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} slice-done(%start.1)
}
"""


def test_traffic_counts_main_memory_and_padding_alone():
    fusion, fetched = hlo.operations(PROGRAM)
    row = 8 * 384 * 4  # two rows are padded to eight, 320 lanes to 384
    assert (fusion.name, fusion.source) == ("near", "silu/mul")
    assert (fusion.hbm_bytes, fusion.cycles) == (2 * row, 70)
    assert fetched.hbm_bytes == 64 * 128 * 2


CUTTING = """\
%as_it_is (p: f32[64,256]) -> f32[64,256] {
  %p = f32[64,256]{1,0:T(8,128)} parameter(0)
  ROOT %same = f32[64,256]{1,0:T(8,128)} bitcast(%p)
}

%first_rows (q: f32[64,256]) -> f32[8,256] {
  %q = f32[64,256]{1,0:T(8,128)} parameter(0)
  ROOT %rows = f32[8,256]{1,0:T(8,128)} slice(%q), slice={[0:8], [0:256]}
}

%cut (a: f32[64,256], b: f32[64,256]) -> f32[8,256] {
  %b = f32[64,256]{1,0:T(8,128)} parameter(1)
  %a = f32[64,256]{1,0:T(8,128)} parameter(0)
  %seen = f32[64,256]{1,0:T(8,128)} bitcast(%a)
  %some = f32[8,256]{1,0:T(8,128)} fusion(%seen), kind=kLoop, calls=%first_rows
  %all = f32[64,256]{1,0:T(8,128)} fusion(%b), kind=kLoop, calls=%as_it_is
  ROOT %product = f32[8,256]{1,0:T(8,128)S(1)} dot(%some, %all)
}

%put (array: f32[64,256], rows: f32[8,256]) -> f32[64,256] {
  %array = f32[64,256]{1,0:T(8,128)} parameter(0)
  %rows = f32[8,256]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %new = f32[64,256]{1,0:T(8,128)} dynamic-update-slice(%array, %rows, %zero, %zero)
}

%main (x: f32[64,256], y: f32[64,256]) -> f32[64,256] {
  %x = f32[64,256]{1,0:T(8,128)} parameter(0)
  %y = f32[64,256]{1,0:T(8,128)} parameter(1)
  %near = f32[8,256]{1,0:T(8,128)S(1)} fusion(%x, %y), kind=kOutput, calls=%cut
  ROOT %written = f32[64,256]{1,0:T(8,128)} fusion(%x, %near), kind=kLoop, calls=%put
}
"""


def test_of_what_a_fusion_cuts_or_writes_in_place_only_that_part_counts():
    rows, array = 8 * 256 * 4, 64 * 256 * 4
    product, written = hlo.operations(CUTTING)
    assert (product.name, product.hbm_bytes) == ("near", rows + array)
    assert (written.name, written.hbm_bytes) == ("written", rows)


def test_a_kernels_arithmetic_is_by_its_own_estimate():
    line = (
        "  %attended = f32[8,128]{1,0:T(8,128)} custom-call(%q), "
        'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
        '{"cost_estimate":{"flops":"4096","transcendentals":"64"}}}\n'
    )
    (kernel,) = hlo.operations("%body (q: f32[8,128]) -> f32[8,128] {\n" + line + "}\n")
    assert (kernel.kernel_flops, kernel.cycles) == (4096, 0)


def test_operations_are_added_up_by_source():
    first, second = hlo.by_source(hlo.operations(PROGRAM + PROGRAM.replace("%near", "%near.2")))
    assert (first["operation"], first["count"], first["million cycles"]) == ("near", 2, 140e-6)
    assert (second["operation"], second["HBM MB"]) == ("start", 2 * 64 * 128 * 2 / 1e6)


def test_a_loop_is_found_by_a_scope_inside_it():
    other = (
        PROGRAM.replace("%body", "%other").replace("silu/mul", "deep/mul").replace("%near", "%away")
    )
    hoisted = PROGRAM.replace("%body", "%main").replace("silu/mul", "silu/dot")
    line = next(line for line in PROGRAM.splitlines() if "silu" in line)
    body = PROGRAM.replace(line, f"{line}\n{line}")  # twice in the loop, once moved out of it
    found = list(hlo.operations(hoisted + body + other))
    assert {one.computation for one in hlo.around(found, "silu")} == {"body"}
    assert [one.name for one in hlo.around(found, "silu")] == ["near", "near", "start.1"]
    assert [one.name for one in hlo.around(found, "deep")] == ["away", "start.1"]
    assert hlo.around(found, "sil") == []


def test_a_roofline_is_the_longer_of_flops_and_traffic():
    chip = tpu_compile.Chip("", "", flops=1e12, bandwidth=1e9, memory=1e9, units=1)
    arithmetic = tpu_compile.Compiled("advance", "yes", flops=2e12, hbm=1e9, resident=5e8)
    memory = tpu_compile.Compiled(
        "advance", "yes", flops=1e12, hbm=3e9, resident=5e8, temporary=6e8
    )
    assert tpu_compile._row(chip, arithmetic)["roofline s"] == 2
    assert tpu_compile._row(chip, memory)["roofline s"] == 3
    assert tpu_compile._row(chip, arithmetic)["fits"] == "yes"
    assert tpu_compile._row(chip, memory)["fits"] == "no: memory"


def test_estimates_are_shown_where_xla_makes_one():
    row = partial(tpu_compile._row, one=tpu_compile.Compiled("advance", "yes", estimate=2.5))
    chip = tpu_compile.Chip("", "", flops=1, bandwidth=1, memory=1, units=1, estimates=True)
    assert row(chip)["estimate s"] == 2.5
    assert row(dataclasses.replace(chip, estimates=False))["estimate s"] is None
    failed = tpu_compile.Compiled("advance", "no: too large")
    assert tpu_compile._row(chip, failed)["estimate s"] is None


def test_the_programs_are_lowered():
    lowered = tpu_compile._lowered("tiny", make_mesh(1), 1, 0)
    assert list(lowered) == [*tpu_compile.PROGRAMS, tpu_compile.TEACH]
    assert "stablehlo" in lowered["encode"]().as_text()
    assert "stablehlo" in lowered[tpu_compile.TEACH]().as_text()


def lowered_old(programs: tuple[str, ...]) -> list[str]:
    lowered = old_flax.lowered(OLD_FLAX, "tiny", make_mesh(1), 1, 32)
    return [lowered[program]().as_text() for program in programs]


@pytest.mark.skipif(not OLD_FLAX.is_dir(), reason="the old diffusers, that has Flax, is missing")
def test_the_old_flax_networks_are_lowered():
    unet, decode = in_fresh_process(lowered_old, old_flax.PROGRAMS)
    assert "-> (tensor<1x4x16x16x" in unet and "-> (tensor<1x32x32x3x" in decode


def test_a_folder_without_old_flax_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"no diffusers with Flax .* pip install"):
        tpu_compile.main(["--old-flax", str(tmp_path)])


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is missing")
def test_a_tiny_model_compiles_for_a_tpu(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # libtpu's XLA ends a process over flags that it does not know
    flags = "--models tiny --chips v5e-8 --images 1 --programs encode --by-operation 3"
    tpu_compile.main([*flags.split(), "--results", str(tmp_path)])
    found = {record.title: record.by_column() for record in read_all(tmp_path)}
    assert len(found["encode of tiny on v5e-8, 1 a device, by operation"]) == 3
    (row,) = found[tpu_compile.TITLE]
    assert (row["model"], row["program"], row["fits"]) == ("tiny", "encode", "yes")
    assert row["cycles M"] > 0 and row["estimate s"] is None
