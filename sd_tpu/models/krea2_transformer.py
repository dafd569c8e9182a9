"""The transformer of Krea 2 (Krea 2026): states of many of a language model's layers are fused into
one text, which passes all layers as one sequence with the picture.

Prompts of different lengths share a program: how many tokens are the prompt's is data, and each row
is what it would be alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Real

from sd_tpu.checkpoint.config import Krea2TransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import (
    TimestepEmbedding,
    ZeroCentredRMSNorm,
    gelu_tanh,
    linear,
    pack,
    swiglu,
    timestep_encoding,
    unpack,
)
from sd_tpu.models.products import by_rows, finished
from sd_tpu.models.rotary import Rotation, rotation
from sd_tpu.models.transformer_blocks import SelfAttention

PATCH = 2  # latents along a side


class Krea2Transformer2DModel(nnx.Module):
    """A network that predicts the velocity of latents at a timestep for a text."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.width
        self.img_in = linear(config.in_channels, width, **layer)
        self.time_embed = TimestepEmbedding(
            config.timestep_embed_dim, width, activation=gelu_tanh, **layer
        )
        self.time_mod_proj = linear(width, 6 * width, **layer)
        self.text_fusion = TextFusion(config, **layer)
        self.txt_in = TextProjection(config, **layer)
        self.transformer_blocks = nnx.List(
            [Block(config, **layer) for _ in range(config.num_layers)]
        )
        self.final_layer = FinalLayer(config, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        config = self.config
        block = r"(transformer_blocks|text_fusion\.(layerwise|refiner)_blocks)\.\d+"
        return TensorParallelPlan(
            heads=(
                config.num_attention_heads,
                config.num_key_value_heads,
                config.text_num_attention_heads,
                config.text_num_key_value_heads,
            ),
            columns={rf"{block}\.(attn\.to_([qkv]|gate)|ff\.(gate|up))": ()},
            rows={rf"{block}\.(attn\.to_out\.0|ff\.down)": ()},
        )

    def __call__(
        self,
        x: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b t d"],
        lengths: Int[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            x: latents [B, h, w, in_channels / 4].
            timesteps: [B] from 0 to 1, all noise.
            text: [B, T, num_text_layers * text_hidden_dim] states of the language model's layers,
                side by side.
            lengths: [B] int32 from 0 to T, how many of them are the text's, the first ones. The
                others do not matter.

        Returns:
            Like x, float32.

        Raises:
            ValueError: height or width does not divide into patches.
        """
        batch, height, width, _ = x.shape
        rows, columns = height // PATCH, width // PATCH
        if height % PATCH or width % PATCH:
            raise ValueError(f"{height}x{width} latents do not divide into patches of {PATCH}.")
        encoded = timestep_encoding(1000 * timesteps, self.config.timestep_embed_dim)
        condition = self.time_embed(encoded.astype(self.dtype))
        shared = self.time_mod_proj(gelu_tanh(condition))

        attended = jnp.maximum(lengths, 1)  # without a text there is nothing to attend to
        words = self.txt_in(self.text_fusion(text.astype(self.dtype), attended))
        patches = pack(x.astype(self.dtype)).reshape(batch, rows * columns, -1)
        # The picture is first, so that what counts is together.
        tokens = jnp.concatenate([self.img_in(patches), words], axis=1)
        by = self._rotation(rows, columns, text.shape[1])
        for block in self.transformer_blocks:
            tokens = block(tokens, shared, by, rows * columns + lengths)
        out = self.final_layer(tokens[:, : rows * columns], condition).astype(jnp.float32)
        return unpack(out.reshape(batch, rows, columns, -1))

    def _rotation(self, rows: int, columns: int, words: int) -> Rotation:
        """Return how a picture's patches turn, by row and column, and a text, which is at 0."""
        grid = jnp.indices((1, rows, columns), jnp.int32).reshape(3, -1).T
        positions = jnp.pad(grid, ((0, words), (0, 0)))[None]
        return rotation(positions, self.config.axes_dims_rope, self.config.rope_theta)


class TextFusion(nnx.Module):
    """A text of one state a token, from those of several layers, which attend to each other."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.layers = config.num_text_layers
        self.layerwise_blocks = nnx.List(
            [TextBlock(config, **layer) for _ in range(config.num_layerwise_text_blocks)]
        )
        self.projector = linear(config.num_text_layers, 1, bias=False, **layer)
        self.refiner_blocks = nnx.List(
            [TextBlock(config, **layer) for _ in range(config.num_refiner_text_blocks)]
        )

    def __call__(self, text: jax.Array, keys: jax.Array) -> jax.Array:
        """text [B, T, layers * text_hidden_dim], keys [B] of the tokens to attend to -> [B, T,
        text_hidden_dim]."""
        batch, count, _ = text.shape
        # An axis of pictures stays in front for layers that tell them apart.
        states = text.reshape(batch, count * self.layers, -1)
        for block in self.layerwise_blocks:
            states = block(states, together=self.layers)
        # The projector of the identity is its weights, with each picture's factors:
        # these, applied to the states, would make numbers as many as the states for every rank.
        each = jnp.broadcast_to(jnp.eye(self.layers, dtype=text.dtype), (batch, *[self.layers] * 2))
        words = jnp.einsum(
            "btld,bl->btd",
            states.reshape(batch, count, self.layers, -1),
            self.projector(each)[..., 0],
            preferred_element_type=jnp.float32,
        ).astype(text.dtype)
        for block in self.refiner_blocks:
            words = block(words, keys=keys)
        return words


class TextProjection(TimestepEmbedding):
    """A norm before two dense layers."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        inputs, layer = config.text_hidden_dim, dict[str, Any](dtype=dtype, rngs=rngs)
        super().__init__(inputs, config.width, activation=gelu_tanh, **layer)
        self.norm = ZeroCentredRMSNorm(inputs, config.norm_eps, **layer)

    def __call__(self, x: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        """x [B, T, text_hidden_dim] -> [B, T, width]."""
        return super().__call__(self.norm(x), condition)


class GatedAttention(SelfAttention):
    """Self-attention in heads that share keys and values, each channel of which a gate scales."""

    norm = ZeroCentredRMSNorm

    def __init__(
        self, channels: int, heads: int, key_heads: int, eps: float, *, dtype, rngs: nnx.Rngs
    ):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        super().__init__(channels, heads, eps, key_heads=key_heads, **layer)
        self.to_gate = linear(channels, channels, **layer)

    def __call__(
        self,
        x: jax.Array,
        by: Rotation | None = None,
        keys: jax.Array | None = None,
        together: int = 0,
    ) -> jax.Array:
        """x [B, N, channels], by and keys as in `SelfAttention` -> like x.

        Of each `together` tokens in a row, each attends to these alone; if it is 0, to all.
        """
        q, k, v = (
            each.reshape(-1, together or x.shape[1], each.shape[-1])
            for each in self.projected(x, by=by)
        )
        attended = attention(q, k, v, self.heads, keys=keys).reshape(*x.shape[:2], -1)
        gate = nnx.sigmoid(self.to_gate(x).astype(jnp.float32)).astype(x.dtype)
        return self.to_out[0](attended * gate)


class FeedForward(nnx.Module):
    """SwiGLU and a dense layer."""

    def __init__(self, channels: int, inside: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.gate = linear(channels, inside, **layer)
        self.up = linear(channels, inside, **layer)
        self.down = linear(inside, channels, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., channels] -> the same."""
        return by_rows(
            lambda x: self.down(finished(swiglu(self.gate(x), self.up(x)))),
            x,
            whole=self.gate.by_picture,
        )


class TextBlock(nnx.Module):
    """Self-attention and a feed-forward layer, each normed first and added to its input."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, heads = config.text_hidden_dim, config.text_num_attention_heads
        key_heads, eps = config.text_num_key_value_heads, config.norm_eps
        self.norm1, self.norm2 = (ZeroCentredRMSNorm(width, eps, **layer) for _ in range(2))
        self.attn = GatedAttention(width, heads, key_heads, eps, **layer)
        self.ff = FeedForward(width, config.text_intermediate_size, **layer)

    def __call__(
        self, x: jax.Array, *, keys: jax.Array | None = None, together: int = 0
    ) -> jax.Array:
        """x [B, N, text_hidden_dim], keys and together as `GatedAttention` has them -> like x."""
        x = x + self.attn(self.norm1(x), None, keys, together)
        return x + self.ff(self.norm2(x))


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, which the time shifts, scales and gates by numbers
    that all blocks share and some of its own."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, eps = config.width, config.norm_eps
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale_shift_table = nnx.Param(jnp.zeros((6, width), dtype))
        self.norm1, self.norm2 = (ZeroCentredRMSNorm(width, eps, **layer) for _ in range(2))
        self.attn = GatedAttention(width, heads, key_heads, eps, **layer)
        self.ff = FeedForward(width, config.intermediate_size, **layer)

    def __call__(self, x: jax.Array, shared: jax.Array, by: Rotation, keys: jax.Array) -> jax.Array:
        """x [B, N, width], shared [B, 6 width], by [1, N, pairs], keys [B] of the tokens to attend
        to -> like x."""
        table = self.scale_shift_table[...]
        made = shared.reshape(len(shared), *table.shape) + table
        scale, shift, gate, feed_scale, feed_shift, feed_gate = jnp.split(made, 6, axis=1)
        x = x + gate * finished(self.attn((1 + scale) * self.norm1(x) + shift, by, keys))
        return x + feed_gate * finished(self.ff((1 + feed_scale) * self.norm2(x) + feed_shift))


class FinalLayer(nnx.Module):
    """A norm that the time scales and shifts, and the patches."""

    def __init__(self, config: Krea2TransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.scale_shift_table = nnx.Param(jnp.zeros((2, config.width), dtype))
        self.norm = ZeroCentredRMSNorm(config.width, config.norm_eps, **layer)
        self.linear = linear(config.width, config.in_channels, **layer)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [B, N, width], condition [B, width] -> [B, N, in_channels]."""
        scale, shift = jnp.split(condition[:, None] + self.scale_shift_table[...], 2, axis=1)
        return self.linear((1 + scale) * self.norm(x) + shift)
