"""`python -m sd_tpu generate`: up to eight pictures into a folder."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_tpu.cli.drawing import (
    FLAGGED,
    ProgressLine,
    add_setting_flags,
    early_defaults,
    take_all,
    write,
)
from sd_tpu.cli.flags import add_model_flags, open_engine
from sd_tpu.pictures.images import MAX_FILE_BYTES, framed, make_grid
from sd_tpu.pictures.inputs import Input
from sd_tpu.reading import read_bytes
from sd_tpu.request import LARGER, ModelCatalog, Request, larger, rounded
from sd_tpu.serving.arguments import fill
from sd_tpu.serving.job import ImageReady, Job
from sd_tpu.settings import HANDED_IN, MAX_PROMPTS, OVERRIDABLE, SIDES, UPLOADS, Picture, drawn_seed

if TYPE_CHECKING:  # importing it takes seconds
    from sd_tpu.serving.engine import Engine
    from sd_tpu.serving.resolve import ResolvedRequest

MAX_LARGER = 8  # times as large as it was


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; `Request.check` checks the values of settings."""
    parser.set_defaults(run=_generate, decoder_for="pictures")  # there are no previews
    add = parser.add_argument
    add(
        "--prompt",
        dest="prompts",
        action="append",
        required=True,
        metavar="TEXT",
        help=f"what to draw; up to {MAX_PROMPTS} times, picture i has the seed SEED + i",
    )
    add_setting_flags(parser, FLAGGED)
    add(
        "--override",
        dest="overrides",
        action="append",
        nargs=3,
        default=[],
        metavar=("PROMPT", "SETTING", "VALUE"),
        help=f"a setting of a single prompt, which is numbered from 1; one of "
        f"{', '.join(OVERRIDABLE)}",
    )
    add(
        "--larger",
        type=_times,
        metavar="X",
        help=f"draws each picture again X times as large, such as {LARGER}, from what it has "
        "become; --strength says how much of that becomes noise (default: what suits the model, "
        "also where --init-image makes it that of the first drawing)",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets 00.png, 01.png, ... and grid.png",
    )
    add_model_flags(parser)


