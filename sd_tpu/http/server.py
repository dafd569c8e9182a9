"""The HTTP server: uvicorn in a thread, with bounds on what connections may hold.

uvicorn waits for ever for the headers of a first request, for the rest of a body and for a client
that does not read; a process may have so many files open. So connections that hold one without
using it are closed, and where there are too many the oldest of them make room.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from sd_tpu.http.access import is_space, network_of

HEADER_SECONDS = 10.0  # in which the headers of a request come
STALLED_SECONDS = 60.0  # without anything of a body coming in, or of an answer being read
MAX_HEADER_BYTES = 1 << 16
ADDRESS_CONNECTIONS = 1024  # of a network that is no proxy of ours, or an eighth of all if fewer
FILES = 1 << 16  # that the process may have open, where the system lets it
SPARE_FILES = 256  # of these that are no connections: pictures, weights, databases
FIRST_PORT, PORTS = 7860, 100  # tried where none is named
MAX_PORT = 65535
CLOSE_SECONDS = 2.0  # in which what is being sent may still go out
# Where proxies are that say for whom they ask, unless FORWARDED_ALLOW_IPS does; those of a Space on
# the Hugging Face Hub are in a private network.
_TRUSTED = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"retry-after: 10\r\n\r\nToo many connections are open; please try again.\n"
)


class _State(ServerState):
    """State that uvicorn's connections share: the open ones, and how many each network has."""

    def __init__(self, proxies: Container[str]):
        """Begin with none; `proxies` may have as many as all together."""
        super().__init__()
        self.proxies, self.networks = proxies, Counter[str]()


class Connection(AutoHTTPProtocol):  # ty: ignore[unsupported-base]
    """uvicorn's connection; it is closed when it holds a file and does nothing with it."""

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _unread = 0  # bytes of answers, when they were looked at last

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers, if there is room for another connection."""
        super().connection_made(transport)
        self.since, self.network = time.monotonic(), network_of(self.client and self.client[0])
        self.server_state.networks[self.network] += 1
        self._wait(HEADER_SECONDS)
        if (rivals := self._rivals()) is not None:
            idle = [each for each in rivals if each.idle and each is not self]
            if idle:
                most = Counter(each.network for each in idle).most_common(1)[0][0]
                oldest = min(
                    (each for each in idle if each.network == most), key=lambda each: each.since
                )
                oldest.transport.abort()
            else:
                transport.write(_FULL)
                transport.close()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request, of whose headers no more than MAX_HEADER_BYTES."""
        begins = self.idle and not self._header_bytes
        super().data_received(data)
        if not self.idle or (self.cycle and self.cycle.more_body):  # of which no more is wanted
            self._header_bytes = 0
            self._watch_body()
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()
        elif begins:
            self._wait(HEADER_SECONDS)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._wait(STALLED_SECONDS, self._look_at_reader)

    def resume_writing(self) -> None:
        """Go on once the client has read."""
        super().resume_writing()
        self._watch_body()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for a client that has not read everything.

        uvicorn closes the connection soon in the first case, and never in the second.
        """
        super().on_response_complete()
        if self.idle:
            self._unread = self.transport.get_write_buffer_size()
            self._wait(STALLED_SECONDS, self._look_at_reader)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._forget()
        self.server_state.networks[self.network] -= 1
        if not self.server_state.networks[self.network]:
            del self.server_state.networks[self.network]

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _rivals(self) -> Iterable["Connection"] | None:
        """Return the connections of which one is too many; None if there is room."""
        if len(self.connections) >= self.limit_concurrency:
            return self.connections
        most = min(ADDRESS_CONNECTIONS, self.limit_concurrency // 8)
        if self.server_state.networks[self.network] <= most or (
            self.client and self.client[0] in self.server_state.proxies
        ):
            return None
        return [each for each in self.connections if each.network == self.network]

    def _watch_body(self) -> None:
        if self.flow.write_paused:
            return  # it is waited for already, whatever it sends
        self._forget()
        if self.cycle.more_body:
            self._wait(STALLED_SECONDS)

    def _look_at_reader(self) -> None:
        """Close the connection unless something was read since the last look."""
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unread:
            return self.transport.abort()
        self._unread = unread
        self._wait(STALLED_SECONDS, self._look_at_reader)

    def _wait(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        self._forget()
        self._timer = self.loop.call_later(seconds, then or self.transport.abort)

    def _forget(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


class Server:
    """An ASGI application that is served in the background until it is closed."""

    def __init__(self, app: ASGIApp, listener: socket.socket):
        """Prepare to serve.

        Args:
            app: an ASGI application.
            listener: a socket, as `bind` makes it.
        """
        self.address, self._listener = address_of(listener), listener
        trusted = os.environ.get("FORWARDED_ALLOW_IPS") or ",".join(
            (*_TRUSTED, listener.getsockname()[0], *_PRIVATE * is_space())
        )
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                limit_concurrency=max(SPARE_FILES, raise_file_limit() - SPARE_FILES),
                forwarded_allow_ips=trusted,
            )
        )
        self._uvicorn.server_state = _State(ProxyHeadersMiddleware(app, trusted).trusted_hosts)  # ty: ignore[invalid-argument-type]
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([listener],), name="server", daemon=True
        )

    def start(self) -> Self:
        """Serve, and return once the application has started.

        Raises:
            OSError: another program serves there since, or the application did not start.
        """
        self._listener.listen()  # raises here, and not in the thread
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise OSError("The page did not start.")
            time.sleep(0.01)
        return self

    def close(self) -> None:
        """End the server without waiting for open connections."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # on what is broken off
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(CLOSE_SECONDS)


def bind(host: str | None = None, port: int | None = None) -> socket.socket:
    """Bind a socket to an address, on which nothing listens yet.

    Args:
        host: a name, or an address of IPv4 or IPv6 with or without brackets; by default
            GRADIO_SERVER_NAME, else this machine alone. `::` is IPv4 as well.
        port: by default GRADIO_SERVER_PORT, else the first free one from 7860.

    Raises:
        ValueError: nothing can be served there.
    """
    host, named = server_name(host), os.environ.get("GRADIO_SERVER_PORT") if port is None else port
    first = str(named or FIRST_PORT) if port is None else str(port)
    if not first.isdecimal() or not 1 <= int(first) <= MAX_PORT:  # the system would take another
        raise ValueError(f"A port is a number from 1 to {MAX_PORT}, not {first}.")
    try:
        addresses = socket.getaddrinfo(host, first, type=socket.SOCK_STREAM)
        # Programs that know no better look for a name at its address of IPv4.
        family, *_, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
        for port in range(int(first), int(first) + (1 if named else PORTS)):
            try:
                return _bind(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or named:
                    raise
                taken = error
        raise taken
    except (OSError, UnicodeError) as error:
        where = f"[{host}]" if ":" in host else host
        raise ValueError(
            f"The page cannot be served at {where}:{first}: {error}. Name another with --host or "
            "--port; without --port it is the first free one."
        ) from error


def _bind(family: int, address: tuple) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def server_name(host: str | None) -> str:
    """Return the name or address to serve at, without brackets, as `bind` finds it."""
    name = host or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def address_of(listener: socket.socket) -> str:
    """Return the URL by which a browser on this machine finds a socket's server."""
    host, port, *_ = listener.getsockname()
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def raise_file_limit() -> int:
    """Let the process open FILES files, or as many as the system allows; return how many."""
    try:
        import resource  # which Windows has not, nor such a limit
    except ImportError:
        return FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)
