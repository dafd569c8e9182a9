"""Who may use the APIs: whoever has a key, or without keys the programs of this machine."""

import base64
import binascii
import dataclasses
import hashlib
import hmac
import ipaddress
import os
from pathlib import Path
from typing import Any

import fastapi
from starlette.requests import HTTPConnection

from sd_tpu.reading import read_text

LOCAL_NAMES = ("localhost", "localhost.localdomain")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # which holds all addresses of IPv4


@dataclasses.dataclass(frozen=True)
class Access:
    """The keys, of which each program needs one; without any the programs of this machine are
    admitted, or with `public` everybody's."""

    keys: tuple[str, ...] = ()
    public: bool = False

    async def admit(self, visitor: fastapi.Request) -> None:
        """Raise HTTPException for whoever may not use the APIs; recognize the others."""
        if self.keys and not self._key(visitor):
            raise fastapi.HTTPException(
                401,
                "This server asks for an API key.",
                {"WWW-Authenticate": 'Bearer, Basic realm="sd_tpu"'},
            )
        if not self.keys and not self.public and not _is_local(visitor):
            raise fastapi.HTTPException(
                403, "Without an API key only programs on the server's own machine are served."
            )
        self.recognize(visitor)

    def recognize(self, visitor: fastapi.Request) -> None:
        """Names whoever asks, by the key that it gives or else by its address: under that name a
        program has its turns, through whichever door it comes."""
        key = self._key(visitor)
        who = hashlib.sha256(key.encode()).hexdigest()[:16] if key else visitor_network(visitor)
        visitor.state.client = f"program {who}"

    def _key(self, visitor: fastapi.Request) -> str:
        """Return the one of the keys that is given; "" if none is."""
        token = _secret(visitor.headers.get("authorization", "")).encode()
        return next((key for key in self.keys if hmac.compare_digest(token, key.encode())), "")


def client_of(visitor: fastapi.Request) -> str:
    """Return the name that `Access.recognize` gave."""
    return visitor.state.client


def read_keys(file: Path) -> tuple[str, ...]:
    """Read the keys in a file, one a line; lines that begin with # are comments.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no key.
    """
    lines = [line.strip() for line in read_text(file).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"There is no API key in {file}.")
    return keys


def is_loopback(host: str) -> bool:
    """Whether an address, or a name without a port, is this machine's alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in LOCAL_NAMES


def network_of(address: str | None) -> str:
    """Return the network that counts as one visitor; "" if it is not known.

    It is an address of IPv4, and of IPv6 the /56 that a home is given (RIPE-690).
    """
    try:
        ip = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or ""
    if ip.version == 6 and (
        inner := ip.ipv4_mapped
        or ip.sixtofour
        or (ip in NAT64 and ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    ):
        return str(inner)
    whole = ip.version == 4 or ip.is_loopback
    return str(ip if whole else ipaddress.ip_network((ip, 56), strict=False))


def visitor_network(visitor: HTTPConnection | Any) -> str:
    """Return the network of whoever asks, also by Gradio's request; a trusted proxy says for whom
    it asks."""
    return network_of(visitor.client and visitor.client.host)


def is_space() -> bool:
    """Whether this runs as a Space on the Hugging Face Hub."""
    return os.environ.get("SYSTEM") == "spaces"


def host_of(netloc: str) -> str:
    """Return the name in a Host header, without the port."""
    if netloc.startswith("["):
        return netloc[: netloc.find("]") + 1].lower()
    return netloc.partition(":")[0].lower()


def _is_local(visitor: fastapi.Request) -> bool:
    """Whether a visitor is on this machine.

    A tunnel or a proxy on this machine has its address too, but passes on another name, or says for
    whom it asks.
    """
    forwarded = {"forwarded", "x-forwarded-for", "x-real-ip"} & set(visitor.headers)
    return (
        is_loopback(visitor_network(visitor))
        and not forwarded
        and is_loopback(host_of(visitor.headers.get("host", "")))
    )


def _secret(authorization: str) -> str:
    """Return the bearer token, or the password of basic authentication; "" if there is none."""
    kind, _, given = authorization.partition(" ")
    match kind.lower():
        case "bearer":
            return given.strip()
        case "basic":
            try:
                return base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return ""
