"""`python -m sd_tpu`: pictures into a folder, the devices, the samplers.

`add_model_flags` and `open_engine` are the page's as well.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import BUNDLED_MODEL, read_json
from sd_tpu.pictures.images import MAX_FILE_BYTES, make_grid
from sd_tpu.pictures.inputs import Input
from sd_tpu.pictures.movie import KINDS, find_ffmpeg, write_movie
from sd_tpu.request import LARGER, LARGER_STRENGTH, Offer, Request, larger
from sd_tpu.runtime.mesh import make_mesh, set_host_devices
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.serving.catalog import card_defaults
from sd_tpu.serving.engine import Engine
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
from sd_tpu.settings import (
    HANDED_IN,
    MAX_PROMPTS,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    SIDES,
    Choice,
    Number,
    Picture,
    Setting,
    Text,
    Upload,
    drawn_seed,
)

MAX_DEVICES = 256  # more on one host is a slip of the finger, and each takes memory
MAX_LARGER = 8  # times as large as it was
_FLAGGED = {name: setting for name, setting in OVERRIDABLE.items() if setting.flag}
_OF_JOURNEY = {name: setting for name, setting in _FLAGGED.items()
               if not setting.of_upload and name != "share"}
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; what went wrong is one sentence on stderr."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(f"{error.filename or 'A file'}: {error.strerror or error}.", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    return 2


def leave(code: int) -> None:
    """Ends the process with this exit code."""
    if code:  # perhaps while something compiles, and Python's own way out crashes on that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what `open_engine` reads."""
    add = parser.add_argument_group("model").add_argument
    add("--model", default=BUNDLED_MODEL, metavar="DIR_OR_FILE_OR_HUB_ID",
        help="checkpoint folder, single .safetensors file, or hub id (default: the bundled model)")
    add("--models", type=Path, metavar="DIR",
        help="offers every checkpoint in this folder as well: folders and single files")
    add("--revision", help="branch, tag or commit on the hub")
    add("--variant", help="of the weight files, such as fp16")
    add("--size", type=_size, metavar="WIDTHxHEIGHT",
        help="of pictures that ask for none, such as 512x512 (default: the model's)")
    add("--max-pixels", type=_positive, metavar="N",
        help="of a picture, at most (default: four times those its model was trained on)")
    add("--memory", type=_gigabytes, metavar="GB",
        help="of each device that may be taken; what was used least recently makes room for what "
             "is needed (default: what the device has)")
    add("--dtype", choices=("float32", "bfloat16"),
        help="of weights and arithmetic (default: float32 on CPU, bfloat16 elsewhere)")
    add("--token-downsampling", type=int, choices=(1, 2), default=1,
        help="2 lets the finest self-attention take its keys and values from every second row and "
             "column only: faster for large pictures, and not quite the same (default: 1)")
    add("--safety-checker", action=argparse.BooleanOptionalAction,
        help="whether models that bring a safety checker blur what it flags as not safe for work "
             "(default: where the page is served to others)")
    add("--prediction-type", choices=("epsilon", "v_prediction"),
        help="what the UNet of --model predicts, if its files do not say so")
    add("--zero-snr", action=argparse.BooleanOptionalAction,
        help="whether its noise schedule ends without any signal, likewise")
    add("--decoder", metavar="DIR_OR_HUB_ID",
        help="a tiny autoencoder such as madebyollin/taesd, or madebyollin/taesdxl for SDXL: it "
             "draws sooner, and not quite the same")
    add("--lora-dir", type=Path, metavar="DIR",
        help="whose files <lora:name:strength> names in a prompt")
    add("--embedding-dir", type=Path, metavar="DIR",
        help="whose files, learned by textual inversion, prompts name by their stems")
    add("--wildcard-dir", type=Path, metavar="DIR",
        help="whose text files hold, a line each, what __name__ stands for in a prompt")
    add("--styles", type=Path, metavar="FILE",
        help="a list of styles as A1111 keeps it: name,prompt,negative_prompt, where {prompt} "
             "stands for the prompt")
    add("--controlnet", dest="controlnets", action="append", default=[], metavar="DIR_OR_HUB_ID",
        help="a ControlNet that follows control pictures, such as lllyasviel/sd-controlnet-canny; "
             "several times for several")
    add("--ip-adapter", dest="ip_adapters", action="append", default=[],
        metavar="FILE_OR_HUB_ID",
        help="an IP-Adapter that sees reference pictures: a .safetensors file here, or one on the "
             "hub, as in h94/IP-Adapter/models/ip-adapter_sd15.safetensors; several times for "
             "several")
    add("--image-encoder", type=Path, metavar="DIR",
        help="the image encoder of the IP-Adapters, where it is not beside them")
    add("--prompt-chunks", type=int, choices=range(1, 11), default=3, metavar="N",
        help="of 75 tokens that a prompt may have; what is longer is cut (default: 3)")
    _add_devices_flag(parser)


