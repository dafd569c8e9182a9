"""Safetensors <-> the parameters of a module, under an exact check of names and shapes.

Module attributes are spelled as in the checkpoint, so a parameter's path is its name there. Only
the leaves differ: PyTorch keeps convolutions as OIHW and dense layers as [out, in] and calls every
main tensor of a layer `weight`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sd_tpu.config import CheckpointError

Params = dict[str, Any]  # nested: module attribute or list index -> ... -> array

# (leaf, number of axes) -> (leaf in the checkpoint, axes of ours in the checkpoint's order)
LEAVES = {
    ("kernel", 4): ("weight", (3, 2, 0, 1)),
    ("kernel", 2): ("weight", (1, 0)),
    ("scale", 1): ("weight", (0,)),
    ("embedding", 2): ("weight", (0, 1)),
    ("bias", 1): ("bias", (0,)),
}

# Names that older and newer library versions wrote for the same tensors.
SYNONYMS = (
    # Attention of the autoencoder before diffusers 0.17, as in the published SD 1.4.
    (re.compile(r"(mid_block\.attentions\.0)\.query\b"), r"\1.to_q"),
    (re.compile(r"(mid_block\.attentions\.0)\.key\b"), r"\1.to_k"),
    (re.compile(r"(mid_block\.attentions\.0)\.value\b"), r"\1.to_v"),
    (re.compile(r"(mid_block\.attentions\.0)\.proj_attn\b"), r"\1.to_out.0"),
    # transformers 5 leaves out the outermost module of CLIPTextModel.
    (re.compile(r"^(embeddings|encoder\.layers|final_layer_norm)\."), r"text_model.\1."),
)
NOT_PARAMETERS = re.compile(r"\.position_ids$")  # a buffer that older checkpoints carry


class _OneKey:
    """Stands in for nnx.Rngs where only shapes are wanted.

    Every draw from an nnx.Rngs advances a counter, which under tracing takes time quadratic in the
    number of draws: five seconds for the UNet of SD, against half a second.
    """

    def __init__(self):
        self._key = jax.random.key(0)

    def params(self) -> jax.Array:
        return self._key


def abstract(build: Callable[..., nnx.Module]) -> tuple[nnx.GraphDef, Params]:
    """What `build(rngs=...)` returns, without its numbers; nothing is allocated.

    Returns the module's structure, and its parameters as a tree of ShapeDtypeStruct.
    """
    module = nnx.eval_shape(lambda: build(rngs=_OneKey()))
    return nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))


def shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """The names and shapes that parameters have in a checkpoint."""
    return {_checkpoint_name(path, leaf): _checkpoint_shape(path, leaf)
            for path, leaf in _leaves(params)}


def load(files: list[Path], expected: Params, dtype, sharding=None) -> Params:
    """Reads parameters tensor by tensor, each straight to its place on the devices.

    Args:
        files: safetensors files that together hold every parameter once.
        expected: tree of arrays or ShapeDtypeStructs that names the parameters and their shapes.
        dtype: of the parameters returned.
        sharding: where they go; None is JAX's default device.

    Raises:
        CheckpointError: names or shapes differ (all of them listed), or a file is damaged.
    """
    _check(files, shapes(expected))
    wanted = {_checkpoint_name(path, leaf): (path, leaf) for path, leaf in _leaves(expected)}
    loaded = {}
    for file in files:
        with _open(file) as tensors:
            for name in filter(_is_parameter, tensors.keys()):
                path, leaf = wanted[_modern(name)]
                _, axes = LEAVES[path[-1].key, leaf.ndim]
                value = tensors.get_tensor(name).transpose(np.argsort(axes)).astype(dtype)
                loaded[path] = jax.device_put(value, sharding)
    return jax.tree_util.tree_map_with_path(lambda path, _: loaded[path], expected)


def save(params: Params, file: Path, dtype=None) -> None:
    """Writes parameters under the checkpoint's names, in `dtype` if given."""
    tensors = {}
    for path, leaf in _leaves(params):
        _, axes = LEAVES[path[-1].key, leaf.ndim]
        value = np.asarray(leaf).transpose(axes)
        tensors[_checkpoint_name(path, leaf)] = np.ascontiguousarray(value, dtype=dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})


def _leaves(params: Params):
    return jax.tree_util.tree_leaves_with_path(params)


def _checkpoint_name(path: tuple, leaf) -> str:
    *modules, last = (str(key.key) for key in path)
    return ".".join([*modules, LEAVES[last, leaf.ndim][0]])


def _checkpoint_shape(path: tuple, leaf) -> tuple[int, ...]:
    _, axes = LEAVES[path[-1].key, leaf.ndim]
    return tuple(leaf.shape[axis] for axis in axes)


def _modern(name: str) -> str:
    for pattern, replacement in SYNONYMS:
        name = pattern.sub(replacement, name)
    return name


def _is_parameter(name: str) -> bool:
    return not NOT_PARAMETERS.search(name)


def _open(file: Path):
    try:
        # The default maps the file, and all that was read of it then stays in memory beside the
        # parameters until it is closed.
        return safe_open(file, framework="np", backend="pread")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or incomplete ({error}). Fetch or copy it again."
        ) from error


def _check(files: list[Path], wanted: dict[str, tuple[int, ...]]) -> None:
    found = {}
    for file in files:
        with _open(file) as tensors:
            for name in filter(_is_parameter, tensors.keys()):
                found[_modern(name)] = tuple(tensors.get_slice(name).get_shape())
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    difference = [f"- missing    {name} {list(wanted[name])}" for name in missing]
    difference += [f"+ unexpected {name} {list(found[name])}" for name in unexpected]
    difference += [
        f"~ shape      {name}: the file has {list(found[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if difference:
        lines = "\n  ".join(sorted(difference))
        raise CheckpointError(
            f"The weights in {files[0].parent} do not fit the model that its config.json describes "
            f"({len(difference)} differences):\n  {lines}"
        )
