"""The gate before page and APIs: the names that the server answers to, and security headers.

A page of another website can have its visitors' browsers ask a server on their own machine, and
read the answers once its name leads there (DNS rebinding). So a name that is not the server's is
refused, and so are requests by another site's page.
"""

import dataclasses
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Collection
from typing import Self
from urllib.parse import urlsplit

from starlette._utils import get_route_path  # what the router itself decides by
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sd_tpu.http.access import Access, host_of, is_loopback, is_space, visitor_network
from sd_tpu.pictures.images import MAX_FILE_BYTES

ANY = "*"
SHARED = ".gradio.live"  # as links through Gradio's servers end
TOOLS = "/gradio_api/mcp"
# What Gradio has and the page does not use: passing on what lies at an address, which a browser
# would take for the server's own, turning recordings into other files, and telling of visitors.
_CLOSED = re.compile(
    r"/monitoring(/|$)|/gradio_api/(file[=/]\W*https?:|proxy=|process_recording)", re.IGNORECASE
)
NETWORK_REQUESTS = 1024  # that are answered at a time; a page that is open holds one or two
MAX_BODY_BYTES = 2 * MAX_FILE_BYTES  # of a request: a picture in base64, or a file in a form
# Gradio's browser part makes functions of texts and styles of values.
_POLICY = {
    "default-src": "'self'",
    "script-src": "'self' 'unsafe-inline' 'unsafe-eval' blob:",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "media-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "worker-src": "'self' blob:",
    "connect-src": "'self' data: blob:",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
}
# Scripts and styles of the page, none of which is a worker: they obey the page's own policy.
ASSETS = "/assets/"
_LOCAL_FRAMES = "'self' http://localhost:* http://127.0.0.1:*"  # notebooks of this machine
_NOTEBOOKS = {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}  # which are reached by a proxy only
_HUB = "https://huggingface.co https://*.huggingface.co https://*.hf.space"


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the server, besides numeric addresses and this machine's own names.

    Nobody else can have those lead here.

    Attributes:
        names: of the server; `*.example.org` is any below it, `*` any at all.
        frames: sites whose pages may show the server's inside theirs, as `frame-ancestors` takes
            it.
        shared: whether a link through Gradio's servers is one. Its name is not known beforehand,
            and other people's end alike, so that no page of another such name may use the server.
    """

    names: frozenset[str] = frozenset()
    frames: str = _LOCAL_FRAMES
    shared: bool = False

    @classmethod
    def here(cls, given: Collection[str], *, share: bool = False) -> Self:
        """Return the given names, and those that follow from where this runs.

        A Space on the Hugging Face Hub is public and shown in a frame, and so are pages in hosted
        notebooks.

        Args:
            given: by whoever started the server.
            share: whether there is a link through Gradio's servers.
        """
        if is_space():
            return cls(frozenset({ANY}), f"'self' {_HUB}")
        if _NOTEBOOKS & os.environ.keys():
            return cls(frozenset({ANY}), "'self' https:")
        root = urlsplit(os.environ.get("GRADIO_ROOT_PATH", "")).hostname
        return cls(
            frozenset(name.lower() for name in (*given, root, socket.gethostname()) if name),
            shared=share,
        )

    def own(self, host: str) -> bool:
        """Whether a host may be this server."""
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return is_loopback(host) or self.named(host) or (self.shared and host.endswith(SHARED))
        return True

    def named(self, host: str) -> bool:
        """Whether a host is one of the names."""
        return (
            ANY in self.names
            or host in self.names
            or any(name.startswith("*.") and host.endswith(name[1:]) for name in self.names)
        )

    def same_site(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may ask what was asked of this host."""
        try:
            theirs = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        if theirs == host.lower() or ANY in self.names:
            return True
        name = host_of(theirs)
        return self.named(name) or (is_loopback(name) and is_loopback(host_of(host)))


def is_shared_unasked() -> bool:
    """Whether there is to be a link through Gradio's servers unless somebody says otherwise: where
    its own variable says so, and in hosted notebooks, which nobody can reach without."""
    return os.environ.get("GRADIO_SHARE", "").lower() == "true" or bool(
        _NOTEBOOKS & os.environ.keys()
    )


def is_below(path: str, folder: str) -> bool:
    """Whether a path is this one or below it, by whole segments."""
    return path == folder or path.startswith(f"{folder}/")


def _name_visitor(scope: Scope) -> None:
    """Have the headers say who asks: Gradio passes those of an assistant on to this server, which
    believes itself."""
    headers = MutableHeaders(scope=scope)
    del headers["x-forwarded-for"]
    if scope.get("client"):
        headers["x-forwarded-for"] = scope["client"][0]


class Gate:
    """ASGI middleware: refuses what `Names` does, passes what is the API's on to it, and the rest
    to the page."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Names,
        access: Access,
        api: ASGIApp | None,
        paths: Collection[str],
    ):
        """Begin with no request.

        Args:
            app: the page.
            names: what the server is called.
            access: to the page's tools for assistants; it names the page's programs as well.
            api: sees to its access itself; None if there is none.
            paths: of the API, each with all below it.
        """
        self._page, self._names, self._access = app, names, access
        self._api, self._paths = api, tuple(path.rstrip("/") for path in paths)
        self._open: Counter[str] = Counter()  # requests that are being answered, by network
        policy = "; ".join(f"{what} {sources}" for what, sources in _POLICY.items())
        frames = f"frame-ancestors {names.frames}"
        self._policy, self._api_policy = f"{policy}; {frames}", frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._page(scope, receive, send)
        path = get_route_path(scope)
        is_api = any(is_below(path, each) for each in self._paths)
        policy = self._api_policy if is_api else self._policy

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                if not path.startswith(ASSETS):
                    headers["Content-Security-Policy"] = policy
            await send(message)

        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message if received <= MAX_BODY_BYTES else {"type": "http.disconnect"}

        closed = _CLOSED.match(path) and PlainTextResponse("The page needs no such thing.\n", 403)
        network = visitor_network(HTTPConnection(scope))
        app = (
            closed
            or self._refusal(Headers(scope=scope), network)
            or (self._api if is_api else self._page)
        )
        if app is self._page and is_below(path, TOOLS):
            app = await self._not_admitted(Request(scope)) or app
            _name_visitor(scope)
        elif app is self._page:
            self._access.recognize(Request(scope))
        self._open[network] += 1
        try:
            await app(scope, receive_bounded, send_guarded)  # ty: ignore[not-callable]
        finally:
            self._open[network] -= 1
            if not self._open[network]:
                del self._open[network]

    async def _not_admitted(self, visitor: Request) -> ASGIApp | None:
        try:
            await self._access.admit(visitor)
        except HTTPException as error:
            return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
        return None

    def _refusal(self, headers: Headers, network: str) -> ASGIApp | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.own(host_of(host)):
            return PlainTextResponse(
                f"This server does not answer to the name {host_of(host)!r}; "
                "whoever runs it can allow it with --allowed-host.\n",
                403,
            )
        if origin is not None and not self._names.same_site(origin, host):
            return PlainTextResponse(
                "This server does not take what another website's page asks "
                "for; whoever runs it can allow that with --allowed-host.\n",
                403,
            )
        if self._open[network] >= NETWORK_REQUESTS:
            return PlainTextResponse(
                "Too many requests of your network are being answered; please "
                "try again in a minute.\n",
                429,
                {"Retry-After": "60"},
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
            return PlainTextResponse(f"At most {MAX_BODY_BYTES >> 20} MiB are taken.\n", 413)
        return None
