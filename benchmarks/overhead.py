"""Overhead of the engine over its programs, and gains of sharing: `python -m benchmarks.overhead`.

One gallery of eight pictures, by where its time goes, with and without previews; then several users
at once, each asking for a few pictures one after the other, against the same requests served one at
a time by the same programs; then a gallery asked of the server's `/generate` by gradio_client.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from gradio_client import Client

from benchmarks.report import (
    add_model,
    add_rounds,
    in_fresh_process,
    parser,
    report,
    seconds_of,
    side_by_side,
)
from benchmarks.server import serve as serve_page
from sd_tpu.cli.devices import find_devices
from sd_tpu.request import Request
from sd_tpu.serving.engine import SLOTS, Engine
from sd_tpu.serving.job import Done

# Devices, and slots that each steps together.
LAYOUTS = {
    "1 device, slots one by one": (1, 1),
    "1 device, slots in eights": (1, SLOTS),
    "8 devices, a slot each": (SLOTS, 1),
}
# Flags of gradio_client's `Client`.
CLIENTS: dict[str, dict[str, Any]] = {
    "Client": {},
    "Client, ssl_verify=False": {"ssl_verify": False},
    "Client, download_files=False": {"download_files": False},
}
BOXES = (1, 5, 2, 4, 8, 1, 2, 1)  # that users fill: 3 on average, as are each four
NOTES = (
    "Users fill three boxes on average. Occupancy is the share of the slots' rows (steps) "
    "that make a picture, from the first request to the last picture. Gain is against "
    "the same requests one at a time: in pictures a second, and in rows that the batch takes.",
    "No previews are drawn. Slots one by one cost nothing while they are idle, so occupancy means "
    "nothing there, and sharing them can gain no more than the time between requests. Slots in "
    "eights cost the same whether one is live or all, as on a chip that a larger batch fills. "
    "Eight devices would as well, but here they share the cores of one CPU: only their gain in "
    "rows says what eight chips would see.",
)


class Meter:
    """Seconds in each of an engine's programs, and rows that its slots took, while it is put on."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.rows = self.live_rows = 0

    def occupancy(self, slots: int) -> float:
        """Return the share of the rows taken that made pictures."""
        return self.live_rows / (self.rows * slots)


@contextmanager
def metered(engine: Engine) -> Iterator[Meter]:
    """Put a meter on the engine's programs; each call then lasts until its result is there."""
    meter, programs = Meter(), engine.programs

    def timed(name: str) -> Callable[..., Any]:
        program = getattr(programs, name)

        def call(*arguments):
            begun = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            meter.seconds[name] += time.perf_counter() - begun
            if name == "advance":
                rows = arguments[-1]
                meter.rows += int(rows.max())
                meter.live_rows += int(rows.sum())
            return result

        return call

    names = ("encode", "advance", "decode")
    for name in names:
        setattr(programs, name, timed(name))
    try:
        yield meter
    finally:
        for name in names:
            delattr(programs, name)


# --- one gallery --------------------------------------------------------------------------------


def serve(engine: Engine, boxes: int, *, previews: bool = False, **settings) -> None:
    """Ask for so many pictures and wait until they are there."""
    request = Request.check({"prompts": ["a cat"] * boxes, **settings}, engine.catalog)
    *_, end = engine.submit(request, previews=previews).events()
    if not isinstance(end, Done):
        raise RuntimeError(f"the engine did not finish: {end}")


def gallery(engine: Engine, rounds: int, **settings) -> list[dict[str, Any]]:
    """Rows of the table: where the time of eight pictures goes, without previews and with them."""
    shares: dict[bool, list[dict[str, float]]] = {False: [], True: []}

    def make(previews: bool) -> None:
        with metered(engine) as meter:
            seconds = seconds_of(partial(serve, engine, SLOTS, previews=previews, **settings))
        program = {name: spent / seconds for name, spent in meter.seconds.items()}
        rest = 1 - sum(program.values())
        outside = rest + program["encode"]
        shares[previews].append({**program, "host": rest, "outside advance and decode": outside})

    times = side_by_side({previews: partial(make, previews) for previews in shares}, rounds)
    return [
        {
            "eight pictures": "with previews" if previews else "without previews",
            "seconds": times[previews].median,
            **{
                f"{name}, %": 100 * statistics.median(share[name] for share in taken[1:])
                for name in ("advance", "decode", "encode", "host", "outside advance and decode")
            },
        }
        for previews, taken in shares.items()
    ]  # the first of each is not counted


# --- users --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Service:
    """Seconds and work of an engine that served some requests."""

    seconds: float
    pictures: int
    rows: int  # that the batch took
    occupancy: float


def together(engine: Engine, users: int, requests: int, **settings) -> Service:
    """Serve users at once, each of whom sends requests one after the other."""

    def use(user: int) -> None:
        for boxes in _boxes(user, requests):
            serve(engine, boxes, **settings)

    def crowd() -> None:
        with ThreadPoolExecutor(users) as threads:
            list(threads.map(use, range(users)))

    return _served(engine, crowd, users, requests)


def one_at_a_time(engine: Engine, users: int, requests: int, **settings) -> Service:
    """Serve the requests of `together` one at a time."""

    def queue() -> None:
        for user in range(users):
            for boxes in _boxes(user, requests):
                serve(engine, boxes, **settings)

    return _served(engine, queue, users, requests)


def _boxes(user: int, requests: int) -> list[int]:
    return [BOXES[(user + 4 * request) % len(BOXES)] for request in range(requests)]


