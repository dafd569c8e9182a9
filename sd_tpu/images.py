"""Finished pictures: the 2x4 grid, PNG files, and the request that a PNG carries, both ways.

The text chunk `parameters` is that of the stable-diffusion-webui by AUTOMATIC1111 (A1111), which
most galleries and tools read: the prompt, `Negative prompt: ...`, and one line of settings. What
that text cannot say without doubt (several prompts, a prompt that looks like settings, control
characters) is said once more, exactly, as JSON in a field of the settings line, as are the
settings that some of several pictures have on their own. What A1111 has no setting for is a field
where it is not the default: "Guidance start", "Guidance stop", "Cache interval" and, which no
request can set, "Token downsampling".
"""

import json
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from sd_tpu.request import ACCELERATIONS, Request, RequestError, Settings, parse_number
from sd_tpu.samplers import SAMPLERS

VERSION = "0.1.0"
KEY = "parameters"
SIGNATURE = b"\x89PNG\r\n\x1a\n"  # of every PNG file
MAX_FILE_BYTES = 1 << 26
MAX_TEXT_LENGTH = 1 << 20  # eight prompts and negatives of the longest kind, escaped, fit
BLANK = 255
INK = 32  # of labels, on the blank
MIN_LABELLED = 256  # pixels: a picture with a label is at least so wide

# Where A1111 has a sampler under another name than diffusers, or a spacing under another.
_A1111_SAMPLERS = {"pndm": "PLMS", "euler_ancestral": "Euler a", "kdpm2": "DPM2"}
_A1111_SPACINGS = {"automatic": None, "uniform": "linspace", "sgm uniform": "trailing"}
_NAMES = {
    **{sampler.label.lower(): key for key, sampler in SAMPLERS.items()},
    **{name.lower(): key for key, name in _A1111_SAMPLERS.items()},
    **{key: key for key in SAMPLERS},
}

_ACCELERATIONS = {name: name.replace("_", " ").capitalize() for name in ACCELERATIONS}
_DOWNSAMPLING = "Token downsampling"

_NEGATIVE = re.compile(r"(?:^|\n)[ \t]*Negative prompt:")
_FIELD = re.compile(r'(?:^|,)\s*(\w[\w /-]*):\s*("(?:[^\\"]++|\\.)*+"|[^,]*+)\s*(?=,|$)')
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # which PNG's text chunks should not hold