def open_engine(args: argparse.Namespace) -> Engine:
    """The engine that the flags describe. Must come before anything else asks JAX for devices.

    Raises:
        ValueError: the model cannot be loaded, or the devices or the size are not possible.
    """
    find_devices(args.devices)
    return Engine.open(devices=args.devices, memory=args.memory, dtype=args.dtype,
                       **model_options(args))


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of models, as `serving.client.open_models` takes it; not the dtype."""
    names = ("model", "models", "revision", "variant", "size", "max_pixels", "token_downsampling",
             "decoder", "decoder_for", "prediction_type", "zero_snr", "lora_dir", "embedding_dir",
             "prompt_chunks", "wildcard_dir", "styles", "controlnets",
             "ip_adapters", "image_encoder")
    return {**{name: getattr(args, name) for name in names},
            "safety_checker": bool(args.safety_checker)}


def find_devices(count: int | None) -> list[jax.Device]:
    """The first `count` of this process's devices, or all of them; a CPU counts as so many.

    Raises:
        ValueError: there are too few, or none of the platform that JAX was told to use.
    """
    try:
        if count is not None:
            set_host_devices(count)  # concerns the CPU only, whatever else there is
    except RuntimeError:
        pass  # JAX has begun with the devices it has, which may be enough
    try:
        return list(make_mesh(count).devices.flat)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"JAX finds no device to work on ({reason}).") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sd_tpu",
                                     description="Stable Diffusion on JAX.",
                                     epilog="`page` starts the page; see `page --help`.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="make up to eight pictures in a folder")
    generate.set_defaults(run=_generate, decoder_for="pictures")  # there are no previews
    _add_request_flags(generate)
    add_model_flags(generate)
    journey = commands.add_parser(
        "journey", help="make pictures on the way from one prompt or seed to another, and a movie")
    journey.set_defaults(run=_journey, decoder_for="pictures")
    _add_journey_flags(journey)
    add_model_flags(journey)
    devices = commands.add_parser("devices", help="say what JAX finds to work on")
    devices.set_defaults(run=_devices)
    _add_devices_flag(devices)
    samplers = commands.add_parser("samplers", help="list the samplers and their spacings")
    samplers.set_defaults(run=_samplers)
    return parser


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the settings' flags; what they hold is for `Request.check`."""
    add = parser.add_argument
    add(SETTINGS["prompt"].flag, dest="prompts", action="append", required=True, metavar="TEXT",
        help=f"what to draw; up to {MAX_PROMPTS} times, picture i has the seed SEED + i")
    _add_setting_flags(parser, _FLAGGED)
    add("--own", dest="own", action="append", nargs=3, default=[],
        metavar=("PROMPT", "SETTING", "VALUE"),
        help=f"a setting of a single prompt, which is numbered from 1; one of "
             f"{', '.join(OVERRIDABLE)}")
    add("--larger", type=_times, metavar="X",
        help=f"draws each picture again X times as large, such as {LARGER}, from what it has "
             f"become; --strength says how much of that becomes noise (default: {LARGER_STRENGTH})")
    add("--out", type=Path, required=True, metavar="DIR",
        help="gets 00.png, 01.png, ... and grid.png")


