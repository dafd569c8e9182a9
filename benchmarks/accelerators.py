"""All that is to be measured on a GPU or a TPU: `python -m benchmarks.accelerators`.

Steps and decoders of SD 1.4, SDXL, FLUX.2 klein 4B and Z-Image, LoRAs, weights in int8, and whole
pictures, the most important first; on a GPU beside diffusers on PyTorch, with `torch.compile`. Each
measurement is a process of its own that is ended after three minutes and writes its record when it
is done, so that what is there when the time on a machine ends is kept. One that fails is a row that
says why. Without an accelerator the same is done with tiny models on the CPU, to show that it
works, and the rows say "not measured yet".
"""

import argparse
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax

from benchmarks import contestants
from benchmarks.contestants import Figures, Workload, evaluations_of
from benchmarks.records import Record, newest, read_all, table
from benchmarks.report import add_rounds, parser, report
from benchmarks.tpu_compile import CHIPS, SIDES, as_trained
from sd_tpu.checkpoint.config import WEIGHTS

OURS, PYTORCH = "sd_tpu", "diffusers, PyTorch"
STEP, DECODER, PICTURES, LORA = "a step", "decoder", "whole pictures", "merging a LoRA"
UNMEASURED = "not measured yet"
TITLE = "Accelerators: "  # and a measurement's name
STEPS = 50  # of the guide's pictures
MEASURES: dict[tuple[str, str], Callable[[Workload], Figures]] = {
    (STEP, OURS): contestants.our_step,
    (STEP, PYTORCH): contestants.their_step,
    (DECODER, OURS): contestants.our_decoder,
    (DECODER, PYTORCH): contestants.their_decoder,
    (PICTURES, OURS): contestants.our_pictures,
    (PICTURES, PYTORCH): contestants.their_pictures,
    (LORA, OURS): contestants.our_lora,
}
TO_INSTALL = (
    'pip install torch "diffusers>=0.42,<0.43" "transformers>=5.23,<6" accelerate, with CUDA'
)


class Operations(NamedTuple):
    """Operations for one picture, two to a multiplication with its addition."""

    evaluation: float
    decoder: float
    text_encoder: float = 0


# Counts of torch.utils.flop_counter for convolutions and matrix products of diffusers' networks.
OPERATIONS = {
    "sd14": Operations(0.803e12, 2.515e12, 0.0133e12),
    "sdxl": Operations(6.761e12, 10.47e12),
    "klein": Operations(34.82e12, 10.47e12),
    "zimage": Operations(56.58e12, 10.47e12),
}

# Peak of dense bfloat16 matrix products by what is in the device's name, from NVIDIA's data sheets
# and Google Cloud's pages; float16 where a chip has no bfloat16. The first that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
    "T4": 65e12,
    "TPU v2": CHIPS["v2-8"].flops,
    "TPU v3": CHIPS["v3-8"].flops,
    "TPU v4": CHIPS["v4-8"].flops,
    "TPU v5 lite": CHIPS["v5e-8"].flops,
    "TPU v5e": CHIPS["v5e-8"].flops,
    "TPU v5p?": 459e12,
    "TPU v6 lite": CHIPS["v6e-8"].flops,
    "TPU v6e": CHIPS["v6e-8"].flops,
}

# The tiny model that stands in on a CPU.
TINY = {"sd14": "tiny", "sdxl": "tinyxl", "klein": "tinyklein", "zimage": "tinyzimage"}


@dataclass(frozen=True)
class Measurement:
    """A part of a model with so many pictures at once, by one contestant."""

    model: str
    part: str
    pictures: int
    by: str = OURS

    @property
    def name(self) -> str:
        """Description of the measurement."""
        return f"{self.model}, {self.part}, {self.pictures} at once, {self.by}"

    @property
    def columns(self) -> dict[str, Any]:
        """The first cells of its row."""
        return {"model": self.model, "part": self.part, "pictures": self.pictures, "": self.by}


def _both(model: str, part: str, pictures: int) -> list[Measurement]:
    return [Measurement(model, part, pictures, by) for by in (OURS, PYTORCH)]


MEASUREMENTS = (  # the most important first
    *_both("sd14", STEP, 4),
    *_both("sdxl", STEP, 1),
    *_both("klein", STEP, 1),
    *_both("zimage", STEP, 1),
    *(
        Measurement(f"{model}-{weights}", STEP, 1)
        for weights in WEIGHTS
        for model in ("klein", "zimage")
    ),
    *_both("sd14", PICTURES, 8),
    *_both("sd14", DECODER, 4),
    *_both("klein", DECODER, 1),
    *_both("sdxl", DECODER, 1),
    *(Measurement(model, LORA, 1) for model in TINY),
    *_both("sdxl", STEP, 4),
    *_both("klein", STEP, 4),
    *_both("zimage", STEP, 4),
    *_both("sd14", STEP, 1),
)


# --- a process for each -------------------------------------------------------------------------


