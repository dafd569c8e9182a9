"""Finished pictures: the 2x4 grid, PNG files, and the request that a PNG carries, both ways.

The text chunk `parameters` is that of the stable-diffusion-webui by AUTOMATIC1111 (A1111), which
most galleries and tools read: the prompt, `Negative prompt: ...`, and one line of settings. What
that text cannot say without doubt (several prompts, a prompt that looks like settings, control
characters) is said once more, exactly, as JSON in a field of the settings line, as are the
settings that some of several pictures have on their own. What is for experts is a field where it
is not the default, as is "Token downsampling", which no request can set. Such texts are read from
other kinds of pictures as well.
"""

import base64
import codecs
import contextlib
import itertools
import json
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageDraw, ImageFilter, ImageFont
from PIL.PngImagePlugin import PngInfo, iTXt

from sd_tpu.reading import check_regular
from sd_tpu.request import AnyModelCatalog, Request
from sd_tpu.sampling.samplers import SAMPLERS, steps_taken
from sd_tpu.settings import OVERRIDABLE, SETTINGS, SIDES, Picture, RequestError, short_seed

VERSION = "0.1.0"
KEY = "parameters"
SIGNATURE = b"\x89PNG\r\n\x1a\n"  # of every PNG file
MAX_FILE_BYTES = 1 << 26
MAX_CHUNKS = 1 << 16  # of a PNG; of the largest file, in pieces of 1 KiB each
MAX_EXIF_BYTES = 1 << 21  # there are workflows in it
_EXIF = b"Exif\0\0"  # before it
# The keywords of texts in which programs write settings, in small letters, and of those that hold
# EXIF in hexadecimal digits, as ImageMagick and ExifTool write it.
_KEYWORDS = (KEY, "usercomment", "comment", "description")
_HEX_EXIF = ("raw profile type exif", "raw profile type app1")
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
MAX_TEXT_LENGTH = 1 << 20  # eight prompts and negatives of the longest kind, escaped, fit
BLANK = 255
INK = 32  # of labels, on the blank
MIN_LABELLED = 256  # pixels: a picture with a label is at least so wide

# Where A1111 has a sampler under another name than diffusers, or a spacing under another.
_A1111_SAMPLERS = {"pndm": "PLMS", "euler_ancestral": "Euler a", "kdpm2": "DPM2"}
_A1111_SPACINGS = {
    "automatic": "",
    "uniform": "linspace",
    "normal": "linspace",
    "sgm uniform": "trailing",
    "sgm_uniform": "trailing",
}
_NAMES = {
    **{sampler.label.lower(): key for key, sampler in SAMPLERS.items()},
    **{name.lower(): key for key, name in _A1111_SAMPLERS.items()},
    **{key: key for key in SAMPLERS},
}

# The fields of the settings line, in the order that A1111 gives those it knows.
_A1111_FIELDS = (
    "Steps",
    "Sampler",
    "Schedule type",
    "CFG scale",
    "Seed",
    "Size",
    "Model hash",
    "Model",
)
_PROMPTS, _NEGATIVES, _OWN = SETTINGS["prompt"].png, SETTINGS["negative_prompt"].png, "Own settings"
_MODEL_HASH = "Model hash"
UPSCALER = "Lanczos"  # what A1111 calls the way in which start pictures are enlarged
_HIRES_UPSCALE, _HIRES_RESIZE = "Hires upscale", "Hires resize"
_CONTROL = "ControlNet 0"  # of A1111's extension, which numbers them, with fields of its own
_CONTROL_FIELDS = {
    "Module": "detector",
    "Model": "controlnet",
    "Weight": "control_scale",
    "Guidance Start": "control_start",
    "Guidance End": "control_stop",
}
# What A1111's extension calls detectors that find the same or nearly so; the first of each is
# written.
MODULES = {
    "none": "",
    "canny": "canny",
    "scribble_xdog": "scribble",
    "lineart_standard": "lineart",
    "": "",
    "None": "",
    "scribble": "scribble",
    "lineart": "lineart",
}
_LINE = {
    setting.png: name
    for name, setting in OVERRIDABLE.items()
    # A file has what a style made of the prompts.
    if name not in {"negative_prompt", "style", *SIDES}
}
# Settings that are written, as A1111 does, where there is such a picture, default or not.
_ALWAYS = {"strength": "init_image", "mask_blur": "mask", "reference_scale": "reference"}
_BESIDE = (_HIRES_UPSCALE, _HIRES_RESIZE, _CONTROL, _PROMPTS, _NEGATIVES, _OWN)
_REQUIRED = {*_A1111_FIELDS} - {"Schedule type", "Model hash", "Model"}
_DOWNSAMPLING = "Token downsampling"

