"""Names that layers had in Flax.

They are `down_blocks_0.attentions_1...to_out_0` where checkpoints and our networks have
`down_blocks.0.attentions.1...to_out.0`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.weights import Params, first_lines

# Attention of the autoencoder, which kept the names of before diffusers 0.17.
VAE_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out_0": "proj_attn"}

Path = tuple[str, ...]


def flax_path(path: tuple[str | int, ...]) -> Path:
    """Return a parameter's path in Flax's names, given in ours or in Flax's."""
    names: list[str] = []
    for key in map(str, path):
        if key.isdigit() and names[-1] != "layers":  # which transformers numbered in a tree
            names[-1] += f"_{key}"
        else:
            names.append(key)
    if names[0] == "vision_model" != names[1]:  # transformers nested that of the safety checker
        names.insert(0, "vision_model")
    if len(names) > 2 and names[-3].startswith("attentions_"):
        names[-2] = VAE_ATTENTION.get(names[-2], names[-2])
    return tuple(names)


def to_flax(params: Params) -> dict[str, Any]:
    """Return our parameters, or a tree like them, as nested dictionaries with Flax's names."""
    tree: dict[str, Any] = {}
    for path, leaf in _leaves(params):
        *modules, last = flax_path(path)
        at = tree
        for name in modules:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def to_ours(params: Mapping[str, Any], expected: Params) -> Params:
    """Return parameters in Flax's names, or in ours, as the tree that our networks take.

    Args:
        params: nested mappings; what is not expected is left out.
        expected: our tree of the same network.

    Raises:
        CheckpointError: some are missing.
    """
    by_path = {flax_path(path): leaf for path, leaf in _leaves(params)}
    wanted = {
        path: flax_path(tuple(key.key for key in path))
        for path, _ in jax.tree_util.tree_leaves_with_path(expected)
    }
    missing = sorted(".".join(name) for name in wanted.values() if name not in by_path)
    if missing:
        raise CheckpointError(f"{len(missing)} parameters are missing: {first_lines(missing)}")
    return jax.tree_util.tree_map_with_path(lambda path, _: by_path[wanted[path]], expected)


def check(params: Mapping[str, Any], expected: Params, where: str) -> None:
    """Raise CheckpointError unless the names and shapes of `params` are those expected."""
    shapes = {flax_path(path): leaf.shape for path, leaf in _leaves(params)}
    wanted = {flax_path(path): leaf.shape for path, leaf in _leaves(expected)}
    lines = [
        f"{'.'.join(name)}: the file has {shapes.get(name)}, the model needs {wanted.get(name)}"
        for name in sorted(shapes.keys() | wanted.keys())
        if shapes.get(name) != wanted.get(name)
    ]
    if lines:
        raise CheckpointError(
            f"The weights in {where} do not fit the model that its config.json "
            f"describes ({len(lines)} differences):\n  {first_lines(lines)}"
        )


def _leaves(tree: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
