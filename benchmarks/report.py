"""What all benchmarks do alike: taking turns, medians, and tables with what they were measured on."""

import argparse
import datetime
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
from tabulate import tabulate

RESULTS = Path(__file__).parent / "RESULTS.md"
COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX reports each compilation under it
PACKAGES = ("jax", "flax", "libtpu", "torch", "diffusers", "openvino")


def parser(description: str) -> argparse.ArgumentParser:
    """A benchmark's command line, with the flag that all of them have."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="Markdown file that the tables are appended to (%(default)s)",
    )
    return flags


class Timing(NamedTuple):
    """Seconds of a contestant's first call, in which it compiles, and the median of the others."""

    first: float
    median: float


def side_by_side(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Times each contestant's first call, and then those of several rounds.

    They take turns in every round, so that whatever else the machine does meets them all alike. A
    contestant returns only when its work is done (`jax.block_until_ready`).
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
    """What tells how many programs this process has compiled from now on."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event)
    )
    return lambda: events.count(COMPILED)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own, whose memory holds nothing else yet."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def memory(what: str) -> int:
    """Bytes of this process that Linux counts: "VmRSS" resident now, "VmHWM" at the most so far.

    The peak that `getrusage` tells begins with that of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return int(kilobytes) * 1024


def forget_peak() -> None:
    """Lets this process's peak begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def report(
    title: str, rows: Sequence[Mapping[str, Any]], results: Path, *, notes: Sequence[str] = ()
) -> None:
    """Prints rows as a table and appends it to the results.

    Args:
        title: what was measured, without the date and the machine, which are added.
        rows: the cells by column, empty where a row has none; numbers are shown with four digits
            that count.
        results: the Markdown file.
        notes: sentences to stand below the table.
    """
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g")
    measured_on = f"{datetime.date.today()}, {machine()}; {versions()}"
    text = "\n\n".join([f"## {title}", f"Measured on: {measured_on}.", table, *notes])
    print(text, flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")


def machine() -> str:
    """The devices and the host, in words."""
    devices = jax.devices()
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    host = f"{cores} cores of {processor()}, {memory:.0f} GiB"
    kind = devices[0].device_kind
    return host if devices[0].platform == "cpu" else f"{len(devices)} x {kind}, {host}"


def processor() -> str:
    """The processor's name as Linux has it, else its architecture."""
    with suppress(OSError):
        known = Path("/proc/cpuinfo").read_text("utf-8")
        if name := re.search(r"^model name\s*: *(.+)", known, re.M):
            return name[1]
    return platform.machine()


def versions() -> str:
    """Of Python and of those packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
