"""The pages of docs/performance, written from the newest records: `python -m benchmarks.pages`.

Pages show the newest record of each table and machine, in few columns; records hold the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import accelerators, cpu_step, goals, teach_step, tpu_compile
from benchmarks.machine import name
from benchmarks.records import RESULTS, Record, newest, read_all, table
from sd_tpu.checkpoint.config import W8A8

DOCS = Path(__file__).parent.parent / "docs" / "performance"
WRITTEN = "<!-- Written by `python -m benchmarks.pages`. -->"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
OURS = {FLOAT32: "sd_tpu", BFLOAT16: "sd_tpu, bfloat16"}
CHECKPOINTS = {
    "SD 1.4, 512x512": "sd14, 512x512",
    "SDXL, 512x512": "sdxl, 512x512",
    "SDXL, 1024x1024": "sdxl, 1024x1024",
    "SD-Turbo, 512x512, 1 step": "turbo, 512x512",
    "LCM, 512x512, 4 steps": "lcm, 512x512",
}
STEPPED = {"FLUX.2 klein 4B": "klein", "Z-Image": "zimage"}
Rows = list[dict[str, Any]]


def pages(records: Sequence[Record]) -> dict[str, str]:
    """Return the text of each page by its file's name."""
    return {
        f"{page.__name__}.md": f"{WRITTEN}\n{page(records)}\n"
        for page in (index, cpu, tpu, gpu, serving, inputs, teaching)
    }


def index(records: Sequence[Record]) -> str:
    """Return the page of all goals, the missed ones first."""
    current = [*_current(records)]
    checked = [(check, record) for record in current for check in goals.check(record)]
    missed, met = ([pair for pair in checked if pair[0].met is wanted] for wanted in (False, True))
    return _text(
        "# Performance",
        "How long pictures take: [on CPUs](cpu.md), [on a GPU](gpu.md), [on TPUs](tpu.md) by the "
        "compiler (none has been measured), [for people at the page and its APIs](serving.md), "
        "[with start pictures and larger ones](inputs.md), and what [teaching](teaching.md) does. "
        "Figures are of the newest run of each benchmark on each machine. [How we measure]"
        "(how-we-measure.md) says how to run them, and the [decisions](../decisions/index.md) what "
        "was tried.",
        "Machines: "
        + "; ".join(f"`{key}` {name(key)}" for key in sorted({each.machine for each in current}))
        + ".",
        f"## Missed goals: {len(missed)} of {len(checked)} figures",
        _goals(missed),
        "## Goals that are met",
        _goals(met),
        "## What bounds each machine",
        *(record.markdown() for record in newest(records, "What bounds each machine")),
    )


def cpu(records: Sequence[Record]) -> str:
    """Return the page about networks, pictures and memory on CPUs, against others."""
    return _text(
        "# CPU",
        "Seconds, the same weights and latents, all cores for each contestant. *Best other* is the "
        "fastest of PyTorch (eager, channels last, compiled) and, where it was installed, "
        "OpenVINO.",
        _table([row for model in CHECKPOINTS for row in _times(records, model)]),
        "## In turns with OpenVINO: SD 1.4, 512x512",
        _table(
            [
                {"machine": record.machine, "dtype": dtype, "date": record.date[:10]}
                | {
                    f"{row['seconds']}, {column}": row[column]
                    for row in record.by_column()
                    for column in ("sd_tpu", "ours / theirs")
                    if row["seconds"] != "text"
                }
                for dtype in (FLOAT32, BFLOAT16)
                for record in newest(records, f"CPU beside OpenVINO: sd14, 512x512, {dtype}")
            ]
        ),
        "## A step of a transformer, bfloat16",
        "One picture of 256x256, random weights; peak memory from the first weight on.",
        _table(
            [
                {"model": model, "machine": record.machine} | row
                for model, key in STEPPED.items()
                for record in newest(records, f"{cpu_step.TITLE}{key}, 256x256")
                for row in record.by_column()
            ]
        ),
        "## Peak memory",
        "Gigabytes of a process that loads float16 files and draws one picture.",
        _table(
            [
                {"model": model, "machine": record.machine}
                | {row[""]: row["a picture, GB"] for row in record.by_column()}
                for model, title in CHECKPOINTS.items()
                for record in newest(records, f"CPU, peak memory: {title}")
            ]
        ),
    )


