"""The transformer of Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): tokens of
the text and of the picture have weights of their own and attend to each other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import SD3TransformerConfig
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import Heads, conv, head_norm, layer_norm, linear, normed_by_head
from sd_tpu.models.products import by_rows
from sd_tpu.models.unet import TimestepEmbedding, timestep_encoding

EPS = 1e-6  # of every norm
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
        time = timestep_encoding(timesteps, SINUSOIDS, flip_sin_to_cos=True, freq_shift=0)
        return self.timestep_embedder(time.astype(pooled.dtype)) + self.text_embedder(pooled)


class JointTransformerBlock(nnx.Module):
    """Joint attention and feed-forward layers, in some blocks with self-attention of the picture
    beside the former; the last one has no use for the text afterwards."""

    def __init__(self, config: SD3TransformerConfig, number: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, last = config.width, number == config.num_layers - 1
        dual = number in config.dual_attention_layers
        self.norm1 = AdaLayerNormZero(width, 3 if dual else 2, **layer)
        self.attn = JointAttention(config, last=last, **layer)
        if dual:
            self.attn2 = SelfAttention(*_heads(config), **layer)
        self.ff = FeedForward(width, **layer)
        if last:
            self.norm1_context = AdaLayerNormContinuous(width, **layer)
        else:
            self.norm1_context = AdaLayerNormZero(width, 2, **layer)
            self.ff_context = FeedForward(width, **layer)

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


class Modulation(NamedTuple):
    """Shift, scale and gate that a condition gives a normed layer, each [B, 1, width]."""

    shift: jax.Array
    scale: jax.Array
    gate: jax.Array

    def norm(self, x: jax.Array) -> jax.Array:
        """Return the layer's input: x [B, N, width] -> like x."""
        return _modulated(x, self.shift, self.scale)


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return layer_norm(x, EPS, 1 + scale.astype(jnp.float32), shift)


class AdaLayerNormZero(nnx.Module):
    """The modulations of some layers (adaLN-Zero, Peebles and Xie 2022, arXiv:2212.09748)."""

    def __init__(self, width: int, layers: int, *, dtype, rngs: nnx.Rngs):
        self.layers = layers
        self.linear = linear(width, 3 * layers * width, dtype=dtype, rngs=rngs)

    def __call__(self, condition: jax.Array) -> list[Modulation]:
        """Condition [B, width] -> those of attention, feed-forward and, if any, more attention."""
        parts = jnp.split(self.linear(condition)[:, None], 3 * self.layers, axis=-1)
        return [Modulation(*parts[first : first + 3]) for first in range(0, len(parts), 3)]


class AdaLayerNormContinuous(nnx.Module):
    """A layer norm that is scaled and shifted as a condition says."""

    def __init__(self, width: int, *, dtype, rngs: nnx.Rngs):
        self.linear = linear(width, 2 * width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [B, N, width], condition [B, width] -> like x."""
        scale, shift = jnp.split(self.linear(condition)[:, None], 2, axis=-1)
        return _modulated(x, shift, scale)


def _heads(config: SD3TransformerConfig) -> tuple[int, int, float | None]:
    """Return channels and heads of attention, and eps of the heads' norms if they are normed."""
    return config.width, config.num_attention_heads, EPS if config.qk_norm else None


class SelfAttention(Heads):
    """Attention of the picture to itself."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, N, width] -> like x."""
        return self.to_out[0](attention(*self.projected(x), self.heads))


class JointAttention(Heads):
    """Attention of picture and text to both, each with projections of its own."""

    def __init__(self, config: SD3TransformerConfig, *, last: bool, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width, heads, eps = _heads(config)
        super().__init__(width, heads, eps, **layer)
        self.add_q_proj = linear(width, width, **layer)
        self.add_k_proj = linear(width, width, **layer)
        self.add_v_proj = linear(width, width, **layer)
        if not last:
            self.to_add_out = linear(width, width, **layer)
        self.norm_added_q = head_norm(config.attention_head_dim, eps, **layer)
        self.norm_added_k = head_norm(config.attention_head_dim, eps, **layer)

    def __call__(self, x: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, N, width], text [B, L, width] -> like x, like text.

        The latter is not projected in the last block, where nothing follows for it.
        """
        added = (
            normed_by_head(self.norm_added_q, self.add_q_proj(text), self.heads),
            normed_by_head(self.norm_added_k, self.add_k_proj(text), self.heads),
            self.add_v_proj(text),
        )
        pairs = zip(self.projected(x), added, strict=True)
        q, k, v = (jnp.concatenate(pair, axis=1) for pair in pairs)
        attended, rest = jnp.split(attention(q, k, v, self.heads), [x.shape[1]], axis=1)
        if hasattr(self, "to_add_out"):
            rest = self.to_add_out(rest)
        return self.to_out[0](attended), rest


class FeedForward(nnx.Module):
    """Two dense layers around a GELU, with four times the channels inside."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        # Checkpoints number the layers of a PyTorch Sequential; its number 1 is a dropout.
        self.net = nnx.Dict(
            {
                "0": GELU(channels, 4 * channels, dtype=dtype, rngs=rngs),
                "2": linear(4 * channels, channels, dtype=dtype, rngs=rngs),
            }
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        return by_rows(lambda x: self.net["2"](self.net["0"](x)), x)


class GELU(nnx.Module):
    """A dense layer and the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

    def __init__(self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
        self.proj = linear(inputs, outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        x = self.proj(x)
        return nnx.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
