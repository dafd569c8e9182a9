"""The transformer of Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): tokens of
the text and of the picture have weights of their own and attend to each other."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import SD3TransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.layers import conv, linear
from sd_tpu.models.transformer_blocks import (
    EPS,
    JOINT_COLUMNS,
    JOINT_ROWS,
    AdaLayerNormContinuous,
    JointTransformerBlock,
    TimestepTextEmbedding,
)


class SD3Transformer2DModel(nnx.Module):
    """A network that predicts the velocity of latents at a timestep for a text."""

    def __init__(self, config: SD3TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.pos_embed = PatchEmbed(config, **layer)
        self.time_text_embed = TimestepTextEmbedding(
            config.width, config.pooled_projection_dim, **layer
        )
        self.context_embedder = linear(config.joint_attention_dim, config.width, **layer)
        self.transformer_blocks = nnx.List(
            [
                JointTransformerBlock(
                    config.width,
                    config.num_attention_heads,
                    EPS if config.qk_norm else None,
                    dual=number in config.dual_attention_layers,
                    last=number == config.num_layers - 1,
                    **layer,
                )
                for number in range(config.num_layers)
            ]
        )
        self.norm_out = AdaLayerNormContinuous(config.width, **layer)
        self.proj_out = linear(config.width, config.patch_size**2 * config.out_channels, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        return TensorParallelPlan(
            heads=(self.config.num_attention_heads,),
            columns={JOINT_COLUMNS: ()},
            rows={JOINT_ROWS: ()},
        )

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
