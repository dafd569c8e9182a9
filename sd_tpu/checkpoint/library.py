"""The checkpoints that lie in a folder, by name; none of them is opened."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from sd_tpu.checkpoint.folder import INDEX, MODULAR_INDEX
from sd_tpu.checkpoint.single_file import SUFFIX
from sd_tpu.checkpoint.split_files import OF_PARTS, TRANSFORMERS
from sd_tpu.reading import composed

INDICES = INDEX, MODULAR_INDEX  # one of which every folder in the diffusers layout has
RESCAN_SECONDS = 5.0  # after which the folder is looked through again
MAX_DEPTH = 5  # of folders within folders, one of which may be a link to where it lies


class Library:
    """The checkpoints in a folder and its folders: single files, and folders in the diffusers
    layout. Text encoders and autoencoders beside transformers, as ComfyUI keeps them, are none.

    A name is the path from there without the file's suffix, as A1111 has it, in NFC. What a name
    holds that is no text is replaced, and what has the name of another gets a number.
    """

    def __init__(self, folder: Path | None):
        """List the folder's checkpoints, now and then again; None is an empty library."""
        self._folder = folder
        self._found: dict[str, Path] = {}
        self._scanned = float("-inf")

    def paths(self) -> dict[str, Path]:
        """Return where the checkpoints lie, in the order of their names.

        A vanished one is not there for more than RESCAN_SECONDS.
        """
        if self._folder and time.monotonic() - self._scanned > RESCAN_SECONDS:
            self._found = self._scan(self._folder)
            self._scanned = time.monotonic()
        return self._found

    def find(self, name: str) -> Path | None:
        """Return where a checkpoint lies, be it new; None if there is none of this name."""
        name = composed(name)
        if name not in self._found:
            self._scanned = float("-inf")
        return self.paths().get(name)

    @staticmethod
    def _scan(folder: Path) -> dict[str, Path]:
        found: dict[str, Path] = {}
        paths = _walk(str(folder), "", MAX_DEPTH)
        for path in sorted(paths, key=lambda path: (composed(path), composed(path) != path)):
            name = os.fsencode(path.removesuffix(SUFFIX)).decode("utf-8", "replace").strip()
            name = composed(name)
            unique, number = name, 1
            while unique in found:
                number += 1
                unique = f"{name} ({number})"
            found[unique] = folder / path
        return found


def _walk(root: str, folder: str, depth: int) -> Iterator[str]:
    """Yield the paths, from the root, of the checkpoints in a folder and its folders.

    Unreadable folders are passed over.
    """
    try:
        with os.scandir(os.path.join(root, folder)) as entries:
            kinds = {
                entry.name: kind
                for entry in entries
                if entry.name[0] != "." and (kind := _is_folder(entry)) is not None
            }
    except OSError:
        return
    files = {name for name, is_folder in kinds.items() if not is_folder and name.endswith(SUFFIX)}
    yield from (os.path.join(folder, name) for name in files)
    of_comfyui = any(kinds.get(name) for name in TRANSFORMERS)
    for name, is_folder in kinds.items():
        path = os.path.join(folder, name)
        # A folder beside a file of the same stem has its configs.
        if not is_folder or f"{name}{SUFFIX}" in files or (name in OF_PARTS and of_comfyui):
            continue
        if any(os.path.isfile(os.path.join(root, path, index)) for index in INDICES):
            yield path
        elif depth > 1:
            yield from _walk(root, path, depth - 1)


def _is_folder(entry: os.DirEntry) -> bool | None:
    """Whether this is a folder; None if that cannot be told, as of a link that leads to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return None
