"""How parameters are divided over the chips of a replica (tensor parallelism, Shoeybi et al. 2019,
arXiv:1909.08053).

Of two dense layers in a row the first is divided by its columns and the second by its rows, so that
the chips have sums to exchange only after the second. What lies between, heads of attention or
channels of a feed-forward layer, each chip has a share of.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

MODEL = "model"  # the axis of a mesh along which the chips of a replica lie
CHIPS = 1, 2, 4, 8  # that a replica may have
Parts = tuple[int, ...]  # channels of what lies side by side in a layer, such as queries and keys


@dataclasses.dataclass(frozen=True)
class Division:
    """Shares of an array, equal ones, that chips hold.

    Attributes:
        chips: how many.
        axis: that is divided.
        parts: lengths along the axis of what lies side by side, each of which is divided by itself.
    """

    chips: int = 1
    axis: int = 0
    parts: Parts = ()

    def sharding(self, whole: NamedSharding, lead: int = 0) -> NamedSharding:
        """Return where the shares lie, with `lead` axes in front, given where all of it would.

        What that divides is among the axes in front.
        """
        if self.chips == 1:
            return whole
        before = (*whole.spec, *[None] * (lead + self.axis))[: lead + self.axis]
        return NamedSharding(whole.mesh, PartitionSpec(*before, MODEL))

    def in_order(self, array: Any) -> Any:
        """Return an array of NumPy or JAX with each chip's share in one piece."""
        if self.chips == 1 or len(self.parts) < 2:
            return array
        indices, first = [], 0
        for length in self.parts:
            indices.append(first + np.arange(length).reshape(self.chips, -1))
            first += length
        return array.take(np.concatenate(indices, axis=1).reshape(-1), axis=self.axis)


WHOLE = Division()


def undivided(shapes: Any) -> Any:
    """Return the divisions of parameters that every chip has all of."""
    return jax.tree.map(lambda _: WHOLE, shapes)


@dataclasses.dataclass(frozen=True)
class TensorParallelPlan:
    """Rules for the parameters of a network, by patterns of its layers' names.

    Attributes:
        heads: numbers of heads, of which every chip has as many.
        columns: layers whose outputs are divided, with the parts of these; none is one part.
        rows: layers whose inputs are divided, with the parts of those.
    """

    heads: tuple[int, ...]
    columns: Mapping[str, Parts]
    rows: Mapping[str, Parts]

    def divisions(self, shapes: Any, chips: int) -> Any:
        """Return the division of each parameter.

        All are whole where the chips cannot have equal shares.

        Args:
            shapes: the network's parameters, or their shapes.
            chips: of a replica.
        """
        divisions = jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._division(path, leaf, chips), shapes
        )
        if self._divides(shapes, divisions, chips):
            return divisions
        return undivided(shapes)

    def divides(self, layer: str) -> bool:
        """Whether a layer of this name is divided, as the large ones of blocks are."""
        return any(re.fullmatch(pattern, layer) for pattern in (*self.columns, *self.rows))

    def _division(self, path: tuple, leaf: Any, chips: int) -> Division:
        *modules, last = (str(key.key) for key in path)
        name = ".".join(modules)
        for pattern, parts in self.columns.items():
            if re.fullmatch(pattern, name):
                return Division(chips, leaf.ndim - 1, parts)
        for pattern, parts in self.rows.items():
            if last == "kernel" and re.fullmatch(pattern, name):
                return Division(chips, 0, parts)
        return WHOLE

    def _divides(self, shapes: Any, divisions: Any, chips: int) -> bool:
        lengths = [
            length
            for leaf, division in zip(
                jax.tree.leaves(shapes), jax.tree.leaves(divisions), strict=True
            )
            if division != WHOLE
            for length in division.parts or (leaf.shape[division.axis],)
        ]
        return not any(length % chips for length in (*self.heads, *lengths))


def bytes_of(shapes: Any, divisions: Any = None) -> int:
    """Return the bytes that each chip has of a tree of arrays, or of their shapes.

    Without divisions it has all of them.
    """

    def of(leaf: Any, division: Division = WHOLE) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize // division.chips

    each = jax.tree.map(of, shapes, *([] if divisions is None else [divisions]))
    return sum(jax.tree.leaves(each))