def _add_setting_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    for name, setting in settings.items():
        parser.add_argument(setting.flag, dest=name, type=setting.kind.parse,
                            metavar=_metavar(setting), help=_help(setting))


def _add_journey_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(SETTINGS["prompt"].flag, dest="prompt", required=True, metavar="TEXT",
        help="what the first picture shows")
    _add_setting_flags(parser, _OF_JOURNEY)
    add("--pictures", type=int, choices=(8, 16, 32), default=16, help="how many (default: 16)")
    add("--movie", choices=KINDS, default=KINDS[0],
        help="the kind of the file that moves; mp4 needs ffmpeg (default: webp)")
    add("--milliseconds", type=_positive, default=120, metavar="N",
        help="for which each picture is seen (default: 120)")
    add("--out", type=Path, required=True, metavar="DIR",
        help="gets 00.png, 01.png, ... and journey.webp, .gif or .mp4")


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
    """What `--help` says of a flag."""
    if setting.name == "seed":
        return f"of the first picture; {RANDOM} draws one (default: 0)"
    default = setting.kind.shown(setting.default) if setting.expert else "the model's"
    listed = ""
    if isinstance(setting.kind, Choice):
        listed = " See `samplers`." if setting.name in ("sampler", "spacing") else (
            f" One of {', '.join(filter(None, setting.kind.options))}.")
    told = "" if isinstance(setting.kind, Text | Upload) else f" (default: {default})"
    return f"{setting.label}. {setting.help}{listed}{told}"


def _add_devices_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=_count, metavar="N",
                        help="how many to use; a CPU counts as N (default: all)")


def _size(text: str) -> tuple[int, int]:
    """Height and width from "WIDTHxHEIGHT", or from one number for a square."""
    match = re.fullmatch(r"([0-9]{1,5})(?: *[xX×*] *([0-9]{1,5}))?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} should be like 512x512, width first")
    return int(match[2] or match[1]), int(match[1])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text[:12]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from 1")
    return int(text[:12])