def apart(seconds: float, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Call a function in a new process, which is ended with all of its own after so many seconds.

    Returns:
        The function's result and "", or None and a sentence about why there is none.
    """
    context = get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(answer, function, arguments))
    process.start()
    answer.close()
    try:
        if not answers.poll(seconds):
            return None, f"ended after {seconds:g} s"
        return answers.recv()
    except EOFError:
        process.join()
        return None, f"the process died ({process.exitcode})"
    finally:
        _end(process)


def _answer(answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Send what a function returns, from a process that leads a group of its own."""
    os.setsid()
    try:
        answer.send((function(*arguments), ""))
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        answer.send((None, f"{type(error).__name__}: {first}"[:200]))


def _end(process: BaseProcess) -> None:
    """End a process and those that it started, such as PyTorch's compilers."""
    with suppress(ProcessLookupError):  # it has not begun, or all have ended
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


# --- rows ---------------------------------------------------------------------------------------


def measure(one: Measurement, args: argparse.Namespace) -> None:
    """Take a measurement and write its record."""
    if one.by == PYTORCH:  # JAX only says what the device is, and leaves its memory alone
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_enable_compilation_cache", False)  # to see what compiling takes
    model, real = one.model, jax.default_backend() != "cpu"
    if not real:
        whole = as_trained(model)
        model = model.replace(whole, TINY[whole])
    load = Workload(
        model,
        SIDES[model],
        one.pictures,
        steps=STEPS if real else 2,
        evaluations=10 if real else 1,
        rounds=args.rounds if real else 1,
    )
    try:
        if real and one.by == PYTORCH and not contestants.pytorch_sees_gpu():
            raise ImportError("PyTorch sees no GPU")
        figures = MEASURES[one.part, one.by](load)
    except ImportError as error:
        raise ImportError(f"{error}; {TO_INSTALL}") from error
    _report(one, args, _cells(one, figures) if real else dict.fromkeys(_FIGURES, UNMEASURED))


_FIGURES = ("milliseconds", "share of peak, %", "peak memory, GB", "first call, s")


def _cells(one: Measurement, figures: Figures) -> dict[str, Any]:
    everywhere = one.part == PICTURES and one.by == OURS
    devices = jax.devices() if everywhere else jax.devices()[:1]
    count, most = operations(one), peak(devices[0])
    share = 100 * count / figures.seconds / (len(devices) * most) if count and most else None
    memory = figures.memory and figures.memory / 1e9
    values = 1000 * figures.seconds, share, memory, figures.first
    return dict(zip(_FIGURES, values, strict=True))


def _report(one: Measurement, args: argparse.Namespace, cells: dict[str, Any]) -> None:
    report(f"{TITLE}{one.name}", [{**one.columns, **cells}], args)


def report_failure(one: Measurement, args: argparse.Namespace, why: str) -> None:
    """Write the record of a measurement that came to nothing."""
    _report(one, args, {**dict.fromkeys(_FIGURES), "why not": why})


def operations(one: Measurement) -> float:
    """Return the operations of all pictures of a measurement; 0 where nobody counts them."""
    of = OPERATIONS.get(as_trained(one.model))
    if of is None or one.part == LORA:
        return 0
    rows = evaluations_of(one.model, one.pictures)
    texts = rows * of.text_encoder
    return {
        STEP: rows * of.evaluation,
        DECODER: one.pictures * of.decoder,
        PICTURES: STEPS * rows * of.evaluation + one.pictures * of.decoder + texts,
    }[one.part]


def peak(device: jax.Device) -> float | None:
    """Operations a second that the device can do at most, if it is known."""
    return next(
        (peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device.device_kind)),
        None,
    )


def rows(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield the newest row of each measurement on each machine, beside PyTorch's where it is."""
    found = {
        (record.machine, one): {
            "machine": record.machine,
            "date": record.date[:10],
            **record.by_column()[0],
        }
        for one in MEASUREMENTS
        for record in newest(records, f"{TITLE}{one.name}")
    }
    for (machine, one), row in found.items():
        theirs = found.get((machine, Measurement(one.model, one.part, one.pictures, PYTORCH)))
        times = [each and each["milliseconds"] for each in (theirs, row)]
        ratio = None if None in times or UNMEASURED in times else times[0] / times[1]
        yield {**row, "times PyTorch's speed": ratio}


def as_table(found: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown, without columns that none has."""
    columns = [
        column
        for column in dict.fromkeys(column for row in found for column in row)
        if any(row.get(column) is not None for row in found)
    ]
    return table(columns, [[row.get(column) for column in columns] for row in found])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all, or show that it would work."""
    flags = parser("accelerators", __doc__.splitlines()[0])
    flags.add_argument(
        "--models",
        nargs="+",
        choices=dict.fromkeys(one.model for one in MEASUREMENTS),
        help="(default: all)",
    )
    flags.add_argument(
        "--parts",
        nargs="+",
        choices=dict.fromkeys(one.part for one in MEASUREMENTS),
        help="(default: all)",
    )
    flags.add_argument(
        "--limit",
        type=float,
        default=180,
        metavar="SECONDS",
        help="after which a measurement is ended (default: 180)",
    )
    add_rounds(flags, 5)
    args = flags.parse_args(arguments)
    platform, why = apart(args.limit, jax.default_backend)
    if why:
        sys.exit(f"JAX finds no device: {why}.")
    if platform == "cpu":
        print("There is no accelerator: tiny models on the CPU show that all works.", flush=True)
    for one in MEASUREMENTS:
        if not (
            one.model in (args.models or [one.model])
            and one.part in (args.parts or [one.part])
            and (one.by == OURS or platform != "tpu")
        ):
            continue
        _, why = apart(args.limit, measure, one, args)
        if why:
            apart(args.limit, report_failure, one, args, why)
    found = [*rows(read_all(args.results, args.benchmark))]
    print("## The newest of each", as_table(found), sep="\n\n")


if __name__ == "__main__":
    main()
