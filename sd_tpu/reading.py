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


def expanded(path: str | Path) -> Path:
    """The path with the home that a `~` before it means; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def find_inside(folder: Path, path: str, listings: dict[Path, dict[str, str]]) -> Path | None:
    """The regular file below a folder that has this path, in whichever normal form, with `\\` as
    well as `/` between its parts; None if there is none. Links are followed within the folder.

    Args:
        folder: one whose own path has no links.
        path: of the file.
        listings: what the folders on the way held when they were first looked into; kept by the
            caller as long as that may count.
    """
    found = folder
    for part in PurePosixPath(path.replace("\\", "/")).parts:
        try:
            if found not in listings:  # in this order a name in NFC comes after its other forms
                listings[found] = {composed(name): name for name in sorted(os.listdir(found))}
            # `Path.resolve` raises RuntimeError for a link to itself.
            found = Path(os.path.realpath(found / listings[found][composed(part)]))
        except (KeyError, OSError):
            return None
        if not found.is_relative_to(folder):
            return None
    return found if os.path.isfile(found) else None