def tpu(records: Sequence[Record]) -> str:
    """Return the TPU compiler's figures for the programs, and the capacity that follows."""
    found = tpu_compile.rows(records)
    cases = sorted(
        (model, chip)
        for model, chip, images, program in found
        if images == 1 and program == "advance" and "old" not in model
    )
    bounds = sorted(newest(records, tpu_compile.ROOFLINES), key=lambda record: record.date)
    fastest = {
        (row["model"], row["chip"]): row["s, 50 steps"]
        for record in bounds
        for row in record.by_column()
        if tpu_compile.as_trained(row["model"]) not in tpu_compile.DISTILLED_STEPS
    }
    rows = []
    for model, chip in cases:
        step, decode, old_step, old_decode = (
            found.get((network, chip, 1, program), {})
            for network, program in (
                (model, "advance"),
                (model, "decode"),
                (f"{model}, old Flax", "UNet"),
                (f"{model}, old Flax", "decode"),
            )
        )
        rows.append(
            {
                "model": model,
                "chip": chip,
                "step, M cycles": _beside(step, old_step, "cycles M"),
                "step, HBM GB": _beside(step, old_step, "HBM GB"),
                "decode, M cycles": _beside(decode, old_decode, "cycles M"),
                "step, memory GB": (step["arguments MB"] + step["temporary MB"]) / 1000,
                "8 pictures, 50 steps, s": fastest.get((model, chip)),
            }
        )
    return _text(
        "# TPU",
        "These are the TPU compiler's own figures (libtpu, bfloat16, one guided picture a device; "
        "SD 1 and 2 at 512x512, the others at 1024x1024; sd35m is SD 3.5 medium without T5), in "
        "brackets those of the old Flax networks of diffusers 0.35.2. Cycles leave out kernels, of "
        "attention and of transformers' heads, for which the compiler has no estimate; the old "
        "networks' attention is among their cycles. Memory is that of the weights that a step "
        "takes, slots and temporaries on one device. The last column is a bound by the rooflines: "
        "no run can be faster. " + tpu_compile.PUBLISHED,
        _table(rows),
        "MLPerf 4.1 published, for SDXL offline in Flax, 0.44 samples a second and chip on v5e and "
        "1.36 on v6e.",
        "## Distilled transformers on paper, beside MaxDiffusion",
        "One picture of 1024x1024 a device: the compiler's cycles over the clock, for encoding, "
        "all steps and decoding, and kernels' arithmetic at the chip's peak, which none reaches, "
        "without what the host does. The share of the peak is that of what is beside kernels, of "
        "w8a8 int8's. Heads are normed and turned by a kernel here, which at the memory's speed "
        "takes 2% of a step on v5e; MaxDiffusion's are among its cycles, of its networks by the "
        "same compiler. Its seconds are what its authors measured, eight pictures of Z-Image on "
        "v6e-8, and a fourth of four of FLUX.2 klein on one chip.",
        _table(list(_beside_maxdiffusion(found))),
        "## Capacity of hosts of v5e-8, simulated",
        "The scheduler itself, on devices that take the compiler's cycles, at list price, under "
        "80% of the load that it can carry; pictures of 20 guided steps; seconds.",
        _table(
            _merged(
                records,
                "Capacity of v5e-8, 20 steps with guidance",
                "model|chips|pictures/s|waiting p50|waiting p95|in all p50|in all p95|$ per 1,000",
                rows=lambda row: row["load"] == "80%",
                machines=False,
            )
        ),
        *_accelerators(records, tpu=True),
    )


