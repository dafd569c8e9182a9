"""The Flax networks that diffusers had before 0.40, as the guide's pipeline called them.

They run under today's JAX from a folder of their own, beside the diffusers that the tests compare
with: `pip install --no-deps --target FOLDER diffusers==0.35.2`.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.make_checkpoint import MODELS
from sd_tpu.families.tokenizer import LENGTH
from sd_tpu.runtime.mesh import REPLICATED, SPLIT, replicated, split

PACKAGE = "diffusers==0.35.2"
PROGRAMS = ("UNet", "decode")


def check(folder: Path) -> None:
    """Raise FileNotFoundError if `folder` has no diffusers with Flax."""
    if not (folder / "diffusers" / "models" / "vae_flax.py").is_file():
        raise FileNotFoundError(
            f"There is no diffusers with Flax in {folder}: "
            f"pip install --no-deps --target {folder} {PACKAGE}"
        )


def lowered(
    folder: Path, model: str, mesh: Mesh, images: int, side: int
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return functions that lower the programs for `images` pictures on each device.

    "UNet" is one guided evaluation: all of a step but the scheduler's few operations. "decode" is
    the decoder. Parameters and arithmetic are bfloat16, as in the guide. From now on `diffusers` is
    the one in `folder`, so this is for a process of its own.
    """
    sys.path.insert(0, str(folder))
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel
    from diffusers.models.vae_flax import FlaxAutoencoderKL

    unet = _build(FlaxUNet2DConditionModel, MODELS[model]["unet"])
    vae = _build(FlaxAutoencoderKL, MODELS[model]["vae"])

    def guided(params, latents, t, text, added, guidance):
        twice = jnp.concatenate([latents] * 2)
        both = unet.apply(
            {"params": params}, twice, jnp.broadcast_to(t, len(twice)), text, added
        ).sample
        negative, positive = jnp.split(both, 2)
        return negative + guidance * (positive - negative)

    def decode(params, latents):
        images = vae.apply({"params": params}, latents / vae.scaling_factor, method=vae.decode)
        return (images.sample / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    def each(function, *others):  # on each device for itself, as `pmap` had it
        return jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=(REPLICATED, *others),
                out_specs=SPLIT,
                check_vma=False,
            )
        )

    shape, everywhere = partial(jax.ShapeDtypeStruct, sharding=split(mesh)), replicated(mesh)
    count = images * mesh.size
    side //= 2 ** (len(vae.block_out_channels) - 1)
    latents = shape((count, unet.in_channels, side, side), jnp.float32)
    t = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    text = shape((2 * count, LENGTH, unet.cross_attention_dim), jnp.bfloat16)
    added = _added_conditions(unet, 2 * count, shape) if unet.addition_embed_type else None
    guidance = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)

    def params(network):
        shapes = jax.eval_shape(network.init_weights, jax.random.key(0))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=everywhere), shapes
        )

    step = each(guided, SPLIT, REPLICATED, SPLIT, SPLIT, REPLICATED)
    return {
        "UNet": partial(step.lower, params(unet), latents, t, text, added, guidance),
        "decode": partial(each(decode, SPLIT).lower, params(vae), latents),
    }


def _added_conditions(unet: Any, count: int, shape: Callable) -> dict[str, jax.ShapeDtypeStruct]:
    """Return SDXL's added conditions as shapes: the pooled text, and six numbers of the size."""
    pooled = unet.projection_class_embeddings_input_dim - 6 * unet.addition_time_embed_dim
    return {
        "text_embeds": shape((count, pooled), jnp.bfloat16),
        "time_ids": shape((count, 6), jnp.float32),
    }


def _build(network: type, config: dict[str, Any]) -> Any:
    """Build the network of a config, without those of its keys that Flax did not have."""
    known = {field.name for field in dataclasses.fields(network)}
    return network(
        dtype=jnp.bfloat16,
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in config.items()
            if key in known
        },
    )
