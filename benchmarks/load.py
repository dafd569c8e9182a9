"""Many clients at once: `python -m benchmarks.load --clients 50 --minutes 10`.

Clients of the page and of all APIs ask for pictures without a pause, each with a key of its own. A
third of the time they give up: they interrupt, or disconnect. Every picture that arrives is checked
for whose it is. The server is a process of its own, whose memory is watched.
"""

import asyncio
import base64
import collections
import contextlib
import dataclasses
import itertools
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
import numpy as np
import psutil
from matplotlib.figure import Figure

from benchmarks.report import add_model, parser, report
from benchmarks.server import Server, serve
from sd_tpu.pictures.images import read_png

KINDS = PAGE, A1111, OPENAI, STREAM, ASSISTANT = (
    "page",
    "A1111",
    "OpenAI",
    "OpenAI, streamed",
    "MCP",
)
STEPS = (2, 12)
GIVES_UP = 1 / 3
PATIENCE = 3600.0  # seconds
SETTLING = 0.2  # of the time, after which memory is to stay what it is
DONE, GONE, REFUSED, LOST, CROSSED = "done", "gave up", "refused", "lost", "crossed"


@dataclasses.dataclass(frozen=True)
class Visit:
    """A request and how it ended; seconds are None where they are not known."""

    kind: str
    end: str
    waited: float | None = None
    drawn: float | None = None
    total: float | None = None
    told: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The server at a moment: seconds since the crowd came, bytes, and requests not over."""

    at: float
    memory: int
    jobs: int


class Client:
    """A client that sends one request after another until its time is over."""

    def __init__(self, number: int, key: str, http: httpx.AsyncClient):
        self._http, self._random, self._numbers = http, random.Random(number), itertools.count()
        self._kind, self._number = KINDS[number % len(KINDS)], number
        self._headers = {"authorization": f"Bearer {key}"}
        self._began: float | None = None

    async def visits(self, until: float) -> list[Visit]:
        """Send requests until then; return their visits."""
        visits = []
        while time.monotonic() < until:
            visits.append(await self._visit())
            if visits[-1].end == REFUSED:
                await asyncio.sleep(1.0)
        return visits

    async def _visit(self) -> Visit:
        prompt = f"client {self._number} asks for picture {next(self._numbers)}"
        seed, count = self._random.randrange(1 << 32), self._random.choice((1, 1, 1, 4))
        count = 1 if self._kind == ASSISTANT else count
        asks = {
            PAGE: self._page,
            A1111: self._a1111,
            OPENAI: self._openai,
            STREAM: self._stream,
            ASSISTANT: self._assistant,
        }[self._kind]
        gives_up = self._random.random() < GIVES_UP
        since, self._began = time.monotonic(), None
        try:
            async with asyncio.timeout(self._random.uniform(0.05, 3) if gives_up else PATIENCE):
                files = await asks(prompt, seed, count, self._random.randint(*STEPS))
        except TimeoutError:
            if gives_up and self._kind == A1111 and self._random.random() < 0.5:
                await self._http.post("/sdapi/v1/interrupt", headers=self._headers)
            return Visit(self._kind, GONE if gives_up else LOST)
        except httpx.HTTPStatusError as error:
            refused = error.response.status_code == 429
            return Visit(self._kind, REFUSED if refused else LOST, told=error.response.text[:200])
        except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
            return Visit(self._kind, LOST, told=f"{type(error).__name__}: {error}"[:200])
        if len(files) != count:
            return Visit(self._kind, LOST, told=f"{len(files)} pictures, not {count}")
        made = [read_png(file).pictures[0] for file in files]
        wanted = [(prompt, (seed + index) % (1 << 32)) for index in range(count)]
        if [(picture.prompt, picture.seed) for picture in made] != wanted:
            return Visit(self._kind, CROSSED, told=f"{made} for {prompt}")
        now = time.monotonic()
        waited = None if self._began is None else self._began - since
        return Visit(self._kind, DONE, waited, waited and now - self._began, now - since)

    # --- how each kind asks ---------------------------------------------------------------------

    async def _post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        answer = await self._http.post(path, json=body, headers={**self._headers, **headers})
        return answer.raise_for_status()

    async def _a1111(self, prompt: str, seed: int, count: int, steps: int) -> list[bytes]:
        answer = await self._post(
            "/sdapi/v1/txt2img",
            {"prompt": prompt, "seed": seed, "batch_size": count, "steps": steps},
        )
        return [base64.b64decode(image) for image in answer.json()["images"]]

    async def _openai(self, prompt: str, seed: int, count: int, steps: int) -> list[bytes]:
        answer = await self._post(
            "/v1/images/generations", {"prompt": prompt, "seed": seed, "n": count, "steps": steps}
        )
        return [base64.b64decode(image["b64_json"]) for image in answer.json()["data"]]

    async def _stream(self, prompt: str, seed: int, count: int, steps: int) -> list[bytes]:
        asked = {
            "prompt": prompt,
            "seed": seed,
            "n": count,
            "steps": steps,
            "stream": True,
            "partial_images": 1,
        }
        files = []
        async with self._http.stream(
            "POST", "/v1/images/generations", json=asked, headers=self._headers
        ) as answer:
            if answer.is_error:
                await answer.aread()
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == ": drawing":
                    self._began = time.monotonic()
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if event["type"] == "image_generation.completed":
                        files.append(base64.b64decode(event["b64_json"]))
        return sorted(files, key=lambda file: (read_png(file).seed - seed) % (1 << 32))

    async def _page(self, prompt: str, seed: int, count: int, steps: int) -> list[bytes]:
        (await self._http.get("/")).raise_for_status()
        info = (await self._http.get("/gradio_api/info")).json()
        given = {"prompts": [prompt] * count, "seed": seed, "steps": steps}
        data = [
            given.get(each["parameter_name"], each.get("parameter_default"))
            for each in info["named_endpoints"]["/generate"]["parameters"]
        ]
        asked = await self._post("/gradio_api/call/generate", {"data": data})
        path = f"/gradio_api/call/generate/{asked.json()['event_id']}"
        pictures = []
        async for kind, told in self._events(path):
            if kind == "error":
                _failed(str(told), asked.request)
            pictures, _, sentence = told
            if self._began is None and sentence.startswith("Step"):
                self._began = time.monotonic()
        return [
            (await self._http.get(f"/gradio_api/file={picture['path']}")).content
            for picture in pictures
        ]

    async def _events(self, path: str) -> AsyncIterator[tuple[str, Any]]:
        async with self._http.stream("GET", path) as answer:
            kind = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind != "heartbeat":
                    yield kind, json.loads(line.removeprefix("data: "))

    async def _assistant(self, prompt: str, seed: int, count: int, steps: int) -> list[bytes]:
        answer = await self._post(
            "/gradio_api/mcp/",
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "tools/call",
                "params": {
                    "name": "draw",
                    "arguments": {"prompt": prompt, "seed": seed, "steps": steps},
                },
            },
            accept="application/json, text/event-stream",
        )
        message = next(
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        )
        if message["result"]["isError"]:
            _failed(message["result"]["content"][0]["text"], answer.request)
        path = re.search("/gradio_api/file=.*", message["result"]["content"][1]["text"])[0]
        return [(await self._http.get(path)).content]


def _failed(told: str, request: httpx.Request) -> NoReturn:
    """Raise an API's error for a sentence: refusals are sentences of the limits that bite."""
    refused = "Too much" in told or "Too many" in told
    answer = httpx.Response(429 if refused else 500, text=told)
    raise httpx.HTTPStatusError(told, request=request, response=answer)


