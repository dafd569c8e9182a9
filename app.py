"""Starts the page: `python app.py`, then open the address it prints."""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from sd_tpu.cli import INTERRUPTED, add_model_flags, leave, open_engine
from sd_tpu.folders import data_folder
from sd_tpu.history import History, HistoryError
from sd_tpu.page import build, launch

MAX_PORT = 65535


def main(arguments: list[str] | None = None) -> int:
    """Loads, compiles and serves until interrupted; the exit code."""
    args = _parser().parse_args(arguments)
    try:
        return _serve(args)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(f"sd_tpu: {error}", file=sys.stderr)
        return 2


def _serve(args: argparse.Namespace) -> int:
    _check_address(args.host, args.port)
    history = _open_history(args.history)
    begun = time.monotonic()
    print(f"Loading {args.model} ...", flush=True)
    engine = open_engine(args)
    print(f"Compiling ... ({time.monotonic() - begun:.0f} s so far)", flush=True)
    engine.ready.wait()
    if engine.failure:
        print(f"sd_tpu: {engine.failure}", file=sys.stderr)
        return 1
    page = build(engine, history)
    try:
        address = launch(page, server_name=args.host, server_port=args.port, share=args.share)
        print(f"Ready on {address} after {time.monotonic() - begun:.0f} s: open this address in a "
              "browser; Ctrl+C ends it.", flush=True)
        page.block_thread()
    finally:
        engine.close()
    return 0


def _open_history(folder: Path | None) -> History | None:
    """The history in the folder, if there is to be one; opened before minutes go into loading."""
    try:
        return folder and History(folder)
    except HistoryError as error:
        raise ValueError(f"{error} Name another folder with --history, or keep nothing with "
                         "--no-history.") from error


def _check_address(host: str | None, port: int | None) -> None:
    """Refuses an address where nothing can listen, before minutes go into loading."""
    host = host or os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    if port is None and "GRADIO_SERVER_PORT" in os.environ:
        port = int(os.environ["GRADIO_SERVER_PORT"])
    if port is not None and not 1 <= port <= MAX_PORT:  # the system would take another
        raise ValueError(f"A port is a number from 1 to {MAX_PORT}, not {port}.")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ValueError(f"The page cannot be served at {host}:{port}: {error}. Name another with "
                         "--host or --port; without --port it is the first free one.") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Stable Diffusion's page: eight prompts, a seed.")
    add_model_flags(parser)
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 for every network")
    parser.add_argument("--port", type=int, help="by default the first free one from 7860")
    parser.add_argument("--share", action="store_true", default=None,
                        help="make a public link through Gradio's servers")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--history", type=Path, default=data_folder() / "history", metavar="DIR",
                      help="where finished pictures are kept, for the browser that made them "
                           "(default: %(default)s)")
    kept.add_argument("--no-history", dest="history", action="store_const", const=None,
                      help="keep no pictures")
    return parser


if __name__ == "__main__":
    leave(main())
