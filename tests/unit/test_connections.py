"""What connections may hold of the server, and where it listens."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sd_tpu.http import server
from sd_tpu.http.access import network_of
from sd_tpu.http.server import Server, address_of, bind, server_name

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
WAITS = pytest.mark.slow("waits for seconds, as servers do")


async def endless(_) -> StreamingResponse:
    async def megabytes():
        while True:
            yield bytes(1 << 20)

    return StreamingResponse(megabytes())


async def body(request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def hold(_) -> PlainTextResponse:
    while True:
        await asyncio.sleep(0.05)


async def refuse(_) -> PlainTextResponse:
    return PlainTextResponse("too much", 429)


async def large(_) -> PlainTextResponse:
    return PlainTextResponse("x" * LARGE)


LARGE = 24 << 20
APP = Starlette(
    routes=[
        Route("/refuse", refuse, methods=["POST"]),
        Route("/large", large),
        Route("/", lambda _: PlainTextResponse("here")),
        Route("/endless", endless),
        Route("/hold", hold),
        Route("/body", body, methods=["POST"]),
    ]
)


@pytest.fixture
def serve(monkeypatch) -> Iterator:
    """Serves with short timeouts, which a busy machine can keep all the same."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 1)
    monkeypatch.setattr(server, "STALLED_SECONDS", 2)
    with contextlib.ExitStack() as ends:

        def begin(**bounds: int) -> Server:
            if "files" in bounds:
                monkeypatch.setattr(server, "raise_file_limit", lambda: bounds["files"])
                monkeypatch.setattr(server, "SPARE_FILES", 4)
            served = Server(APP, bind()).start()
            ends.callback(served.close)
            return served

        yield begin
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)


