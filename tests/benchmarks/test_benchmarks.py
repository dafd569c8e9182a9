"""Each benchmark at tiny size: it runs, and its records have the right rows.

No test expects a time, as the machine that tests is busy.
"""

import dataclasses
import os
import pickle
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from benchmarks import (
    abuse,
    accelerations,
    capacity,
    choose,
    cpu,
    cpu_step,
    inputs,
    load,
    make_checkpoint,
    overhead,
    page,
    start,
    teach,
    teach_step,
)
from benchmarks.machine import processor
from benchmarks.records import Record
from benchmarks.report import in_fresh_process, memory, parser, report, side_by_side
from benchmarks.tpu_compile import training_step
from sd_tpu import FlaxStableDiffusionPipeline
from sd_tpu.runtime.mesh import make_mesh
from tests.support.tiny import flags_of_devices
from training import evaluate, judge
from training.captions import BACKGROUNDS

WHOLE = pytest.mark.long("runs a benchmark whole")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache folder for all of these tests, so that the tiny checkpoint is made once."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def small_servers(monkeypatch):
    """Servers that benchmarks start have one device, not the eight of these tests."""
    assert jax.device_count() == 8, "which are there by then"
    monkeypatch.setenv("XLA_FLAGS", flags_of_devices(1))


@pytest.fixture(autouse=True)
def compiled_once():
    """Switches JAX's compilation cache on again after a benchmark has switched it off."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def one_process(monkeypatch):
    """Lets benchmarks measure here what they measure in processes of their own, as long as it can
    be sent there: what others have imported and compiled serves them too."""

    def here(function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))

    for benchmark in (choose, cpu, inputs, overhead, start):
        monkeypatch.setattr(benchmark, "in_fresh_process", here)
    monkeypatch.setattr(cpu, "on_cpu", lambda: None)


def recorded(benchmark, tmp_path, *arguments: str) -> list[Record]:
    """Runs a benchmark and returns the records it wrote, in the order of its tables."""
    folder = tmp_path / "results"
    before = set(folder.rglob("*.json"))
    titles = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            benchmark,
            "report",
            lambda title, *args, **kwargs: titles.append(title) or report(title, *args, **kwargs),
        )
        benchmark.main([*arguments, "--results", str(folder)])
    found = {
        record.title: record for record in map(Record.read, set(folder.rglob("*.json")) - before)
    }
    for record in found.values():
        assert record.benchmark == benchmark.__name__.removeprefix("benchmarks.")
        assert record.versions["jax"] == jax.__version__ and processor() in record.host
    return [found[title] for title in titles]


def tables(benchmark, tmp_path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Runs a benchmark; its tables' rows by column, by the tables' titles."""
    records = recorded(benchmark, tmp_path, *arguments)
    return {record.title: record.by_column() for record in records}


