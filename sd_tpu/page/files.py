"""Files as Gradio has them: what visitors have handed in, and what it serves to them."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

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
