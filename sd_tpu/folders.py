"""The user's own folders by the XDG Base Directory Specification, and a temporary one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from filelock import FileLock, Timeout

_PREFIX, _LOCK = "sd_tpu-page", "lock"
GRADIO = "GRADIO_TEMP_DIR"  # the variable that names Gradio's


def data_folder() -> Path:
    """Return the folder for lasting data: `~/.local/share/sd_tpu`, or under $XDG_DATA_HOME."""
    return _folder("XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Return the folder for data that can be made again: `~/.cache/sd_tpu` or $XDG_CACHE_HOME's."""
    return _folder("XDG_CACHE_HOME", ".cache")


def keep_within(folder: Path, size: int, pattern: str = "*") -> None:
    """Remove the least recently used files of a folder until the rest has at most `size` bytes.

    Files that cannot be removed stay.

    Args:
        folder: where they are.
        size: of those that stay.
        pattern: of their paths in the folder.
    """
    files = []
    for file in folder.glob(pattern):
        with suppress(OSError):  # somebody has just removed it
            status = file.stat()
            if S_ISREG(status.st_mode):
                files.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    for _, taken, file in sorted(files, reverse=True):
        size -= taken
        if size < 0:
            with suppress(OSError):
                file.unlink()


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else _home() / default) / "sd_tpu"


def _home() -> Path:
    """Return the user's home, or a temporary folder for users without one, as in containers.

    The temporary folder is this user's alone, as compiled programs are kept below it.
    """
    with suppress(RuntimeError):
        return Path.home()
    folder = Path(tempfile.gettempdir()) / f"sd_tpu-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    ours = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    return folder if ours else Path(tempfile.mkdtemp(prefix="sd_tpu-"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Have Gradio put files into a new folder, for this user alone to read; it is there as long as
    this context. Those of servers that were killed are removed."""
    before = os.environ.get(GRADIO)
    base = Path(before or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    for other in base.glob(f"{_PREFIX}-*"):
        _remove_if_orphaned(other)
    # It is held before others can take it for an orphan.
    unnamed = Path(tempfile.mkdtemp(dir=base))
    with FileLock(unnamed / _LOCK):
        folder = unnamed.rename(base / f"{_PREFIX}-{unnamed.name}")
        os.environ[GRADIO] = str(folder)
        try:
            yield folder
        finally:
            os.environ.pop(GRADIO)
            if before is not None:
                os.environ[GRADIO] = before
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_orphaned(folder: Path) -> None:
    """Remove a folder whose server is gone: the system has released its lock.

    A clock or a process id, which another process may have by now, would not be as sure.
    """
    with suppress(OSError, Timeout), FileLock(folder / _LOCK, blocking=False):
        shutil.rmtree(folder, ignore_errors=True)
