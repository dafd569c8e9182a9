"""Changes of Gradio before it is imported; `sd_tpu.page.sessions` changes more while it serves."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_editor_stubs() -> Iterator[None]:
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
