"""Start-up, memory while loading, and compilations in a session: `python -m benchmarks.start`.

How long `python app.py` takes to be ready and to make its first pictures, without compiled programs
from an earlier start and with them; how much memory loading takes at most; and whether anything is
compiled again while somebody changes everything that can be changed.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from gradio_client import Client

from benchmarks.make_checkpoint import MODELS, checkpoint_folder
from benchmarks.report import (
    add_model,
    count_compilations,
    in_fresh_process,
    memory,
    parser,
    report,
    seconds_of,
)
from benchmarks.server import serve
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Job, Progress
from sd_tpu.settings import MAX_PROMPTS, MAX_SEED, SETTINGS, RequestError

FIRST, SECOND = STARTS = ("first start", "second start")
READY, EARLIEST, EIGHT = "ready", "first picture there", "eight pictures"
FEW = 5  # steps of a request in a session, where their number is not what is tried out
STEPS, GUIDANCE = SETTINGS["steps"].kind, SETTINGS["guidance"].kind


# --- starting -----------------------------------------------------------------------------------


def start(model: str | Path, kept: Path) -> dict[str, float]:
    """Seconds of each part of a start of the page that keeps compiled programs in a folder.

    The last three are what somebody waits for: `ready` and `first picture there` count from the
    start of the process, without the time in which the program that asks connects.
    """
    with serve(model, "--no-history", JAX_COMPILATION_CACHE_DIR=str(kept)) as server:
        client = Client(server.address, verbose=False)
        first = seconds_of(lambda: client.predict(["a cat"], api_name="/generate"))
        eight = seconds_of(lambda: client.predict(["a cat"] * MAX_PROMPTS, api_name="/generate"))
    printed = server.printed
    return {
        "importing what draws": printed["Loading"],
        "loading": printed["Compiling"] - printed["Loading"],
        "compiling, importing and serving the page": printed["Ready"] - printed["Compiling"],
        READY: printed["Ready"],
        EARLIEST: printed["Ready"] + first,
        EIGHT: eight,
    }


def starts(model: str | Path, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table: medians over rounds of a first start and a second one."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as kept:
            for name in STARTS:
                taken[name].append(start(model, Path(kept)))
    rows = []
    for part in taken[FIRST][0]:
        medians = {name: statistics.median(times[part] for times in taken[name]) for name in STARTS}
        rows.append(
            {"seconds": part, **medians, "second / first": medians[SECOND] / medians[FIRST]}
        )
    return rows


# --- loading ------------------------------------------------------------------------------------


def loading_peak(folder: Path, dtype: str) -> dict[str, Any]:
    """Measure how much this process grows while loading; it must have done nothing else before."""
    jax.block_until_ready(jax.device_put(0))  # JAX's own beginnings are not the loader's
    before = memory("VmRSS")
    _, params = Checkpoint.from_pretrained(folder, dtype=dtype)
    jax.block_until_ready(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak = memory("VmHWM") - before
    return {
        "parameters": dtype,
        "GB": size / 1e9,
        "peak while loading, GB": peak / 1e9,
        "peak / parameters": peak / size,
    }


# --- a session ----------------------------------------------------------------------------------


def session(engine: Engine) -> dict[str, Any]:
    """Ask an engine for everything that can differ; tell what was compiled after it was ready and
    had drawn a picture without guidance and one with it, which have programs of their own."""
    engine.ready.wait()
    for guidance in (1, 2):
        list(_submit(engine, prompts=["a cat"], steps=FEW, guidance=guidance).events())
    traces = engine.programs.traces.total()
    compiled = count_compilations()
    requests = 0
    for values in _wishes():
        try:
            request = Request.check({"steps": FEW, **values}, engine.catalog)
            list(engine.submit(request, previews=requests % 2 == 0).events())
        except RequestError:  # a spacing that this model's noise schedule does not allow
            continue
        requests += 1
    long = _submit(engine, prompts=["a cat"], steps=STEPS.most)
    together = [long, *(_submit(engine, prompts=["a cat"] * n, steps=FEW) for n in range(2, 9))]
    together[-1].cancel()  # while it waits
    next(event for event in long.events() if isinstance(event, Progress))
    long.cancel()  # while it runs
    for job in together:
        list(job.events())
    return {
        "requests": requests + len(together),
        "traced again": engine.programs.traces.total() - traces,
        "compiled again": compiled(),
    }


def _submit(engine: Engine, **values) -> Job:
    return engine.submit(Request.check(values, engine.catalog))


def _wishes() -> Iterator[dict[str, Any]]:
    """Yield the requests of somebody who tries out everything, one after the other."""
    for count in range(1, MAX_PROMPTS + 1):
        yield dict(prompts=["a cat"] * count, seed=count)
    yield dict(prompts=["", "a dog", "", "", "a house"], seed=MAX_SEED)
    yield dict(prompts=["very " * 70 + "long"], negative_prompt="fog " * 74)
    for steps in (1, 2, STEPS.most):
        yield dict(prompts=["a cat"], steps=steps)
    for guidance in (0, 1, 7.5, GUIDANCE.most):
        yield dict(prompts=["a cat"], guidance=guidance)
    for key, sampler in SAMPLERS.items():
        for spacing in sampler.spacings:
            yield dict(prompts=["a cat", "a dog"], sampler=key, spacing=spacing)
    yield dict(
        prompts=["a cat"] * 4,
        overrides=[
            dict(steps=3, seed=9),
            dict(sampler="heun", guidance=2),
            dict(negative_prompt="blue"),
            None,
        ],
    )
    yield dict(
        prompts=["a cat"] * 4,
        steps=9,
        overrides=[
            dict(cache_interval=3),
            dict(guidance_start=0.2, guidance_stop=0.6),
            dict(guidance_stop=0.5, cache_interval=5),
            None,
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure starts, loading and a session."""
    flags = parser("start", __doc__.splitlines()[0])
    add_model(flags)
    flags.add_argument(
        "--load",
        choices=MODELS,
        default="sd14",
        help="made by make_checkpoint, that is loaded for its peak (%(default)s)",
    )
    flags.add_argument("--rounds", type=int, default=3, help="of two starts each (%(default)s)")
    args = flags.parse_args(arguments)

    folder = checkpoint_folder(args.load)
    peaks = [in_fresh_process(loading_peak, folder, dtype) for dtype in ("float32", "bfloat16")]
    report(
        f"Memory while loading: {args.load} from float16 files",
        peaks,
        args,
        notes=[
            "How much the process grows, on the host: parameters of a TPU or GPU pass through it "
            "one tensor at a time."
        ],
    )

    engine = Engine.open(args.model)
    name = engine.checkpoint.card.name
    report(
        f"Compilations in a session: {name}",
        [session(engine)],
        args,
        notes=[
            "Every number of prompts, sampler, spacing, the least and the most steps and "
            "guidance, per-picture settings, accelerations, texts as long as a chunk, previews or "
            "none, eight users at once, cancelled while running and while waiting."
        ],
    )
    engine.close()

    report(
        f"Start-up: {name}",
        starts(args.model, args.rounds),
        args,
        notes=[
            f"Medians of {args.rounds} rounds; the first start finds no compiled programs, "
            "the second those of the first. Pictures are fetched over HTTP by a program that "
            "is already connected; the model's own number of steps."
        ],
    )


if __name__ == "__main__":
    main()
