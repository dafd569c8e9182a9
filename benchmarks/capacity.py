"""Pictures, waiting and price on hosts of TPUs, simulated: `python -m benchmarks.capacity`.

On paper: seconds of a step and of decoding are the compiler's cycles, as `benchmarks.tpu_compile`
recorded them, over the chip's clock. By simulation: the scheduler itself serves requests that
arrive at random, on devices that take that long. Each of several hosts has a scheduler of its own,
and requests are divided among them as `deploy.orders` does it.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tpu_compile
from benchmarks.records import RESULTS, Record, read_all
from benchmarks.report import parser, report
from deploy.orders import Host, ranked
from sd_tpu.cli.flags import positive
from sd_tpu.runtime.slots import GUIDED
from sd_tpu.serving.engine import SLOTS
from sd_tpu.serving.job import Done
from sd_tpu.serving.latency import LatencyModel
from sd_tpu.serving.plan import Batch, Compiled, Plan, Prompt, Report, TextEncoder, Ticket, Weights
from sd_tpu.serving.scheduler import Limits, Scheduler

CHIP, CHIPS = "v5e-8", 8  # of a host
CLOCK = tpu_compile.CHIPS[CHIP].clock
MODELS = {"SD 1.5, 512x512": "sd14", "SDXL, 1024x1024": "sdxl"}  # 1.4 and 1.5 are one architecture
PRICE = 1.20  # dollars an hour and chip: the list price on demand (cloud.google.com/tpu/pricing)
LOADS = (0.5, 0.8, 0.95)
OVERLOAD, SATURATING = 1.5, 200  # of what is possible on paper, and so many requests
PICTURES = (1, 4, 8)  # of a request, each as often
WEIGHTS, PIXELS = Weights(name="weights"), np.zeros((1, 1, 3), np.uint8)
PROMPT = Prompt(
    encoder=TextEncoder(architecture="", shapes=()),
    weights=Weights(name="weights", texts=True),
    digest=b"",
)
ENDLESS = Limits(*[1 << 40] * 4)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a guided step, and of decoding, of one picture on one chip."""

    step: float
    decode: float

    @classmethod
    def of(cls, model: str, records: Sequence[Record]) -> "Cost":
        """Return the cost by the compiler's cycles for one picture a device, by newest records."""
        return cls(*(cycles(records, model, program) / CLOCK for program in ("advance", "decode")))

    def picture(self, steps: int) -> float:
        """Seconds of a whole one."""
        return steps * self.step + self.decode


def cycles(records: Sequence[Record], model: str, program: str) -> float:
    """Return the compiler's cycles of a program on CHIP; raises ValueError without a record."""
    try:
        return tpu_compile.rows(records)[model, CHIP, 1, program]["cycles M"] * 1e6
    except KeyError:
        raise ValueError(f"No record has cycles of {program} of {model} for {CHIP}.") from None