# --- the server ---------------------------------------------------------------------------------


@contextlib.contextmanager
def serve_apis(model: str | Path, keys: Sequence[str]) -> Iterator[Server]:
    """Start a server with its APIs that knows these keys, and end it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("\n".join(keys))
        history = ("--history", Path(folder) / "history")
        with serve(
            model, *history, "--api", "--api-key-file", file, GRADIO_TEMP_DIR=folder
        ) as server:
            yield server


async def crowd(
    address: str, process: subprocess.Popen, keys: Sequence[str], minutes: float
) -> tuple[list[Visit], list[Sample], bool]:
    """Let a client for each key send requests for some minutes.

    Returns the requests, samples of the server, and whether nothing was left to draw in the end.
    """
    until = time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(
        base_url=address,
        timeout=PATIENCE,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    ) as http:
        samples: list[Sample] = []
        watch = asyncio.create_task(_watch(http, keys[0], process, samples))
        clients = [Client(number, key, http) for number, key in enumerate(keys)]
        visits = await asyncio.gather(*(client.visits(until) for client in clients))
        for _ in range(60):
            await asyncio.sleep(1)
            if samples[-1].jobs == 0:
                break
        watch.cancel()
    return [*itertools.chain(*visits)], samples, samples[-1].jobs == 0


async def _watch(
    http: httpx.AsyncClient, key: str, process: subprocess.Popen, samples: list[Sample]
) -> None:
    server, since = psutil.Process(process.pid), time.monotonic()
    while True:
        answer = await http.get("/metrics", headers={"authorization": f"Bearer {key}"})
        jobs = re.search(r"^sd_tpu_jobs (.*)$", answer.text, re.M)[1]
        samples.append(Sample(time.monotonic() - since, server.memory_info().rss, int(float(jobs))))
        await asyncio.sleep(1)


# --- reports ------------------------------------------------------------------------------------


def row(kind: str, visits: Sequence[Visit]) -> dict[str, Any]:
    """Return the table's row of one kind of client."""
    ends = collections.Counter(visit.end for visit in visits)
    told = {"clients of": kind, **{end: ends[end] for end in (DONE, GONE, REFUSED, LOST, CROSSED)}}
    for name, field in (("waiting", "waited"), ("drawing", "drawn"), ("in all", "total")):
        seconds = [value for visit in visits if (value := getattr(visit, field)) is not None]
        for share in (50, 95):
            told[f"{name} p{share}"] = float(np.percentile(seconds, share)) if seconds else None
    return told


