"""The transformer of Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): tokens of
the text and of the picture have weights of their own and attend to each other."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import SD3TransformerConfig
from sd_tpu.models.layers import TimestepEmbedding, conv, linear, timestep_encoding
from sd_tpu.models.transformer_blocks import (
    EPS,
    GELU,
    AdaLayerNormContinuous,
    FeedForward,
    JointAttention,
    Modulations,
    SelfAttention,
)

SINUSOIDS = 256  # of a timestep


class SD3Transformer2DModel(nnx.Module):
    """A network that predicts the velocity of latents at a timestep for a text."""

    def __init__(self, config: SD3TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.pos_embed = PatchEmbed(config, **layer)
        self.time_text_embed = TimestepTextEmbedding(config, **layer)
        self.context_embedder = linear(config.joint_attention_dim, config.width, **layer)
        self.transformer_blocks = nnx.List(
            [JointTransformerBlock(config, number, **layer) for number in range(config.num_layers)]
        )
        self.norm_out = AdaLayerNormContinuous(config.width, **layer)
        self.proj_out = linear(config.width, config.patch_size**2 * config.out_channels, **layer)

    def __call__(
        self,
        x: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b l d"],
        pooled: Float[Array, "b p"],
    ) -> Float[Array, "b h w c_out"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            x: latents [B, h, w, in_channels].
            timesteps: [B] from 0 to 1000, fractions allowed.
            text: [B, L, joint_attention_dim] text embeddings.
            pooled: [B, pooled_projection_dim], one vector for the whole text.

        Returns:
            [B, h, w, out_channels] float32.

        Raises:
            ValueError: height or width does not divide into patches, or is larger than the
                checkpoint has positions for.
        """
        batch, height, width, _ = x.shape
        tokens = self.pos_embed(x.astype(self.dtype))
        condition = nnx.silu(self.time_text_embed(timesteps, pooled.astype(self.dtype)))
        context = self.context_embedder(text.astype(self.dtype))
        for block in self.transformer_blocks:
            tokens, context = block(tokens, context, condition)
        out = self.proj_out(self.norm_out(tokens, condition)).astype(jnp.float32)
        patch = self.config.patch_size
        out = out.reshape(batch, height // patch, width // patch, patch, patch, -1)
        return out.swapaxes(2, 3).reshape(batch, height, width, -1)


class PatchEmbed(nnx.Module):
    """Linear maps of patches with the positions of the checkpoint added."""

    def __init__(self, config: SD3TransformerConfig, *, dtype, rngs: nnx.Rngs):
        self.patch, self.side = config.patch_size, config.pos_embed_max_size
        self.proj = conv(
            config.in_channels,
            config.width,
            self.patch,
            strides=self.patch,
            padding=0,
            dtype=dtype,
            rngs=rngs,
        )
        self.pos_embed = nnx.Param(jnp.zeros((1, self.side**2, config.width), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, in_channels] -> [B, patches, width], row by row."""
        if any(length % self.patch for length in x.shape[1:3]):
            raise ValueError(
                f"{x.shape[1]}x{x.shape[2]} latents do not divide into patches of {self.patch}."
            )
        patches = self.proj(x)
        batch, height, width, channels = patches.shape
        if max(height, width) > self.side:
            most = self.side * self.patch
            raise ValueError(
                f"{x.shape[1]}x{x.shape[2]} latents are too large: this network has positions for "
                f"{most}x{most}."
            )
        top, left = (self.side - height) // 2, (self.side - width) // 2
        positions = self.pos_embed[...].reshape(self.side, self.side, channels)
        patches += positions[None, top : top + height, left : left + width]
        return patches.reshape(batch, -1, channels)


class TimestepTextEmbedding(nnx.Module):
    """A timestep and a pooled text, each through two dense layers, added."""

    def __init__(self, config: SD3TransformerConfig, *, dtype, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepEmbedding(SINUSOIDS, config.width, dtype=dtype, rngs=rngs)
        self.text_embedder = TimestepEmbedding(
            config.pooled_projection_dim, config.width, dtype=dtype, rngs=rngs
        )

    def __call__(self, timesteps: jax.Array, pooled: jax.Array) -> jax.Array:
        """timesteps [B], pooled [B, pooled_projection_dim] -> [B, width]."""
        time = timestep_encoding(timesteps, SINUSOIDS)
        return self.timestep_embedder(time.astype(pooled.dtype)) + self.text_embedder(pooled)


class JointTransformerBlock(nnx.Module):
    """Joint attention and feed-forward layers, in some blocks with self-attention of the picture
    beside the former; the last one has no use for the text afterwards."""

    def __init__(self, config: SD3TransformerConfig, number: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, last = config.width, number == config.num_layers - 1
        heads = width, config.num_attention_heads, EPS if config.qk_norm else None
        dual = number in config.dual_attention_layers
        self.norm1 = Modulations(width, 3 if dual else 2, **layer)
        self.attn = JointAttention(*heads, last=last, **layer)
        if dual:
            self.attn2 = SelfAttention(*heads, **layer)
        self.ff = FeedForward(width, GELU, **layer)
        if last:
            self.norm1_context = AdaLayerNormContinuous(width, **layer)
        else:
            self.norm1_context = Modulations(width, 2, **layer)
            self.ff_context = FeedForward(width, GELU, **layer)

    def __call__(
        self, x: jax.Array, text: jax.Array, condition: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, N, width], text [B, L, width], condition [B, width] -> like x, like text."""
        joint, feed, *dual = self.norm1(condition)
        if isinstance(self.norm1_context, AdaLayerNormContinuous):
            attended, _ = self.attn(joint.norm(x), self.norm1_context(text, condition))
        else:
            joint_text, feed_text = self.norm1_context(condition)
            attended, attended_text = self.attn(joint.norm(x), joint_text.norm(text))
            text = text + joint_text.gate * attended_text
            text = text + feed_text.gate * self.ff_context(feed_text.norm(text))
        change = joint.gate * attended
        for alone in dual:
            change += alone.gate * self.attn2(alone.norm(x))
        x = x + change
        return x + feed.gate * self.ff(feed.norm(x)), text