def make_grid(pictures: Sequence[np.ndarray | None], rows: int = 2, cols: int = 4) -> np.ndarray:
    """Pictures side by side, row by row; a None leaves its place blank.

    Args:
        pictures: uint8 [H, W, 3] of one size, 1 to rows * cols places.
        rows: at most.
        cols: at most; fewer pictures than that make one shorter row.

    Returns:
        uint8 [R*H, C*W, 3].
    """
    shapes = {picture.shape for picture in pictures if picture is not None}
    if len(shapes) != 1 or len(pictures) > rows * cols:
        raise ValueError(f"A grid takes 1 to {rows * cols} pictures of one size.")
    height, width, channels = shapes.pop()
    cols = min(cols, len(pictures))
    rows = -(-len(pictures) // cols)
    grid = np.full((rows, height, cols, width, channels), BLANK, np.uint8)
    for place, picture in enumerate(pictures):
        if picture is not None:
            grid[place // cols, :, place % cols] = picture
    return grid.reshape(rows * height, cols * width, channels)


def with_labels(pictures: Sequence[np.ndarray | None],
                texts: Sequence[str]) -> list[np.ndarray | None]:
    """The pictures, each with a line of text in a band below it, for the grid of a comparison.

    Pictures too narrow for words are enlarged, every pixel to as many.

    Args:
        pictures: uint8 [H, W, 3] of one size; a None stays what it is.
        texts: of each, in Latin letters, which are all that Pillow's own font has. All are as small
            as the longest needs to fit in the width; what does not fit in the smallest letters that
            can be read is cut off, with an ellipsis.

    Returns:
        uint8 [N*H + B, N*W, 3], where N and B depend on H and W alone.
    """
    height, width, _ = next(picture.shape for picture in pictures if picture is not None)
    times = -(-MIN_LABELLED // width)
    height, width = height * times, width * times
    texts = [text[:width] for text in texts]  # no letter is narrower than a pixel
    largest = max(12, height // 16)
    fonts = [ImageFont.load_default(size) for size in range(largest, 7, -1)]
    fitting = (font for font in fonts if all(font.getlength(text) <= width for text in texts))
    font = next(fitting, fonts[-1])

    def labelled(picture: np.ndarray, text: str) -> np.ndarray:
        band = Image.new("L", (width, round(1.6 * largest)), BLANK)
        ImageDraw.Draw(band).text((width / 2, band.height / 2), _cut(text, font, width), INK, font,
                                  "mm")
        larger = picture.repeat(times, axis=0).repeat(times, axis=1)
        return np.vstack([larger, np.repeat(np.asarray(band)[..., None], 3, axis=2)])

    return [None if picture is None else labelled(picture, text)
            for picture, text in zip(pictures, texts, strict=True)]


def _cut(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """As much of the text as fits in the width, in pixels, with an ellipsis if that is not all."""
    lengths = range(len(text), 0, -1)
    cuts = (text[:length].rstrip() + "…" * (length < len(text)) for length in lengths)
    return next((cut for cut in cuts if font.getlength(cut) <= width), "")


def to_png(pixels: np.ndarray, request: Request, model: str, *,
           token_downsampling: int = 1) -> bytes:
    """A PNG file of pixels uint8 [H, W, 3] that carries the request it was made from."""
    info = PngInfo()
    info.add_text(KEY, format_parameters(request, model, token_downsampling))
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", pnginfo=info)
    return file.getvalue()


def to_webp(pixels: np.ndarray, quality: int | None) -> bytes:
    """A WebP file of pixels uint8 [H, W, 3], to be looked at: small, quickly made, and without
    settings. A quality (0 to 100) of 70 is enough for a preview; None loses nothing."""
    file = BytesIO()
    lossless = dict(lossless=True, quality=0) if quality is None else dict(quality=quality)
    Image.fromarray(pixels).save(file, "WEBP", method=0, **lossless)
    return file.getvalue()


def to_zip(files: Mapping[str, bytes]) -> bytes:
    """A zip file of these files by name. PNGs are compressed already, so they are only stored."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def read_png(file: bytes | str | PathLike | BinaryIO) -> Request:
    """The request that a PNG file carries; its pixels are not decoded.

    Raises:
        RequestError: the file is no whole PNG, or carries no settings, or bad ones.
    """
    return parse_parameters(read_parameters(file))


def read_parameters(file: bytes | str | PathLike | BinaryIO) -> str:
    """The text that a PNG file carries; its pixels are not decoded.

    Raises:
        RequestError: the file is no whole PNG, or carries no text.
    """
    data = _read(file)
    if len(data) > MAX_FILE_BYTES:
        raise RequestError("The file is larger than {limit} MiB.", limit=MAX_FILE_BYTES >> 20)
    if not data.startswith(SIGNATURE):
        raise RequestError("The file is not a PNG picture; no other kind carries settings here.")
    try:
        with Image.open(BytesIO(data), formats=["PNG"]) as image:
            text = image.info.get(KEY)
            image.verify()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RequestError("The picture has far too many pixels.") from None
    except (OSError, SyntaxError, ValueError, struct.error):
        raise RequestError("The file is not a whole PNG picture.") from None
    if not isinstance(text, str):
        raise RequestError("The picture carries no settings: its PNG has no 'parameters' text.")
    return text


def _read(file: bytes | str | PathLike | BinaryIO) -> bytes:
    """The file's bytes, or somewhat more than are allowed of them."""
    if isinstance(file, bytes):
        return file
    try:
        if hasattr(file, "read"):
            return file.read(MAX_FILE_BYTES + 1)
        with Path(file).open("rb") as opened:
            return opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError("The file cannot be read ({reason}).", reason=error.strerror) from error


def format_parameters(request: Request, model: str, token_downsampling: int = 1) -> str:
    """The request as A1111's text, from which `parse_parameters` makes the same request; the
    model and its token downsampling are written too, and are no part of it."""
    body = _plain("\n".join(filter(None, request.prompts)))
    if request.negative_prompt:
        body += f"\nNegative prompt: {_plain(request.negative_prompt)}"
    fields = {
        "Steps": str(request.steps),
        "Sampler": _A1111_SAMPLERS.get(request.sampler, SAMPLERS[request.sampler].label),
        "Schedule type": (request.spacing or "").capitalize(),
        "CFG scale": _number(request.guidance),
        "Seed": str(request.seed),
        "Size": f"{request.width}x{request.height}",
        **{_ACCELERATIONS[name]: _number(value) for name, value in request.accelerated().items()},
        _DOWNSAMPLING: str(token_downsampling) if token_downsampling > 1 else "",
        "Model": model,
        "Version": f"sd_tpu {VERSION}",
    }
    fields = {name: value for name, value in fields.items() if value}
    prompt, negative = _split(body)
    if request.prompts != (prompt,):
        fields["Prompts"] = json.dumps(request.prompts, ensure_ascii=False)
    if request.negative_prompt != negative:
        fields["Negative"] = request.negative_prompt
    if request.own:
        own = [own and own.given() for own in request.own]
        fields["Own settings"] = json.dumps(own, ensure_ascii=False)
    line = ", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items())
    return f"{body}\n{line}"


def parse_parameters(text: str) -> Request:
    """The request that a text of ours or of A1111 describes; fields that mean nothing here are
    ignored. The size is whatever the text says.

    Raises:
        RequestError: the text is something else, or one of its values cannot be served.
    """
    body, fields = _settings(text)
    missing = {"Steps", "Sampler", "CFG scale", "Seed", "Size"} - fields.keys()
    if missing:
        raise RequestError("The picture's settings lack {names}.", names=", ".join(sorted(missing)))
    prompt, negative = _split(body)
    sampler, spacing = _sampler(fields["Sampler"], fields.get("Schedule type", ""))
    width, height = _size(fields["Size"])
    values = {
        "prompts": _json(fields, "Prompts", [prompt]),
        "own": _json(fields, "Own settings", []),
        "negative_prompt": fields.get("Negative", negative),
        "seed": parse_number(fields["Seed"]),
        "steps": parse_number(fields["Steps"]),
        "guidance": parse_number(fields["CFG scale"]),
        "sampler": sampler,
        "spacing": spacing,
        **{name: parse_number(fields[label]) for name, label in _ACCELERATIONS.items()
           if label in fields},
    }
    return Request.check(values, Settings(height=height, width=width))


def parse_token_downsampling(text: str) -> int:
    """What a text says of how its picture was drawn and no request can set; 1 if it says nothing.

    Raises:
        RequestError: the text is something else.
    """
    _, fields = _settings(text)
    named = re.fullmatch(r"[1-9]\d?", fields.get(_DOWNSAMPLING, ""), re.ASCII)
    return int(named[0]) if named else 1


def _settings(text: str) -> tuple[str, dict[str, str]]:
    """What stands above the line of settings, and its fields by name."""
    if len(text) > MAX_TEXT_LENGTH:
        raise RequestError("The text is far too long to be a picture's settings.")
    lines = text.replace("\r\n", "\n").split("\n")
    last = max((i for i, line in enumerate(lines) if line.startswith("Steps:")), default=None)
    if last is None:
        raise RequestError("The text holds no picture settings: no line begins with 'Steps:'.")
    fields = {name: _unquoted(value) for name, value in _FIELD.findall(lines[last])}
    return "\n".join(lines[:last]), fields


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _plain(text: str) -> str:
    """The text without what a line of text in a PNG should not hold."""
    return _CONTROLS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))


def _split(body: str) -> tuple[str, str]:
    prompt, *negative = _NEGATIVE.split(body, maxsplit=1)
    return prompt.strip(), "".join(negative).strip()


def _quoted(value: str) -> str:
    clean = value.isprintable() and value == value.strip() and not re.search('[,:"]', value)
    return value if value and clean else json.dumps(value)


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value.strip()


def _json(fields: dict[str, str], name: str, default: Any) -> Any:
    if name not in fields:
        return default
    try:
        return json.loads(fields[name])
    except (ValueError, RecursionError):
        raise RequestError("The picture's settings are garbled: {name}.", name=name) from None


def _sampler(name: str, schedule: str) -> tuple[str, str | None]:
    """Key and spacing. A1111 before 1.9 wrote the schedule behind the sampler's name."""
    name, schedule = name.lower()[:40], schedule.lower()[:40]
    first, _, last = name.rpartition(" ")
    if name not in _NAMES and last in ("karras", "exponential"):
        name, schedule = first, schedule or last
    return _NAMES.get(name, name), _A1111_SPACINGS.get(schedule, schedule) or None


def _size(value: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,5})x([0-9]{1,5})", value)
    if not match:
        raise RequestError("The picture's size should be like 512x512, not {value}.",
                           value=repr(value[:40]))
    return int(match[1]), int(match[2])
