"""`python -m sd_tpu journey`: pictures on the way from one to another, and a file that moves."""

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from sd_tpu.cli.drawing import FLAGGED, Line, add_setting_flags, early_defaults, take_all, write
from sd_tpu.cli.flags import add_model_flags, open_engine, positive
from sd_tpu.pictures.movie import KINDS, find_ffmpeg, write_movie
from sd_tpu.request import Request
from sd_tpu.settings import MAX_PROMPTS, RANDOM, SETTINGS, Picture, drawn_seed

_OF_JOURNEY = {name: setting for name, setting in FLAGGED.items()
               if not setting.of_upload and name != "share"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags; what those of settings hold is for `Request.check`."""
    parser.set_defaults(run=_journey, decoder_for="pictures")  # there are no previews
    add = parser.add_argument
    add(SETTINGS["prompt"].flag, dest="prompt", required=True, metavar="TEXT",
        help="what the first picture shows")
    add_setting_flags(parser, _OF_JOURNEY)
    add("--pictures", type=int, choices=(8, 16, 32), default=16, help="how many (default: 16)")
    add("--movie", choices=KINDS, default=KINDS[0],
        help="the kind of the file that moves; mp4 needs ffmpeg (default: webp)")
    add("--milliseconds", type=positive, default=120, metavar="N",
        help="for which each picture is seen (default: 120)")
    add("--out", type=Path, required=True, metavar="DIR",
        help="gets 00.png, 01.png, ... and journey.webp, .gif or .mp4")
    add_model_flags(parser)


def _journey(args: argparse.Namespace) -> int:
    if args.movie == "mp4":
        find_ffmpeg()  # before minutes go into pictures for it
    values = {name: getattr(args, name) for name in _OF_JOURNEY} | {"seed": drawn_seed(args.seed)}
    to_prompt, to_seed = (values.pop(name) for name in ("to_prompt", "to_seed"))
    if to_prompt in (None, "", args.prompt) and to_seed in (None, RANDOM):
        raise ValueError("A journey needs another prompt (--to-prompt) or seed (--to-seed) to go "
                         "to.")
    both = [args.prompt, to_prompt or args.prompt]
    Request.check({**values, "prompts": both}, early_defaults(args.model))
    args.out.mkdir(parents=True, exist_ok=True)
    line = Line()
    line.show(f"Loading {args.model} ...")
    engine = open_engine(args)
    try:
        first, last = Request.check({**values, "prompts": both}, engine.offer).pictures
        seed = SETTINGS["to_seed"].check(RANDOM if to_seed is None else to_seed)
        last = dataclasses.replace(last, seed=first.seed if seed == RANDOM else seed)
        made: list[np.ndarray] = []
        for request in _on_the_way(first, last, args.pictures):
            job, found = engine.submit(request, previews=False), []
            if not take_all(job, found.append, line):
                return 1
            line.keep()
            for event in sorted(found, key=lambda event: event.place):
                write(args.out / f"{len(made):02}.png",
                       engine.to_png(event.pixels, job.request.only(event.place)))
                made.append(event.pixels)
        movie = args.out / f"journey.{args.movie}"
        write_movie(made, movie, args.milliseconds)
        print(movie, flush=True)
        return 0
    finally:
        line.keep()
        if engine.ready.is_set():
            engine.close()


def _on_the_way(first: Picture, last: Picture, count: int) -> list[Request]:
    """Requests for so many pictures from the first to the last one."""
    shares = np.linspace(0, 1, count)[1:-1].tolist()
    to_prompt = last.prompt if last.prompt != first.prompt else ""
    to_seed = last.seed if last.seed != first.seed else RANDOM
    pictures = [first, *(dataclasses.replace(first, to_prompt=to_prompt, to_seed=to_seed,
                                             share=share) for share in shares), last]
    return [Request(tuple(pictures[at:at + MAX_PROMPTS])) for at in range(0, count, MAX_PROMPTS)]