def _served(engine: Engine, work: Callable[[], None], users: int, requests: int) -> Service:
    with metered(engine) as meter:
        seconds = seconds_of(work)
    pictures = sum(sum(_boxes(user, requests)) for user in range(users))
    return Service(seconds, pictures, meter.rows, meter.occupancy(SLOTS))


def load(
    engine: Engine, users: int, requests: int, rounds: int, *, idle_costs: bool, **settings
) -> dict[str, Any]:
    """Return a row of the table: so many users at once, against one request at a time.

    Where idle slots cost nothing there are no figures of how many were.
    """
    served: dict[Callable[..., Service], list[Service]] = {together: [], one_at_a_time: []}
    for _ in range(rounds):
        for way, services in served.items():
            services.append(way(engine, users, requests, **settings))

    def median(way: Callable[..., Service], what: Callable[[Service], float]) -> float:
        return statistics.median(map(what, served[way]))

    def speed(service: Service) -> float:
        return service.pictures / service.seconds

    def work(service: Service) -> float:
        return service.rows / service.pictures

    row = {
        "users": users,
        "pictures": served[together][0].pictures,
        "pictures/s": median(together, speed),
        "one at a time": median(one_at_a_time, speed),
        "gain": median(together, speed) / median(one_at_a_time, speed),
    }
    if not idle_costs:
        return row
    return {
        **row,
        "gain in rows": median(one_at_a_time, work) / median(together, work),
        "occupancy, %": 100 * median(together, lambda service: service.occupancy),
        "one at a time, %": 100 * median(one_at_a_time, lambda service: service.occupancy),
    }


# --- over HTTP ----------------------------------------------------------------------------------


def over_http(model: str, rounds: int, **settings) -> list[dict[str, Any]]:
    """Rows of the table: eight pictures by each client, beside what the engine took for them."""
    processor: dict[str, list[float]] = {name: [] for name in CLIENTS}
    seconds: dict[str, list[float]] = {name: [] for name in CLIENTS}

    def ask(name: str, client: Client) -> None:
        used = time.process_time()
        prompts = ["a cat"] * SLOTS
        seconds[name].append(
            seconds_of(lambda: client.predict(prompts, api_name="/generate", **settings))
        )
        processor[name].append(time.process_time() - used)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serve_page(model, "--no-history", "--log", log) as (address, *_):
            asks = {
                name: partial(ask, name, Client(address, verbose=False, **flags))
                for name, flags in CLIENTS.items()
            }
            side_by_side(asks, rounds)
        engine = [json.loads(line)["seconds"] for line in log.read_text("utf-8").splitlines()]
    rows = []
    for index, name in enumerate(CLIENTS):
        # Leave out each client's first run.
        taken, inside = seconds[name][1:], engine[index :: len(CLIENTS)][1:]
        more = [whole - part for whole, part in zip(taken, inside, strict=True)]
        rows.append(
            {
                "eight pictures over HTTP": name,
                "seconds": statistics.median(taken),
                "the engine's": statistics.median(inside),
                "more": statistics.median(more),
                "processor s of the client": statistics.median(processor[name][1:]),
            }
        )
    return rows


@dataclasses.dataclass
class Findings:
    """Findings of a layout: the model's name, and rows of the two tables."""

    model: str
    parts: list[dict[str, Any]]
    users: list[dict[str, Any]]


def measured(args: argparse.Namespace, layout: str) -> Findings | None:
    """Measure a gallery and users on a layout; None if there are too few devices.

    For a process of its own: where a CPU counts as eight devices, one of them is half as fast as
    when it is the only one.
    """
    devices, group = LAYOUTS[layout]
    try:
        find_devices(devices)
    except ValueError:
        return None
    engine = Engine.open(args.model, devices=devices, group=group)
    engine.ready.wait()
    settings = dict(steps=args.steps)
    parts = gallery(engine, args.rounds, **settings)
    rows = [
        load(
            engine,
            users,
            args.requests,
            args.rounds,
            idle_costs=devices * group == SLOTS,
            **settings,
        )
        for users in args.users
    ]
    engine.close()
    return Findings(
        engine.checkpoint.card.name,
        [{"": layout, **row} for row in parts],
        [{"": layout, **row} for row in rows],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a gallery and users on each layout that the devices allow."""
    flags = parser("overhead", __doc__.splitlines()[0])
    add_model(flags)
    flags.add_argument("--steps", type=int, metavar="N", help="(default: the model's)")
    flags.add_argument(
        "--users", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="(default: 1 4 16)"
    )
    flags.add_argument(
        "--requests",
        type=int,
        default=2,
        metavar="N",
        help="of each user, one after the other (%(default)s)",
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)
    found = [in_fresh_process(measured, args, layout) for layout in LAYOUTS]
    found = [findings for findings in found if findings]
    name = found[0].model
    report(
        f"Engine overhead: {name}",
        [row for findings in found for row in findings.parts],
        args,
        notes=[
            f"Medians of {args.rounds} rounds, in turn, from the request to the last picture. "
            "Each call of a program is waited for; host is all the rest."
        ],
    )
    report(
        f"Concurrent users: {name}",
        [row for findings in found for row in findings.users],
        args,
        notes=NOTES,
    )
    report(
        f"Eight pictures over HTTP: {name}",
        over_http(args.model, args.rounds, **({"steps": args.steps} if args.steps else {})),
        args,
        notes=[
            f"Medians of {args.rounds} rounds, in turn, by gradio_client of a server in a process "
            "of its own; the engine's is what the server's log has for the same run. More is what "
            "a run took beyond that."
        ],
    )


if __name__ == "__main__":
    main()
