"""Gains and costs of accelerations: `python -m benchmarks.accelerations`.

Eight pictures of the same prompts and seeds, exact and accelerated in several ways: how long they
take, and how far they are from the exact ones; beside them exact pictures of fewer steps. Then the
time of one evaluation of the UNet, with all tokens and with fewer. For the bundled model, whose
judge `python -m training.judge` makes, `--judged N` also asks it about N pictures of each of two
kinds.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.report import add_model, add_rounds, parser, report, side_by_side
from sd_tpu.request import Request
from sd_tpu.serving.engine import SLOTS, Engine
from sd_tpu.serving.job import ImageReady
from training import evaluate, judge

EXACT = "exact"
DOWNSAMPLING = 2  # in an engine of its own
FEWER = f"token downsampling {DOWNSAMPLING}"
WAYS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "guidance 0 to 0.5": dict(guidance_stop=0.5),
    "guidance 0 to 0.8": dict(guidance_stop=0.8),
    "guidance 0.2 to 0.8": dict(guidance_start=0.2, guidance_stop=0.8),
    "cache interval 2": dict(cache_interval=2),
    "cache interval 3": dict(cache_interval=3),
    "cache interval 5": dict(cache_interval=5),
    "as many steps as interval 2 evaluates": dict(evaluated_at=2),
    "as many steps as interval 3 evaluates": dict(evaluated_at=3),
    "cache interval 3, guidance 0 to 0.8": dict(cache_interval=3, guidance_stop=0.8),
    FEWER: dict(token_downsampling=DOWNSAMPLING),
    f"cache interval 3, {FEWER}": dict(cache_interval=3, token_downsampling=DOWNSAMPLING),
}
TOKENS = {1: "all tokens", DOWNSAMPLING: FEWER}
GROUPS = {1: "one by one", SLOTS: "in eights"}  # slots that the device steps together
FAR = 16  # of 255: what can be seen
JUDGED = {"one thing": "the thing, top-1", "two side by side": "both things, each in its place"}


def draw(
    engines: Mapping[int, Engine],
    prompts: Sequence[str],
    *,
    token_downsampling: int = 1,
    steps: int | None = None,
    evaluated_at: int = 1,
    **settings,
) -> np.ndarray:
    """Pictures [N, H, W, 3] u8 of the prompts; picture i has the seed i. They have as many steps as
    are evaluated of `steps`, by default the model's, at an interval `evaluated_at`."""
    engine, pictures = engines[token_downsampling], {}
    steps = steps or engine.defaults.steps
    settings["steps"] = steps if evaluated_at == 1 else 2 - (2 - steps) // evaluated_at
    for first in range(0, len(prompts), SLOTS):
        request = Request.check(
            {"prompts": prompts[first : first + SLOTS], "seed": first, **settings}, engine.catalog
        )
        events = engine.submit(request, previews=False).events()
        pictures |= {
            first + event.index: event.pixels for event in events if isinstance(event, ImageReady)
        }
    return np.stack([pictures[index] for index in range(len(prompts))])


def speeds(
    engines: Mapping[int, Engine], prompts: Sequence[str], rounds: int, **settings
) -> dict[str, float]:
    """Median seconds of the prompts' pictures, by way; the ways take turns."""
    calls = {
        way: partial(draw, engines, prompts, **settings, **differing)
        for way, differing in WAYS.items()
    }
    return {way: times.median for way, times in side_by_side(calls, rounds).items()}


def differences(
    engines: Mapping[int, Engine], prompts: Sequence[str], **settings
) -> dict[str, dict[str, float]]:
    """Measure how far the pictures of each way are from the exact ones."""
    drawn = {
        way: draw(engines, prompts, **settings, **differing).astype(int)
        for way, differing in WAYS.items()
    }
    off = {way: abs(pictures - drawn[EXACT]) for way, pictures in drawn.items()}
    return {
        way: {
            "mean difference": off[way].mean(),
            f"off by more than {FAR}, %": 100 * np.mean(off[way] > FAR),
        }
        for way in WAYS
    }


