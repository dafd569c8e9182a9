"""The image half of CLIP (Radford et al. 2021, arXiv:2103.00020), by which safety checkers look at
pictures and IP-Adapters at reference pictures."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from sd_tpu.checkpoint.config import ProjectedVisionEncoderConfig, VisionEncoderConfig
from sd_tpu.models.layers import LayerNorm, conv, linear
from sd_tpu.models.text_encoder import Encoder

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures in [0, 1], by colour
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class CLIPVisionModelWithProjection(nnx.Module):
    """Pictures -> one vector for each, or one for each of its patches."""

    def __init__(self, config: ProjectedVisionEncoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.vision_model = VisionTransformer(config, dtype=dtype, rngs=rngs)
        self.visual_projection = linear(
            config.hidden_size, config.projection_dim, bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: Float[Array, "b side side 3"]) -> Float[Array, "b p"]:
        """Pictures as `normalized` makes them -> [B, projection_dim]."""
        return self.visual_projection(self.vision_model.pooled(x))


class VisionTransformer(nnx.Module):
    """Patches and one class token through encoder layers, between two norms."""

    def __init__(self, config: VisionEncoderConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = PatchEmbeddings(config, **layer)
        self.pre_layrnorm = LayerNorm(size, eps, **layer)  # spelled so in every checkpoint
        self.encoder = Encoder(config, causal=False, **layer)
        self.post_layernorm = LayerNorm(size, eps, **layer)

    def hidden_state(self, x: jax.Array, skip: int = 0) -> jax.Array:
        """Pictures as `normalized` makes them -> what the layers but the last `skip` give of the
        class token and the patches, without the last norm: [B, 1 + patches, hidden_size]."""
        return self.encoder(self.pre_layrnorm(self.embeddings(x)))[-1 - skip]

    def pooled(self, x: jax.Array) -> jax.Array:
        """Pictures as `normalized` makes them -> the class token at the end, [B, hidden_size]."""
        return self.post_layernorm(self.hidden_state(x)[:, 0])


class PatchEmbeddings(nnx.Module):
    """A class token and linear maps of patches, with learned positions added."""

    def __init__(self, config: VisionEncoderConfig, *, dtype, rngs: nnx.Rngs):
        size, patch = config.hidden_size, config.patch_size
        self.class_embedding = nnx.Param(jnp.ones(size, dtype))
        self.patch_embedding = conv(
            3, size, patch, strides=patch, padding=0, bias=False, dtype=dtype, rngs=rngs
        )
        self.position_embedding = nnx.Embed(
            1 + (config.image_size // patch) ** 2, size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, side, side, 3] -> [B, 1 + patches, hidden_size]."""
        patches = self.patch_embedding(x)
        patches = patches.reshape(len(x), -1, patches.shape[-1])
        first = jnp.broadcast_to(self.class_embedding[...], (len(x), 1, patches.shape[-1]))
        return jnp.concatenate([first, patches], axis=1) + self.position_embedding.embedding[...]


def normalized(pictures: Shaped[Array, "*b side side 3"]) -> Float[Array, "*b side side 3"]:
    """Normalize pictures of CLIP's size with colours in [0, 255]."""
    return (pictures / 255 - jnp.array(MEAN)) / jnp.array(DEVIATION)
