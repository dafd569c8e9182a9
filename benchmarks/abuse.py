"""Attacks from one address, and a visitor at another: `python -m benchmarks.abuse`.

The attacker is 127.0.0.2, the visitor 127.0.0.3. Each attack is made on a server of its own, and
the visitor's picture is timed before the attack and during it.
"""

import asyncio
import os
import secrets
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.load import serve_apis
from benchmarks.report import add_model, parser, report

KEY, ATTACKER, VISITOR = "key-of-the-visitor", "127.0.0.2", "127.0.0.3"
ATTACKS = {"names": 200, "enlargements": 300, "connections": 2000, "uploads": 12}
HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FORM = {
    "prompts": [f"a fox {number}" for number in range(8)],
    "settings": {},
    "overrides": [{}] * 8,
    "seed": "7",
    "keep": [False] * 8,
}


class Attacker:
    """Attacks a server from one address."""

    def __init__(self, http: httpx.AsyncClient, hub: int):
        """Ask as this client; `hub` is the component that answers the page."""
        self._http, self._hub = http, hub
        self._held: list[socket.socket] = []
        self._asked: list[asyncio.Task] = []

    async def names(self, count: int) -> str:
        """Ask for eight long pictures under each of so many names."""
        form = {**FORM, "settings": {"steps": "200"}}
        told = await asyncio.gather(
            *(self._ask("generate", secrets.token_hex(16), form=form) for _ in range(count))
        )
        await asyncio.sleep(2)
        return f"{sum('run' in each for each in told)} runs"

    async def enlargements(self, count: int) -> str:
        """Ask so many times at once for pictures of a run, enlarged."""
        browser = secrets.token_hex(16)
        run = (await self._ask("generate", browser, form=FORM))["run"]
        while not (await self._ask("large", browser, run=run, index=7)).get("file"):
            await asyncio.sleep(0.5)
        self._asked = [
            asyncio.create_task(self._ask("large", browser, run=run, index=each % 8))
            for each in range(count)
        ]
        await asyncio.sleep(1)
        return f"{count} asked for"

    async def connections(self, count: int) -> str:
        """Open so many connections and send half a request's head on each."""
        address = urlsplit(str(self._http.base_url))
        for _ in range(count):
            self._held.append(
                socket.create_connection(
                    (address.hostname, address.port), 5, source_address=(ATTACKER, 0)
                )
            )
            self._held[-1].sendall(HALF)
        await asyncio.sleep(12)
        return f"{sum(map(_is_open, self._held))} are open after 12 s"

    async def uploads(self, count: int) -> str:
        """Upload so many files of 60 MB."""
        data = os.urandom(60 << 20)

        async def send(number: int) -> int:
            answer = await self._http.post(
                "/gradio_api/upload", files={"files": (f"{number}.png", data + bytes([number]))}
            )
            return answer.status_code

        taken = Counter(await asyncio.gather(*map(send, range(count))))
        return f"{taken[200]} taken"

    async def end(self) -> None:
        """Give up requests that have not been answered yet."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    async def _ask(self, action: str, browser: str, **more: Any) -> dict:
        answer = await self._http.post(
            "/gradio_api/component_server",
            json={
                "component_id": self._hub,
                "fn_name": "answer",
                "session_hash": secrets.token_hex(5),
                "data": {
                    "do": action,
                    "browser": browser,
                    "lang": "en",
                    "run": None,
                    "form": FORM,
                    **more,
                },
            },
        )
        return answer.json()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@asynccontextmanager
async def _client(server: str, address: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(
        local_address=address,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )
    async with httpx.AsyncClient(
        base_url=server, timeout=300, transport=transport, **options
    ) as http:
        yield http


async def _seconds(http: httpx.AsyncClient, path: str, **asked: Any) -> float:
    begun = time.perf_counter()
    answer = await (http.post(path, json=asked) if asked else http.get(path))
    answer.raise_for_status()
    return time.perf_counter() - begun


async def measure(server: str, attack: str, count: int) -> dict[str, Any]:
    """Return the table's row of an attack on a server that nobody else uses."""
    async with (
        _client(server, ATTACKER) as theirs,
        _client(server, VISITOR, headers={"authorization": f"Bearer {KEY}"}) as mine,
    ):
        components = (await theirs.get("/config")).json()["components"]
        attacker = Attacker(
            theirs,
            next(
                each["id"] for each in components if "answer" in each["props"].get("server_fns", ())
            ),
        )

        async def picture() -> float:
            return await _seconds(mine, "/v1/images/generations", prompt="a cat")

        alone = statistics.median([await picture() for _ in range(5)])
        outcome = await getattr(attacker, attack)(count)
        health, during = await _seconds(mine, "/healthz"), await picture()
        await attacker.end()
        return {
            "attack": f"{count} {attack}",
            "outcome": outcome,
            "/healthz, s": health,
            "picture alone, s": alone,
            "picture during it, s": during,
            "during / alone": during / alone,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each attack."""
    flags = parser("abuse", __doc__.splitlines()[0])
    add_model(flags)
    for attack, count in ATTACKS.items():
        flags.add_argument(f"--{attack}", type=int, default=count, help="(%(default)s)")
    args, rows = flags.parse_args(arguments), []
    for attack in ATTACKS:
        with serve_apis(args.model, [KEY]) as (address, *_):
            rows.append(asyncio.run(measure(address, attack, getattr(args, attack))))
    report("Attacks from one address", rows, args)


if __name__ == "__main__":
    main()
