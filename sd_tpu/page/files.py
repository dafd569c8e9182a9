"""Files as Gradio has them: what visitors have handed in, and what it serves to them."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
from gradio.utils import get_upload_folder

from sd_tpu.settings import RequestError


def uploaded(path: Any) -> Path:
    """A file that somebody has handed in; raises RequestError for any other of the server's."""
    file = Path(str(path)).resolve()
    if not file.is_relative_to(Path(get_upload_folder()).resolve()) or file.is_dir():
        raise RequestError("This file has not been uploaded.")
    return file


def url(path: str) -> str:
    """Where Gradio serves a file of its cache, relative to the page, which may lie in a folder."""
    return f"gradio_api/file={quote(path)}"


def fetch_nothing() -> None:
    """Has Gradio, in this process, refuse the addresses that visitors give for files: it would load
    whatever lies there, of any size, before anything here is asked."""
    async def refuse(*_: Any, **__: Any) -> str:
        raise gr.Error("Only files that are uploaded are taken, no addresses.",
                       print_exception=False)

    gr.processing_utils.async_ssrf_protected_download = refuse
