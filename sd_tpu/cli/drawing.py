"""Common parts of the commands that draw: settings as flags, files, and a line of progress."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import is_file, read_json
from sd_tpu.reading import expanded
from sd_tpu.serving.job import (
    BLURRED,
    COMPILING,
    Done,
    Event,
    Failed,
    ImageReady,
    Job,
    Progress,
    Queued,
)
from sd_tpu.settings import OVERRIDABLE, RANDOM, Choice, Number, Picture, Setting, Text, Upload

FLAGGED = {name: setting for name, setting in OVERRIDABLE.items() if setting.flag}


def add_setting_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Add a flag for each of these settings."""
    for name, setting in settings.items():
        parser.add_argument(
            setting.flag or "",  # all of these have one
            dest=name,
            type=setting.kind.parse,
            action="append" if setting.most_pictures > 1 else "store",
            metavar=_metavar(setting),
            help=_help(setting),
        )


def _metavar(setting: Setting) -> str:
    match setting.kind:
        case Text():
            return "TEXT"
        case Choice():
            return "KEY"
        case Upload():
            return "FILE"
        case Number(type=kind):
            return "N" if kind is int else "X"


def _help(setting: Setting) -> str:
    """Return the help of a setting's flag."""
    if setting.name == "seed":
        return f"of the first picture; {RANDOM} draws one (default: 0)"
    default = setting.kind.shown(setting.default) if setting.expert else "the model's"
    listed = ""
    if isinstance(setting.kind, Choice):
        listed = (
            " See `samplers`."
            if setting.name in ("sampler", "spacing")
            else (f" One of {', '.join(filter(None, setting.kind.options))}.")
        )
    if setting.most_pictures > 1:
        listed = f" As often as the model takes one, up to {setting.most_pictures} times."
    default_text = "" if isinstance(setting.kind, Text | Upload) else f" (default: {default})"
    return f"{setting.label}. {setting.help}{listed}{default_text}"


def early_defaults(model: str | Path) -> Picture:
    """Return a model's defaults as far as they are known before minutes go into loading it.

    Those of a folder are, except for its size, so that a spacing its sampler lacks is refused at
    once.
    """
    folder = expanded(model)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    if not is_file(scheduler):
        return Picture()
    from sd_tpu.serving.catalog import card_defaults  # takes seconds to import

    return card_defaults(ModelCard.read(folder, folder.name), read_json(scheduler))


def take_all(job: Job, take: Callable[[ImageReady], None], line: "ProgressLine") -> bool:
    """Show a job's progress and pass on its pictures as they come; return whether all came."""
    unsafe = False
    try:
        for event in job.events():
            line.show(_sentence(event))
            if isinstance(event, ImageReady):
                line.clear()
                if event.unsafe and not unsafe:
                    print(f"{BLURRED}.", file=sys.stderr)
                unsafe |= event.unsafe
                take(event)
    finally:
        job.cancel()  # changes nothing once it is over
    return isinstance(event, Done)


def write(file: Path, png: bytes) -> None:
    """Write a file and say so."""
    file.write_bytes(png)
    print(file, flush=True)


def _sentence(event: Event) -> str:
    match event:
        case Queued(reason=reason):  # nobody else is in this queue
            return "Compiling, or loading what was compiled before ..." * (reason == COMPILING)
        case Progress(step, steps):
            return f"Step {step} of {steps}"
        case Done(seconds):
            return f"Done in {seconds:.1f} s."
        case Failed(message):
            return message
    return ""


class ProgressLine:
    """A line on stderr: on a terminal the next text replaces it, elsewhere it comes below."""

    def __init__(self):
        self._last = ""
        self._over = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show the text in place of the last; no text changes nothing."""
        if text and text != self._last:
            self._last = text
            self._print(f"\r{text}\x1b[K" if self._over else f"{text}\n")

    def clear(self) -> None:
        """Make room on the terminal for what others print."""
        self._last = ""
        self._print("\r\x1b[K" if self._over else "")

    def keep(self) -> None:
        """Leave the shown text on the terminal."""
        self._print("\n" if self._over and self._last else "")
        self._last = ""

    def _print(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)
