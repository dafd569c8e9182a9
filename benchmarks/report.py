"""Helpers of all benchmarks: command line, calls in turn, medians, memory, and reports."""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import goals, machine
from benchmarks.records import RESULTS, Record, cell
from sd_tpu import BUNDLED_MODEL

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX reports each compilation under it


def parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    """Return the command line of `python -m benchmarks.<benchmark>`, with the common flag."""
    flags = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=description
    )
    flags.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where a record of each table is written (default: benchmarks/results)",
    )
    flags.set_defaults(benchmark=benchmark)
    return flags


def add_model(flags: argparse.ArgumentParser) -> None:
    """Add `--model`, a folder or hub id, to a benchmark that runs the bundled model by default."""
    flags.add_argument(
        "--model",
        default=BUNDLED_MODEL,
        metavar="DIR_OR_HUB_ID",
        help="(default: the bundled model)",
    )


def add_rounds(flags: argparse.ArgumentParser, default: int) -> None:
    """Add `--rounds`, of which medians are taken."""
    flags.add_argument(
        "--rounds", type=int, default=default, help="to take medians of (%(default)s)"
    )


class Timing(NamedTuple):
    """Seconds of a contestant's first call, which compiles, and the median of the others."""

    first: float
    median: float


def side_by_side(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Time each contestant's first call, and then the calls of several rounds.

    Contestants take turns in every round, so that other work on the machine slows all of them. A
    contestant must return only when its work is done (`jax.block_until_ready`).
    """
    first = {name: seconds_of(call) for name, call in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            taken[name].append(seconds_of(call))
    return {name: Timing(first[name], statistics.median(taken[name])) for name in contestants}


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def count_compilations() -> Callable[[], int]:
    """Return a function that counts the programs this process has compiled since."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event)
    )
    return lambda: events.count(COMPILED)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process and return its result.

    The memory of that process holds nothing else yet.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def memory(what: str) -> int:
    """Bytes of this process as Linux counts them: "VmRSS" resident now, "VmHWM" the peak so far.

    The peak of `getrusage` starts at that of the parent process.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return int(kilobytes) * 1024


def forget_peak() -> None:
    """Reset this process's peak memory to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    args: argparse.Namespace,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Print rows as a table and record them.

    Args:
        title: the table's; records with the same title and machine are compared over time.
        rows: cells by column; a row may leave columns out.
        args: the parsed command line, by `parser`: which benchmark it is, where results go, and the
            flags that are recorded.
        notes: sentences to print below the table.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    flags = {
        name: value for name, value in vars(args).items() if name not in ("benchmark", "results")
    }
    record = Record(
        benchmark=args.benchmark,
        title=title,
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        commit=machine.commit(),
        machine=machine.key(),
        host=machine.describe(),
        versions=machine.versions(),
        flags={name: _flag(value) for name, value in flags.items()},
        columns=columns,
        rows=[[cell(row.get(column)) for column in columns] for row in rows],
        notes=list(notes),
    )
    packages = ", ".join(f"{package} {number}" for package, number in record.versions.items())
    aims = [
        f"- {each.what}: {each.figure:.4g}, goal {each.goal}: {'met' if each.met else 'missed'}"
        for each in goals.check(record)
    ]
    parts = [
        f"## {title}",
        f"{record.host}; {packages}",
        record.markdown(),
        *notes,
        "\n".join(aims),
    ]
    print("\n\n".join(filter(None, parts)), flush=True)
    record.write(args.results)


def _flag(value: Any) -> Any:
    """Return a flag's value as JSON has it, of a folder or file its name alone."""
    if isinstance(value, list | tuple):
        return [_flag(each) for each in value]
    if value == BUNDLED_MODEL:
        return "bundled"
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    return value
