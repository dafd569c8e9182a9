"""The project's goals for its figures, and whether a record meets them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Record

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound on the figures of one column in some rows of a benchmark's tables.

    Tables are those whose title begins with `title`. `limit` is a number, or the column that holds
    it; figures should be no greater, or with `at_least` no smaller.
    """

    what: str
    title: str
    column: str
    limit: float | str
    rows: Callable[[Row], bool] = lambda row: True
    at_least: bool = False


@dataclass(frozen=True)
class Check:
    """A figure beside the goal for it."""

    what: str
    figure: float
    goal: str
    met: bool


def named(*labels: str) -> Callable[[Row], bool]:
    """Choose the rows that begin with one of these labels."""
    return lambda row: next(iter(row.values())) in labels


STEP, DECODING, IMAGE = (
    named(part) for part in ("UNet step", "autoencoder, decoding", "whole image")
)
FLOAT32, BFLOAT16 = "ours / best other, float32", "ours / best other, bfloat16"
BESIDE, SDXL = "CPU beside OpenVINO: sd14, 512x512", "CPU, times: sdxl, 1024x1024"
GOALS = (
    Goal("SD 1.4, sd_tpu / PyTorch, float32", "CPU, times: sd14", FLOAT32, 0.9, STEP),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, float32", SDXL, FLOAT32, 0.8, STEP),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, float32", SDXL, FLOAT32, 0.8, DECODING),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, float32", SDXL, FLOAT32, 0.8, IMAGE),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, bfloat16", SDXL, BFLOAT16, 0.8, STEP),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, bfloat16", SDXL, BFLOAT16, 0.8, DECODING),
    Goal("SDXL at 1024x1024, sd_tpu / PyTorch, bfloat16", SDXL, BFLOAT16, 0.8, IMAGE),
    Goal("SD 1.4, sd_tpu / best other, bfloat16", "CPU, times: sd14", BFLOAT16, 0.95, STEP),
    Goal("SD 1.4, sd_tpu / best other, bfloat16", "CPU, times: sd14", BFLOAT16, 0.9, DECODING),
    Goal("SD-Turbo, sd_tpu / best other, float32", "CPU, times: turbo", FLOAT32, 1, IMAGE),
    Goal("SD-Turbo, sd_tpu / best other, bfloat16", "CPU, times: turbo", BFLOAT16, 1, IMAGE),
    Goal("LCM, sd_tpu / best other, float32", "CPU, times: lcm", FLOAT32, 1, IMAGE),
    Goal("LCM, sd_tpu / best other, bfloat16", "CPU, times: lcm", BFLOAT16, 1, IMAGE),
    Goal("SD 1.4, sd_tpu / OpenVINO, float32", f"{BESIDE}, float32", "ours / theirs", 0.9, STEP),
    Goal("SD 1.4, sd_tpu / OpenVINO, bfloat16", f"{BESIDE}, bfloat16", "ours / theirs", 1, STEP),
    Goal(
        "SD 1.4, sd_tpu / OpenVINO, bfloat16", f"{BESIDE}, bfloat16", "ours / theirs", 1, DECODING
    ),
    Goal("SD 1.4, bfloat16 / float32", "CPU, bfloat16: sd14", "bfloat16 / float32", 0.55, STEP),
    Goal("SD 1.4, bfloat16 / float32", "CPU, bfloat16: sd14", "bfloat16 / float32", 0.55, DECODING),
    Goal("second start, s", "Start-up: ", "second start", 5, named("ready")),
    Goal("second start, s", "Start-up: ", "second start", 10, named("eight pictures")),
    Goal("second start / first", "Start-up: ", "second / first", 0.4, named("first picture there")),
    Goal("a command that draws nothing, s", "Import time", "seconds", 2, named("sd_tpu devices")),
    Goal("eight pictures beyond the engine's, s", "Eight pictures over HTTP: ", "more", 0.4,
         named("Client", "Client, ssl_verify=False")),
    Goal("main thread, s", "The page in a browser", "this machine", 0.7,
         named("busy during a run of eight pictures")),
    Goal(
        "loading a folder, peak / size", "Memory while loading: sd14 from", "peak / parameters", 1.3
    ),
    Goal("loading a file, peak / size", "Memory while loading: sd14, a", "peak / parameters", 1.1),
    Goal("programs compiled again in a session", "Compilations", "compiled again", 0),
    Goal("first picture with another choice, s", "Switching: sd14", "first", 2, named("LoRA two")),
    Goal("first picture with another choice, s", "Switching: sd14", "first", "reading its file",
         named("another fine-tune")),
    Goal(
        "pictures of a host, simulated / on paper", "Capacity of v5e-8", "at most / paper", 0.9,
        lambda row: (row["chips"], row["load"]) == (8, "95%"), at_least=True,
    ),
    Goal(
        "time outside advance and decode, %", "Engine overhead", "outside advance and decode, %", 3
    ),
    Goal("eight pictures in one batch, s", "Engine overhead", "seconds", 0.5,
         named("1 device, slots in eights")),
    Goal("occupancy with 16 users, %", "Concurrent users", "occupancy, %", 90,
         lambda row: row["users"] == 16, at_least=True),
    Goal("gain in rows with 16 users", "Concurrent users", "gain in rows", 1.8,
         lambda row: row["users"] == 16, at_least=True),
    Goal("requests lost", "Clients: ", "lost", 0, named("all")),
    Goal("requests answered with another's pictures", "Clients: ", "crossed", 0, named("all")),
    Goal("teaching the bundled model, s", "Teaching, time: sd_tpu", "seconds", 600),
    Goal("a taught word, liker than any untaught, %", "Teaching, the new word: sd_tpu",
         "liker than any untaught, %", 90, named("after 100%"), at_least=True),
    Goal("other words after teaching", "Teaching, other words: sd_tpu", "like before", 0.9,
         named("after 100%"), at_least=True),
    Goal("a step of teaching, time", "Teaching, a step", "time / PyTorch's", 1, named("sd_tpu")),
    Goal("a step of teaching, memory", "Teaching, a step", "memory / PyTorch's", 1.1,
         named("sd_tpu")),
    Goal("first visit", "First visit", "figure", "goal", lambda row: not _pictures(row)),
    Goal("first visit", "First visit", "figure", "goal", lambda row: _pictures(row), at_least=True),
)  # fmt: skip


def _pictures(row: Row) -> bool:
    return row[""].startswith(("pictures whole", "pictures, %"))


def check(record: Record) -> Iterator[Check]:
    """Compare a record's figures with the goals for them."""
    for goal in GOALS:
        if not record.title.startswith(goal.title):
            continue
        for row in filter(goal.rows, record.by_column()):
            figure = row.get(goal.column)
            limit = row.get(goal.limit) if isinstance(goal.limit, str) else goal.limit
            if figure is None or limit is None:
                continue
            label = [cell for cell in [*row.values()][:2] if isinstance(cell, str)]
            what = f"{goal.what}: {', '.join(label)}" if label else goal.what
            met = figure >= limit if goal.at_least else figure <= limit
            yield Check(what, figure, f"{'≥' if goal.at_least else '≤'} {limit:g}", met)
