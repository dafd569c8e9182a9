"""The transformer of FLUX.1 (Black Forest Labs 2024, github.com/black-forest-labs/flux): tokens of
the text and of the picture pass some blocks with weights of their own, attending to each other, and
the rest as one sequence.

Positions have three axes, the text's own and row and column of the picture; tokens of the text are
all at 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import FluxTransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import gelu_tanh, linear, pack, unpack
from sd_tpu.models.rotary import Rotation, rotation
from sd_tpu.models.transformer_blocks import (
    EPS,
    JOINT_COLUMNS,
    JOINT_ROWS,
    AdaLayerNormContinuous,
    Heads,
    JointTransformerBlock,
    Modulations,
    TimestepTextEmbedding,
)

THETA = 10_000.0  # of positions


class FluxTransformer2DModel(nnx.Module):
    """A network that predicts the velocity of latents at a timestep for a text."""

    def __init__(self, config: FluxTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, outputs = config.width, config.out_channels or config.in_channels
        self.time_text_embed = TimestepTextEmbedding(
            width, config.pooled_projection_dim, guidance=config.guidance_embeds, **layer
        )
        self.context_embedder = linear(config.joint_attention_dim, width, **layer)
        self.x_embedder = linear(config.in_channels, width, **layer)
        self.transformer_blocks = nnx.List(
            [
                JointTransformerBlock(width, config.num_attention_heads, EPS, **layer)
                for _ in range(config.num_layers)
            ]
        )
        self.single_transformer_blocks = nnx.List(
            [SingleBlock(config, **layer) for _ in range(config.num_single_layers)]
        )
        self.norm_out = AdaLayerNormContinuous(width, **layer)
        self.proj_out = linear(width, outputs, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        width, single = self.config.width, r"single_transformer_blocks\.\d+"
        return TensorParallelPlan(
            heads=(self.config.num_attention_heads,),
            columns={JOINT_COLUMNS: (), rf"{single}\.(attn\.to_[qkv]|proj_mlp)": ()},
            rows={JOINT_ROWS: (), rf"{single}\.proj_out": (width, 4 * width)},
        )

    def __call__(
        self,
        x: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b t d"],
        pooled: Float[Array, "b p"],
        guidance: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b h w c_out"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            x: latents [B, h, w, in_channels / 4], h and w even: four of them are a token.
            timesteps: [B] from 0 to 1000, fractions allowed. They are not multiplied in here, as
                they are in diffusers' network, which takes 0 to 1.
            text: [B, T, joint_attention_dim] text embeddings, all attended to.
            pooled: [B, pooled_projection_dim], one vector for the whole text.
            guidance: [B] guidance scales, of a network that was distilled with them alone.

        Returns:
            [B, h, w, out_channels / 4] float32.
        """
        patches = pack(x.astype(self.dtype))
        batch, height, width, channels = patches.shape
        words = text.shape[1]
        condition = nnx.silu(self.time_text_embed(timesteps, pooled.astype(self.dtype), guidance))
        by = rotation(_positions(words, height, width)[None], self.config.axes_dims_rope, THETA)
        picture = self.x_embedder(patches.reshape(batch, height * width, channels))
        context = self.context_embedder(text.astype(self.dtype))
        for block in self.transformer_blocks:
            picture, context = block(picture, context, condition, by)
        tokens = jnp.concatenate([context, picture], axis=1)
        for block in self.single_transformer_blocks:
            tokens = block(tokens, condition, by)
        out = self.proj_out(self.norm_out(tokens[:, words:], condition)).astype(jnp.float32)
        return unpack(out.reshape(batch, height, width, -1))


def _positions(words: int, height: int, width: int) -> jax.Array:
    """Return positions of a text's tokens and of a picture's, row by row: [T + N, 3] int32."""
    grid = jnp.indices((height, width), jnp.int32).reshape(2, -1).T
    return jnp.pad(grid, ((words, 0), (1, 0)))


class SingleBlock(nnx.Module):
    """Attention of all tokens to all and a feed-forward layer beside it, with one dense layer after
    both (Dehghani et al. 2023, arXiv:2302.05442)."""

    def __init__(self, config: FluxTransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.width
        self.norm = Modulations(width, 1, **layer)
        self.attn = Heads(width, config.num_attention_heads, EPS, **layer)
        self.proj_mlp = linear(width, 4 * width, **layer)
        self.proj_out = linear(5 * width, width, **layer)

    def __call__(self, x: jax.Array, condition: jax.Array, by: Rotation) -> jax.Array:
        """x [B, N, width], condition [B, width], by [1, N, pairs] -> like x."""
        (modulation,) = self.norm(condition)
        normed = modulation.norm(x)
        attended = attention(*self.attn.projected(normed, by=by), self.attn.heads)
        fed = gelu_tanh(self.proj_mlp(normed))
        return x + modulation.gated(self.proj_out(jnp.concatenate([attended, fed], axis=-1)))