def _gigabytes(text: str) -> int:
    """Bytes from gigabytes."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of gigabytes above 0")
    return int(number * 1e9)


def _times(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 < number <= MAX_LARGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be above 1 and at most {MAX_LARGER}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} should be from 1 to {MAX_DEVICES}")
    return int(text)


# --- the commands -------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    values = {name: getattr(args, name) for name in ("prompts", *_FLAGGED)}
    own, inputs = _read_own(args.own), []
    for settings in (values, *own):
        inputs += _take_inputs(settings)
    _check_used(values, own, {"strength"} if args.larger else set())
    if args.larger and not values["init_image"] and values["strength"] is None:
        values["strength"] = LARGER_STRENGTH
    values |= {"seed": drawn_seed(args.seed), "own": own}
    seed = Request.check(_early(values), _early_defaults(args.model)).seed
    args.out.mkdir(parents=True, exist_ok=True)
    line = _Line()
    line.show(f"Seed {seed}")
    line.keep()
    line.show(f"Loading {args.model} ...")
    engine = open_engine(args)
    try:
        request = _filled(values, engine.offer)
        for note in engine.notes(request):
            line.show(note)
            line.keep()
        given, sizes = {each.name: each for each in inputs}, {}
        if args.larger:
            sizes = {place: (request.pictures[place].width, request.pictures[place].height)
                     for place in request.places()}
            request = _again(request, args.larger, engine, given, line)
        if request is None:
            return 1
        job = engine.submit(request, previews=False, inputs=given)
        return _save(job, args.out, engine.to_png, line, sizes)
    finally:
        line.keep()
        if engine.ready.is_set():  # else it compiles, which cannot be stopped and may take minutes
            engine.close()


def _again(request: Request, times: float, engine: Engine, given: dict[str, Input],
           line: "_Line") -> Request | None:
    """What draws the pictures again so many times as large, once they are drawn, and are in what
    is given; None if that failed."""
    def one(picture: Picture) -> Picture:
        strength = LARGER_STRENGTH if picture.init_image else picture.strength
        return larger(picture, round(times * picture.width), round(times * picture.height),
                      strength=strength)

    again = Request(tuple(picture and one(picture) for picture in request.pictures))
    for place in again.places():  # before anything is drawn
        engine.offer.check(again.pictures[place])

    def take(event: ImageReady) -> None:
        nonlocal again
        start = Input.of_pixels(event.pixels)
        given[start.name] = start
        again = again.replaced(event.place, dataclasses.replace(
            again.pictures[event.place], init_image=start.name))

    job = engine.submit(request, previews=False, inputs=given)
    return again if _take_all(job, take, line) else None


def _journey(args: argparse.Namespace) -> int:
    if args.movie == "mp4":
        find_ffmpeg()  # before minutes go into pictures for it
    values = {name: getattr(args, name) for name in _OF_JOURNEY} | {"seed": drawn_seed(args.seed)}
    to_prompt, to_seed = (values.pop(name) for name in ("to_prompt", "to_seed"))
    if to_prompt in (None, "", args.prompt) and to_seed in (None, RANDOM):
        raise ValueError("A journey needs another prompt (--to-prompt) or seed (--to-seed) to go "
                         "to.")
    both = [args.prompt, to_prompt or args.prompt]
    Request.check({**values, "prompts": both}, _early_defaults(args.model))
    args.out.mkdir(parents=True, exist_ok=True)
    line = _Line()
    line.show(f"Loading {args.model} ...")
    engine = open_engine(args)
    try:
        first, last = Request.check({**values, "prompts": both}, engine.offer).pictures
        seed = SETTINGS["to_seed"].check(RANDOM if to_seed is None else to_seed)
        last = dataclasses.replace(last, seed=first.seed if seed == RANDOM else seed)
        made: list[np.ndarray] = []
        for request in _on_the_way(first, last, args.pictures):
            job, found = engine.submit(request, previews=False), []
            if not _take_all(job, found.append, line):
                return 1
            line.keep()
            for event in sorted(found, key=lambda event: event.place):
                _write(args.out / f"{len(made):02}.png",
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


def _filled(values: dict[str, Any], offer: Offer) -> Request:
    """The request, with what a prompt stands for in as many places as there are."""
    given = values["prompts"]
    request = Request.check({**values, "prompts": [*given, *[""] * (MAX_PROMPTS - len(given))]},
                            offer)
    places = request.places()
    for place, settings in enumerate(values.get("own", ())):
        if settings and place not in places:
            raise ValueError(f"--own {place + 1}: there is no prompt {place + 1}.")
    return Request(request.pictures[:max(len(given), places[-1] + 1)])


def _read_own(given: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What each prompt has for itself, by place; raises ValueError for what is no setting."""
    own = [{} for _ in range(MAX_PROMPTS)]
    for number, name, text in given:
        if not number.isdecimal() or not 1 <= int(number[:9]) <= MAX_PROMPTS:
            raise ValueError(f"--own should begin with the number of a prompt, from 1 to "
                             f"{MAX_PROMPTS}, not {number!r}.")
        if name not in OVERRIDABLE:
            raise ValueError(f"--own {number}: there is no setting {name!r}; there are "
                             f"{', '.join(OVERRIDABLE)}.")
        own[int(number) - 1][name] = OVERRIDABLE[name].kind.parse(text)
    return own


def _take_inputs(settings: dict[str, Any]) -> list[Input]:
    """The pictures whose files these settings name, which name their content from then on."""
    inputs = []
    for name, path in settings.items():
        if name in OVERRIDABLE and isinstance(OVERRIDABLE[name].kind, Upload) and path:
            with Path(path).open("rb") as file:
                inputs.append(Input(file.read(MAX_FILE_BYTES + 1), file.name))
            settings[name] = inputs[-1].name
    return inputs


