"""Gradio's page, and files that browsers keep for good: its styles as one, modules, our script.

Gradio loads what a component needs when it first meets one, a small file after the other. Its build
says which files these are, so all of them are asked for at once. Files that cannot be found there,
say in a later build, Gradio loads as ever. Its page is sent in the visitor's language.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from urllib.parse import parse_qs

import brotli
from anyio import to_thread
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sd_tpu.gradio_compat import FRONTEND
from sd_tpu.http.gate import ASSETS
from sd_tpu.language import Language, language_of

_FILLED = ("/", "/config", "/config/")  # what has places for texts
# Gradio loads no style that has a link already, and browsers none whose link is disabled, unless
# they read of it in the page.
_SKIPPED = """<script>for (const href of %s) {
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href });
    link.setAttribute("disabled", "");
    document.head.append(link);
}</script>"""
# What tells a frame how large its page is: nobody else needs it.
_RESIZING = (
    b"document.head.appendChild(script)",
    b"if (window.parent !== window) document.head.appendChild(script)",
)
FOR_GOOD = "public, max-age=31536000, immutable"


class Assets:
    """ASGI middleware before Gradio's page and the files of its browser part."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        components: Collection[str],
        script: str,
        fill: Callable[[bytes, Language], bytes],
    ):
        """Serve the page and its files.

        Args:
            app: Gradio's.
            components: kinds that the page has.
            script: that runs before Gradio's.
            fill: puts the texts of a language into the page.
        """
        self._app, self._fill, files = app, fill, files_of(components)
        styles = [name for name in files if name.endswith(".css")]
        style = b"\n".join(map(_read, styles))
        name, script_name = _named(style, "css"), _named(script.encode(), "js")
        self._files = {name: style, script_name: script.encode()}
        self._files |= {each: _read(each) for each in files if each not in styles}
        # Before Gradio's own, which runs what it brings along.
        self._first = f'<script defer src=".{ASSETS}{script_name}" fetchpriority="high"></script>'
        links = [
            f'<link rel="stylesheet" href=".{ASSETS}{name}">',
            _SKIPPED % json.dumps([f".{ASSETS}{each}" for each in styles]),
        ]
        links += [
            f'<link rel="modulepreload" crossorigin href=".{ASSETS}{each}">'
            for each in files
            if each not in styles
        ]
        self._head = "".join(links).encode() if styles else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] != "GET":
            return await self._app(scope, receive, send)
        path = get_route_path(scope)
        if path in _FILLED:
            return await self._page(scope, receive, send)
        if not path.startswith(ASSETS):
            return await self._app(scope, receive, send)
        if data := self._files.get(path.removeprefix(ASSETS)):
            kind = "text/css" if path.endswith(".css") else "text/javascript"
            return await (await _response(data, kind, scope))(scope, receive, send)

        async def send_for_good(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                MutableHeaders(scope=message)["Cache-Control"] = FOR_GOOD
            await send(message)

        await self._app(scope, receive, send_for_good)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return Gradio's page in a language, with links to what Gradio would need later, or what
        other pages read of it to show it."""
        begun, body = {}, b""

        async def take(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start":
                begun = message
            body += message.get("body", b"")

        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        await self._app({**scope, "headers": headers}, receive, take)
        body = self._changed(body, _language(scope))
        headers = MutableHeaders(scope=begun)
        headers.add_vary_header("Accept-Encoding")
        headers.add_vary_header("Accept-Language")
        if _packs(scope):
            body = await to_thread.run_sync(_packed_page, body)
            headers["Content-Encoding"] = "br"
        headers["Content-Length"] = str(len(body))
        await send(begun)
        await send({"type": "http.response.body", "body": body})

    def _changed(self, page: bytes, language: Language) -> bytes:
        first = f'<html lang="{language.tag}" dir="{language.direction}"'
        for before, after in (
            (b'<html\n\tlang="en"', first.encode()),
            (b"<head>", b"<head>" + self._first.encode()),
            (b"</head>", self._head + b"</head>"),
            _RESIZING,
        ):
            page = page.replace(before, after, 1)
        return self._fill(page, language)


def _language(scope: Scope) -> Language:
    """Return the language of an address (`?lang=ko`), else the first that the browser asks for."""
    chosen = parse_qs(scope["query_string"].decode("latin-1")).get("lang", [])
    return language_of(*chosen, *Headers(scope=scope).get("accept-language", "").split(","))


def files_of(components: Collection[str]) -> list[str]:
    """Return the files that Gradio's browser part loads for these kinds of components.

    Its build tells them; the styles that its page names itself are left out.
    """
    page = (FRONTEND / "index.html").read_text("utf-8")
    files = dict.fromkeys(re.findall(r'src="\./assets/([^"]+)"', page))
    for name in [*files]:
        files |= dict.fromkeys(_listed(name))
    for name in [*files]:
        for before in (
            r"import\(`\./Blocks-[^_]*",
            *(rf"[{{,]{kind}:\{{[^{{}}]*component:[^{{}}]*?" for kind in components),
        ):
            files |= dict.fromkeys(_listed(name, before))
    return [
        name
        for name in files
        if (FRONTEND / "assets" / name).is_file() and not (name.endswith(".css") and name in page)
    ]


def _listed(name: str, before: str = "") -> list[str]:
    """Return the files that a module of Vite's lists, all or those loaded behind `before`."""
    text = _read(name).decode() if name.endswith(".js") else ""
    listed = re.search(r"\.f=(\[[^]]*\])", text)
    if not listed:
        return []
    names = [each.removeprefix("./") for each in json.loads(listed[1])]
    if not before:
        return names
    needed = re.search(rf"{before}__vite__mapDeps\(\[([\d,]+)\]\)", text)
    return [names[int(each)] for each in needed[1].split(",")] if needed else []


def _read(name: str) -> bytes:
    return (FRONTEND / "assets" / name).read_bytes()


def _packs(scope: Scope) -> bool:
    return "br" in Headers(scope=scope).get("accept-encoding", "")


async def _response(data: bytes, kind: str, scope: Scope) -> Response:
    headers = {"Cache-Control": FOR_GOOD, "Vary": "Accept-Encoding"}
    if _packs(scope):
        data = await to_thread.run_sync(_packed_file, data)
        headers["Content-Encoding"] = "br"
    return Response(data, media_type=kind, headers=headers)


def _named(data: bytes, suffix: str) -> str:
    """Return a file's name, which changes with its content."""
    return f"{hashlib.sha256(data).hexdigest()[:16]}.{suffix}"


# The page is another for each language, and for each address that it is asked by, which visitors
# choose: these push out no file, and cost less (decision 0026).
@lru_cache(maxsize=16)
def _packed_page(data: bytes) -> bytes:
    return brotli.compress(data, mode=brotli.MODE_TEXT, quality=10)


@lru_cache
def _packed_file(data: bytes) -> bytes:
    return brotli.compress(data, mode=brotli.MODE_TEXT, quality=11)