def _times(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 < number <= MAX_LARGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be above 1 and at most {MAX_LARGER}")
    return number


def _generate(args: argparse.Namespace) -> int:
    values = {name: getattr(args, name) for name in ("prompts", *FLAGGED)}
    per_picture, inputs = _read_overrides(args.overrides), []
    for settings in (values, *per_picture):
        inputs += _take_inputs(settings)
    _check_used(values, per_picture, {"strength"} if args.larger else set())
    values |= {"seed": drawn_seed(args.seed), "overrides": per_picture}
    seed = Request.check(_early(values), early_defaults(args.model)).seed
    args.out.mkdir(parents=True, exist_ok=True)
    line = ProgressLine()
    line.show(f"Seed {seed}")
    line.keep()
    line.show(f"Loading {args.model} ...")
    engine = open_engine(args)
    try:
        request = _filled(values, engine.catalog)
        inputs_by_name, sizes = {each.name: each for each in inputs}, {}
        resolved = engine.resolver.resolve(request, inputs_by_name)
        for note in notes(resolved):
            line.show(note)
            line.keep()
        if args.larger:
            sizes = {
                index: (request.picture(index).width, request.picture(index).height)
                for index in request.indices()
            }
            said = [each.get("strength", values["strength"]) for each in per_picture]
            again = _again(request, resolved, args.larger, said, engine, inputs_by_name, line)
            if again is None:
                return 1
            resolved = engine.resolver.resolve(again, inputs_by_name)
        job = engine.queue(resolved, previews=False)
        return _save(job, args.out, engine.to_png, line, sizes)
    finally:
        line.keep()
        if engine.ready.is_set():  # else it compiles, which cannot be stopped and may take minutes
            engine.close()


def notes(resolved: "ResolvedRequest") -> list[str]:
    """Return remarks about words past the tokens that the models see, or unknown to them."""
    request = resolved.request
    remarks = {index: each.remarks for index, each in resolved.pictures.items() if each.remarks}
    lost = {f"Prompt {index + 1}": of.count.lost for index, of in remarks.items()}
    for index, of in remarks.items():
        overrides = "negative_prompt" in request.overrides(index)
        whose = f" of prompt {index + 1}" if overrides else ""
        lost[f"The negative prompt{whose}"] = of.cut_negative
    unknown = dict.fromkeys(word for of in remarks.values() for word in of.unknown)
    told = [
        f"{name} is too long for the model, which will not see its end: “{_short(words)}”"
        for name, words in lost.items()
        if words
    ]
    if unknown:
        told.append(
            "The model was never shown these words, and draws something else there: "
            f"“{_short(', '.join(unknown))}”"
        )
    return told


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _again(
    request: Request,
    resolved: "ResolvedRequest",
    times: float,
    said: Sequence[float | None],
    engine: "Engine",
    given: dict[str, Input],
    line: ProgressLine,
) -> Request | None:
    """Return a request that draws the pictures again, `times` as large or nearly so.

    They are drawn first, as resolved, and added to `given`; None if that failed. The strength that
    was `said` of a prompt is that of its second drawing, unless the first has a start picture.
    """

    def one(index: int, picture: Picture) -> Picture:
        strength = engine.catalog.larger_strength(picture.model)
        if said[index] is not None and not picture.init_image:
            strength = picture.strength
        unit = engine.catalog.size_unit(picture.model)
        return larger(
            picture,
            rounded(times * picture.width, unit),
            rounded(times * picture.height, unit),
            strength=strength,
        )

    again = Request(
        tuple(picture and one(index, picture) for index, picture in enumerate(request.pictures))
    )
    for index in again.indices():  # before anything is drawn
        engine.catalog.check(again.picture(index))

    def take(event: ImageReady) -> None:
        nonlocal again
        start = Input.of_pixels(event.pixels)
        given[start.name] = start
        again = again.replaced(
            event.index, dataclasses.replace(again.picture(event.index), init_image=start.name)
        )

    job = engine.queue(resolved, previews=False)
    return again if take_all(job, take, line) else None


def _filled(values: dict[str, Any], catalog: ModelCatalog) -> Request:
    """Return the checked request; raises ValueError for overrides without a prompt."""
    request = fill(values, catalog)
    indices = request.indices()
    for index, settings in enumerate(values.get("overrides", ())):
        if settings and index not in indices:
            raise ValueError(f"--override {index + 1}: there is no prompt {index + 1}.")
    return request


def _read_overrides(given: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Parse each prompt's overrides, by index; raises ValueError for an unknown setting."""
    per_picture = [{} for _ in range(MAX_PROMPTS)]
    for number, name, text in given:
        if not number.isdecimal() or not 1 <= int(number) <= MAX_PROMPTS:
            raise ValueError(
                f"--override should begin with the number of a prompt, from 1 to "
                f"{MAX_PROMPTS}, not {number!r}."
            )
        if name not in OVERRIDABLE:
            raise ValueError(
                f"--override {number}: there is no setting {name!r}; there are "
                f"{', '.join(OVERRIDABLE)}."
            )
        overrides, setting = per_picture[int(number) - 1], OVERRIDABLE[name]
        value = setting.kind.parse(text)
        overrides[name] = [*overrides.get(name, []), value] if setting.most_pictures > 1 else value
    return per_picture


def _take_inputs(settings: dict[str, Any]) -> list[Input]:
    """Read the pictures whose files the settings name, and name them by content instead."""
    inputs = []
    for name, given in settings.items():
        if name in UPLOADS and given:
            paths = filter(None, given if isinstance(given, list) else [given])
            read = [Input(read_bytes(Path(path), MAX_FILE_BYTES), path) for path in paths]
            settings[name] = " ".join(each.name for each in read)
            inputs += read
    return inputs


def _check_used(
    values: dict[str, Any], per_picture: Sequence[dict[str, Any]], used_anyway: set[str]
) -> None:
    """Raise ValueError for settings of an input picture that is missing."""
    fitted = any(each.get("control_image") for each in (values, *per_picture))  # by --fit as well
    for section, image in HANDED_IN.items():
        for given in [] if values[image] else [values, *per_picture]:
            used = per_picture if given is values else [given]
            name = next(
                (
                    name
                    for name, setting in OVERRIDABLE.items()
                    if setting.section == section
                    and given.get(name) is not None
                    and name not in used_anyway
                    and not (name == "fit" and fitted)
                ),
                None,
            )
            if name and not any(each.get(image) for each in used):
                what = OVERRIDABLE[image]
                raise ValueError(
                    f"{OVERRIDABLE[name].label} says how a {what.label.lower()} is "
                    f"used: give one with {what.flag}."
                )


def _early(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that can be checked before a model is loaded: not models and sizes."""
    per_picture = [
        {name: value for name, value in settings.items() if name not in ("model", *SIDES)}
        for settings in values["overrides"][: len(values["prompts"])]
    ]
    return {**values, "overrides": per_picture}


def _save(
    job: Job,
    folder: Path,
    to_png: Callable[..., bytes],
    line: ProgressLine,
    sizes: Mapping[int, tuple[int, int]],
) -> int:
    """Write the pictures as they come and the grid at the end; return the exit code.

    `sizes` are those of the pictures which these are larger than, by index.
    """
    request = job.request
    pictures: list[np.ndarray | None] = [None] * len(request.prompts)

    def take(event: ImageReady) -> None:
        index = event.index
        pictures[index] = event.pixels
        write(
            folder / f"{index:02}.png",
            to_png(event.pixels, request.only(index), first_size=sizes.get(index)),
        )

    if not take_all(job, take, line):
        return 1
    line.keep()
    write(folder / "grid.png", to_png(make_grid(framed(pictures)), request))
    return 0
