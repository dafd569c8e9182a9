"""The HTTP server: uvicorn in a thread, with bounds on what connections may hold.

uvicorn waits for ever for the headers of a first request, for the rest of a body and for a client
that does not read; a process may have so many files open. So connections that hold one without
using it are closed, and where there are too many the oldest of them make room.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sd_tpu.http.access import network_of

HEADER_SECONDS = 10.0  # in which the headers of a request come
STALLED_SECONDS = 60.0  # without anything of a body coming in, or of an answer being read
MAX_HEADER_BYTES = 1 << 16
ADDRESS_CONNECTIONS = 512  # of a network that is no proxy of ours
FILES = 1 << 16  # that the process may have open, where the system lets it
SPARE_FILES = 256  # of these that are no connections: pictures, weights, databases
FIRST_PORT, PORTS = 7860, 100  # tried where none is named
MAX_PORT = 65535
CLOSE_SECONDS = 2.0  # in which what is being sent may still go out
# Where proxies are that say for whom they ask, unless FORWARDED_ALLOW_IPS does.
_TRUSTED = "127.0.0.1,::1,::ffff:127.0.0.1"
_FULL = (b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nconnection: close\r\n"
         b"retry-after: 10\r\n\r\nToo many connections are open; please try again.\n")


class Connection(AutoHTTPProtocol):
    """uvicorn's connection; it is closed when it holds a file and does nothing with it."""

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for headers, if there is room for another connection."""
        super().connection_made(transport)
        self.since, self.network = time.monotonic(), network_of(self.client and self.client[0])
        self._wait(HEADER_SECONDS)
        if (rivals := self._rivals()) is not None:
            idle = [each for each in rivals if each.idle and each is not self]
            if idle:
                most = Counter(each.network for each in idle).most_common(1)[0][0]
                oldest = min((each for each in idle if each.network == most),
                             key=lambda each: each.since)
                oldest.transport.abort()
            else:
                transport.write(_FULL)
                transport.close()

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request, of whose headers no more than MAX_HEADER_BYTES."""
        begins = self.idle and not self._header_bytes
        super().data_received(data)
        if not self.idle:
            self._header_bytes = 0
            self._watch_body()
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()
        elif begins:
            self._wait(HEADER_SECONDS)

    def pause_writing(self) -> None:
        """Begins to wait for a client that does not read."""
        super().pause_writing()
        self._wait(STALLED_SECONDS)

    def resume_writing(self) -> None:
        """Goes on once it has read."""
        super().resume_writing()
        self._watch_body()

    def on_response_complete(self) -> None:
        """Waits for the next request, for which uvicorn closes the connection soon; or for a client
        that has not read all, for which it does not."""
        super().on_response_complete()
        self._wait(STALLED_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        super().connection_lost(exc)
        self._forget()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _rivals(self) -> Iterable["Connection"] | None:
        """The connections of which one is too many; None if there is room."""
        if len(self.connections) >= self.limit_concurrency:
            return self.connections
        near = [each for each in self.connections if each.network == self.network]
        return near if len(near) > ADDRESS_CONNECTIONS and not self._is_of_a_proxy() else None

    def _is_of_a_proxy(self) -> bool:
        """Whether others may be behind the address, as uvicorn is told."""
        proxies = ProxyHeadersMiddleware(self.app, self.config.forwarded_allow_ips).trusted_hosts
        return bool(self.client) and self.client[0] in proxies

    def _watch_body(self) -> None:
        if self.flow.write_paused:
            return  # it is waited for already, whatever it sends
        self._forget()
        if not self.idle and self.cycle.more_body:
            self._wait(STALLED_SECONDS)

    def _wait(self, seconds: float) -> None:
        self._forget()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _forget(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


class Server:
    """An ASGI application that is served in the background until it is closed."""

    def __init__(self, app: ASGIApp, listener: socket.socket):
        """Serves once the application has started.

        Args:
            app: what is served.
            listener: where, as `bind` makes it.

        Raises:
            OSError: another program serves there since.
            RuntimeError: the application did not start.
        """
        self.address = address_of(listener)
        listener.listen()  # raises here, and not in the thread
        self._uvicorn = uvicorn.Server(uvicorn.Config(
            app, http=Connection, ws="none", lifespan="on", log_config=None, access_log=False,
            limit_concurrency=max(SPARE_FILES, raise_file_limit() - SPARE_FILES),
            forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", _TRUSTED)))
        self._thread = threading.Thread(target=self._uvicorn.run, args=([listener],),
                                        name="server", daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError("The page did not start.")
            time.sleep(0.01)

    def close(self) -> None:
        """Ends it; what is open is not waited for."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # on what is broken off
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(CLOSE_SECONDS)


def bind(host: str | None = None, port: int | None = None) -> socket.socket:
    """A socket at an address, on which nothing listens yet.

    Args:
        host: a name, or an address of IPv4 or IPv6 with or without brackets; by default what
            GRADIO_SERVER_NAME says, else this machine alone. `::` is IPv4 as well.
        port: by default what GRADIO_SERVER_PORT says, else the first free one from 7860.

    Raises:
        ValueError: nothing can be served there.
    """
    host, named = server_name(host), port is not None or "GRADIO_SERVER_PORT" in os.environ
    first = int(os.environ.get("GRADIO_SERVER_PORT", FIRST_PORT)) if port is None else port
    if not 1 <= first <= MAX_PORT:  # the system would take another
        raise ValueError(f"A port is a number from 1 to {MAX_PORT}, not {first}.")
    for each in range(first, first + (1 if named else PORTS)):
        try:
            return _bind(host, each)
        except (OSError, UnicodeError) as error:
            failure = error
    where = f"[{host}]" if ":" in host else host
    raise ValueError(f"The page cannot be served at {where}:{first}: {failure}. Name another with "
                     "--host or --port; without --port it is the first free one.") from failure


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # Programs that know no better look for a name at its address of IPv4.
    family, kind, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def server_name(given: str | None) -> str:
    """The name or address to serve at, without brackets, as `bind` finds it."""
    name = given or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def address_of(listener: socket.socket) -> str:
    """The URL by which a browser on this machine finds what a socket serves."""
    host, port, *_ = listener.getsockname()
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def raise_file_limit() -> int:
    """Lets the process have FILES files open, or as many as the system allows; how many."""
    try:
        import resource  # which Windows has not, nor such a limit
    except ImportError:
        return FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)
