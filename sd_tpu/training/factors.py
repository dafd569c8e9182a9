"""The layers that training gives low-rank factors, and the file of what these have become.

Blocks become blocks whose insides are computed again on the way back, as layers become
`sd_tpu.models.factors.AdaptedLinear` (decision 0031).
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    krea2_transformer,
    unet,
    z_image_transformer,
)
from sd_tpu.models.factors import Factors, Layer, adapt, applied
from sd_tpu.models.layers import ResnetBlock
from sd_tpu.models.platform import platform
from sd_tpu.models.products import KEPT
from sd_tpu.models.text_encoder import EncoderLayer
from sd_tpu.models.transformer_blocks import JointTransformerBlock

# Layers that each family's users train, as in diffusers' own scripts: the projections of attention,
# among them those of FLUX.2 klein that hold a feed-forward layer too.
ATTENTION = re.compile(
    r".*\b(attn\d?|attention|self_attn)\."
    r"(to_[qkv]|to_gate|to_out(\.0)?|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj|[qkv]_proj|out_proj)"
)
FEED_FORWARD = re.compile(
    r".*\b((ff|ff_context)\.(net\.(0\.proj|2)|linear_(in|out)|gate|up|down)|feed_forward\.w[123]|mlp\.fc[12]"
    r"|single_transformer_blocks\.\d+\.proj_(mlp|out))"
)
# Pixels up to which the results of all layers take less memory than the weights do.
MOST_KEPT = 512 * 512
BLOCKS = (
    ResnetBlock,
    unet.TransformerBlock,
    JointTransformerBlock,
    flux_transformer.SingleBlock,
    flux2_transformer.DoubleBlock,
    flux2_transformer.SingleBlock,
    z_image_transformer.Block,
    cosmos_transformer.Block,
    krea2_transformer.Block,
    krea2_transformer.TextBlock,
    EncoderLayer,
)


@functools.cache
def recomputing(kind: type[nnx.Module], *, keep: bool) -> type[nnx.Module]:
    """Return a block's class whose insides are computed again for the gradient, and not kept.

    Args:
        kind: the block's class.
        keep: whether the results of its layers are kept on CPUs, so that only what is between
            layers is computed again (decision 0036).
    """
    results = jax.checkpoint_policies.save_only_these_names(KEPT)

    def call(self, *args, **kwargs):
        policy = results if keep and platform() == "cpu" else None
        return jax.checkpoint(lambda: kind.__call__(self, *args, **kwargs), policy=policy)()

    return type(f"Recomputing{kind.__name__}", (kind,), {"__call__": call})


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """A model whose layers take factors, and these layers.

    Attributes:
        model: whose parameters hold factors beside the kernels of the layers.
        layers: by their names in a checkpoint, with the component in front.
        rank: of the factors.
    """

    model: Any
    layers: Mapping[str, Layer] = dataclasses.field(hash=False)
    rank: int

    @classmethod
    def of(cls, model: Any, shapes: Params, rank: int, *, pixels: int, feed_forward: bool = False):
        """Adapt components of a model.

        Args:
            model: as a `Checkpoint` has it.
            shapes: of the parameters of those components that are trained.
            rank: of the factors.
            pixels: of all pictures that a device looks at together.
            feed_forward: whether feed-forward layers are adapted as well.
        """
        keep = pixels <= MOST_KEPT
        graphs: dict[str, Any] = {}
        layers: dict[str, Layer] = {}
        for part, of_part in shapes.items():
            graphs[part], found = _adapted(getattr(model, part), of_part, feed_forward, keep)
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
        return applied(params, self.layers, factors)


def _adapted(
    graph: nnx.GraphDef, shapes: Params, feed_forward: bool, keep: bool
) -> tuple[nnx.GraphDef, dict[str, Layer]]:
    """Return a network of layers with factors and of blocks that recompute, and these layers."""
    network = nnx.merge(graph, shapes)
    layers = adapt(
        network,
        lambda name: ATTENTION.fullmatch(name) or (feed_forward and FEED_FORWARD.fullmatch(name)),
    )
    for _, module in nnx.iter_modules(network):
        if type(module) in BLOCKS:
            module.__class__ = recomputing(type(module), keep=keep)
    return nnx.graphdef(network), layers


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