def test_contestants_take_turns_after_a_first_call():
    calls = []
    times = side_by_side({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2)
    assert "".join(calls) == "ababab"
    assert all(timing.first > 0 and timing.median > 0 for timing in times.values())


def test_one_slow_call_does_not_change_the_median(monkeypatch):
    seconds = iter([9.0, 1.0, 2.0, 60.0])
    monkeypatch.setattr("benchmarks.report.seconds_of", lambda call: next(seconds))
    assert side_by_side({"a": str}, rounds=3) == {"a": (9.0, 2.0)}


def test_a_report_is_printed_and_recorded(tmp_path, capsys):
    args = parser("cpu", "").parse_args(["--results", str(tmp_path)])
    args.rounds, args.model, args.folder = 3, "hub/id", tmp_path / "model"
    rows = [{"a": 1.23456789, "b": "x"}, {"a": 2, "c": ""}]
    report("one, two", rows, args, notes=["A note."])
    printed = capsys.readouterr().out
    assert "## one, two" in printed and "| 1.235 | x   |" in printed and "A note." in printed
    (file,) = tmp_path.glob("cpu/*.json")
    record = Record.read(file)
    assert file.name.endswith(f"-{record.machine}-one-two.json")
    assert record.by_column() == [
        {"a": 1.23457, "b": "x", "c": None},
        {"a": 2, "b": None, "c": None},
    ]
    assert (record.flags, record.notes) == (
        {"rounds": 3, "model": "hub/id", "folder": "model"},
        ["A note."],
    )
    assert file.read_text(encoding="utf-8") == record.text()


def test_memory_of_this_process():
    assert 50e6 < memory("VmRSS") <= memory("VmHWM") < 50e9


def test_a_fresh_process_starts_with_its_own_memory():
    assert in_fresh_process(os.getppid) == os.getpid()
    tiny = make_checkpoint.checkpoint_folder("tiny")
    row = in_fresh_process(start.loading_peak, tiny, "float32")
    assert 0.5 * row["GB"] < row["peak while loading, GB"] < memory("VmRSS") / 1e9


@pytest.mark.slow("makes a checkpoint and draws with it twice")
def test_a_made_checkpoint_draws_as_in_pytorch_and_is_made_once(cache, capsys):
    make_checkpoint.main(["tiny"])
    folder = cache / "sd_tpu" / "checkpoints" / "tiny"
    assert capsys.readouterr().out.startswith(f"{folder}: ")
    written = (folder / "model_index.json").stat().st_mtime_ns
    assert make_checkpoint.checkpoint_folder("tiny") == folder
    assert (folder / "model_index.json").stat().st_mtime_ns == written

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(folder)
    reference = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    reference.set_progress_bar_config(disable=True)
    latents = np.random.default_rng(0).standard_normal((1, 4, 8, 8)).astype(np.float32)
    ours = pipeline(
        pipeline.prepare_inputs("a cat"), params, jax.random.key(0), 3, latents=latents
    ).images
    theirs = reference(
        "a cat", num_inference_steps=3, latents=torch.tensor(latents), output_type="np"
    ).images
    assert 0.05 < np.std(theirs) < 0.45, "neither flat nor all black and white"
    assert np.mean(np.abs(np.asarray(ours) - theirs) > 1.5 / 255) <= 0.001


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        make_checkpoint.main(["sd3"])
    assert "there is no model sd3" in capsys.readouterr().err


@WHOLE
def test_cpu(tmp_path, one_process, monkeypatch):
    """OpenVINO where it is installed, as it is for those who measure with it."""
    for name in (cpu.CHANNELS_LAST, cpu.COMPILED):
        monkeypatch.delitem(cpu.CONTESTANTS, name)
    records = recorded(cpu, tmp_path, "--model=tinyxl", "--size=32", "--rounds=1", "--steps=1")
    peaks, times = (record.by_column() for record in records)
    there = [name for name in cpu.CONTESTANTS if name not in cpu.left_out()]
    assert [row[""] for row in peaks] == there
    for row in peaks:
        assert 0.1 < float(row["loading, GB"]) < 5 and 0.1 < float(row["a picture, GB"]) < 5
    assert [row["seconds"] for row in times] == list(cpu.PARTS)
    for row in times:
        others = [float(row[name]) for name in there[1:] if "bfloat16" not in name]
        assert min(others) > 0
        assert float(row["ours / best other, float32"]) == pytest.approx(
            float(row[cpu.OURS]) / min(others), rel=0.01
        )
    note, *left_out = records[1].notes
    assert "more than 1 of 255 in 0.00%" in note
    assert left_out == [f"{name} is left out: {why}." for name, why in cpu.left_out().items()]


@WHOLE
def test_cpu_step(tmp_path):
    (record,) = recorded(cpu_step, tmp_path, "--model=tinyklein", "--side=32", "--rounds=1")
    assert [row[""] for row in record.by_column()] == [cpu.OURS, cpu.PYTORCH]
    for row in record.by_column():
        assert 0 < float(row["a step, s"]) < 60
        # More than its weights, which are too small here to say more.
        assert float(row["peak / weights"]) > 1 and float(row["peak memory, GB"]) < 2


@WHOLE
def test_teach_step(tmp_path):
    (record,) = recorded(teach_step, tmp_path, "--model=tiny", "--side=32", "--rounds=1")
    assert [row[""] for row in record.by_column()] == [
        cpu.OURS,
        cpu.PYTORCH,
        teach_step.CHECKPOINTED,
    ]
    for row in record.by_column():
        assert 0 < float(row["a step, s"]) < 60 and 0 < float(row["peak memory, GB"]) < 2
    ours, plain, _ = record.by_column()
    assert plain["time / PyTorch's"] == plain["memory / PyTorch's"] == 1
    # A record keeps six digits of each figure.
    assert ours["time / PyTorch's"] == pytest.approx(
        ours["a step, s"] / plain["a step, s"], rel=1e-4
    )


def test_teach_step_trains_the_factors_that_peft_does():
    ours = training_step("tiny", make_mesh(1), 32)[1]["factors"]
    theirs = teach_step.with_factors("tiny")
    names = {
        name.removesuffix(".lora_A.default.weight")
        for name, _ in theirs.named_parameters()
        if ".lora_A." in name
    }
    assert {name.removeprefix("unet.") for name in ours} == names


@WHOLE
def test_cpu_with_few_steps(tmp_path, one_process, monkeypatch):
    alike = {cpu.OURS, cpu.PYTORCH, "sd_tpu, bfloat16", "PyTorch, bfloat16"}
    for name in cpu.CONTESTANTS.keys() - alike:
        monkeypatch.delitem(cpu.CONTESTANTS, name)
    asked = "--model=tinylcm", "--size=32", "--rounds=1", "--steps=2", "--guidance=8.5"
    _, times = recorded(cpu, tmp_path, *asked)
    (note, *_) = times.notes
    assert "2 steps at a guidance of 8.5." in note and "more than 1 of 255 in 0.00%" in note
    _, times = recorded(cpu, tmp_path, *asked, "--dtypes=bfloat16")
    for row in times.by_column():
        ours, theirs = row["sd_tpu, bfloat16"], row["PyTorch, bfloat16"]
        assert row["ours / best other, bfloat16"] == pytest.approx(ours / theirs, rel=1e-3)
        assert "ours / best other, float32" not in row
    assert not any(f"{cpu.OPENVINO} is left out" in note for note in times.notes)


def test_cpu_leaves_out_contestants_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    missing = cpu.left_out()
    assert missing.keys() == cpu.CONTESTANTS.keys() - {
        cpu.OURS,
        "sd_tpu, bfloat16",
        cpu.PYTORCH,
        cpu.CHANNELS_LAST,
        "PyTorch, bfloat16",
    }
    assert "pip install openvino" in missing[cpu.OPENVINO]


@WHOLE
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("model", ["tiny", "tinylcm"])
def test_openvino_draws_what_pytorch_draws(model, precision):
    pytest.importorskip("openvino")
    folder = make_checkpoint.checkpoint_folder(model)
    theirs, exact = (
        calls[cpu.IMAGE]().astype(int)
        for calls in (
            cpu.pytorch(
                folder,
                32,
                2,
                "contiguous_format",
                prepare=partial(cpu.convert_networks, precision=precision),
            ),
            cpu.pytorch(folder, 32, 2, "contiguous_format"),
        )
    )
    assert np.mean(np.abs(theirs - exact) > (1 if precision == "f32" else 16)) < 0.001


@pytest.mark.parametrize("rounds", ["0", "100"])
def test_cpu_refuses_too_few_or_too_many_rounds(rounds, capsys):
    with pytest.raises(SystemExit):
        cpu.main(["--rounds", rounds])
    assert f"--rounds should be from 1 to 98, not {rounds}" in capsys.readouterr().err


@WHOLE
def test_inputs(tmp_path, one_process):
    steps, batch, pytorch, larger = tables(
        inputs,
        tmp_path,
        "--model=tiny",
        "--size=32",
        "--steps=4",
        "--rounds=1",
        "--larger=2",
        "--tile=48",
        "--decode=32",
    ).values()
    assert [row[""] for row in steps] == list(inputs.KINDS)
    assert min(float(row["s a step"]) for row in steps) > 0
    plain, start, mask, control, reference = (float(row["times its operations"]) for row in steps)
    assert plain == start == mask == 1 < reference < control < 2
    first, second, third = batch
    assert third["compiled"] == 0 < second["compiled"] and third["bytes as alone"] == "8 of 8"
    assert (first["steps in all"], second["steps in all"]) == (32, 4)
    assert [(row[""], row["values off"]) for row in pytorch] == [
        (f"{kind}: {name}", "0.00%" if name == cpu.OURS else None)
        for kind in inputs.COMPARED
        for name in inputs.CONTESTANTS
    ]
    assert [(row[""], row["tiles"]) for row in larger] == [
        ("64x64", None),
        ("64x64", 4),
        ("32x32, decoding alone", None),
        ("32x32, decoding alone, whole", None),
    ]
    assert all(0.1 < float(row["peak, GB"]) < 5 for row in larger)


@WHOLE
def test_start(tmp_path, one_process, monkeypatch):
    monkeypatch.setattr(start, "STEPS", dataclasses.replace(start.STEPS, most=20))
    monkeypatch.setattr(start, "FEW", 2)
    tiny = make_checkpoint.checkpoint_folder("tiny")
    loading, compiled, started = tables(
        start, tmp_path, "--load=tiny", f"--model={tiny}", "--rounds=1"
    ).values()
    assert [row["parameters"] for row in loading] == ["float32", "bfloat16"]
    assert float(loading[0]["GB"]) == pytest.approx(2 * float(loading[1]["GB"]), rel=0.01)
    assert all(float(row["peak / parameters"]) > 0.5 for row in loading)
    assert int(compiled[0]["requests"]) > 50
    assert compiled[0]["traced again"] == compiled[0]["compiled again"] == 0
    seconds = {row["seconds"]: float(row[start.SECOND]) for row in started}
    assert 0 < seconds[start.READY] < seconds[start.EARLIEST]


@WHOLE
def test_choose(tmp_path, one_process):
    found = tables(choose, tmp_path, "--model", "tiny")
    loading, choosing = found.values()
    assert [float(row["peak / parameters"]) > 0 for row in loading] == [True, True]
    assert [row["choice"] for row in choosing] == [
        "LoRA one",
        "LoRA two",
        "another fine-tune",
        "another size",
    ]
    assert float(choosing[-1]["first"]) > 0, "it compiles"


@WHOLE
def test_overhead(tmp_path, one_process, monkeypatch):
    monkeypatch.delitem(overhead.LAYOUTS, "8 devices, a slot each")
    tiny = make_checkpoint.checkpoint_folder("tiny")
    galleries, users, over_http = tables(
        overhead,
        tmp_path,
        f"--model={tiny}",
        "--steps=2",
        "--users",
        "1",
        "4",
        "--requests=1",
        "--rounds=1",
    ).values()
    assert len(galleries) == 2 * len(overhead.LAYOUTS)
    for row in galleries:
        shares = [float(row[f"{name}, %"]) for name in ("advance", "decode", "encode", "host")]
        assert min(shares) >= 0 and sum(shares) == pytest.approx(100, abs=0.1)
    assert len(users) == 2 * len(overhead.LAYOUTS)
    for row in users:
        assert float(row["pictures/s"]) > 0
        if row[""] == "1 device, slots one by one":
            assert row["occupancy, %"] == row["gain in rows"] is None
            continue
        assert 0 < float(row["occupancy, %"]) <= 100
        if row["users"] == 4:
            assert float(row["gain in rows"]) > 1
    assert [row["eight pictures over HTTP"] for row in over_http] == list(overhead.CLIENTS)
    for row in over_http:
        assert row["seconds"] == pytest.approx(row["the engine's"] + row["more"], abs=1e-4)
        assert min(row["the engine's"], row["more"], row["processor s of the client"]) > 0
    certificates, none, _ = (row["processor s of the client"] for row in over_http)
    assert none < certificates


@WHOLE
def test_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "SETTLED", 600)
    monkeypatch.setattr(page, "TYPED", "a red")
    tiny = make_checkpoint.checkpoint_folder("tiny")
    rows, seen = tables(page, tmp_path, f"--model={tiny}", "--slowdowns=2", "--rounds=1").values()
    told = {row[""]: float(row["figure"]) for row in seen}
    assert told["pictures changed by one click on Redraw"] == 1
    assert told["axe's violations with all panels open, dark"] == 0
    assert [row["seconds"] for row in rows] == list(page.PARTS)
    assert all(float(row["a processor 2 times slower"]) > 0 for row in rows)
    assert page.column(1) == "this machine"


