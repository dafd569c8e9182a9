"""`python -m sd_tpu journey`: pictures on the way from one to another, and a file that moves."""

import argparse
from pathlib import Path

import numpy as np

from sd_tpu.cli.drawing import (
    FLAGGED,
    ProgressLine,
    add_setting_flags,
    early_defaults,
    take_all,
    write,
)
from sd_tpu.cli.flags import add_model_flags, open_engine, positive
from sd_tpu.pictures.movie import KINDS, MILLISECONDS, find_ffmpeg, write_movie
from sd_tpu.request import JOURNEYS, ModelCatalog, Request, journey
from sd_tpu.serving.job import ImageReady
from sd_tpu.settings import RANDOM, Picture, drawn_seed

_OF_JOURNEY = {
    name: setting for name, setting in FLAGGED.items() if not setting.of_upload and name != "share"
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; `Request.check` checks the values of settings."""
    parser.set_defaults(run=_journey, decoder_for="pictures")  # there are no previews
    add = parser.add_argument
    add(
        "--prompt",
        dest="prompt",
        required=True,
        metavar="TEXT",
        help="what the first picture shows",
    )
    add_setting_flags(parser, _OF_JOURNEY)
    add("--pictures", type=int, choices=JOURNEYS, default=16, help="how many (default: 16)")
    add(
        "--movie",
        choices=KINDS,
        default=KINDS[0],
        help="the kind of the file that moves; mp4 needs ffmpeg (default: webp)",
    )
    add(
        "--milliseconds",
        type=positive,
        default=MILLISECONDS,
        metavar="N",
        help="for which each picture is seen (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets 00.png, 01.png, ... and journey.webp, .gif or .mp4",
    )
    add_model_flags(parser)


def _journey(args: argparse.Namespace) -> int:
    if args.movie == "mp4":
        find_ffmpeg()  # before minutes go into pictures for it
    values = {name: getattr(args, name) for name in _OF_JOURNEY} | {"seed": drawn_seed(args.seed)}
    ends = values.pop("to_prompt") or "", values.pop("to_seed")

    def request(catalog: ModelCatalog | Picture) -> Request:
        first = Request.check({**values, "prompts": [args.prompt]}, catalog).picture(0)
        return journey(first, ends[0], RANDOM if ends[1] is None else ends[1], args.pictures)

    request(early_defaults(args.model))
    args.out.mkdir(parents=True, exist_ok=True)
    line = ProgressLine()
    line.show(f"Loading {args.model} ...")
    engine = open_engine(args)
    try:
        made: dict[int, np.ndarray] = {}
        job = engine.submit(request(engine.catalog), previews=False)

        def take(event: ImageReady) -> None:
            made[event.index] = event.pixels
            write(
                args.out / f"{event.index:02}.png",
                engine.to_png(event.pixels, job.request.only(event.index)),
            )

        if not take_all(job, take, line):
            return 1
        movie = args.out / f"journey.{args.movie}"
        write_movie([made[index] for index in sorted(made)], movie, args.milliseconds)
        print(movie, flush=True)
        return 0
    finally:
        line.keep()
        if engine.ready.is_set():
            engine.close()
