"""Single files that are spoilt, read and refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import original_vae
from sd_tpu.checkpoint import single_file, weights
from tests.support import refusals


def rewritten(file: Path, change: Callable[[dict], None]) -> Path:
    """Write the file anew after a change of its tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def spoilt(file: Path, name: str, shape: tuple[int, ...] | None) -> Path:
    """Write the file anew with ones of this shape in a tensor's place, or nothing."""

    def change(tensors):
        del tensors[name]
        if shape is not None:
            tensors[name] = torch.ones(shape)

    return rewritten(file, change)


def without(file: Path, *prefixes: str) -> Path:
    """Write the file anew without tensors that begin so."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return rewritten(file, change)


def refusal(file: Path, **options) -> str:
    """Return the sentence by which the file is refused."""
    return refusals.refusal(single_file.read, file, **options)


def refusal_of(folder: Path, name: str) -> str:
    """Return the sentence by which a file that holds a tensor of this name alone is refused."""
    save_file({name: torch.ones(2, 2)}, folder / "other.safetensors")
    return refusal(folder / "other.safetensors")


def assert_configs_are_of(single: single_file.SingleFile, pipeline, *unsaid: str) -> None:
    """Compare a file's configs with PyTorch's, but for values that it does not say: of all parts
    or, as "vae.name", of one."""
    unsaid = {"_class_name", "architectures", "force_upcast", *unsaid}
    for part in single.stored:
        config = getattr(pipeline, part).config
        theirs = plain(config.to_dict() if part.startswith("text") else dict(config))
        for name, value in plain(single.configs[part]).items():
            if not unsaid & {name, f"{part}.{name}"}:
                assert value == theirs[name], (part, name)


def plain(config: dict) -> dict:
    """As it is after writing and reading it."""
    return json.loads(json.dumps(config))


def original_autoencoder(vae: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of an autoencoder of three levels by their names in original files."""
    tensors = {}
    for name, tensor in vae.state_dict().items():
        attention = "attentions" in name and tensor.ndim == 2
        tensors[original_vae(name, 3)] = tensor[:, :, None, None] if attention else tensor
    return tensors


def read_from(single: single_file.SingleFile, part: str) -> dict[str, np.ndarray]:
    """Read a part's tensors by diffusers' names."""
    with weights.opened(single.path) as tensors:
        return {name: stored.read(tensors) for name, stored in single.stored[part].items()}
