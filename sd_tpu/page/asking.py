"""How the page asks the server, and who is asking."""

import re
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

from gradio.components import Component
from gradio.events import Dependency

from sd_tpu.page.layout import Form

# At each event Gradio's browser part visits all components on which any event so far shows its
# progress, by default its outputs, also where nothing of it is to be seen.
QUIET = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
REFRESH_HISTORY = "() => window.sdTpu.refreshHistory()"
LOOK_AT_REFUSAL = "() => window.sdTpu.lookAtRefusal()"


def gather(trigger: Callable[..., Dependency], form: Form,
           also: Mapping[Component, str] = MappingProxyType({})) -> Dependency:
    """When something is done on the page, puts all that is filled in into `form.gathered`, for the
    server to be asked with it `then`; and into others what JavaScript says.

    At each event Gradio's browser part visits every input of all events that have asked the server
    so far. With the form's fields as inputs, each letter that is typed and each step of a run would
    cost twice as much there.
    """
    return trigger(None, form.inputs(), [form.gathered, *also], **QUIET,
                   js=f"(...form) => [{', '.join(['form', *also.values()])}]")


def browser_of(saved: dict) -> str:
    """The browser's name for itself, which nobody else can guess; a new one if it has none."""
    name = str(saved.get("browser"))
    return name if re.fullmatch("[0-9a-f]{32}", name) else secrets.token_hex(16)
