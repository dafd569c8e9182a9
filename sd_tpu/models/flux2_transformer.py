"""The transformer of FLUX.2 klein (Black Forest Labs 2025, github.com/black-forest-labs/flux2):
tokens of the text and of the picture pass some blocks with weights of their own, attending to each
other, and the rest as one sequence.

Every block of a kind is given the same modulations, which a timestep alone makes. Positions have
four axes: time, row and column of the picture, and along the text. Reference pictures are further
tokens, at other times. They see the picture as it sees them, so that their keys and values change
from step to step, and none can be kept: only the variants called KV are trained for that.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Real

from sd_tpu.checkpoint.config import Flux2TransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.attention import attention
from sd_tpu.models.heads import prepare_heads
from sd_tpu.models.layers import RMSNorm, TimestepEmbedding, linear, swiglu, timestep_encoding
from sd_tpu.models.products import by_rows
from sd_tpu.models.rotary import Rotation, rotation
from sd_tpu.models.transformer_blocks import (
    EPS,
    JOINT_COLUMNS,
    JOINT_ROWS,
    AdaLayerNormContinuous,
    JointAttention,
    Modulation,
    Modulations,
)


class References(NamedTuple):
    """Tokens of reference pictures, which are filled up to R of them.

    Attributes:
        latents: [B, R, in_channels].
        positions: [B, R, 4] int32.
        counts: [B] int32 from 0 to R, how many tokens there are, the first ones. The others do not
            matter.
    """

    latents: Float[Array, "b r c"]
    positions: Int[Array, "b r 4"]
    counts: Int[Array, " b"]


class Flux2Transformer2DModel(nnx.Module):
    """A network that predicts the velocity of latents at a timestep for a text."""

    def __init__(self, config: Flux2TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, outputs = config.width, config.out_channels or config.in_channels
        embedding = TimestepEmbedding(config.timestep_guidance_channels, width, bias=False, **layer)
        self.time_guidance_embed = nnx.Dict({"timestep_embedder": embedding})
        self.double_stream_modulation_img = Modulations(width, 2, bias=False, **layer)
        self.double_stream_modulation_txt = Modulations(width, 2, bias=False, **layer)
        self.single_stream_modulation = Modulations(width, 1, bias=False, **layer)
        self.x_embedder = linear(config.in_channels, width, bias=False, **layer)
        self.context_embedder = linear(config.joint_attention_dim, width, bias=False, **layer)
        self.transformer_blocks = nnx.List(
            [DoubleBlock(config, **layer) for _ in range(config.num_layers)]
        )
        self.single_transformer_blocks = nnx.List(
            [SingleBlock(config, **layer) for _ in range(config.num_single_layers)]
        )
        self.norm_out = AdaLayerNormContinuous(width, bias=False, **layer)
        self.proj_out = linear(width, outputs, bias=False, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        width, inside = self.config.width, self.config.feed_forward_dim
        fed, single = r"transformer_blocks\.\d+\.ff(_context)?", r"single_transformer_blocks\.\d+"
        return TensorParallelPlan(
            heads=(self.config.num_attention_heads,),
            columns={
                JOINT_COLUMNS: (),
                rf"{fed}\.linear_in": (inside, inside),
                rf"{single}\.attn\.to_qkv_mlp_proj": (width, width, width, inside, inside),
            },
            rows={
                JOINT_ROWS: (),
                rf"{fed}\.linear_out": (),
                rf"{single}\.attn\.to_out": (width, inside),
            },
        )

    def __call__(
        self,
        x: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b t d"],
        references: References | None = None,
    ) -> Float[Array, "b h w c_out"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            x: latents [B, h, w, in_channels], in patches and whitened: each position is a token.
            timesteps: [B] from 0 to 1000, fractions allowed. They are not multiplied in here, as
                they are in diffusers' network, which takes 0 to 1.
            text: [B, T, joint_attention_dim] text embeddings, all attended to.
            references: tokens of reference pictures, or None where there are none.

        Returns:
            [B, h, w, out_channels] float32.
        """
        batch, height, width, channels = x.shape
        words = text.shape[1]
        time = timestep_encoding(timesteps, self.config.timestep_guidance_channels)
        embedded = self.time_guidance_embed["timestep_embedder"](time.astype(self.dtype))
        condition = nnx.silu(embedded)
        of_picture = self.double_stream_modulation_img(condition)
        of_text = self.double_stream_modulation_txt(condition)
        (of_tokens,) = self.single_stream_modulation(condition)

        positions = jnp.concatenate([_text_positions(words), picture_positions(height, width)])[
            None
        ]
        latents, keys = x.reshape(batch, height * width, channels), None
        if references is not None:
            everywhere = jnp.broadcast_to(positions, (batch, *positions.shape[1:]))
            positions = jnp.concatenate([everywhere, references.positions], axis=1)
            latents = jnp.concatenate([latents, references.latents.astype(x.dtype)], axis=1)
            keys = words + height * width + references.counts
        by = rotation(positions, self.config.axes_dims_rope, self.config.rope_theta)
        picture = self.x_embedder(latents.astype(self.dtype))
        context = self.context_embedder(text.astype(self.dtype))
        for block in self.transformer_blocks:
            picture, context = block(picture, context, of_picture, of_text, by, keys)
        tokens = jnp.concatenate([context, picture], axis=1)
        for block in self.single_transformer_blocks:
            tokens = block(tokens, of_tokens, by, keys)
        drawn = tokens[:, words : words + height * width]
        out = self.proj_out(self.norm_out(drawn, condition))
        return out.astype(jnp.float32).reshape(batch, height, width, -1)


