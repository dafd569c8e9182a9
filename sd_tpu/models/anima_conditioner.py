"""Anima's text conditioner (CircleStone Labs 2026): learned embeddings of T5's tokens attend to
each other and to the states of a language model of the same text."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sd_tpu.checkpoint.config import AnimaConditionerConfig
from sd_tpu.models.attention import attention
from sd_tpu.models.heads import prepare_heads
from sd_tpu.models.layers import RMSNorm, gelu, linear
from sd_tpu.models.rotary import Rotation, text_rotation
from sd_tpu.models.transformer_blocks import EPS

THETA = 10000.0  # of the positions of both texts


class AnimaTextConditioner(nnx.Module):
    """Token ids of T5 and states of a language model -> text embeddings."""

    def __init__(self, config: AnimaConditionerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.model_dim
        self.embed = nnx.Embed(
            config.target_vocab_size, width, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, **layer) for _ in range(config.num_layers)])
        self.out_proj = linear(width, width, **layer)
        self.norm = RMSNorm(width, EPS, **layer)

    def __call__(
        self,
        ids: Int[Array, "b l"],
        lengths: Int[Array, " b"],
        states: Float[Array, "b t d"],
        state_lengths: Int[Array, " b"],
    ) -> Float[Array, "b l width"]:
        """Embed a batch of texts.

        Args:
            ids: [B, L] int32 of T5's tokens.
            lengths: [B] int32 from 1 on, how many of them are the text's.
            states: [B, T, source_dim] of a language model's tokens.
            state_lengths: [B] int32, how many of them are the text's; 0 is as one of zeros.

        Returns:
            [B, L, model_dim], zeros beyond the text.
        """
        size = self.config.model_dim // self.config.num_attention_heads
        by, by_state = (
            Rotation(*(table[None] for table in text_rotation(count, size, THETA)))
            for count in (ids.shape[1], states.shape[1])
        )
        states = _kept(states, state_lengths)
        keys = jnp.maximum(state_lengths, 1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, by, lengths, states, by_state, keys)
        return _kept(self.norm(self.out_proj(x)), lengths)


def _kept(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """x [B, N, C], zero from lengths [B] on."""
    return jnp.where(jnp.arange(x.shape[1])[:, None] < lengths[:, None, None], x, 0)


class Block(nnx.Module):
    """Self-attention, attention to states and a feed-forward layer, each normed first and added to
    its input."""

    def __init__(self, config: AnimaConditionerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, heads = config.model_dim, config.num_attention_heads
        self.norm_self_attn, self.norm_cross_attn, self.norm_mlp = (
            RMSNorm(width, EPS, **layer) for _ in range(3)
        )
        self.self_attn = Attention(width, width, heads, **layer)
        self.cross_attn = Attention(width, config.source_dim, heads, **layer)
        # Checkpoints number the layers of a PyTorch Sequential; its number 1 is a GELU.
        self.mlp = nnx.Dict(
            {
                "0": linear(width, config.feed_forward_dim, **layer),
                "2": linear(config.feed_forward_dim, width, **layer),
            }
        )

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        lengths: jax.Array,
        states: jax.Array,
        by_state: Rotation,
        keys: jax.Array,
    ) -> jax.Array:
        """x [B, L, width], lengths [B] of it, states [B, T, source_dim], keys [B] of them -> like
        x."""
        normed = self.norm_self_attn(x)
        x = x + self.self_attn(normed, by, normed, by, lengths)
        x = x + self.cross_attn(self.norm_cross_attn(x), by, states, by_state, keys)
        return x + self.mlp["2"](gelu(self.mlp["0"](self.norm_mlp(x))))


class Attention(nnx.Module):
    """Attention of tokens to those of a context that count, with normed heads."""

    def __init__(self, width: int, context: int, heads: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.heads = heads
        self.q_proj = linear(width, width, bias=False, **layer)
        self.k_proj = linear(context, width, bias=False, **layer)
        self.v_proj = linear(context, width, bias=False, **layer)
        self.o_proj = linear(width, width, bias=False, **layer)
        self.q_norm = RMSNorm(width // heads, EPS, **layer)
        self.k_norm = RMSNorm(width // heads, EPS, **layer)

    def __call__(
        self, x: jax.Array, by: Rotation, context: jax.Array, by_context: Rotation, keys: jax.Array
    ) -> jax.Array:
        """x [B, N, width], context [B, M, context], keys [B] of them -> like x."""
        q = prepare_heads(self.q_proj(x), self.heads, self.q_norm, by, halves=True)
        k = prepare_heads(self.k_proj(context), self.heads, self.k_norm, by_context, halves=True)
        return self.o_proj(attention(q, k, self.v_proj(context), self.heads, keys=keys))
