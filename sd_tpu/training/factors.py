"""Low-rank factors beside the kernels of networks (LoRA, Hu et al. 2021, arXiv:2106.09685).

Dense layers become layers that add (x A) B, and blocks become blocks whose insides are computed
again on the way back. Neither changes a network: their classes are exchanged in its graph, and the
names of its parameters stay (decision 0031).
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save

from sd_tpu.checkpoint.weights import Params
from sd_tpu.models import (
    cosmos_transformer,
    flux2_transformer,
    flux_transformer,
    unet,
    z_image_transformer,
)
from sd_tpu.models.layers import Linear, ResnetBlock
from sd_tpu.models.products import matmul
from sd_tpu.models.text_encoder import EncoderLayer
from sd_tpu.models.transformer_blocks import JointTransformerBlock

# Layers that each family's users train, as in diffusers' own scripts: the projections of attention,
# among them those of FLUX.2 klein that hold a feed-forward layer too.
ATTENTION = re.compile(
    r".*\b(attn\d?|attention|self_attn)\."
    r"(to_[qkv]|to_out(\.0)?|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj|[qkv]_proj|out_proj)"
)
FEED_FORWARD = re.compile(
    r".*\b((ff|ff_context)\.(net\.(0\.proj|2)|linear_(in|out))|feed_forward\.w[123]|mlp\.fc[12]"
    r"|single_transformer_blocks\.\d+\.proj_(mlp|out))"
)
BLOCKS = (
    ResnetBlock,
    unet.TransformerBlock,
    JointTransformerBlock,
    flux_transformer.SingleBlock,
    flux2_transformer.DoubleBlock,
    flux2_transformer.SingleBlock,
    z_image_transformer.Block,
    cosmos_transformer.Block,
    EncoderLayer,
)

Factors = dict[str, dict[str, jax.Array]]  # a layer's name -> "A" [in, rank], "B" [rank, out], f32


class AdaptedLinear(Linear):
    """A dense layer with a product of two factors beside its kernel, in the dtype of its input."""

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
        down, up = (each[...].astype(inputs.dtype) for each in (self.lora_A, self.lora_B))
        return super().__call__(inputs, out_sharding) + matmul(matmul(inputs, down), up)


@functools.cache
def recomputing(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return a block's class whose insides are computed again for the gradient, and not kept."""

    def call(self, *args, **kwargs):
        return jax.checkpoint(lambda: kind.__call__(self, *args, **kwargs))()

    return type(f"Recomputing{kind.__name__}", (kind,), {"__call__": call})


class Layer(NamedTuple):
    """An adapted layer: its path in the parameters, its inputs and its outputs."""

    path: tuple[Any, ...]
    inputs: int
    outputs: int


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """A model whose layers take factors, and these layers.

    Attributes:
        model: whose parameters hold factors beside the kernels of the layers.
        layers: by their names in a checkpoint, with the component in front.
        rank: of the factors.
    """

    model: Any
    layers: Mapping[str, Layer]
    rank: int

    @classmethod
    def of(cls, model: Any, shapes: Params, rank: int, *, feed_forward: bool = False):
        """Adapt components of a model.

        Args:
            model: as a `Checkpoint` has it.
            shapes: of the parameters of those components that are trained.
            rank: of the factors.
            feed_forward: whether feed-forward layers are adapted as well.
        """
        graphs: dict[str, Any] = {}
        layers: dict[str, Layer] = {}
        for part, of_part in shapes.items():
            graphs[part], found = _adapted(getattr(model, part), of_part, feed_forward)
            layers |= {f"{part}.{name}": found[name] for name in sorted(found)}
        layers = {
            name: layer._replace(path=(name.partition(".")[0], *layer.path))
            for name, layer in layers.items()
        }
        return cls(dataclasses.replace(model, **graphs), layers, rank)

    def with_model(self, model: Any) -> "Adaptation":
        """Return the adaptation of a model that differs in the shapes of its inputs alone."""
        parts = {name.partition(".")[0] for name in self.layers}
        graphs: dict[str, Any] = {part: getattr(self.model, part) for part in parts}
        return dataclasses.replace(self, model=dataclasses.replace(model, **graphs))

    def first(self, seed: jax.Array | int) -> Factors:
        """Draw the first factors: A from a normal distribution, B zero, so that nothing changes."""
        keys = jax.random.split(jax.random.key(seed), len(self.layers))
        return {
            name: {
                "A": jax.random.normal(key, (layer.inputs, self.rank)) / self.rank,
                "B": jnp.zeros((self.rank, layer.outputs)),
            }
            for key, (name, layer) in zip(keys, self.layers.items(), strict=True)
        }

    def applied(self, params: Params, factors: Factors) -> Params:
        """Return parameters with the factors among them, as the adapted model takes them."""
        for name, layer in self.layers.items():
            its = factors[name]
            params = _inserted(params, layer.path, {"lora_A": its["A"], "lora_B": its["B"]})
        return params


def _adapted(
    graph: nnx.GraphDef, shapes: Params, feed_forward: bool
) -> tuple[nnx.GraphDef, dict[str, Layer]]:
    """Return a network of layers with factors and of blocks that recompute, and these layers."""
    network, layers = nnx.merge(graph, shapes), {}
    for path, module in nnx.iter_modules(network):
        name = ".".join(map(str, path))
        wanted = ATTENTION.fullmatch(name) or (feed_forward and FEED_FORWARD.fullmatch(name))
        if wanted and type(module) is Linear:
            layers[name] = Layer(path, module.in_features, module.out_features)
            AdaptedLinear.adapt(module)
        elif type(module) in BLOCKS:
            module.__class__ = recomputing(type(module))
    return nnx.graphdef(network), layers


def _inserted(tree: Any, path: tuple[str | int, ...], leaves: Mapping[str, Any]) -> Any:
    """Return a tree of dictionaries with leaves at a path; what lies elsewhere is shared."""
    if not path:
        return {**tree, **leaves}
    return {**tree, path[0]: _inserted(tree[path[0]], path[1:], leaves)}


def write_lora(factors: Factors, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a LoRA in PEFT's names, whose alpha is its rank: strength 1 is what was trained.

    Equal factors and metadata give equal bytes. Being cut off while it is written leaves no file.
    """
    tensors = {
        f"{name}.lora_{factor}.weight": np.ascontiguousarray(np.asarray(array, np.float32).T)
        for name, its in factors.items()
        for factor, array in its.items()
    }
    replace_file(file, _with_metadata(save(tensors), {"format": "pt", **metadata}))


def replace_file(file: Path, content: bytes) -> None:
    """Write a file beside its place and move it there."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, file)


def _with_metadata(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """Put metadata into a safetensors file, in order: the library writes it in any order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(content[8:end])}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight bytes
    return len(encoded).to_bytes(8, "little") + encoded + content[end:]