class Simulated:
    """A simulated host: the scheduler, and devices that take given seconds."""

    def __init__(self, cost: Cost):
        """Start with everything compiled and the weights on all chips."""
        self._cost, self._model = cost, LatencyModel()
        self.scheduler = Scheduler(CHIPS, self._model, limits=ENDLESS)
        self.batch = Batch(architecture="", height=1, width=1, slots=2 * max(SLOTS, CHIPS))
        self.scheduler.prepare(PROMPT.encoder, self.batch, now=0.0)
        speed = Compiled(seconds=0.0, row_seconds=cost.step, decode_seconds=cost.decode)
        for chip in range(CHIPS):
            for weights in (PROMPT.weights, WEIGHTS):
                self.scheduler.hold(chip, weights)
        compiled = {PROMPT.encoder: Compiled(seconds=0.0), self.batch: speed}
        self.scheduler.update(Report(compiled=compiled), 0.0)
        self.plan: Plan | None = None  # on which the devices are

    def begin(self, now: float) -> float | None:
        """Start the scheduler's next plan; return when it ends, None if there is nothing to do."""
        if self.scheduler.idle:
            return None
        self.plan = self.scheduler.schedule(now)
        share = self.batch.slots // CHIPS
        rows, decoded = Counter(), Counter(slot // share for slot in self.plan.finish)
        for slot, taken in self.plan.rows.items():
            rows[slot // share] += taken
        self._advance = self._cost.step * max(rows.values())
        self._decode = self._cost.decode * max(decoded.values(), default=0)
        return now + self._advance + self._decode

    def end(self, now: float) -> list[int]:
        """Report the plan as done to the scheduler; return the jobs that are finished."""
        self.scheduler.update(
            Report(
                advance_seconds=self._advance,
                decode_seconds=self._decode,
                pictures=dict.fromkeys(self.plan.finish, PIXELS),
            ),
            now,
        )
        self.plan = None
        return [job for job, event in self.scheduler.events() if isinstance(event, Done)]


@dataclasses.dataclass
class Visit:
    """A request: when it came, for how many pictures, and when it was begun and done."""

    came: float
    pictures: int
    begun: float = math.nan
    done: float = math.nan


def at_most(cost: Cost, steps: int) -> float:
    """Pictures a second that a host draws which is asked for more than it can. That is less than on
    paper: chips wait while others decode."""
    rate = OVERLOAD * CHIPS / cost.picture(steps) / np.mean(PICTURES)
    visits = simulate(cost, 1, steps, rate, SATURATING)
    return sum(visit.pictures for visit in visits) / max(visit.done for visit in visits)


def simulate(
    cost: Cost, hosts: int, steps: int, rate: float, requests: int, seed: int = 0
) -> list[Visit]:
    """Simulate clients who each send one request, so many of them a second."""
    chance, numbers = random.Random(seed), itertools.count()
    park = [Simulated(cost) for _ in range(hosts)]
    visits: dict[int, Visit] = {}
    happens: list[tuple[float, int, int | None]] = [(0.0, next(numbers), None)]  # host, or arrival
    while happens:
        now, _, which = heapq.heappop(happens)
        if which is None:
            job, count = len(visits), chance.choice(PICTURES)
            visits[job] = Visit(now, count)
            which, *_ = ranked(
                {index: Host(host.scheduler.rows) for index, host in enumerate(park)}, [WEIGHTS]
            )
            host = park[which]
            host.scheduler.submit(
                [
                    Ticket(
                        job=job,
                        index=index,
                        client=str(job),
                        batch=host.batch,
                        weights=WEIGHTS,
                        prompt=PROMPT,
                        kinds=np.full(steps, GUIDED),
                        previews=False,
                    )
                    for index in range(count)
                ],
                now,
                steps=steps,
            )
            if len(visits) < requests:
                heapq.heappush(happens, (now + chance.expovariate(rate), next(numbers), None))
            if host.plan:
                continue  # it goes on as soon as the devices are free
        else:
            host = park[which]
            for job in host.end(now):
                visits[job].done = now
        until = host.begin(now)
        if until is not None:
            for ticket in host.plan.enter.values():
                visit = visits[ticket.job]
                visit.begun = now if math.isnan(visit.begun) else visit.begun
            heapq.heappush(happens, (until, next(numbers), which))
    return list(visits.values())


def rows(
    records: Sequence[Record], steps: int, price: float, requests: int, hosts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the table's rows."""
    for name, model in MODELS.items():
        cost = Cost.of(model, records)
        most = at_most(cost, steps)
        for count, load in itertools.product(hosts, LOADS):
            drawn = load * count * most
            visits = simulate(cost, count, steps, drawn / np.mean(PICTURES), requests)
            settled = visits[
                len(visits) // 10 :
            ]  # before that the queue is shorter than it will be
            waited, total = (
                [getattr(visit, field) - visit.came for visit in settled]
                for field in ("begun", "done")
            )
            chips = count * CHIPS
            yield {
                "model": name,
                "chips": chips,
                "s a step": cost.step,
                "s a picture": cost.picture(steps),
                "paper/s": chips / cost.picture(steps),
                "at most/s": count * most,
                "at most / paper": most * cost.picture(steps) / CHIPS,
                "load": f"{load:.0%}",
                "pictures/s": drawn,
                **{
                    f"{what} p{share}": float(np.percentile(seconds, share))
                    for what, seconds in (("waiting", waited), ("in all", total))
                    for share in (50, 95)
                },
                "$ per 1,000": 1000 * chips * price / (3600 * drawn),
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate each load and report the table."""
    flags = parser("capacity", __doc__.splitlines()[0])
    flags.add_argument("--steps", type=positive, default=20, help="of a picture (%(default)s)")
    flags.add_argument(
        "--price",
        type=float,
        default=PRICE,
        metavar="DOLLARS",
        help="of a chip for an hour; by default (%(default).2f) Google's list price "
        "of v5e on demand",
    )
    flags.add_argument("--requests", type=positive, default=1000, help="to simulate (%(default)s)")
    flags.add_argument(
        "--hosts",
        type=positive,
        nargs="+",
        default=[1, 4],
        help=f"each of {CHIPS} chips (%(default)s)",
    )
    flags.add_argument(
        "--cycles",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="of records, with the compiler's (default: benchmarks/results)",
    )
    args = flags.parse_args(arguments)
    records = read_all(args.cycles, "tpu_compile")
    report(
        f"Capacity of {CHIP}, {args.steps} steps with guidance",
        [*rows(records, args.steps, args.price, args.requests, args.hosts)],
        args,
        notes=[
            f"On paper, not on a TPU: cycles as the compiler of {CHIP} expects them, at "
            f"{CLOCK / 1e9:.2f} GHz, without attention's kernels, for which it expects nothing, "
            "and without what the host does. At most so many a second come of the scheduler's own "
            f"plans under {OVERLOAD:g} times that load, as chips of a host wait while others "
            f"decode; loads are shares of these. Requests of {', '.join(map(str, PICTURES))} "
            f"pictures come by chance, each of another client; {args.requests} for each row. "
            f"Seconds until the first of a request's pictures is begun, and until the last is "
            f"done; ${args.price:.2f} for a chip and hour."
        ],
    )


if __name__ == "__main__":
    main()