@WHOLE
def test_teach(tmp_path, monkeypatch):
    """A judge that learned nothing looks: every figure is there, and what is untaught is alike."""
    monkeypatch.setattr(judge, "latest", lambda folder, params: params)
    tiny, file = make_checkpoint.checkpoint_folder("tiny"), tmp_path / "grid.png"
    news, others, (time,) = tables(
        teach, tmp_path, f"--model={tiny}", "--steps=4", "--rank=4", "--seeds=1", f"--grid={file}"
    ).values()
    states = [teach.UNTAUGHT, "after 25%", "after 50%", "after 100%"]
    assert [(row[""], row["prompts"]) for row in news] == [
        (state, kind) for state in states for kind in teach.KINDS
    ]
    assert all(-1 <= row[teach.LIKE] <= 1 and 0 <= row["as asked, %"] <= 100 for row in news)
    assert {row[teach.LIKER] for row in news if row[""] == teach.UNTAUGHT} == {0}
    assert [row[""] for row in others] == ["another seed", *states[1:]]
    seed, first, _, last = (row["mean difference"] for row in others)
    assert 0 < first < last < seed
    assert time["seconds"] > 0 < time["peak, GB"]
    with Image.open(file) as grid:
        assert grid.height % len(states) == 0 and grid.width % 8 == 0