_NEGATIVE = re.compile(r"(?:^|\n)[ \t]*Negative prompt:")
HASH = re.compile(r"\s*\[[0-9a-fA-F]{8,64}\]$")  # behind the name of what is in a file
_STEPS = re.compile("^Steps:", re.MULTILINE)  # of the line of settings
_COMMENT = re.compile(rb"(UNICODE\0|ASCII\0{3}|JIS\0{5}|\0{8})?(.*)", re.DOTALL | re.IGNORECASE)
_C1 = re.compile(r"[\x80-\x9f]")  # controls that no Latin text holds
_FIELD = re.compile(r'(?:^|,)\s*(\w[\w /-]*):\s*("(?:[^\\"]++|\\.)*+"|[^,]*+)\s*(?=,|$)')
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # which PNG's text chunks should not hold


def blurred(pixels: np.ndarray) -> np.ndarray:
    """Blur a picture uint8 [H, W, 3] until little more than its colours is left."""
    radius = max(pixels.shape) / 12
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def make_grid(
    pictures: Sequence[np.ndarray | None], rows: int = 2, cols: int = 4, *, gap: int = 0
) -> np.ndarray:
    """Pictures side by side, row by row; a None leaves its place blank.

    Args:
        pictures: uint8 [H, W, 3] of one size, 1 to rows * cols places.
        rows: at most.
        cols: at most; fewer pictures than that make one shorter row.
        gap: blank pixels between them.

    Returns:
        uint8 [R*H + (R-1)*gap, C*W + (C-1)*gap, 3].
    """
    shapes = {picture.shape for picture in pictures if picture is not None}
    if len(shapes) != 1 or len(pictures) > rows * cols:
        raise ValueError(f"A grid takes 1 to {rows * cols} pictures of one size.")
    height, width, channels = shapes.pop()
    cols = min(cols, len(pictures))
    rows = -(-len(pictures) // cols)
    grid = np.full((rows, height + gap, cols, width + gap, channels), BLANK, np.uint8)
    for index, picture in enumerate(pictures):
        if picture is not None:
            grid[index // cols, :height, index % cols, :width] = picture
    whole = grid.reshape(rows * (height + gap), cols * (width + gap), channels)
    return whole[: rows * (height + gap) - gap, : cols * (width + gap) - gap]


def framed(pictures: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Center pictures uint8 [H, W, 3] in blanks of the largest height and width.

    A None stays None.
    """
    there = [picture.shape for picture in pictures if picture is not None]
    height, width, _ = map(max, zip(*there, strict=True))

    def one(picture: np.ndarray) -> np.ndarray:
        around = [
            (more // 2, more - more // 2)
            for more in (height - picture.shape[0], width - picture.shape[1])
        ]
        return np.pad(picture, [*around, (0, 0)], constant_values=BLANK)

    return [None if picture is None else one(picture) for picture in pictures]


def enlarged(pixels: np.ndarray, least: int) -> np.ndarray:
    """Enlarge a picture uint8 [H, W, 3] by a whole factor, smoothly, to be `least` wide or more.

    The filter is Lanczos'.
    """
    times = max(1, -(-least // pixels.shape[1]))
    size = (pixels.shape[1] * times, pixels.shape[0] * times)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def with_labels(
    pictures: Sequence[np.ndarray | None], texts: Sequence[str], least: int = MIN_LABELLED
) -> list[np.ndarray | None]:
    """Return the pictures, each with a line of text in a band below it, for a grid.

    Pictures that are narrower than `least`, in pixels, are `enlarged`.

    Args:
        pictures: uint8 [H, W, 3] of one size; a None stays what it is.
        texts: of each, in Latin letters, which are all that Pillow's own font has. All are as small
            as the longest needs to fit in the width; what does not fit in the smallest letters that
            can be read is cut off, with an ellipsis.

    Returns:
        uint8 [N*H + B, N*W, 3], where N and B depend on H and W alone.
    """
    height, width, _ = next(picture.shape for picture in pictures if picture is not None)
    times = max(1, -(-least // width))
    height, width = height * times, width * times
    texts = [text[:width] for text in texts]  # no letter is narrower than a pixel
    largest = max(12, height // 16)
    fonts = [ImageFont.load_default(size) for size in range(largest, 7, -1)]
    fitting = (font for font in fonts if all(font.getlength(text) <= width for text in texts))
    font = next(fitting, fonts[-1])

    def labelled(picture: np.ndarray, text: str) -> np.ndarray:
        band = Image.new("L", (width, round(1.6 * largest)), BLANK)
        ImageDraw.Draw(band).text(
            (width / 2, band.height / 2), _cut(text, font, width), INK, font, "mm"
        )
        return np.vstack([enlarged(picture, least), np.asarray(band.convert("RGB"))])

    return [
        None if picture is None else labelled(picture, text)
        for picture, text in zip(pictures, texts, strict=True)
    ]


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Cut a text to a width in pixels; an ellipsis shows that it was cut."""
    lengths = range(len(text), 0, -1)
    cuts = (text[:length].rstrip() + "…" * (length < len(text)) for length in lengths)
    return next((cut for cut in cuts if font.getlength(cut) <= width), "")


def to_png(pixels: np.ndarray, request: Request, **facts: Any) -> bytes:
    """Return a PNG file of pixels uint8 [H, W, 3] that carries the request it was made from.

    Facts are those that `format_parameters` takes.
    """
    return with_text(pixels, format_parameters(request, **facts))


def with_text(pixels: np.ndarray, text: str) -> bytes:
    """Return a PNG file of pixels uint8 [H, W, 3] that carries a text of `format_parameters`."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", pnginfo=png_info(text))
    return file.getvalue()


def png_info(text: str) -> PngInfo:
    """Return the chunk of a PNG file for a text of `format_parameters`, as Pillow takes it."""
    info, latin = PngInfo(), text.encode("latin-1", "replace").decode("latin-1")
    info.add_text(KEY, text if _decoded(latin) == text else iTXt(text))
    return info


def to_webp(pixels: np.ndarray, quality: int | None, *, effort: int = 0) -> bytes:
    """Return a small WebP file, without settings, of pixels uint8 [H, W, 3].

    Args:
        pixels: of the picture.
        quality: 0 to 100, of which 70 is enough for a preview; None loses nothing.
        effort: up to 6; more takes longer and is smaller.
    """
    file = BytesIO()
    lossless = dict(lossless=True, quality=0) if quality is None else dict(quality=quality)
    Image.fromarray(pixels).save(file, "WEBP", method=effort, **lossless)
    return file.getvalue()


def data_url(pixels: np.ndarray) -> str:
    """Pixels [H, W, 3] uint8 as a small picture inside the page, needing no request of its own."""
    return webp_url(to_webp(pixels, 70))


def webp_url(file: bytes) -> str:
    """Return a WebP file as a data URL."""
    return f"data:image/webp;base64,{base64.b64encode(file).decode()}"


def to_zip(files: Mapping[str, bytes]) -> bytes:
    """Return a zip of these files by name. PNGs are compressed already, so they are only stored."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def read_png(file: bytes | str | PathLike | BinaryIO) -> Request:
    """Read the request that a picture's file, mostly a PNG, carries; pixels are not decoded.

    Raises:
        RequestError: the file is no picture or no whole PNG, or carries no settings, or bad ones.
    """
    return parse_parameters(read_parameters(file))


def carries_settings(file: bytes | str | PathLike | BinaryIO) -> bool:
    """Whether a file is a picture that carries a text of settings, which may be bad ones."""
    try:
        return bool(_STEPS.search(read_text(file)))
    except RequestError:
        return False


def read_parameters(file: bytes | str | PathLike | BinaryIO) -> str:
    """Read the text of settings in a picture's file; raises RequestError where there is none."""
    if text := read_text(file):
        return text
    raise RequestError(
        "The picture carries no settings: there are none in its texts or its EXIF data."
    )


def read_text(file: bytes | str | PathLike | BinaryIO) -> str:
    """Read the text of settings in a picture's file, or another text in its place.

    It is empty if none can be read. Pixels are not decoded. A file in memory, such as a picture
    just drawn, may be larger than one that is read.

    Raises:
        RequestError: the file is no picture, or no whole PNG.
    """
    data = file if isinstance(file, bytes) else _read(file)
    if png := data.startswith(SIGNATURE):
        data = _texts_before_pixels(data)
    try:
        with open_picture(data) as image:
            texts = [*filter(None, map(_decoded, _texts(image.info)))]
            if png:
                image.verify()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RequestError("The picture has far too many pixels.") from None
    except Exception:  # Pillow raises whatever a damaged file leads it into
        if png:
            raise RequestError("The file is not a whole PNG picture.") from None
        raise RequestError("The file is not a picture, or is damaged.") from None
    return next(filter(_STEPS.search, texts), next(iter(texts), ""))


class _ReadOnce(BytesIO):
    """A file whose reading fails where its parts are read again and again: a directory of TIFF or
    EXIF may name each of its bytes thousands of times."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._left = 4 * len(data) + (1 << 20)

    def read(self, size: int | None = -1) -> bytes:
        """Read as from any file; raises OSError once too much has been read."""
        data = super().read(size)
        self._left -= len(data)
        if self._left < 0:
            raise OSError("The file refers to the same bytes again and again.")
        return data


def open_picture(data: bytes, formats: Sequence[str] | None = None) -> Image.Image:
    """Open a picture without decoding it; raises whatever Pillow does.

    Args:
        data: the file.
        formats: the only ones to accept; None is any.
    """
    if data.startswith(b"\xff\xd8"):  # a JPEG, all of whose EXIF Pillow joins and reads at once
        first, mark, rest = data.partition(_EXIF)
        data = first + mark + rest.replace(_EXIF, b"Exif\0\1")
    return Image.open(_ReadOnce(data), formats=[*formats] if formats else None)


def read_exif(data: bytes) -> tuple[Image.Exif, Image.Exif]:
    """Return a picture's tags and those of EXIF's own directory, decoded when they are asked for.

    Damaged tags, and those of more than MAX_EXIF_BYTES, are left out.
    """
    outer, inner = Image.Exif(), Image.Exif()
    if len(data) <= MAX_EXIF_BYTES:
        with contextlib.suppress(Exception):  # Pillow raises whatever a damaged file leads it into
            file = _ReadOnce(data.removeprefix(_EXIF))
            outer.load_from_fp(file)
            inner.endian = outer.endian
            inner.load_from_fp(file, outer[ExifTags.IFD.Exif])
    return outer, inner


def _texts_before_pixels(data: bytes) -> bytes:
    """Return a PNG of the chunks that are read, its texts where Pillow need not decode pixels.

    Raises:
        RequestError: Pillow would read the PNG for long, or not to its end.
    """
    start, chunks = len(SIGNATURE), {kind: [] for kind in (b"IHDR", b"text", b"IDAT", b"IEND")}
    for _ in range(MAX_CHUNKS):
        if chunks[b"IEND"] or start + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + length + 12  # with its length, kind and checksum
        if kind in _TEXT_CHUNKS:
            keyword = data[start + 8 : start + 88].partition(b"\0")[0].decode("latin-1").lower()
            kind = b"text" if keyword in (*_KEYWORDS, *_HEX_EXIF) else kind
        chunks.get(b"text" if kind == b"eXIf" else kind, []).append(data[start:end])
        start = end
    else:
        raise RequestError("The PNG is in more than {limit} pieces.", limit=MAX_CHUNKS)
    if not all(chunks[kind] for kind in (b"IHDR", b"IDAT", b"IEND")):
        raise RequestError("The file is not a whole PNG picture.")
    return b"".join([SIGNATURE, *itertools.chain.from_iterable(chunks.values())])


def _texts(info: Mapping[Any, Any]) -> Iterator[str | bytes]:
    """Yield the texts where programs write settings, from Pillow's `info`: the usual ones first."""
    named = {name.lower(): value for name, value in info.items() if isinstance(name, str)}
    exif = named.get("exif", b"") or next(
        filter(None, map(_from_hex, map(named.get, _HEX_EXIF))), b""
    )
    outer, inner = read_exif(exif)
    yield named.get(KEY, b"")
    for text in (
        _tag(inner, "UserComment"),
        *map(named.get, _KEYWORDS[1:]),
        _tag(outer, "UserComment"),
        _tag(outer, "ImageDescription"),
    ):
        if isinstance(text, str) and not isinstance(text, iTXt):
            text = text.encode("latin-1", "replace")  # for which Pillow takes whatever it is
        if isinstance(text, str | bytes):
            yield text
    if isinstance(text := _tag(outer, "XPComment"), bytes):
        yield codecs.BOM_UTF16_LE + text


def _tag(exif: Image.Exif, name: str) -> Any:
    """Return the value of a tag; None where there is none, or it is damaged."""
    with contextlib.suppress(Exception):
        return exif.get(ExifTags.Base[name])


def _from_hex(profile: str | None) -> bytes:
    """Return the bytes of a hexadecimal profile behind its name and length; else nothing."""
    with contextlib.suppress(ValueError):
        return bytes.fromhex("".join((profile or "").split("\n")[3:]))
    return b""


def _decoded(text: str | bytes) -> str:
    """Decode a text that Pillow found; empty if it is in an unknown encoding.

    A PNG's tEXt should be Latin-1, for which Pillow takes it, and is often UTF-8. EXIF's
    UserComment says in 8 bytes what it is in, without the order of UTF-16's bytes, and not always
    truly: the encoding in which there is a line of settings is the right one.
    """
    if isinstance(text, iTXt):
        return str(text)
    whole = text.encode("latin-1") if isinstance(text, str) else text
    if len(whole) > 4 * MAX_TEXT_LENGTH:
        return ""
    code, body = _COMMENT.fullmatch(whole).groups()  # ty: ignore[missing-union-attribute]
    code = (code or b"")[:3].upper()
    certain = ["utf-16"] * body.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE))
    certain += ["iso2022_jp"] * (code == b"JIS") + ["utf-8-sig"] * (code != b"UNI")
    encodings = dict.fromkeys([*certain, "utf-8-sig", "utf-16-be", "utf-16-le", "latin-1"])
    certain += ["latin-1"] * isinstance(text, str)
    texts = {encoding: _in_encoding(body, encoding) for encoding in encodings}
    found = next(filter(_STEPS.search, texts.values()), None)
    if found is None:
        found = next(
            (
                found
                for encoding, found in texts.items()
                if found
                and "\0" not in found
                and (encoding in certain or _is_english(found, encoding))
            ),
            "",
        )
    return found.replace("\0", "")


def _in_encoding(body: bytes, encoding: str) -> str:
    """Decode bytes; empty if they are in another encoding."""
    how = "ignore" if encoding.startswith("utf-16") else "strict"  # it may end in half a letter
    try:
        text = body.decode(encoding, how).rstrip("\0")
    except UnicodeDecodeError:
        return ""
    return "" if encoding == "latin-1" and _C1.search(text) else text


def _is_english(text: str, encoding: str) -> bool:
    """Whether a text in UTF-16 is mostly ASCII, which it is in the right order of bytes alone."""
    return encoding.startswith("utf-16") and 2 * len(text.encode("ascii", "ignore")) > len(text)


def _read(file: str | PathLike | BinaryIO) -> bytes:
    """Read the file; raises RequestError if that fails, or it is too large."""
    try:
        if not isinstance(file, str | PathLike):
            data = file.read(MAX_FILE_BYTES + 1)
        else:
            check_regular(Path(file))
            with Path(file).open("rb") as opened:
                data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError("The file cannot be read ({reason}).", reason=error.strerror) from error
    if len(data) > MAX_FILE_BYTES:
        raise RequestError("The file is larger than {limit} MiB.", limit=MAX_FILE_BYTES >> 20)
    return data


def format_parameters(
    request: Request,
    model_hash: str = "",
    token_downsampling: int = 1,
    vae: str = "",
    lora_hashes: Mapping[str, str] = MappingProxyType({}),
    first_size: tuple[int, int] | None = None,
    weights: str = "",
) -> str:
    """Format a request as A1111's text, from which `parse_parameters` makes the same request.

    Args:
        request: for pictures of one file.
        model_hash: of the model; like the following, no part of the request.
        token_downsampling: of the model.
        vae: the name of an autoencoder that is not the model's own.
        lora_hashes: by name.
        first_size: width and height of the picture that this one is larger than, as in A1111's
            hires fix.
        weights: what those of the model were rounded to, if they were.
    """
    common = request.common
    body = _plain("\n".join(filter(None, request.prompts)))
    if common.negative_prompt:
        body += f"\nNegative prompt: {_plain(common.negative_prompt)}"
    line: dict[str, Any] = {
        field: _written(name, getattr(common, name)) for field, name in _LINE.items()
    }
    for name, of in _ALWAYS.items():
        if getattr(common, of):
            line[SETTINGS[name].png] = SETTINGS[name].kind.shown(getattr(common, name))
    if common.control_image:
        line |= dict.fromkeys(SETTINGS[name].png for name in _CONTROL_FIELDS.values())
        line[_CONTROL] = _control(common)
    line["Size"] = f"{common.width}x{common.height}"
    if first_size:
        line |= _hires(common, *first_size)
    if token_downsampling > 1:
        line[_DOWNSAMPLING] = str(token_downsampling)
    hashes = ", ".join(
        f"{re.sub('[:,]', '', name)}: {value}" for name, value in lora_hashes.items()
    )
    line |= {
        _MODEL_HASH: model_hash,
        "VAE": vae,
        "Weights": weights,
        "Lora hashes": hashes,
        "Version": f"sd_tpu {VERSION}",
    }
    fields = {name: line[name] for name in (*_A1111_FIELDS, *line) if line[name]}
    prompt, negative = _split(body)
    if request.prompts != (prompt,):
        fields[_PROMPTS] = json.dumps(request.prompts, ensure_ascii=False)
    if common.negative_prompt != negative:
        fields[_NEGATIVES] = common.negative_prompt
    if overrides := request.values()["overrides"]:
        fields[_OWN] = json.dumps(overrides, ensure_ascii=False)
    last = ", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items())
    return f"{body}\n{last}"


def _hires(picture: Picture, width: int, height: int) -> dict[str, str]:
    """Return A1111's fields of a picture that was drawn at this size before."""
    times, size = picture.width / width, f"{picture.width}x{picture.height}"
    resized = _HIRES_UPSCALE if picture.height == times * height else _HIRES_RESIZE
    return {
        "Size": f"{width}x{height}",
        resized: f"{times:g}" if resized == _HIRES_UPSCALE else size,
        "Hires steps": str(steps_taken(picture.steps, picture.strength)),
        "Hires upscaler": UPSCALER,
    }


def _drawn_size(fields: Mapping[str, str]) -> tuple[int, int]:
    """Width and height of the picture itself, not of what it was larger than. A text of A1111
    that names no start picture is of both passes, and the first one's size is meant."""
    width, height = _size(fields["Size"])
    if "Init image" not in fields:
        return width, height
    if _HIRES_RESIZE in fields:
        return _size(fields[_HIRES_RESIZE])
    times = re.fullmatch(r"\d{1,2}(\.\d{1,9})?", fields.get(_HIRES_UPSCALE, "1"), re.ASCII)
    times = float(times[0]) if times else 1
    return round(width * times), round(height * times)


def _written(name: str, value: Any) -> str:
    """Return the value as its field has it; "" if the field can be left out."""
    setting = SETTINGS[name]
    if setting.expert and value == setting.default:
        return ""
    match name:
        case "sampler":
            return a1111_name(value)
        case "spacing":
            return value.capitalize()
    return value if isinstance(value, str) else setting.kind.shown(value)


def parse_parameters(text: str) -> Request:
    """Parse a text of ours or of A1111; fields that mean nothing here are ignored.

    The size is whatever the text says.

    Raises:
        RequestError: the text is something else, or one of its values cannot be served.
    """
    body, fields = _settings(text)
    if missing := _REQUIRED - fields.keys():
        raise RequestError("The picture's settings lack {names}.", names=", ".join(sorted(missing)))
    return _request(body, fields)


def parse_usable(text: str) -> tuple[Request, list[str]]:
    """Parse the usable part of a text, and return the fields that are missing or unusable.

    Raises:
        RequestError: the text is something else, or has no prompt.
    """
    body, fields = _settings(text)
    unusable, used = _REQUIRED - fields.keys(), {}
    request = _request(body, used)
    for field in filter(fields.get, (*_LINE, "Size", *_BESIDE)):
        try:
            request = _request(body, {**used, field: fields[field]})
            used[field] = fields[field]
        except RequestError:
            unusable.add(field)
    return request, sorted(unusable)


def _request(body: str, fields: dict[str, str]) -> Request:
    """Make a request of the text above a line of settings and its fields; raises RequestError."""
    prompt, negative = _split(body)
    sampler, spacing = a1111_sampler(fields.get("Sampler", ""), fields.get("Schedule type", ""))
    width, height = _drawn_size(fields) if "Size" in fields else (None, None)
    values: dict[str, Any] = {
        name: SETTINGS[name].kind.parse(fields[field])
        for field, name in _LINE.items()
        if field in fields
    }
    values |= _parse_control(fields.get(_CONTROL, ""))
    values |= {
        "prompts": _json(fields, _PROMPTS, [prompt]),
        "overrides": _json(fields, _OWN, []),
        "negative_prompt": fields.get(_NEGATIVES, negative),
        "seed": short_seed(values.get("seed")),
        "sampler": sampler or None,
        "spacing": spacing or None,
        "height": height,
        "width": width,
    }
    return Request.check(values, AnyModelCatalog())


def _control(picture: Picture) -> str:
    """Format a picture's control settings as A1111's extension does."""
    fields = {
        field: _written_plainly(name, getattr(picture, name))
        for field, name in _CONTROL_FIELDS.items()
    }
    return ", ".join(f"{field}: {value}" for field, value in fields.items())


def _written_plainly(name: str, value: Any) -> str:
    if name == "detector":
        return next(module for module, detector in MODULES.items() if detector == value)
    return _quoted(value) if isinstance(value, str) else SETTINGS[name].kind.shown(value)


def _parse_control(text: str) -> dict[str, Any]:
    """Parse the settings of A1111's extension; a detector that is not here is left out."""
    fields = {name: _unquoted(value) for name, value in _FIELD.findall(text)}
    values: dict[str, Any] = {
        name: SETTINGS[name].kind.parse(fields[field])
        for field, name in _CONTROL_FIELDS.items()
        if field in fields
    }
    if "detector" in values:
        values["detector"] = MODULES.get(values["detector"], "")
    if "controlnet" in values:
        values["controlnet"] = a1111_controlnet(values["controlnet"])
    return values


def a1111_controlnet(name: str) -> str:
    """Return a ControlNet's name without the hash that A1111's extension puts behind it.

    Its "None" is "".
    """
    return "" if name == "None" else HASH.sub("", name)


def fields_of(text: str) -> dict[str, str]:
    """Return a text's fields by A1111's names, whether they can be served or not; {} of no text."""
    if not text:
        return {}
    try:
        body, fields = _settings(text)
    except RequestError:
        body, fields = text, {}
    prompt, negative = _split(body)
    if size := re.fullmatch(r"(\d+)x(\d+)", fields.get("Size", "")):
        fields |= {"Size-1": size[1], "Size-2": size[2]}
    return {"Prompt": prompt, "Negative prompt": negative, **fields}


def parse_token_downsampling(text: str) -> int:
    """Parse the token downsampling, which no request can set; 1 if the text says nothing.

    Raises:
        RequestError: the text is something else.
    """
    _, fields = _settings(text)
    named = re.fullmatch(r"[1-9]\d?", fields.get(_DOWNSAMPLING, ""), re.ASCII)
    return int(named[0]) if named else 1


def _settings(text: str) -> tuple[str, dict[str, str]]:
    """Split a text into the part above the line of settings, and its fields by name."""
    if len(text) > MAX_TEXT_LENGTH:
        raise RequestError("The text is far too long to be a picture's settings.")
    lines = text.replace("\r\n", "\n").split("\n")
    last = max((i for i, line in enumerate(lines) if line.startswith("Steps:")), default=None)
    if last is None:
        raise RequestError("The text holds no picture settings: no line begins with 'Steps:'.")
    fields = {name: _unquoted(value) for name, value in _FIELD.findall(lines[last])}
    return "\n".join(lines[:last]), fields


def _plain(text: str) -> str:
    """Return a text without characters that a line of text in a PNG should not hold."""
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


def a1111_sampler(name: str, schedule: str) -> tuple[str, str]:
    """Return the key and the spacing of A1111's sampler and schedule type.

    Unknown names stay as they are. A1111 before 1.9 wrote the schedule behind the sampler.
    """
    name, schedule = name.lower()[:40], schedule.lower()[:40]
    first, _, last = name.rpartition(" ")
    if name not in _NAMES and last in ("karras", "exponential"):
        name, schedule = first, last
    return _NAMES.get(name, name), _A1111_SPACINGS.get(schedule, schedule)


def a1111_name(sampler: str) -> str:
    """Return A1111's name of the sampler of this key."""
    return _A1111_SAMPLERS.get(sampler, SAMPLERS[sampler].label)


def _size(value: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,5}) ?[x×] ?([0-9]{1,5})", value)
    if not match:
        raise RequestError(
            "The picture's size should be like 512x512, not {value}.", value=repr(value[:40])
        )
    return int(match[1]), int(match[2])