def judged(engines: Mapping[int, Engine], count: int) -> dict[str, dict[str, float]]:
    """Return the share of `count` pictures of each kind that the judge finds right, by way.

    The prompts are those of `python -m training.evaluate`, the steps and the guidance the model's.
    """
    ask, found = judge.trained(), {way: {} for way in WAYS}
    for seed, (kind, mix) in enumerate(evaluate.KINDS.items(), start=1):
        if kind in JUDGED:
            trial = evaluate.Trial.of(mix, count, seed)
            for way, differing in WAYS.items():
                pictures = draw(engines, trial.texts, **differing)
                right = evaluate.shares(ask, trial, kind, pictures)[JUDGED[kind]]
                found[way][f"{kind}, %"] = 100 * right
    return found


def evaluations(engines: Mapping[int, Engine], rounds: int) -> dict[int, dict[str, float]]:
    """Median seconds of a row of one guided picture, by engine; the engines take turns, and the
    first rows of each are not counted."""
    slots = {}
    for number, engine in engines.items():
        request = Request.check(
            {"prompts": ["a cat"], "steps": rounds + 1, "sampler": "ddim"}, engine.catalog
        )
        slots[number] = engine.programs.encode(
            engine.params,
            engine.programs.empty(),
            {0: engine.resolver.resolve(request).pictures[0].slots[0]},
        )

    def row(number: int) -> None:
        engine = engines[number]
        advanced = engine.programs.advance(engine.params, slots[number], 1)
        slots[number] = jax.block_until_ready(advanced)

    times = side_by_side({number: partial(row, number) for number in engines}, rounds)
    return {number: {"seconds": time.median} for number, time in times.items()}


def _rows(
    times: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Rows of the table, from seconds by layout and way, and whatever else is known of each way."""
    return [
        {
            "": way,
            **{
                key: value
                for layout, taken in times.items()
                for key, value in (
                    (f"{layout}, s", taken[way]),
                    ("speed-up " + layout, taken[EXACT] / taken[way]),
                )
            },
            **found[way],
        }
        for way in WAYS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure evaluations, and pictures unless there are to be none."""
    flags = parser("accelerations", __doc__.splitlines()[0])
    add_model(flags)
    flags.add_argument(
        "--size", type=int, metavar="PIXELS", help="of the square pictures (default: the model's)"
    )
    flags.add_argument("--steps", type=int, metavar="N", help="(default: the model's)")
    flags.add_argument(
        "--pictures",
        type=int,
        choices=range(SLOTS + 1),
        default=SLOTS,
        metavar="N",
        help="0 measures evaluations only (%(default)s)",
    )
    flags.add_argument(
        "--groups",
        type=int,
        nargs="+",
        choices=GROUPS,
        default=list(GROUPS),
        help="slots stepped together (default: %(default)s)",
    )
    flags.add_argument(
        "--judged",
        type=int,
        default=0,
        metavar="N",
        help="pictures of each kind that the bundled model's judge is asked about (%(default)s)",
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)

    single, times = [], {}
    size = (args.size, args.size) if args.size else None
    for group in args.groups:
        engines = {
            number: Engine.open(
                args.model, devices=1, group=group, size=size, token_downsampling=number
            )
            for number in TOKENS
        }
        for engine in engines.values():
            engine.ready.wait()
        card, defaults = engines[1].checkpoint.card, engines[1].defaults
        model = f"{card.name}, {defaults.width}x{defaults.height}"
        single += [
            {"": f"{GROUPS[group]}, {TOKENS[number]}", **found}
            for number, found in evaluations(engines, args.rounds).items()
        ]
        if args.pictures:
            prompts, steps = list(card.prompts[: args.pictures]), dict(steps=args.steps)
            times[GROUPS[group]] = speeds(engines, prompts, args.rounds, **steps)
            found = differences(engines, prompts, **steps)
            if args.judged and group == args.groups[-1]:
                shares = judged(engines, args.judged)
                found = {way: {**found[way], **shares[way]} for way in WAYS}
        for engine in engines.values():
            engine.close()
    report(
        f"An evaluation: {model}",
        single,
        args,
        notes=[
            f"Medians of {args.rounds} rows each of one guided picture; in eights, one takes "
            "as long as eight."
        ],
    )
    if args.pictures:
        asked = f" The judge saw {args.judged} pictures of each kind." if args.judged else ""
        report(
            f"Accelerations: {model}, {args.pictures} pictures",
            _rows(times, found),
            args,
            notes=[
                f"Medians of {args.rounds} rounds, in turn, from the request to the last "
                "picture. Differences are of values from 0 to 255, from the exact pictures "
                f"of the same prompts and seeds.{asked}"
            ],
        )


if __name__ == "__main__":
    main()
