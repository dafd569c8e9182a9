"""Starts the page: `python app.py`, then open the address it prints."""

import argparse
import os
import socket
import sys
import time

from sd_tpu import ui
from sd_tpu.config import BUNDLED_MODEL
from sd_tpu.engine import Engine
from sd_tpu.sharding import set_host_devices


def main(arguments: list[str] | None = None) -> int:
    """Loads, compiles and serves until interrupted; the exit code."""
    args = _parser().parse_args(arguments)
    try:
        _serve(args)
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(f"sd_tpu: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> None:
    _check_address(args.host, args.port)
    if args.devices:
        set_host_devices(args.devices)
    begun = time.monotonic()
    print(f"Loading {args.model} ...", flush=True)
    engine = Engine.open(args.model, revision=args.revision, variant=args.variant,
                         dtype=args.dtype, devices=args.devices, size=args.size)
    print(f"Compiling ... ({time.monotonic() - begun:.0f} s so far)", flush=True)
    engine.ready.wait()
    page = ui.build(engine)
    try:
        address = ui.launch(page, server_name=args.host, server_port=args.port, share=args.share)
        print(f"Ready on {address} after {time.monotonic() - begun:.0f} s", flush=True)
        page.block_thread()
    finally:
        engine.close()


def _check_address(host: str | None, port: int | None) -> None:
    """Refuses an address where nothing can listen, before minutes go into loading."""
    host = host or os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    port = port or int(os.environ.get("GRADIO_SERVER_PORT", 0))
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ValueError(f"The page cannot be served at {host}:{port}: {error}.") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Stable Diffusion's page: eight prompts, a seed.")
    parser.add_argument("--model", default=BUNDLED_MODEL, metavar="DIR_OR_HUB_ID",
                        help="a checkpoint in the diffusers layout; by default the bundled one")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--variant", help="of the weight files, such as fp16")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"],
                        help="by default float32 on CPU and bfloat16 elsewhere")
    parser.add_argument("--devices", type=_count, metavar="N",
                        help="use so many devices; a CPU is made to count as so many")
    parser.add_argument("--size", type=_size, metavar="WIDTHxHEIGHT",
                        help="of the pictures; by default what the model was trained on")
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 for every network")
    parser.add_argument("--port", type=int, help="by default the first free one from 7860")
    parser.add_argument("--share", action="store_true", default=None,
                        help="make a public link through Gradio's servers")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from 1.")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    """Height and width of WIDTHxHEIGHT."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} should be like 512x512.")
    return int(height), int(width)


if __name__ == "__main__":
    sys.exit(main())