def _beside_maxdiffusion(found: dict[tuple, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each distilled transformer and chip, if its step was compiled since kernels
    are counted apart; with seconds of a picture if all programs were."""
    for (model, chip, images, program), step in sorted(found.items()):
        trained, of_kernels = tpu_compile.as_trained(model), step.get("kernels GFLOP")
        is_step = (images, program) == (1, "advance") and step["cycles M"] > 0
        if not is_step or trained not in tpu_compile.DISTILLED_STEPS or not of_kernels:
            continue
        on, steps = tpu_compile.CHIPS[chip], tpu_compile.DISTILLED_STEPS[trained]
        theirs = tpu_compile.MAXDIFFUSION.get((trained, chip))
        peak = on.flops * (2 if model.endswith(f"-{W8A8}") else 1)
        taken = step["cycles M"] * 1e6 / on.clock
        times = {"encode": 1, "advance": steps, "decode": 1}
        rows = [found.get((model, chip, 1, each)) for each in times]
        seconds = [
            number * _seconds(row, on)
            for number, row in zip(times.values(), rows, strict=True)
            if row is not None
        ]
        yield {
            "model": model,
            "chip": chip,
            "step, M cycles": step["cycles M"],
            "MaxDiffusion's": theirs,
            "ours / theirs": step["cycles M"] / theirs if theirs else None,
            "share of the peak, %": 100 * 1e9 * (step["GFLOP"] - of_kernels) / peak / taken,
            "step, HBM GB": step["HBM GB"],
            "steps": steps,
            "a picture, s": sum(seconds) if len(seconds) == len(rows) else None,
            "MaxDiffusion's, s": tpu_compile.MAXDIFFUSION_SECONDS.get((trained, chip)),
        }


def _seconds(row: dict[str, Any], chip: tpu_compile.Chip) -> float:
    """Return what a program takes on paper: its cycles, and its kernels at the chip's peak."""
    of_kernels = row.get("kernels GFLOP") or 0
    return row["cycles M"] * 1e6 / chip.clock + of_kernels * 1e9 / chip.flops


def _beside(ours: dict[str, Any], old: dict[str, Any], column: str) -> str | None:
    if not ours:
        return None
    return f"{ours[column]:.4g}" + (f" ({old[column]:.4g})" if old else "")


def gpu(records: Sequence[Record]) -> str:
    """Return the page about a CUDA GPU."""
    return _text(
        "# GPU",
        "SD 1.4 at 512x512 in bfloat16, random weights, from prompts to uint8 pictures on the "
        "host.",
        *_with_notes(records, "GPU: sd14, 512x512, bfloat16"),
        "## The networks alone, beside PyTorch",
        *_with_notes(records, "GPU: networks of sd14 beside PyTorch, 512x512, bfloat16"),
        "Published for one picture of SD 1.5 on an A100 80GB, 50 steps in float16 "
        "(stable-diffusion-benchmarks): PyTorch with SDPA 1.591 s, compiled with channels last "
        "1.066 s, TensorRT 0.819 s.",
        *_accelerators(records, tpu=False),
    )


def _accelerators(records: Sequence[Record], *, tpu: bool) -> Iterator[str]:
    """Yield the section of what `benchmarks.accelerators` measures on TPUs or on GPUs."""
    found = [row for row in accelerators.rows(records) if row["machine"].startswith("tpu") is tpu]
    yield "## All models, step by step"
    yield (
        "`make accelerators`: random weights in bfloat16, 1024x1024, SD 1.4 at 512x512; a process "
        "for each row. Steps of SD 1.4 and SDXL are guided."
    )
    yield _table(found) if found else "Not measured yet."


def _with_notes(records: Sequence[Record], title: str) -> Iterator[str]:
    """Yield the table of a title, and what is noted beneath its newest records."""
    yield _table(_merged(records, title))
    for record in newest(records, title):
        yield from record.notes


def serving(records: Sequence[Record]) -> str:
    """Return the page about start-up, switching models, users, attacks, and the browser."""
    bundled = "sd_tpu emoji 256"
    return _text(
        "# Serving",
        "The bundled model unless another is named, which drew 128x128 before 29 November 2026; "
        "seconds unless a unit is given.",
        "## Start-up",
        "`python app.py` without compiled programs from an earlier start, and with them.",
        _table(
            [
                {"machine": record.machine, "date": record.date[:10]}
                | {
                    f"{row['seconds']}, {start}": row[start]
                    for row in record.by_column()
                    for start in ("first start", "second start")
                    if row["seconds"] in ("ready", "first picture there")
                }
                for record in newest(records, f"Start-up: {bundled}")
            ]
        ),
        "## Switching, SD 1.4: seconds that the first picture waits longer",
        _table(_merged(records, "Switching: sd14")),
        "## Eight pictures: the engine's part",
        _table(
            _merged(
                records,
                f"Engine overhead: {bundled}",
                "|eight pictures|seconds|advance, %|decode, %|outside advance and decode, %",
                rows=lambda row: row["eight pictures"] == "without previews",
            )
        ),
        "## Eight pictures over HTTP",
        *_with_notes(records, f"Eight pictures over HTTP: {bundled}"),
        "## Concurrent users",
        _table(
            _merged(
                records,
                f"Concurrent users: {bundled}",
                "|users|pictures/s|one at a time|gain|gain in rows|occupancy, %",
                rows=lambda row: row["users"] == 16,
            )
        ),
        "## 50 clients of the page and all APIs for 10 minutes",
        _table(_merged(records, "Clients: 50 for 10 minutes", rows=goals.named("all"))),
        "![Memory and requests over those minutes](crowd.webp)",
        "## One address that asks for too much, and a visitor at another",
        _table(_merged(records, "Attacks from one address")),
        "## The page in a browser",
        _table(_merged(records, f"The page in a browser: {bundled}")),
    )


def inputs(records: Sequence[Record]) -> str:
    """Start pictures, masks, ControlNets, IP-Adapters, and larger pictures, on CPUs."""
    sd14, bundled = "sd14, 256x256, float32", "sd_tpu emoji 128, 128x128, float32"
    return _text(
        "# Pictures to begin with, and larger ones",
        "SD 1.4 at 256x256, or the bundled model, while it drew 128x128, in float32 on CPUs.",
        "## Single steps: SD 1.4",
        _table(_merged(records, f"Input pictures, single steps: {sd14}")),
        "## Whole pictures against PyTorch: SD 1.4",
        _table(
            _merged(
                records,
                f"Input pictures, against PyTorch: {sd14}",
                rows=lambda row: row[""].endswith(": sd_tpu"),
            )
        ),
        "## Eight in one batch: the bundled model",
        _table(_merged(records, f"Input pictures, eight in one batch: {bundled}")),
        "## Drawn larger: the bundled model",
        _table(_merged(records, f"Input pictures, drawn larger: {bundled}")),
    )


def teaching(records: Sequence[Record]) -> str:
    """Return the page about a new thing taught to the bundled model, by its word and by others."""
    of, trained = "sd_tpu emoji 256, 1000 steps", _trained_on_tpus(records)
    return _text(
        "# Teaching",
        "Eight drawings of an invented figure, each on another background, taught to the bundled "
        "model by what `python -m sd_tpu teach` does by default ([Teach a model]"
        "(../guide/teach.md)).",
        "## The new word",
        *_with_notes(records, f"Teaching, the new word: {of}"),
        "![Untaught, and after 25%, 50% and 100% of the steps](taught.webp)",
        "## Other words",
        *_with_notes(records, f"Teaching, other words: {of}"),
        "## Time and memory",
        *_with_notes(records, f"Teaching, time: {of}"),
        "## A step beside PyTorch: SD 1.4 at 512x512, on CPUs",
        "PyTorch is diffusers' UNet with peft's factors on the same layers.",
        *_with_notes(records, f"{teach_step.TITLE}sd14, 512x512"),
        "## A step on TPUs, by the compiler",
        "bfloat16, rank 16, one picture a device; SD 1.4 at 512x512, the others at 1024x1024. "
        "Memory is that of what draws, the factors with their optimizer's state, and temporaries, "
        "on one device; text encoders and the autoencoder are read before.",
        _table(trained) if trained else "Not compiled yet.",
    )


def _trained_on_tpus(records: Sequence[Record]) -> Rows:
    """Return a row for each model and chip whose step of training was compiled."""
    return [
        {
            "model": model,
            "chip": chip,
            "fits": row["fits"],
            "memory, GB": (row["arguments MB"] + row["temporary MB"]) / 1000,
            "M cycles": row["cycles M"],
        }
        for (model, chip, _, program), row in sorted(tpu_compile.rows(records).items())
        if program == tpu_compile.TEACH
    ]


def _current(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the newest records of all tables that are not superseded."""
    for title in sorted({record.title for record in records}):
        yield from newest(records, title)


def _goals(checked: Sequence[tuple[goals.Check, Record]]) -> str:
    """Return a row for each goal, with the figures of all machines."""
    figures: dict[tuple[str, str], list[str]] = {}
    for check, record in checked:
        key = check.what, check.goal
        figures.setdefault(key, []).append(f"{check.figure:.4g} ({record.machine})")
    return _table(
        [
            {"what": what, "goal": goal, "figures (machine)": ", ".join(found)}
            for (what, goal), found in figures.items()
        ]
    )


def _times(records: Sequence[Record], model: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and dtype: the times of a step, decoding and the picture."""
    for record in newest(records, f"CPU, times: {CHECKPOINTS[model]}"):
        parts = {row["seconds"]: row for row in record.by_column()}
        for dtype, ours in OURS.items():
            if ours in record.columns:
                row = {"model": model, "machine": record.machine, "dtype": dtype}
                for part, short in (
                    ("UNet step", "step"),
                    ("autoencoder, decoding", "decoding"),
                    ("whole image", "image"),
                ):
                    row[short] = parts[part][ours]
                    row[f"{short} / best other"] = parts[part][f"ours / best other, {dtype}"]
                yield row


def _merged(
    records: Sequence[Record],
    title: str,
    columns: str | None = None,
    *,
    rows: Callable[[dict[str, Any]], bool] = lambda row: True,
    machines: bool = True,
) -> Rows:
    """Merge the rows of each machine's newest record, with the machine and the date before them.

    `columns`, separated by |, are those to show, all by default.
    """
    return [
        ({"machine": record.machine, "date": record.date[:10]} if machines else {})
        | {column: row[column] for column in (columns.split("|") if columns else record.columns)}
        for record in newest(records, title)
        for row in record.by_column()
        if rows(row)
    ]


def _table(rows: Rows) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return table(columns, [[row.get(column) for column in columns] for row in rows])


def _text(*parts: str) -> str:
    return "\n\n".join(parts)


def main() -> None:
    """Write the pages."""
    DOCS.mkdir(parents=True, exist_ok=True)
    for file, text in pages(read_all(RESULTS)).items():
        (DOCS / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