def _check_used(values: dict[str, Any], own: Sequence[dict[str, Any]], used_anyway: set[str]
                ) -> None:
    """Raises ValueError for what says how a picture that is handed in is used where there is none.
    """
    fitted = any(each.get("control_image") for each in (values, *own))  # by --fit as well
    for section, image in HANDED_IN.items():
        for given in ([] if values[image] else [values, *own]):
            used = own if given is values else [given]
            name = next((name for name, setting in OVERRIDABLE.items()
                         if setting.section == section and given.get(name) is not None
                         and name not in used_anyway
                         and not (name == "fit" and fitted)), None)
            if name and not any(each.get(image) for each in used):
                what = OVERRIDABLE[image]
                raise ValueError(f"{OVERRIDABLE[name].label} says how a {what.label.lower()} is "
                                 f"used: give one with {what.flag}.")


def _early(values: dict[str, Any]) -> dict[str, Any]:
    """What can be checked before a model is loaded: other models and sizes cannot."""
    own = [{name: value for name, value in settings.items() if name not in ("model", *SIDES)}
           for settings in values["own"][:len(values["prompts"])]]
    return {**values, "own": own}


def _early_defaults(model: str | Path) -> Picture:
    """The model's defaults as far as they are known before minutes go into loading it: those of a
    folder, without its size, so that a spacing its sampler lacks is refused at once."""
    folder = Path(model).expanduser()
    scheduler = folder / "scheduler" / "scheduler_config.json"
    if not scheduler.is_file():
        return Picture()
    return card_defaults(ModelCard.read(folder, folder.name), read_json(scheduler))


def _save(job: Job, folder: Path, to_png: Callable[..., bytes], line: "_Line",
          sizes: Mapping[int, tuple[int, int]]) -> int:
    """Writes the pictures as they come and the grid at the end; returns the exit code. `sizes` are
    those of the pictures which these are larger than, by place."""
    request = job.request
    pictures: list[np.ndarray | None] = [None] * len(request.prompts)

    def take(event: ImageReady) -> None:
        place = event.place
        pictures[place] = event.pixels
        _write(folder / f"{place:02}.png", to_png(event.pixels, request.only(place),
                                                  first_size=sizes.get(place)))

    if not _take_all(job, take, line):
        return 1
    line.keep()
    _write(folder / "grid.png", to_png(make_grid(pictures), request))
    return 0


def _take_all(job: Job, take: Callable[[ImageReady], None], line: "_Line") -> bool:
    """Shows how a job goes and takes its pictures as they come; whether all did."""
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


def _write(file: Path, png: bytes) -> None:
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


class _Line:
    """A line on stderr: on a terminal the next takes its place, elsewhere it comes below."""

    def __init__(self):
        self._last = ""
        self._over = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Shows the text in place of the last; no text changes nothing."""
        if text and text != self._last:
            self._last = text
            self._print(f"\r{text}\x1b[K" if self._over else f"{text}\n")

    def clear(self) -> None:
        """Makes room on the terminal for what others print."""
        self._last = ""
        self._print("\r\x1b[K" if self._over else "")

    def keep(self) -> None:
        """Lets what is shown stand."""
        self._print("\n" if self._over and self._last else "")
        self._last = ""

    def _print(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


def _devices(args: argparse.Namespace) -> int:
    devices = find_devices(args.devices)
    found = "1 JAX device" if len(devices) == 1 else f"{len(devices)} JAX devices"
    print(f"Found {found} of type {devices[0].device_kind}.")
    platform = devices[0].platform
    if platform != "tpu":
        print(f"This is not a TPU but a {platform.upper()}: everything works, at its own speed.")
    return 0


def _samplers(args: argparse.Namespace) -> int:
    rows = [("KEY", "NAME", "SPACINGS")]
    rows += [(key, s.label, ", ".join(s.spacings)) for key, s in SAMPLERS.items()]
    for key, label, spacings in rows:
        print(f"{key:<17}{label:<17}{spacings}")
    return 0
