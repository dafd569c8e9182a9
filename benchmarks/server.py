"""The server as a process of its own, for benchmarks that ask it over HTTP."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

APP = Path(__file__).resolve().parent.parent / "app.py"


class Server(NamedTuple):
    """A server that is ready.

    Attributes:
        address: what it is reached by.
        process: its own.
        printed: seconds from its start to each line that it printed, by the line's first word.
    """

    address: str
    process: subprocess.Popen
    printed: dict[str, float]


@contextmanager
def serve(model: str | Path, *flags: str | Path, **environment: str) -> Iterator[Server]:
    """Start a server on a free port and end it afterwards.

    Args:
        model: a folder or hub id.
        flags: of `app.py`, beside model and port.
        environment: variables of the process, beside this one's or instead of them.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, APP, "--model", model, "--port", str(port), *flags],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        printed = {}
        for line in process.stdout:
            first, *_ = line.split() or [""]
            printed[first] = time.perf_counter() - begun
            if line.startswith("Ready"):
                break
        else:
            raise RuntimeError("The server ended before it was ready; its own words are above.")
        yield Server(f"http://127.0.0.1:{port}", process, printed)
    finally:
        process.terminate()  # Ctrl-C is ignored by what a shell has put into the background
        process.wait()