def test_the_taught_figure_is_drawn_as_asked():
    for word, scenes, _ in teach.KINDS.values():
        for scene in scenes:
            drawn = teach.composer().draw(scene, np.random.default_rng(0))
            assert tuple(drawn[0, 0]) == BACKGROUNDS[scene.background]
            number, said, _, _, *background = teach.prompt(scene, word).split()
            assert (number, said) == ({1: "a", 2: "two", 3: "three"}[scene.count], word)
            assert " ".join(background) == f"{scene.background} background"


@WHOLE
def test_accelerations(tmp_path):
    tiny = make_checkpoint.checkpoint_folder("tiny")
    found = tables(
        accelerations,
        tmp_path,
        f"--model={tiny}",
        "--steps=6",
        "--pictures=2",
        "--groups=1",
        "--rounds=1",
        "--size=48",
    )
    assert next(iter(found)).endswith(", 48x48")
    single, ways = found.values()
    assert [row[""] for row in single] == [
        "one by one, all tokens",
        "one by one, token downsampling 2",
    ]
    assert all(float(row["seconds"]) > 0 for row in single)
    assert [row[""] for row in ways] == list(accelerations.WAYS)
    exact, *others = ways
    assert float(exact["speed-up one by one"]) == 1 and float(exact["mean difference"]) == 0
    assert all(float(row["one by one, s"]) > 0 < float(row["mean difference"]) for row in others)


