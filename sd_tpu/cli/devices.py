"""`python -m sd_tpu devices`, and how others find theirs."""

import argparse

import jax

from sd_tpu.runtime.dtype import fastest_dtype, has_bfloat16
from sd_tpu.runtime.mesh import make_mesh, set_host_devices

MAX_DEVICES = 256  # more on one host is a slip of the finger, and each takes memory


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.set_defaults(run=_devices)
    add_devices_flag(parser)


def add_devices_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--devices`, the number that `find_devices` takes."""
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        help="how many to use; a CPU counts as N (default: all)",
    )


def find_devices(count: int | None) -> list[jax.Device]:
    """Return the first `count` of this process's devices, or all; a CPU counts as so many.

    Raises:
        ValueError: there are too few, or none of the platform that JAX was told to use.
    """
    try:
        if count is not None:
            set_host_devices(count)  # concerns the CPU only, whatever else there is
    except RuntimeError:
        pass  # JAX has begun with the devices it has, which may be enough
    try:
        return list(make_mesh(count).devices.flat)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"JAX finds no device to work on ({reason}).") from error


def _devices(args: argparse.Namespace) -> int:
    devices = find_devices(args.devices)
    found = "1 JAX device" if len(devices) == 1 else f"{len(devices)} JAX devices"
    print(f"Found {found} of type {devices[0].device_kind}.")
    platform = devices[0].platform
    if platform != "tpu":
        print(f"This is not a TPU but a {platform.upper()}: everything works, at its own speed.")
    if platform == "cpu" and has_bfloat16():
        print(
            f"Full-size models are faster in {fastest_dtype(platform)} here, which --dtype auto "
            "takes."
        )
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} should be from 1 to {MAX_DEVICES}")
    return int(text)