def draw(samples: Sequence[Sample], file: Path) -> None:
    """Draw a plot of memory and of waiting pictures over time."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    memory = figure.add_subplot()
    at = [sample.at / 60 for sample in samples]
    memory.plot(at, [sample.memory / 1e6 for sample in samples], color="#4f46e5")
    memory.set(xlabel="minutes", ylabel="memory of the server, MB", ylim=(0, None))
    jobs = memory.twinx()
    jobs.plot(at, [sample.jobs for sample in samples], color="#a8a29e", linewidth=1)
    jobs.set(ylabel="requests not over", ylim=(0, None))
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Let a crowd ask for pictures."""
    flags = parser("load", __doc__.splitlines()[0])
    add_model(flags)
    flags.add_argument("--clients", type=int, default=50, help="(%(default)s)")
    flags.add_argument("--minutes", type=float, default=10, help="(%(default)s)")
    flags.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="of memory and requests over time: .png or .svg",
    )
    args = flags.parse_args(arguments)

    keys = [f"key-of-client-{number}" for number in range(args.clients)]
    with serve_apis(args.model, keys) as (address, process, _):
        visits, samples, empty = asyncio.run(crowd(address, process, keys, args.minutes))
    rows = [row(kind, [visit for visit in visits if visit.kind == kind]) for kind in KINDS]
    settled = [s.memory for s in samples if s.at > SETTLING * samples[-1].at]
    first, last = np.median(settled[:10]) / 1e6, np.median(settled[-10:]) / 1e6
    told = collections.Counter(visit.told for visit in visits if visit.end in (LOST, CROSSED))
    report(
        f"Clients: {args.clients} for {args.minutes:g} minutes",
        [*rows, row("all", visits)],
        args,
        notes=[
            f"Seconds; {GIVES_UP:.0%} of the clients give up early. The server's memory was "
            f"{first:.0f} MB after {SETTLING:.0%} of the time and {last:.0f} MB at the end "
            f"({last / first - 1:+.1%}), {max(settled) / 1e6:.0f} MB at most. "
            f"{'Nothing' if empty else 'Something'} was left to be drawn when all had gone.",
            *(f"{count} times: {sentence}" for sentence, count in told.most_common(5)),
        ],
    )
    if args.picture:
        draw(samples, args.picture)


if __name__ == "__main__":
    main()
