"""Low-rank factors beside the kernels of networks (LoRA, Hu et al. 2021, arXiv:2106.09685).

Dense layers become layers that add (x A) B. A network is not changed: the classes of its layers are
exchanged in its graph, and the names of its parameters stay (decision 0031).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sd_tpu.checkpoint.adapters import LowRank
from sd_tpu.checkpoint.division import WHOLE
from sd_tpu.checkpoint.weights import Params
from sd_tpu.models.layers import Linear
from sd_tpu.models.platform import platform
from sd_tpu.models.products import matmul

# A layer's name -> "A" [in, rank], "B" [rank, out]; with an axis of pictures in front, if each has
# its own.
Factors = Mapping[str, Mapping[str, Any]]
# A LoRA, as what it adds to kernels by the layers' names, and how strong it is.
Scaled = tuple[Mapping[str, LowRank], float]
FACTORS = {"A": "lora_A", "B": "lora_B"}  # what they are called among a layer's parameters


class AdaptedLinear(Linear):
    """A dense layer with a product of two factors beside its kernel, in the dtype of its input.

    Factors [B, in, rank] and [B, rank, out] are those of each of B pictures, for inputs [B, ...,
    in].
    """

    lora_A: nnx.Param
    lora_B: nnx.Param

    @classmethod
    def adapt(cls, layer: Any) -> None:
        """Have a layer take factors; an abstract one alone, as nothing is computed."""
        layer.__class__ = cls
        layer.lora_A = nnx.Param(jax.ShapeDtypeStruct((layer.in_features, 1), jnp.float32))
        layer.lora_B = nnx.Param(jax.ShapeDtypeStruct((1, layer.out_features), jnp.float32))

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        if self._joins_factors and inputs.ndim > 2 and platform() == "tpu":
            return self._in_one(inputs)
        return super().__call__(inputs, out_sharding) + self._beside(inputs)

    def wide(self, x: jax.Array) -> jax.Array:
        """Multiply x [..., inputs] by kernel and factors -> [..., outputs], a float32 sum."""
        return super().wide(x) + self._beside(x)

    @property
    def by_picture(self) -> bool:
        """Whether each picture has its own factors."""
        return self.lora_A[...].ndim > 2

    @property
    def _joins_factors(self) -> bool:
        """Whether factors are multiplied with the kernel, which those beside rounded tokens are
        not."""
        return self.by_picture and not self.rounds_tokens

    def _beside(self, x: jax.Array) -> jax.Array:
        down, up = (each[...].astype(x.dtype) for each in (self.lora_A, self.lora_B))
        return matmul(self._added_up(matmul(x, down)), up)

    def _in_one(self, x: jax.Array) -> jax.Array:
        """Compute x W + (x A) B as one product, of [x, x A] and W above all pictures' factors.

        x is [pictures, N, inputs]. A sum of two products goes to memory and back (decision 0034).
        """
        down, up = (each[...].astype(x.dtype) for each in (self.lora_A, self.lora_B))
        pictures, rank, outputs = up.shape
        own = jnp.eye(pictures, dtype=bool)[:, None, :, None]
        # Zeros in the place of others' factors add nothing, in whatever order sums are taken.
        between = jnp.where(own, matmul(x, down)[:, :, None], 0)
        between = between.reshape(*x.shape[:2], pictures * rank)
        kernel, scale = self.kernel[...].astype(x.dtype), None
        if self.kernel_scale is not None:
            scale = jnp.where(self.kernel_scale[...], self.kernel_scale[...], 1)
            up = (up / scale).astype(x.dtype)
        kernel = jnp.concatenate([kernel, up.reshape(-1, outputs)])
        # Compiled together with what follows it, the product takes a third more cycles.
        y = lax.optimization_barrier(matmul(jnp.concatenate([x, between], axis=-1), kernel))
        y = self._added_up(y if scale is None else (y * scale).astype(x.dtype))
        return y if self.bias is None else y + self.bias[...]


class Layer(NamedTuple):
    """An adapted layer: its path in the parameters, its inputs and its outputs."""

    path: tuple[Any, ...]
    inputs: int
    outputs: int


def adapt(network: nnx.Module, wanted: Callable[[str], Any]) -> dict[str, Layer]:
    """Have dense layers of an abstract network take factors.

    Args:
        network: whose parameters are shapes.
        wanted: says of a layer's name whether it should.

    Returns:
        These layers by name.
    """
    layers = {}
    for path, module in nnx.iter_modules(network):
        name = ".".join(map(str, path))
        if type(module) is Linear and wanted(name):
            layers[name] = Layer(path, module.in_features, module.out_features)
            AdaptedLinear.adapt(module)
    return layers


def applied(params: Params, layers: Mapping[str, Layer], factors: Factors) -> Params:
    """Return parameters with the factors of layers among them, as an adapted network takes them."""
    for name, layer in layers.items():
        leaves = {FACTORS[factor]: array for factor, array in factors[name].items()}
        params = _inserted(params, layer.path, leaves)
    return params


def factor_shapes(layers: Mapping[str, Layer], rank: int, dtype: Any) -> Factors:
    """Return the shapes of factors of layers."""
    return {
        name: {
            "A": jax.ShapeDtypeStruct((layer.inputs, rank), dtype),
            "B": jax.ShapeDtypeStruct((rank, layer.outputs), dtype),
        }
        for name, layer in layers.items()
    }


def joined(
    name: str, loras: Sequence[Scaled], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Return the factors that several LoRAs add to a layer, side by side in NumPy's arrays.

    Args:
        name: of the layer.
        loras: all of which change it.
        shapes: of its factors, up to whose rank zeros fill them up; with strengths multiplied in,
            the numbers are finite in their dtype.
    """
    found = {factor: np.zeros(shape.shape, shape.dtype) for factor, shape in shapes.items()}
    first = 0
    for lora, strength in loras:
        left, right, scale = lora[name]
        last = first + len(right)
        found["A"][:, first:last] = left
        found["B"][first:last] = strength * scale * right.astype(np.float32)
        first = last
    return found


def factor_divisions(layers: Mapping[str, Layer], divisions: Params) -> Factors:
    """Return how factors are divided over chips: A as the rows of its layer's kernel, B as the
    columns.

    Args:
        layers: beside which they are.
        divisions: of the network's parameters.
    """
    found = {}
    for name, layer in layers.items():
        kernel = reduce(operator.getitem, layer.path, divisions)["kernel"]
        found[name] = {
            factor: kernel if kernel.axis == axis else WHOLE for axis, factor in enumerate(FACTORS)
        }
    return found


def _inserted(tree: Any, path: tuple[str | int, ...], leaves: Mapping[str, Any]) -> Any:
    """Return a tree of dictionaries with leaves at a path; what lies elsewhere is shared."""
    if not path:
        return {**tree, **leaves}
    return {**tree, path[0]: _inserted(tree[path[0]], path[1:], leaves)}
