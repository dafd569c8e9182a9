"""Who may use the APIs: whoever has a key, or without keys the programs of this machine."""

import base64
import binascii
import dataclasses
import hashlib
import hmac
import ipaddress
from pathlib import Path

import fastapi

LOCAL_NAMES = ("localhost", "localhost.localdomain")


@dataclasses.dataclass(frozen=True)
class Access:
    """The keys, of which each program needs one; without any the programs of this machine are
    admitted, or with `public` everybody's."""

    keys: tuple[str, ...] = ()
    public: bool = False

    async def admit(self, visitor: fastapi.Request) -> None:
        """Raises HTTPException for whoever may not use the APIs; names the others.

        The name is that of the key or of the address: under it a program has its turns.
        """
        given = _key(visitor.headers.get("authorization", ""))
        peer = visitor.client.host if visitor.client else ""
        known = any(hmac.compare_digest(given.encode(), key.encode()) for key in self.keys)
        if self.keys and not known:
            raise fastapi.HTTPException(401, "This server asks for an API key.",
                                        {"WWW-Authenticate": 'Bearer, Basic realm="sd_tpu"'})
        if not self.keys and not self.public and not _is_local(visitor, peer):
            raise fastapi.HTTPException(403, "Without an API key only programs on the server's own "
                                             "machine are served.")
        who = hashlib.sha256(given.encode()).hexdigest()[:16] if known else peer
        visitor.state.client = f"api {who}"


def client_of(visitor: fastapi.Request) -> str:
    """The name that `Access.admit` gave."""
    return visitor.state.client


def read_keys(file: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; what begins with # is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no key.
    """
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
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


def host_of(netloc: str) -> str:
    """The name in a Host header, without the port."""
    if netloc.startswith("["):
        return netloc[:netloc.find("]") + 1].lower()
    return netloc.partition(":")[0].lower()


def _is_local(visitor: fastapi.Request, peer: str) -> bool:
    """A tunnel or a proxy on this machine has its address too, but passes on another name, or says
    for whom it asks."""
    forwarded = {"forwarded", "x-forwarded-for", "x-real-ip"} & set(visitor.headers)
    return is_loopback(peer) and not forwarded and is_loopback(
        host_of(visitor.headers.get("host", "")))


def _key(authorization: str) -> str:
    """The bearer token, or the password of basic authentication; empty if there is none."""
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
