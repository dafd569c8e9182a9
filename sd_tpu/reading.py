"""Files by name: found however their names are spelled in Unicode, and read within a bound."""

import errno
import os
import stat
import unicodedata
from pathlib import Path, PurePosixPath

MAX_BYTES = 1 << 23  # several times the vocabulary of CLIP, the largest of such files


def check_regular(file: Path) -> None:
    """Raise OSError unless the file is a regular one.

    Reading a device or a pipe need not end.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def read_bytes(file: Path, most: int = MAX_BYTES) -> bytes:
    """Read the contents of a regular file.

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
    """Read a regular file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is in another encoding.
    """
    return read_bytes(file, most).decode("utf-8-sig")


def composed(name: str) -> str:
    """Compose a name (NFC), so that a letter and its accent are one character.

    Files that come from a Mac have them apart (NFD).
    """
    return unicodedata.normalize("NFC", name)


def expanded(path: str | Path) -> Path:
    """Expand a `~` before a path; a path of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def find_inside(folder: Path, path: str, listings: dict[Path, dict[str, str]]) -> Path | None:
    r"""Find the regular file below a folder that has this path, in whichever normal form.

    Parts may be separated by `\` as well as `/`. Links are followed within the folder. Returns None
    if there is no such file.

    Args:
        folder: one whose own path has no links.
        path: of the file.
        listings: the contents of folders that were looked into; kept by the caller as long as that
            may count.
    """
    path_found = folder
    for part in PurePosixPath(path.replace("\\", "/")).parts:
        try:
            if (
                path_found not in listings
            ):  # in this order a name in NFC comes after its other forms
                listings[path_found] = {
                    composed(name): name for name in sorted(os.listdir(path_found))
                }
            # `Path.resolve` raises RuntimeError for a link to itself.
            path_found = Path(os.path.realpath(path_found / listings[path_found][composed(part)]))
        except (KeyError, OSError):
            return None
        if not path_found.is_relative_to(folder):
            return None
    return path_found if os.path.isfile(path_found) else None
