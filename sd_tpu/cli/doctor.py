"""`python -m sd_tpu doctor`: what is here, and what is wrong."""

import argparse
import dataclasses
import json
import subprocess
import sys

from sd_tpu.cli.flags import add_model_flags, model_options
from sd_tpu.doctor import Device, Diagnosis, diagnose
from sd_tpu.reading import expanded
from sd_tpu.runtime.dtype import chosen_dtype
from sd_tpu.runtime.mesh import bytes_to_keep

SECONDS = 120  # that JAX may look for devices; on one host of several it would wait for ever
ASK = """
import json
from sd_tpu.doctor import jax_devices
print(json.dumps(jax_devices(), default=vars))
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.set_defaults(run=_doctor, decoder_for="pictures")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--hub",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to ask the Hugging Face Hub for an answer (default: yes)",
    )
    add_model_flags(parser)


def _doctor(args: argparse.Namespace) -> int:
    devices, failure = _asked()
    found = diagnose(devices, failure=failure, hub=args.hub, more=_problems_of_model(args, devices))
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
    return int(bool(found.problems))


def _asked() -> tuple[list[Device], str]:
    """Ask JAX for its devices, in a process that gives them back and is ended if it waits."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"it waited for {SECONDS} s"
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or [f"it ended with {result.returncode}"]
        return [], last[0]
    devices, failure = json.loads(result.stdout.splitlines()[-1])
    return [Device(**each) for each in devices], failure


def _problems_of_model(args: argparse.Namespace, devices: list[Device]) -> list[str]:
    """Return why the flags' model cannot be drawn with; one of the hub is not fetched for it."""
    if not devices or not (expanded(args.model).exists() or args.models):
        return []
    platform = devices[0].platform
    on_cpu = platform == "cpu"
    dtype = chosen_dtype(args.dtype, platform)
    from sd_tpu.serving.client import open_models  # takes seconds
    from sd_tpu.serving.replicas import fewest_chips

    try:
        catalog, _ = open_models(
            dtype=dtype, tensor_parallel=args.tensor_parallel_size or 1, **model_options(args)
        )
    except ValueError as error:  # of which CheckpointError is one
        return [str(error)]
    # A CPU counts as so many devices as are asked for.
    number = args.devices or 1 if on_cpu else len(devices)
    room = args.memory or bytes_to_keep(devices[0].memory, number)
    checkpoint = catalog.open("").checkpoint
    chips = args.tensor_parallel_size or (1 if on_cpu else fewest_chips(checkpoint, number, room))
    needed = checkpoint.memory_on(chips)
    if needed <= room:
        return []
    each = f" of each of {chips} chips" if chips > 1 else ""
    alone = " on a replica by itself" if number > chips else ""  # beside others it takes more
    helps = {
        "--dtype bfloat16 halves that": dtype == "float32",
        "--no-t5 leaves its largest text encoder out": args.t5
        and "text_encoder_3" in checkpoint.parameters.shapes
        and checkpoint.texts.memory > checkpoint.drawing.memory,
        "--devices 1 keeps them once": on_cpu and number > 1,
    }
    advice = ", ".join(flag for flag, does in helps.items() if does) or (
        "a larger device is needed, or a smaller model"
    )
    return [
        f"The weights of {args.model} take {needed / 1e9:.1f} GB{each} at once{alone}, and "
        f"{room / 1e9:.1f} GB of a device are for what stays there: {advice}."
    ]


def _print(found: Diagnosis) -> None:
    """Print a diagnosis for people, the problems at the end."""
    rows = {
        "System": found.system,
        "Memory": f"{found.memory / 1e9:.1f} GB",
        "Devices": found.hardware or "none",
        "Versions": found.packages,
        **{
            what.capitalize(): folder.path
            + ("" if folder.free is None else f", {folder.free / 1e9:.1f} GB free")
            for what, folder in found.folders.items()
        },
        "Hugging Face Hub": {
            True: "answers",
            False: "does not answer: models are read from folders and files here",
            None: "not asked",
        }[found.hub],
        "MP4 movies": "yes" if found.ffmpeg else "no: ffmpeg is not installed; WebP and GIF are",
    }
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        print(f"{name:<{width}}{text}")
    print()
    print(*(found.problems or ["Nothing is wrong here."]), sep="\n")
