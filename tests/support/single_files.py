"""Single files that are spoilt, read and refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from sd_tpu.checkpoint import single_file, weights
from tests.support import refusals


def rewritten(file: Path, change: Callable[[dict], None]) -> Path:
    """Write the file anew after a change of its tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def without(file: Path, *prefixes: str) -> Path:
    """Write the file anew without tensors that begin so."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return rewritten(file, change)


def refusal(file: Path, **options) -> str:
    """Return the sentence by which the file is refused."""
    return refusals.refusal(single_file.read, file, **options)


def read_from(single: single_file.SingleFile, part: str) -> dict[str, np.ndarray]:
    """Read a part's tensors by diffusers' names."""
    with weights.opened(single.path) as tensors:
        return {name: stored.read(tensors) for name, stored in single.stored[part].items()}
