"""The pictures that a model is taught by: files of a folder, their captions and their sizes."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.pictures.inputs import Input, fitted
from sd_tpu.reading import expanded, read_bytes, read_text
from sd_tpu.settings import Picture, RequestError

FEWEST, MOST = 4, 40  # pictures
PICTURE_SIDES = (1.0, 0.75, 0.5)  # at which pictures may be looked at, of the model's own
KINDS = ("thing", "person", "style")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MAX_CAPTION_BYTES = 1 << 14
RATIOS = (9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9)  # of width to height: a program for each that occurs
NAME = re.compile(r"\w[\w .-]{0,63}")
# Names that cameras and programs give pictures, which say nothing of what these show.
OF_CAMERAS = {
    *"copy dsc dscf dscn image images img mvi pano photo photos pic picture pxl".split(),
    *"screenshot untitled whatsapp".split(),
}


@dataclasses.dataclass(frozen=True)
class Example:
    """A picture with its caption, and the size at which it is looked at.

    Attributes:
        input: the file.
        caption: what it shows.
        size: height and width, in pixels.
    """

    input: Input
    caption: str
    size: tuple[int, int]

    def pixels(self) -> np.ndarray:
        """Return the middle of the picture at its size, float32 [H, W, 3] in [-1, 1]."""
        height, width = self.size
        shown = fitted(self.input, Picture(width=width, height=height), "cover")
        return shown.astype(np.float32) / 127.5 - 1

    @property
    def enlarged(self) -> bool:
        """Whether the picture has fewer pixels than are looked at, in either direction."""
        width, height = self.input.size
        return height < self.size[0] or width < self.size[1]


def check_name(name: str) -> None:
    """Raise RequestError unless a name can be a word in prompts and the name of a file."""
    if not name:
        raise RequestError("Give what is taught a name.")
    if not NAME.fullmatch(name):
        raise RequestError(
            "{name} cannot be the name of what is taught: it should have 1 to 64 letters, digits, "
            "spaces, points, _ or -, and begin with a letter or a digit.",
            name=repr(name),
        )


def read_examples(
    folder: Path, name: str, kind: str, size: tuple[int, int], unit: int
) -> list[Example]:
    """Read the pictures of a folder in the order of their names; folders in it are passed over.

    Args:
        folder: of the pictures and of the text files that hold their captions.
        name: of what is taught.
        kind: one of KINDS.
        size: height and width of the pictures that the model was made for.
        unit: of which sides are multiples.

    Raises:
        RequestError: there are too few pictures or too many, or one cannot be read.
        OSError: the folder or a file cannot be read.
    """
    folder = expanded(folder)
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )
    if not FEWEST <= len(files) <= MOST:
        raise RequestError(
            "A model is taught by {fewest} to {most} pictures ({kinds}); {folder} has {count}.",
            count=len(files),
            folder=folder,
            kinds=", ".join(SUFFIXES),
            fewest=FEWEST,
            most=MOST,
        )
    examples = []
    for file in files:
        given = Input(read_bytes(file, MAX_FILE_BYTES), str(file))
        caption = captioned(_text_beside(file) or words_of_name(file.stem), name, kind)
        examples.append(Example(given, caption, bucket(given.size, size, unit)))
    return examples


def _text_beside(file: Path) -> str:
    """Return the text of the same stem; "" if there is none, or nothing in it."""
    beside = file.with_suffix(".txt")
    if not beside.is_file():
        return ""
    try:
        return " ".join(read_text(beside, MAX_CAPTION_BYTES).split())
    except UnicodeDecodeError:
        raise RequestError("{file} is no text in UTF-8.", file=beside) from None


def words_of_name(stem: str) -> str:
    """Return what a file's name says of its picture: "" where a camera gave it."""
    words = re.sub(r"[\W_]+|\d+", " ", stem).split()
    return " ".join(word for word in words if word.lower() not in OF_CAMERAS)


def captioned(text: str, name: str, kind: str) -> str:
    """Return a caption of a text that names what is taught; the text itself where it does so.

    Args:
        text: what a picture shows; "" is no more than what is taught.
        name: of what is taught.
        kind: one of KINDS.
    """
    if text.lower() == name.lower():
        text = ""
    if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE):
        return text
    match kind:
        case "style":
            return f"{text} in the style of {name}".strip()
        case "person":
            return f"{name}, {text}" if text else name
        case _:
            return f"a {name}, {text}" if text else f"a {name}"


def bucket(shown: tuple[int, int], size: tuple[int, int], unit: int) -> tuple[int, int]:
    """Return the height and width, of those for RATIOS, whose ratio is nearest to a picture's.

    Args:
        shown: width and height of the picture.
        size: height and width of the pictures that the model was made for.
        unit: of which sides are multiples.
    """
    height, width = size
    own = width / height

    def sides(ratio: float) -> tuple[int, int]:
        if ratio == 1:
            return size
        wide = max(unit, round(math.sqrt(height * width * own * ratio) / unit) * unit)
        return max(unit, height * width // wide // unit * unit), wide

    wanted = math.log(shown[0] / shown[1])
    return min(
        map(sides, RATIOS), key=lambda each: (abs(math.log(each[1] / each[0]) - wanted), each)
    )


def digest(examples: Sequence[Example]) -> str:
    """Return a hash that changes with the pictures, their captions and their sizes."""
    described = repr([(each.input.name, each.caption, each.size) for each in examples])
    return hashlib.sha256(described.encode()).hexdigest()
