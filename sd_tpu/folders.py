"""The user's own folders, where the system keeps such things (XDG Base Directory Specification)."""

import os
from pathlib import Path


def data_folder() -> Path:
    """For what is to stay: `~/.local/share/sd_tpu`, or under $XDG_DATA_HOME."""
    return _folder("XDG_DATA_HOME", "~/.local/share")


def cache_folder() -> Path:
    """For what can be made again: `~/.cache/sd_tpu`, or under $XDG_CACHE_HOME."""
    return _folder("XDG_CACHE_HOME", "~/.cache")


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path(default).expanduser()) / "sd_tpu"