def _text_positions(count: int) -> jax.Array:
    """Return positions of a text's tokens: [T, 4] int32."""
    return jnp.pad(jnp.arange(count, dtype=jnp.int32)[:, None], ((0, 0), (3, 0)))


def picture_positions(height: int, width: int, time: int = 0) -> np.ndarray:
    """Return positions of a picture's tokens, row by row: [height * width, 4] int32."""
    grid = np.indices((1, height, width, 1), np.int32).reshape(4, -1).T
    return grid + np.array([time, 0, 0, 0], np.int32)


class DoubleBlock(nnx.Module):
    """Joint attention of picture and text, and a feed-forward layer for either."""

    def __init__(self, config: Flux2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.attn = JointAttention(
            config.width, config.num_attention_heads, EPS, bias=False, **layer
        )
        self.ff = FeedForward(config, **layer)
        self.ff_context = FeedForward(config, **layer)

    def __call__(
        self,
        x: jax.Array,
        text: jax.Array,
        of_picture: list[Modulation],
        of_text: list[Modulation],
        by: Rotation,
        keys: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, N, width], text [B, T, width], by [1 or B, T + N, pairs] -> like x, like text."""
        (joint, feed), (joint_text, feed_text) = of_picture, of_text
        attended, attended_text = self.attn(joint.norm(x), joint_text.norm(text), by, keys)
        x = x + joint.gated(attended)
        x = x + feed.gated(self.ff(feed.norm(x)))
        text = text + joint_text.gated(attended_text)
        text = text + feed_text.gated(self.ff_context(feed_text.norm(text)))
        return x, text


class FeedForward(nnx.Module):
    """SwiGLU and a dense layer."""

    def __init__(self, config: Flux2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.linear_in = linear(config.width, 2 * config.feed_forward_dim, **layer)
        self.linear_out = linear(config.feed_forward_dim, config.width, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> the same."""
        return by_rows(
            lambda x: self.linear_out(swiglu(*jnp.split(self.linear_in(x), 2, axis=-1))),
            x,
            whole=self.linear_in.by_picture,
        )


class SingleBlock(nnx.Module):
    """Attention of all tokens to all, and a feed-forward layer beside it."""

    def __init__(self, config: Flux2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        self.attn = ParallelAttention(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, modulation: Modulation, by: Rotation, keys: jax.Array | None
    ) -> jax.Array:
        """x [B, N, width], by [1 or B, N, pairs], keys [B] or None for all -> like x."""
        return x + modulation.gated(self.attn(modulation.norm(x), by, keys))


class ParallelAttention(nnx.Module):
    """Attention and a feed-forward layer that share one dense layer before them and one after
    (Dehghani et al. 2023, arXiv:2302.05442)."""

    def __init__(self, config: Flux2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, inside = config.width, config.feed_forward_dim
        self._all_heads = config.num_attention_heads
        self.to_qkv_mlp_proj = linear(width, 3 * width + 2 * inside, bias=False, **layer)
        self.norm_q = RMSNorm(config.attention_head_dim, EPS, **layer)
        self.norm_k = RMSNorm(config.attention_head_dim, EPS, **layer)
        self.to_out = linear(width + inside, width, bias=False, **layer)

    def __call__(self, x: jax.Array, by: Rotation, keys: jax.Array | None) -> jax.Array:
        """x [B, N, width], by [1 or B, N, pairs], keys [B] or None for all -> like x."""
        width, heads = map(self.to_qkv_mlp_proj.share_of, (x.shape[-1], self._all_heads))
        ends = [number * width for number in (1, 2, 3)]
        q, k, v, inside = jnp.split(self.to_qkv_mlp_proj(x), ends, axis=-1)
        q, k = prepare_heads(q, heads, self.norm_q, by), prepare_heads(k, heads, self.norm_k, by)
        attended = attention(q, k, v, heads, keys=keys)
        fed = swiglu(*jnp.split(inside, 2, axis=-1))
        return self.to_out(jnp.concatenate([attended, fed], axis=-1))