@WHOLE
def test_accelerations_without_pictures(tmp_path):
    tiny = make_checkpoint.checkpoint_folder("tiny")
    (single,) = tables(
        accelerations,
        tmp_path,
        f"--model={tiny}",
        "--pictures=0",
        "--groups=1",
        "--rounds=1",
        "--size=48",
    ).values()
    assert [row[""] for row in single] == [
        "one by one, all tokens",
        "one by one, token downsampling 2",
    ]


def test_the_judge_sees_the_pictures_of_each_way(monkeypatch):
    trial = evaluate.Trial([], ["a", "b", "c"], np.zeros((3, 8, 8, 3), np.uint8))
    monkeypatch.setattr(accelerations.judge, "trained", lambda: None)
    monkeypatch.setattr(evaluate.Trial, "of", lambda mix, count, seed: trial)
    monkeypatch.setattr(accelerations, "draw", lambda engines, texts, **settings: settings)
    monkeypatch.setattr(
        evaluate,
        "shares",
        lambda ask, trial, kind, settings: {accelerations.JUDGED[kind]: 0.5 if settings else 1.0},
    )
    found = accelerations.judged(None, 3)
    assert found["exact"] == {"one thing, %": 100, "two side by side, %": 100}
    assert found["cache interval 2"] == {"one thing, %": 50, "two side by side, %": 50}


