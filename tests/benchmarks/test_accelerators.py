"""Measurements on accelerators, by tiny models on the CPU."""

import math
import operator
import os
import time
from types import SimpleNamespace

import jax
import psutil
import pytest

from benchmarks import accelerators, contestants, pages
from benchmarks.accelerators import DECODER, LORA, OURS, PICTURES, PYTORCH, STEP, Measurement
from benchmarks.records import Record, read_all
from benchmarks.tpu_compile import SIDES

SLOW = pytest.mark.slow("compiles, or begins processes")


@pytest.fixture
def here(monkeypatch):
    """Measures in this process what is measured in processes of their own, and returns its limits
    in seconds."""
    limits = []

    def apart(seconds, function, *arguments):
        limits.append(seconds)
        try:
            return function(*arguments), ""
        except Exception as error:
            return None, str(error)

    monkeypatch.setattr(accelerators, "apart", apart)
    yield limits
    jax.config.update("jax_enable_compilation_cache", True)


def run(folder, *flags: str) -> list[dict]:
    """Runs the benchmark; the rows of its records in their order."""
    accelerators.main([*flags, "--results", str(folder)])
    return [record.by_column()[0] for record in read_all(folder, "accelerators")]


def record(one: Measurement, machine: str, milliseconds: float | None) -> Record:
    row = {**one.columns, "milliseconds": milliseconds}
    return Record(
        benchmark="accelerators",
        title=f"{accelerators.TITLE}{one.name}",
        date="2026-11-28T12:00:00",
        commit=None,
        machine=machine,
        host="",
        versions={},
        flags={},
        columns=list(row),
        rows=[list(row.values())],
    )


@SLOW
@pytest.mark.parametrize(
    "part, model, by",
    [
        pytest.param(
            STEP, "sdxl", [OURS, PYTORCH] * 2, marks=pytest.mark.long("compiles two of SDXL")
        ),
        (STEP, "klein", [OURS, PYTORCH] * 2),
        (STEP, "zimage-int8", [OURS]),
        (DECODER, "klein", [OURS, PYTORCH]),
        (PICTURES, "sd14", [OURS, PYTORCH]),
        (LORA, "zimage", [OURS]),
    ],
)
def test_without_an_accelerator_tiny_models_run_and_nothing_is_measured(
    part, model, by, here, tmp_path, capsys
):
    found = run(tmp_path, "--models", model, "--parts", part, "--limit", "7")
    assert sorted(row[""] for row in found) == sorted(by)
    assert {row["milliseconds"] for row in found} == {accelerators.UNMEASURED}
    assert all(row["model"] == model and row["part"] == part for row in found)
    assert set(here) == {7}
    assert "There is no accelerator" in capsys.readouterr().out


def test_what_fails_is_a_row_that_says_why_and_the_next_goes_on(here, tmp_path, monkeypatch):
    def fails(load):
        raise ImportError("No module named 'torch'")

    monkeypatch.setitem(accelerators.MEASURES, (DECODER, PYTORCH), fails)
    monkeypatch.setitem(accelerators.MEASURES, (DECODER, OURS), lambda load: None)
    found = run(tmp_path, "--parts", DECODER)
    assert len(found) == 6
    assert {(row[""], row.get("why not")) for row in found} == {
        (OURS, None),
        (PYTORCH, f"No module named 'torch'; {accelerators.TO_INSTALL}"),
    }


