"""Files as Gradio has them: what visitors have handed in, and what it serves to them."""

import time
from collections import Counter, deque
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio.to_thread import run_sync
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sd_tpu.folders import keep_within
from sd_tpu.gradio_compat import UPLOAD_PATH, upload_folder
from sd_tpu.http.access import visitor_network
from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.settings import RequestError

UPLOAD_SECONDS, UPLOAD_BYTES = 600, 1 << 28  # of a network: in this time, so much
LEAST = 1 << 16  # bytes that a file counts for: it has a folder of its own
ALL_UPLOADS = 1 << 30  # bytes of all networks on the disk


def uploaded(path: Any) -> Path:
    """Return an uploaded file's path; raises RequestError for any other of the server's files."""
    file = Path(str(path)).resolve()
    if not file.is_relative_to(upload_folder().resolve()) or file.is_dir():
        raise RequestError("This file has not been uploaded.")
    return file


def url(path: str) -> str:
    """Return where Gradio serves a file of its cache, relative to the page.

    The page may lie in a folder of a site.
    """
    return f"gradio_api/file={quote(path)}"


class Uploads:
    """ASGI middleware that bounds uploads: how much a network hands in lately, and how much of all
    networks lies on the disk. The page reads a file as soon as it is there, so old ones can go."""

    def __init__(self, app: ASGIApp):
        """Begin without uploads."""
        self._app = app
        self._lately: deque[tuple[float, str, int]] = deque()  # when, of whom, bytes
        self._spent: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or get_route_path(scope) != UPLOAD_PATH:
            return await self._app(scope, receive, send)
        network = visitor_network(HTTPConnection(scope))
        length = int(Headers(scope=scope).get("content-length", 2 * MAX_FILE_BYTES))
        length = max(length, LEAST)
        self._forget(time.monotonic() - UPLOAD_SECONDS)
        if self._spent[network] + length > UPLOAD_BYTES:
            answer = PlainTextResponse(
                f"At most {UPLOAD_BYTES >> 20} MiB of files are taken from a network in "
                f"{UPLOAD_SECONDS // 60:g} minutes; please try again later.\n",
                429,
            )
            while (await receive()).get("more_body"):
                pass  # or browsers would hear of a broken connection alone
            return await answer(scope, receive, send)
        self._lately.append((time.monotonic(), network, length))
        self._spent[network] += length
        await run_sync(keep_within, upload_folder(), ALL_UPLOADS, "*/*")
        await self._app(scope, receive, send)

    def _forget(self, until: float) -> None:
        while self._lately and self._lately[0][0] < until:
            _, network, length = self._lately.popleft()
            self._spent[network] -= length
            if not self._spent[network]:
                del self._spent[network]