@pytest.fixture
def few_requests(monkeypatch):
    """Fewer to find out how much can be drawn at most."""
    monkeypatch.setattr(capacity, "SATURATING", 60)


@WHOLE
def test_capacity(tmp_path, few_requests):
    (rows,) = tables(capacity, tmp_path, "--requests", "20", "--hosts", "1", "2").values()
    assert [(row["model"], row["chips"], row["load"]) for row in rows] == [
        (model, chips, load)
        for model in capacity.MODELS
        for chips in (8, 16)
        for load in ("50%", "80%", "95%")
    ]
    for row in rows:
        drawn = float(row["load"].strip("%")) / 100 * row["at most/s"]
        assert row["paper/s"] == pytest.approx(row["chips"] / row["s a picture"], rel=1e-3)
        assert row["at most/s"] < row["paper/s"]
        assert row["pictures/s"] == pytest.approx(drawn, rel=1e-3)
        assert row["$ per 1,000"] == pytest.approx(
            1000 * row["chips"] * capacity.PRICE / 3600 / drawn, rel=1e-3
        )
        assert row["in all p50"] >= row["s a picture"] >= 20 * row["s a step"]


@WHOLE
def test_waiting_grows_with_the_load_from_none(few_requests):
    cost, steps = capacity.Cost(step=0.05, decode=0.2), 20
    most = capacity.at_most(cost, steps)
    waited = {
        load: np.mean(
            [
                visit.begun - visit.came
                for visit in capacity.simulate(
                    cost, 1, steps, load * most / np.mean(capacity.PICTURES), 100
                )
            ]
        )
        for load in (0.01, 0.5, 0.95)
    }
    assert waited[0.01] < 0.05 * cost.picture(steps) and waited[0.01] < waited[0.5] < waited[0.95]
    undecoded = capacity.Cost(step=0.05, decode=0.0)
    paper = capacity.CHIPS / undecoded.picture(steps)
    assert most < 0.9 * capacity.CHIPS / cost.picture(steps), "all chips wait while one decodes"
    assert capacity.at_most(undecoded, steps) > 0.9 * paper
    visits = capacity.simulate(cost, 1, steps, 0.01 * most, 50)
    assert min(visit.done - visit.came for visit in visits) == pytest.approx(cost.picture(steps))


def test_capacity_refuses_a_program_without_recorded_cycles():
    with pytest.raises(ValueError, match="No record has cycles of advance of sd3"):
        capacity.Cost.of("sd3", [])


@WHOLE
def test_abuse(tmp_path):
    (rows,) = tables(
        abuse, tmp_path, "--names=2", "--enlargements=3", "--connections=2", "--uploads=1"
    ).values()
    assert [row["outcome"] for row in rows] == [
        "2 runs",
        "3 asked for",
        "0 are open after 12 s",
        "1 taken",
    ]
    assert all(
        float(row["picture during it, s"]) > 0 and float(row["during / alone"]) > 0 for row in rows
    )


@WHOLE
def test_load_counts_requests_by_outcome_and_draws_memory(tmp_path):
    visits = [
        load.Visit(load.PAGE, load.DONE, 1.0, 2.0, 3.0),
        load.Visit(load.PAGE, load.GONE),
        load.Visit(load.PAGE, load.DONE, 3.0, 4.0, 7.0),
    ]
    told = load.row(load.PAGE, visits)
    assert (told["done"], told["gave up"], told["lost"]) == (2, 1, 0)
    assert (told["waiting p50"], told["drawing p50"], told["in all p95"]) == (2.0, 3.0, 6.8)
    load.draw([load.Sample(0.0, 1 << 20, 0), load.Sample(60.0, 1 << 20, 3)], tmp_path / "crowd.png")
    assert (tmp_path / "crowd.png").read_bytes().startswith(b"\x89PNG")