def test_pytorch_without_a_gpu_is_not_measured_beside_one(here, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(accelerators.MEASURES, (DECODER, OURS), lambda load: 1 / 0)
    found = run(tmp_path, "--parts", DECODER, "--models", "klein")
    why = {row[""]: row["why not"] for row in found}
    assert why[PYTORCH].startswith("PyTorch sees no GPU; pip install torch")


def test_pytorch_is_left_out_on_a_tpu(here, tmp_path, monkeypatch):
    for key in accelerators.MEASURES:
        monkeypatch.setitem(accelerators.MEASURES, key, lambda load: None)
    apart = accelerators.apart
    monkeypatch.setattr(
        accelerators,
        "apart",
        lambda seconds, function, *rest: (
            ("tpu", "") if function is jax.default_backend else apart(seconds, function, *rest)
        ),
    )
    found = run(tmp_path)
    assert {row[""] for row in found} == {OURS}
    assert len(found) == sum(one.by == OURS for one in accelerators.MEASUREMENTS)


@SLOW
def test_a_process_of_its_own_gives_its_result_or_why_there_is_none():
    assert accelerators.apart(60, os.getpid)[0] != os.getpid()
    assert accelerators.apart(60, operator.truediv, 1, 0) == (
        None,
        "ZeroDivisionError: division by zero",
    )
    assert accelerators.apart(60, os._exit, 3) == (None, "the process died (3)")


@SLOW
def test_a_process_that_takes_too_long_is_ended():
    begun = time.perf_counter()
    assert accelerators.apart(0.5, time.sleep, 300) == (None, "ended after 0.5 s")
    assert time.perf_counter() - begun < 60


@SLOW
def test_a_process_leaves_none_behind_that_it_began():
    began, _ = accelerators.apart(60, os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "300")
    while psutil.pid_exists(began) and psutil.Process(began).status() != psutil.STATUS_ZOMBIE:
        assert psutil.Process(began).create_time() > time.time() - 60
        time.sleep(0.05)


@pytest.mark.slow("makes networks of full size, without memory for them")
@pytest.mark.parametrize("model", accelerators.OPERATIONS)
def test_operations_are_those_that_pytorch_counts(model):
    load = contestants.Workload(model, SIDES[model], pictures=1, steps=1, evaluations=1, rounds=1)
    network, arguments = contestants.their_network(load, 1, "meta")
    vae, latents = contestants.their_autoencoder(load, "meta")
    counted = [
        contestants.operations(lambda: network(**arguments)),
        contestants.operations(lambda: vae.decode(latents)),
    ]
    assert counted == pytest.approx(accelerators.OPERATIONS[model][:2], rel=1e-3)


def test_operations_of_a_measurement():
    sd14 = accelerators.OPERATIONS["sd14"]
    known = {
        ("sd14", STEP, 4): 8 * sd14.evaluation,  # guided
        ("klein-int8", STEP, 1): accelerators.OPERATIONS["klein"].evaluation,  # not
        ("sd14", DECODER, 4): 4 * sd14.decoder,
        ("sd14", PICTURES, 8): 800 * sd14.evaluation + 8 * sd14.decoder + 16 * sd14.text_encoder,
        ("sd14", LORA, 1): 0,
    }
    for case, expected in known.items():
        assert accelerators.operations(Measurement(*case)) == pytest.approx(expected)


def test_figures_become_milliseconds_and_a_share_of_the_peak(monkeypatch):
    h100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [h100, h100])
    step, pictures = (Measurement("sd14", *rest) for rest in ((STEP, 4), (PICTURES, 8)))
    figures = contestants.Figures(seconds=0.02, first=30.0, memory=3 * 10**9)
    cells = accelerators._cells(step, figures)
    assert cells["milliseconds"] == pytest.approx(20)
    assert cells["share of peak, %"] == pytest.approx(100 * 8 * 0.803e12 / 0.02 / 989e12)
    assert (cells["peak memory, GB"], cells["first call, s"]) == (3, 30)
    whole = accelerators._cells(pictures, figures._replace(memory=None))
    both = 100 * accelerators.operations(pictures) / 0.02 / (2 * 989e12)
    assert math.isclose(whole["share of peak, %"], both) and whole["peak memory, GB"] is None


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX A1000", None),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v3", 61.5e12),
        ("something new", None),
    ],
)
def test_peak_of_a_device_by_its_name(name, expected):
    assert accelerators.peak(SimpleNamespace(device_kind=name)) == expected


def test_rows_stand_beside_pytorch_of_the_same_machine_and_on_the_page_of_their_kind():
    ours, theirs = Measurement("sdxl", STEP, 1), Measurement("sdxl", STEP, 1, PYTORCH)
    records = [
        record(ours, "nvidia-h100-x1", 50.0),
        record(theirs, "nvidia-h100-x1", 75.0),
        record(ours, "tpu-v5-lite-x8", 300.0),
        record(theirs, "nvidia-l4-x1", None),
        record(ours, "nvidia-l4-x1", 700.0),
    ]
    found = {(row["machine"], row[""]): row for row in accelerators.rows(records)}
    speed = {key: row["times PyTorch's speed"] for key, row in found.items()}
    assert speed == {
        ("nvidia-h100-x1", OURS): 1.5,
        ("nvidia-h100-x1", PYTORCH): 1,
        ("tpu-v5-lite-x8", OURS): None,
        ("nvidia-l4-x1", OURS): None,
        ("nvidia-l4-x1", PYTORCH): None,
    }
    gpu, tpu = ("\n".join(pages._accelerators(records, tpu=kind)) for kind in (False, True))
    assert "nvidia-h100-x1" in gpu and "tpu-v5" not in gpu
    assert "tpu-v5-lite-x8" in tpu and "nvidia" not in tpu
    assert "Not measured yet." in "".join(pages._accelerators([], tpu=True))
