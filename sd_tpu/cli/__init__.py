"""`python -m sd_tpu`: pictures into a folder, a journey between two, LoRAs, devices, samplers.

Each command is a module that adds its flags and says what is run. It is imported when it is asked
for: what draws takes seconds to import.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "generate": "make up to eight pictures in a folder",
    "journey": "make pictures on the way from one prompt or seed to another, and a movie",
    "teach": "make a LoRA of a few pictures, so that a model draws what they show",
    "devices": "say what JAX finds to work on",
    "doctor": "say what is here to work with, and what is wrong and how to mend it",
    "samplers": "list the samplers and their spacings",
}
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one sentence on stderr."""
    args = _parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(f"{error.filename or 'A file'}: {error.strerror or error}.", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    return 2


def leave(code: int) -> NoReturn:
    """End the process with this exit code, perhaps while something compiles in a thread.

    Python's own way out crashes then.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sd_tpu",
        description="Stable Diffusion on JAX.",
        epilog="`page` starts the page; see `page --help`.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = next(iter(arguments), "")
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does)
        if name == chosen:
            importlib.import_module(f"sd_tpu.cli.{name}").add_flags(command)
    return parser.parse_args(arguments)
