"""Sessions without memory: the server keeps nothing of a visitor, as the browser has the form.

Gradio's own sessions each hold a description of every component, for links that this page does not
offer, and stay for ever: 0.5 MB for each program that asks something once. Here all visitors share
one. Events for somebody who does not listen are not made.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.state_holder import SessionState, StateHolder

SILENT_SECONDS = 30.0  # after which nobody listens to what waits to be told


def remember_nothing(page: gr.Blocks) -> None:
    """Have a served page use the sessions of this module."""
    page.app.state_holder = _Sessions(page)


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

    def __init__(self, page: gr.Blocks):
        """Begin with everybody's session."""
        super().__init__()
        self.set_blocks(page)
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
            self.blocks.unsubscribe(name)  # ty: ignore[missing-attribute]
            queue.pending_messages_per_session.pop(name, None)
            asyncio.get_running_loop().create_task(queue.clean_events(session_hash=name))
