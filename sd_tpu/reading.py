"""Files by name: found however their names are spelled in Unicode, and read within a bound."""

import errno
import os
import stat
import unicodedata
from pathlib import Path, PurePosixPath

MAX_BYTES = 1 << 23  # several times the vocabulary of CLIP, the largest of such files


def check_regular(file: Path) -> None:
    """Raises OSError if there is no file, or what is there is a device, a pipe or a folder, whose
    reading need not end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def read_bytes(file: Path, most: int = MAX_BYTES) -> bytes:
    """The contents of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than `most` bytes.
    """
    check_regular(file)
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(file))
    return content


def read_text(file: Path, most: int = MAX_BYTES) -> str:
    """The text of a regular file in UTF-8, with or without a mark before it.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is in another encoding.
    """
    return read_bytes(file, most).decode("utf-8-sig")


def composed(name: str) -> str:
    """A name as keyboards write it: with letters and accents in one (NFC). Files that come from a
    Mac have them apart (NFD)."""
    return unicodedata.normalize("NFC", name)


def find_inside(folder: Path, path: str) -> Path:
    """The place below a folder of what has this path, in whichever normal form; where nothing has,
    it is that of the path as it is written."""
    for part in PurePosixPath(path).parts:
        there = folder / part
        if not os.path.lexists(there) and folder.is_dir():
            alike = (name for name in os.listdir(folder) if composed(name) == composed(part))
            there = folder / next(alike, part)
        folder = there
    return folder