def connect(served: Server, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    port = int(served.address.rpartition(":")[2].strip("/"))
    connection = socket.create_connection(("127.0.0.1", port), 5, source_address=(source, 0))
    connection.sendall(data)
    return connection


def ended(connection: socket.socket, seconds: float = 20) -> bool:
    """Whether the server closes a connection within this time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("data", [b"", b"G", HALF], ids=["nothing", "a letter", "half a head"])
def test_a_connection_without_whole_headers_is_closed(serve, data):
    assert ended(connect(serve(), data))


def test_headers_that_come_a_letter_at_a_time_are_not_waited_for(serve):
    connection = connect(serve(), HALF)
    begun = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begun < 20:
            connection.sendall(b"x: y\r\n")
            time.sleep(0.05)
    assert time.monotonic() - begun < 15


def test_headers_have_a_bound_in_bytes(serve):
    connection = connect(serve(), HALF)
    with contextlib.suppress(OSError):
        for _ in range(100):
            connection.sendall(b"x: " + b"y" * 4096 + b"\r\n")
    assert ended(connection, 0.5)


def test_a_second_request_of_a_connection_has_its_headers_waited_for_as_long(serve):
    connection = connect(serve(), WHOLE)
    assert b"here" in connection.recv(1 << 16)
    connection.sendall(HALF)
    assert ended(connection)


@WAITS
def test_a_body_that_does_not_come_ends_and_one_that_is_slow_does_not(serve):
    served = serve()
    head = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    assert ended(connect(served, head + b"12"))
    slow = connect(served, head)
    for letter in b"12345":
        time.sleep(0.3)
        slow.sendall(bytes([letter]))
    assert slow.recv(1 << 16).endswith(b"5")


@WAITS
def test_a_client_that_does_not_read_is_let_go(serve):
    connection = connect(serve(), WHOLE.replace(b"GET /", b"GET /endless"))
    time.sleep(6)
    received = 0
    with contextlib.suppress(OSError):
        connection.settimeout(1)
        while received < 1 << 26 and (part := connection.recv(1 << 20)):
            received += len(part)
    assert received < 1 << 24  # what was in the buffers


@WAITS
def test_a_client_that_reads_slowly_gets_all(serve):
    connection, received = connect(serve(), WHOLE.replace(b"GET /", b"GET /large")), 0
    connection.settimeout(20)
    for _ in range(60):
        received += len(connection.recv(1 << 18))
        time.sleep(0.05)  # 3 s, in each of which something is read
    while received < LARGE:
        received += len(connection.recv(1 << 20))
    assert received >= LARGE


def test_an_answer_before_the_end_of_a_body_is_heard(serve):
    body = b"POST /refuse HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
    connection = connect(serve(), body + bytes(1000))
    time.sleep(0.2)
    for _ in range(40):
        connection.sendall(bytes(99975))
    assert b"too much" in connection.recv(1 << 16)


@WAITS
def test_a_second_request_that_was_sent_with_the_first_is_waited_for(serve):
    connection = connect(serve(), WHOLE + WHOLE.replace(b"GET /", b"GET /hold"))
    assert b"here" in connection.recv(1 << 16)
    assert not ended(connection, 4)


@WAITS
def test_a_request_that_takes_long_is_waited_for(serve):
    assert not ended(connect(serve(), WHOLE.replace(b"GET /", b"GET /hold")), 4)


def test_half_open_connections_make_room_for_whoever_comes(serve, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 60)
    served = serve(files=24)
    for _ in range(60):
        connect(served, HALF)
    for _ in range(5):
        assert httpx.get(served.address, timeout=5).text == "here"


def test_connections_of_others_stay_where_one_address_has_too_many(serve, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 60)
    served = serve(files=24)
    patient = connect(served, HALF, "127.0.0.2")
    for _ in range(60):
        connect(served, HALF, "127.0.0.3")
    patient.sendall(b"\r\n")
    assert b"here" in patient.recv(1 << 16)


def test_an_address_that_holds_its_bound_is_refused_and_others_are_not(serve, monkeypatch):
    monkeypatch.setattr(server, "ADDRESS_CONNECTIONS", 4)
    served = serve()
    holding = [
        connect(served, WHOLE.replace(b"GET /", b"GET /hold"), "127.0.0.3") for _ in range(4)
    ]
    time.sleep(0.1)
    assert b"503" in connect(served, WHOLE, "127.0.0.3").recv(1 << 16)
    assert b"here" in connect(served, WHOLE, "127.0.0.2").recv(1 << 16)
    many = [connect(served, WHOLE.replace(b"GET /", b"GET /hold")) for _ in range(8)]  # a proxy's
    time.sleep(0.1)
    assert b"here" in connect(served, WHOLE).recv(1 << 16)
    assert holding and many


# --- where it listens -----------------------------------------------------------------------------


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "[::]", "0:0:0:0:0:0:0:1"])
def test_every_spelling_of_an_ipv6_address_is_served(serve, host, monkeypatch):
    monkeypatch.setenv("GRADIO_SERVER_NAME", host)
    served = serve()
    port = int(served.address.rpartition(":")[2].strip("/"))
    assert httpx.get(f"http://[::1]:{port}/").text == "here"
    assert httpx.get(served.address).text == "here"
    if "::" in host and "1" not in host:
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "here"


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("no.such.name.invalid", None),
        ("[::1]:80", None),
        ("http://localhost", None),
        ("a" * 80, 1),
        ("192.0.2.1", 8000),
        ("127.0.0.1", 0),
        ("127.0.0.1", 65536),
        ("127.0.0.1", -1),
    ],
)
def test_an_address_where_nothing_can_be_served_is_refused_in_a_sentence(host, port):
    with pytest.raises(ValueError, match=r"cannot be served at|A port is a number"):
        bind(host, port)


@pytest.mark.parametrize("port", ["a word", "-1", "65536", "80.5"])
def test_a_port_of_the_environment_that_is_none_is_refused_in_a_sentence(port, monkeypatch):
    monkeypatch.setenv("GRADIO_SERVER_PORT", port)
    with pytest.raises(ValueError, match="A port is a number from 1 to 65535"):
        bind()


def test_a_name_is_looked_up_once(monkeypatch):
    asked = []

    def fail(*_, **__):
        asked.append(1)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("GRADIO_SERVER_PORT", "")
    with pytest.raises(ValueError, match="cannot be served"):
        bind("typo.invalid")
    assert len(asked) == 1


def test_the_first_free_port_is_taken_and_one_that_is_named_and_taken_is_refused():
    with bind() as first:
        first.listen()
        with bind() as second:
            assert second.getsockname()[1] > first.getsockname()[1]
        with pytest.raises(ValueError, match="cannot be served"):
            bind(port=first.getsockname()[1])


def test_an_empty_name_is_the_default(monkeypatch):
    monkeypatch.setenv("GRADIO_SERVER_NAME", "")
    assert server_name("") == server_name(None) == "127.0.0.1"
    with bind("0.0.0.0") as listener:
        assert address_of(listener).startswith("http://localhost:")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::1", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1::/56"),
        ("2001:db8:1:ff::9", "2001:db8:1::/56"),
        ("2001:db8:1:100::9", "2001:db8:1:100::/56"),
        ("fe80::1%eth0", "fe80::/56"),
        ("2002:c000:207:1::1", "192.0.2.7"),
        ("64:ff9b::c000:207", "192.0.2.7"),
        ("testclient", "testclient"),
        (None, ""),
    ],
)
def test_an_address_counts_by_what_one_subscriber_has(address, network):
    assert network_of(address) == network
