"""Reliance on Gradio's inside: all that has no public way, as seen in Gradio 6.31.

tests/page/test_gradio_compat.py fails where a later Gradio changes what is used here. This module
imports Gradio; what imports it first starts faster (`_no_editor_stubs`).

Sessions have no memory here: the server keeps nothing of a visitor, as the browser has the form.
Gradio's own sessions each hold a description of every component, for links that this page does not
offer, and stay for ever: 0.5 MB for each program that asks something once. Here all visitors share
one. Events for somebody who does not listen are not made.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@contextmanager
def _no_editor_stubs() -> Iterator[None]:
    """Keep Gradio from writing stubs for editors beside the files of its components.

    While it is imported, it parses the source of each component for them, which takes two fifths of
    the processor's time (2.3 of 3.9 s are left). Where a class has no file, as one typed into a
    notebook, it goes on without.
    """
    getfile = inspect.getfile

    def getfile_of_others(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError("a component of Gradio's, which gets no stub")
        return getfile(thing)

    inspect.getfile = getfile_of_others  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        inspect.getfile = getfile


with _no_editor_stubs():
    import fastapi
    import gradio as gr
    import gradio.processing_utils
    import gradio.queueing
    import gradio.route_utils
    import gradio.routes
    import gradio.utils
    from gradio.networking import setup_tunnel
    from gradio.state_holder import SessionState, StateHolder
    from gradio.tunneling import CURRENT_TUNNELS

    from sd_tpu.logs import log_printed_errors

FRONTEND = Path(gr.__file__).parent / "templates" / "frontend"  # files of its page
UPLOAD_PATH = "/gradio_api/upload"  # which takes what visitors hand in
SILENT_SECONDS = 30.0  # after which nobody listens to what waits to be told


def log_errors() -> None:
    """Have Gradio log the tracebacks that it would print."""
    log_printed_errors(gradio.queueing, gradio.routes, gradio.route_utils, gradio.utils)


def fetch_nothing() -> None:
    """Have Gradio, in this process, refuse the addresses that visitors give for files.

    It would load them from wherever they are.
    """

    async def refuse(*_: Any, **__: Any) -> str:
        raise gr.Error(
            "Only files that are uploaded are taken, no addresses.", print_exception=False
        )

    gradio.processing_utils.async_ssrf_protected_download = refuse  # ty: ignore[invalid-assignment]


def upload_folder() -> Path:
    """Return the folder of what visitors have handed in."""
    return Path(gradio.utils.get_upload_folder())


def prune(page: gr.Blocks, files: set[str]) -> None:
    """Have Gradio delete files of its cache, by their paths, as it does those of its components."""
    page.temp_file_sets.append(files)


def message_of(event: gr.EventData) -> Any:
    """Return what the script has sent with an event, whole."""
    return event._data


def serve_alone(page: gr.Blocks, site: fastapi.FastAPI, unsubscribe: Callable[[str], None]) -> None:
    """Have a mounted page do without memory of its visitors.

    Args:
        page: the page.
        site: serves nothing but the page.
        unsubscribe: called with the name of a session that has gone.
    """
    page.app = site.routes[-1].app  # ty: ignore[missing-attribute]
    page.has_launched = True  # or it would take any file of the server for one of a visitor's
    page.app.state_holder = _Sessions(page, unsubscribe)


def set_address(page: gr.Blocks, address: str) -> None:
    """Tell the tools for assistants where the page is served.

    They would ask what they need by whatever name they are asked.
    """
    if page.mcp_server_obj:
        page.mcp_server_obj._local_url = address


def open_tunnel(page: gr.Blocks, host: str, port: int) -> str:
    """Return a public link to an address, through Gradio's servers; may raise anything."""
    return setup_tunnel(host, port, page.share_token, None, None)


def close_tunnels() -> None:
    """Close the public links of this process."""
    for tunnel in CURRENT_TUNNELS:
        tunnel.kill()


def end_listening(page: gr.Blocks) -> None:
    """End the answers to browsers that listen."""
    page.app.stop_event.set()


class _Everybody(SessionState):
    """The page as it is for everybody."""

    def __init__(self, page: gr.Blocks):
        """Take the components of the page itself."""
        # Without components there is nothing to describe.
        nothing: Any = SimpleNamespace(default_config=page.default_config, blocks={})
        super().__init__(nothing)
        self.blocks_config.blocks = page.default_config.blocks
        self.blocks_config.fns = page.default_config.fns

    def __setitem__(self, key: int, value: Any) -> None:
        """Record nothing: Gradio writes here that what an event left out stays as it is."""

    def _update_value_in_config(self, key: int, value: Any) -> None:
        """Describe nothing anew."""


class _Sessions(StateHolder):
    """The sessions by their names, which the visitors draw."""

    def __init__(self, page: gr.Blocks, unsubscribe: Callable[[str], None]):
        """Begin with everybody's session; `unsubscribe` is told who has gone."""
        super().__init__()
        self.set_blocks(page)
        self._unsubscribe = unsubscribe
        self._everybody = _Everybody(page)
        self._silent: dict[str, float] = {}  # since when, by session

    def __getitem__(self, session_id: str) -> _Everybody:
        return self._everybody

    def delete_all_expired_state(self) -> None:
        """Forget the queue's lists of what visitors wait for, and end what nobody waits for;
        Gradio calls it every second.

        The queue keeps what it had to tell a session when all has been told, and which events a
        session waits for when what it had to tell has been dropped.
        """
        queue = self.blocks._queue
        for name, events in list(queue.pending_event_ids_session.items()):
            if not events or name not in queue.pending_messages_per_session:
                queue.pending_event_ids_session.pop(name, None)
                queue.pending_messages_per_session.pop(name, None)
        self._leave_the_silent()

    def _leave_the_silent(self) -> None:
        """End the events of sessions that do not listen.

        A listener is told at once, so only the events of the others pile up.
        """
        queue, now = self.blocks._queue, time.monotonic()
        untold = {
            name
            for name, messages in queue.pending_messages_per_session.items()
            if not messages.empty()
        }
        self._silent = {name: self._silent.get(name, now) for name in untold}
        for name in [name for name, since in self._silent.items() if now - since > SILENT_SECONDS]:
            self._unsubscribe(name)
            queue.pending_messages_per_session.pop(name, None)
            asyncio.get_running_loop().create_task(queue.clean_events(session_hash=name))
