"""`python -m sd_tpu teach`: a LoRA from a folder of pictures."""

import argparse
import sys
from pathlib import Path

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.cli import INTERRUPTED
from sd_tpu.cli.devices import add_devices_flag, find_devices
from sd_tpu.cli.drawing import ProgressLine
from sd_tpu.cli.flags import positive, size
from sd_tpu.training.options import BOUNDS, OPTIMIZERS, Options
from sd_tpu.training.pictures import FEWEST, KINDS, MOST


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; `Options.check` checks their values."""
    parser.set_defaults(run=_teach)
    add = parser.add_argument
    add(
        "--model",
        default=BUNDLED_MODEL,
        metavar="DIR_OR_FILE_OR_HUB_ID",
        help="what is taught: checkpoint folder, single .safetensors file, or hub id (default: the "
        "bundled model)",
    )
    add(
        "--pictures",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"folder of {FEWEST} to {MOST} pictures, each perhaps with a caption in a text file "
        "of the same name",
    )
    add(
        "--name",
        required=True,
        metavar="WORD",
        help="the word for it in prompts; the LoRA is called so too",
    )
    add("--kind", choices=KINDS, default=Options.kind, help="what it is (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="the LoRA's file (default: WORD.safetensors here)")
    add("--resume", action="store_true", help="go on with a run that was cut off")
    add("--steps", type=positive, default=Options.steps, metavar="N", help="(default: %(default)s)")
    add(
        "--rank",
        type=positive,
        default=Options.rank,
        metavar="N",
        help=f"of the factors, how much can be learned: 4 to {BOUNDS['rank'].most} "
        "(default: %(default)s)",
    )
    rates = ", ".join(f"{rate:g} with {name}" for name, rate in OPTIMIZERS.items())
    add("--learning-rate", type=float, metavar="X", help=f"at its highest (default: {rates})")
    add(
        "--optimizer",
        choices=[*OPTIMIZERS],
        default=Options.optimizer,
        help="prodigy finds the learning rate itself (default: %(default)s)",
    )
    add(
        "--batch",
        type=positive,
        metavar="N",
        help="pictures that are looked at together, a multiple of the devices (default: one on "
        "each)",
    )
    add(
        "--accumulate",
        type=positive,
        default=Options.accumulate,
        metavar="N",
        help="batches that make a step (default: %(default)s)",
    )
    add(
        "--size",
        type=size,
        metavar="WIDTHxHEIGHT",
        help="the area at which pictures are looked at, such as 512x512 (default: the model's)",
    )
    add(
        "--seed",
        type=int,
        default=Options.seed,
        metavar="N",
        help="of everything random (default: %(default)s)",
    )
    add(
        "--caption-dropout",
        type=float,
        default=Options.caption_dropout,
        metavar="X",
        help="how often a caption is left out (default: %(default)s)",
    )
    add("--feed-forward", action="store_true", help="train feed-forward layers beside attention")
    add("--text-encoders", action="store_true", help="train the CLIP text encoders as well")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the model; the factors are float32 (default: float32 on CPU, bfloat16 elsewhere)",
    )
    add_devices_flag(parser)


def _teach(args: argparse.Namespace) -> int:
    from sd_tpu.training.teach import Estimate, Lesson, TeachingStopped, teach

    find_devices(args.devices)
    line = ProgressLine()

    def show(event: str | Estimate | Lesson) -> None:
        match event:
            case Estimate(seconds, size):
                line.show(f"About {_duration(seconds)}, and {size / 1e9:.1f} GB on each device.")
            case Lesson(step, steps, loss, seconds):
                left = f", {_duration(seconds)} left" if step < steps else ""
                line.show(f"Step {step} of {steps}, loss {loss:.4f}{left}")
                return
            case _:
                line.show(event)
        line.keep()

    values = {key: value for key, value in vars(args).items() if key != "run"}
    try:
        file = teach(**values, on_event=show)
    except TeachingStopped as stopped:
        line.keep()
        print(f"{stopped} Go on with the same command and --resume.", file=sys.stderr)
        return INTERRUPTED
    line.keep()
    print(file, flush=True)
    return 0


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
