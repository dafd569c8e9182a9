"""Applications that are served to this machine."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

PATIENCE = 60.0  # seconds


@contextmanager
def served(app) -> Iterator[str]:
    """Return the address of an application while it is served."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def until(condition) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
