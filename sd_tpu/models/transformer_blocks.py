"""Parts of transformers: conditions and modulations by them, attention with heads that may be
normed and turned by positions, feed-forward layers, and a block of these for text and picture."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.models.attention import attention
from sd_tpu.models.heads import prepare_heads
from sd_tpu.models.layers import (
    RMSNorm,
    TimestepEmbedding,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    timestep_encoding,
)
from sd_tpu.models.products import by_rows, finished
from sd_tpu.models.rotary import Rotation

EPS = 1e-6  # of the norms of what is modulated, and of most heads
SINUSOIDS = 256  # of a timestep, or of a guidance scale


class TimestepTextEmbedding(nnx.Module):
    """A timestep, a pooled text and, with `guidance`, a guidance scale, each through two dense
    layers, added."""

    def __init__(self, width: int, pooled: int, *, guidance: bool = False, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.timestep_embedder = TimestepEmbedding(SINUSOIDS, width, **layer)
        if guidance:
            self.guidance_embedder = TimestepEmbedding(SINUSOIDS, width, **layer)
        self.text_embedder = TimestepEmbedding(pooled, width, **layer)

    def __call__(
        self, timesteps: jax.Array, pooled: jax.Array, guidance: jax.Array | None = None
    ) -> jax.Array:
        """timesteps [B], pooled [B, P], guidance [B] or None -> [B, width]."""

        def encoded(numbers: jax.Array) -> jax.Array:
            return timestep_encoding(numbers, SINUSOIDS).astype(pooled.dtype)

        condition = self.timestep_embedder(encoded(timesteps))
        if guidance is not None:
            # Its sinusoids are those of a timestep of a thousand times as much.
            condition = condition + self.guidance_embedder(encoded(1000 * guidance))
        return condition + self.text_embedder(pooled)


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalize x [B, N, width], times 1 + scale, plus shift, each [B, 1, width]: like x."""
    return layer_norm(x, EPS, 1 + scale.astype(jnp.float32), shift)


class Modulation(NamedTuple):
    """Shift, scale and gate that a condition gives a normed layer, each [B, 1, width]."""

    shift: jax.Array
    scale: jax.Array
    gate: jax.Array

    def norm(self, x: jax.Array) -> jax.Array:
        """Return the layer's input: x [B, N, width] -> like x."""
        return modulated(x, self.shift, self.scale)

    def gated(self, y: jax.Array) -> jax.Array:
        """Return what the layer's output y [B, N, width] adds to what it was given: like y."""
        return self.gate * finished(y)


class Modulations(nnx.Module):
    """The modulations of some layers (adaLN-Zero, Peebles and Xie 2022, arXiv:2212.09748)."""

    def __init__(self, width: int, layers: int, *, bias: bool = True, dtype, rngs: nnx.Rngs):
        self.layers = layers
        self.linear = linear(width, 3 * layers * width, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, condition: jax.Array) -> list[Modulation]:
        """Condition [B, width] -> those of attention, feed-forward and, if any, more attention."""
        parts = jnp.split(self.linear(condition)[:, None], 3 * self.layers, axis=-1)
        return [Modulation(*parts[first : first + 3]) for first in range(0, len(parts), 3)]


class AdaLayerNormContinuous(nnx.Module):
    """A layer norm that is scaled and shifted as a condition says."""

    def __init__(self, width: int, *, bias: bool = True, dtype, rngs: nnx.Rngs):
        self.linear = linear(width, 2 * width, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [B, N, width], condition [B, width] -> like x."""
        scale, shift = jnp.split(self.linear(condition)[:, None], 2, axis=-1)
        return modulated(x, shift, scale)


class Heads(nnx.Module):
    """Queries of tokens, keys and values of the same or of others, which have as many channels or
    `context`, in as many heads or `key_heads`; queries and keys are normed by head with `norm_eps`
    unless it is None (Henry et al. 2020, arXiv:2010.04245)."""

    norm: type[RMSNorm] = RMSNorm  # of queries and keys
    halves: bool = False  # which channels of a head turn together, as `rotate_pairs` has it

    def __init__(
        self,
        channels: int,
        heads: int,
        norm_eps: float | None,
        *,
        context: int | None = None,
        key_heads: int | None = None,
        bias: bool = True,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self._all_heads, self._all_key_heads = heads, key_heads or heads
        size = channels // heads
        keys = size * self._all_key_heads
        self.to_q = linear(channels, channels, bias=bias, **layer)
        self.to_k = linear(context or channels, keys, bias=bias, **layer)
        self.to_v = linear(context or channels, keys, bias=bias, **layer)
        self.norm_q = head_norm(size, norm_eps, self.norm, **layer)
        self.norm_k = head_norm(size, norm_eps, self.norm, **layer)

    @property
    def heads(self) -> int:
        """Heads on this chip."""
        return self.to_q.share_of(self._all_heads)

    def projected(
        self, x: jax.Array, context: jax.Array | None = None, by: Rotation | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, N, channels], context [B, M, context] (x itself if None) -> q [B, N, channels], k
        and v [B, M, channels], or of the heads of keys, of the heads on this chip; q and k turned
        by their positions, if `by` [1 or B, N, pairs] says how."""
        context = x if context is None else context
        key_heads = self.to_k.share_of(self._all_key_heads)
        q = prepare_heads(self.to_q(x), self.heads, self.norm_q, by, halves=self.halves)
        k = prepare_heads(self.to_k(context), key_heads, self.norm_k, by, halves=self.halves)
        return q, k, self.to_v(context)


class ProjectedHeads(Heads):
    """Heads with a projection of what they attend to."""

    def __init__(
        self,
        channels: int,
        heads: int,
        norm_eps: float | None,
        *,
        context: int | None = None,
        key_heads: int | None = None,
        bias: bool = True,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(bias=bias, dtype=dtype, rngs=rngs)
        super().__init__(channels, heads, norm_eps, context=context, key_heads=key_heads, **layer)
        self.to_out = nnx.List([linear(channels, channels, **layer)])


def head_norm(
    size: int, eps: float | None, norm: type[RMSNorm] = RMSNorm, **layer: Any
) -> RMSNorm | None:
    """Return a norm of heads of `size` channels, or None if eps is."""
    return None if eps is None else norm(size, eps, **layer)


class SelfAttention(ProjectedHeads):
    """Attention of tokens to each other, or to those of them that count."""

    def __call__(
        self, x: jax.Array, by: Rotation | None = None, keys: jax.Array | None = None
    ) -> jax.Array:
        """x [B, N, channels], keys [B] or None for all -> like x."""
        return self.to_out[0](attention(*self.projected(x, by=by), self.heads, keys=keys))


class HalvesAttention(SelfAttention):
    """Self-attention of heads whose channels i and i + size / 2 turn together."""

    halves = True


class CrossAttention(ProjectedHeads):
    """Attention of tokens to others."""

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """x [B, N, channels], context [B, M, context] -> like x."""
        return self.to_out[0](attention(*self.projected(x, context), self.heads))


class JointAttention(ProjectedHeads):
    """Attention of picture and text to both, each with projections of its own."""

    def __init__(
        self,
        channels: int,
        heads: int,
        norm_eps: float | None,
        *,
        last: bool = False,
        bias: bool = True,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        super().__init__(channels, heads, norm_eps, bias=bias, **layer)
        self.add_q_proj = linear(channels, channels, bias=bias, **layer)
        self.add_k_proj = linear(channels, channels, bias=bias, **layer)
        self.add_v_proj = linear(channels, channels, bias=bias, **layer)
        if not last:
            self.to_add_out = linear(channels, channels, bias=bias, **layer)
        self.norm_added_q = head_norm(channels // heads, norm_eps, **layer)
        self.norm_added_k = head_norm(channels // heads, norm_eps, **layer)

    def __call__(
        self,
        x: jax.Array,
        text: jax.Array,
        by: Rotation | None = None,
        keys: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, N, channels], text [B, L, channels], by [1 or B, L + N, pairs] -> like x and text.

        The text is first where positions count, and `keys` [B] counts from there. It is not
        projected in the last block, where nothing follows for it.
        """
        by_text = by_picture = None
        if by is not None:
            ends = [text.shape[1]]
            by_text, by_picture = map(Rotation, *(jnp.split(each, ends, axis=1) for each in by))
        added = (
            prepare_heads(self.add_q_proj(text), self.heads, self.norm_added_q, by_text),
            prepare_heads(self.add_k_proj(text), self.heads, self.norm_added_k, by_text),
            self.add_v_proj(text),
        )
        # Sums depend on the order: as in diffusers, the text is first where positions count.
        order = 1 if by is None else -1
        first, second = (self.projected(x, by=by_picture), added)[::order]
        q, k, v = (jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True))
        both = attention(q, k, v, self.heads, keys=keys)
        attended, rest = jnp.split(both, [first[0].shape[1]], axis=1)[::order]
        if hasattr(self, "to_add_out"):
            rest = self.to_add_out(rest)
        return self.to_out[0](attended), rest


# Layers of `JointTransformerBlock` and its like that are divided by columns and by rows.
JOINT_COLUMNS = (
    r"transformer_blocks\.\d+\.(attn[12]?\.(to_[qkv]|add_[qkv]_proj)|ff(_context)?\.net\.0\.proj)"
)
JOINT_ROWS = r"transformer_blocks\.\d+\.(attn[12]?\.(to_out\.0|to_add_out)|ff(_context)?\.net\.2)"


class GEGLU(nnx.Module):
    """A dense layer of which one half gates the other (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
        self.proj = linear(inputs, 2 * outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        x, gate = jnp.split(self.proj(x), 2, axis=-1)
        return x * gelu(gate)


class GELU(nnx.Module):
    """A dense layer and a form of GELU."""

    def __init__(
        self, inputs: int, outputs: int, *, form=gelu_tanh, bias: bool = True, dtype, rngs: nnx.Rngs
    ):
        self.form = form
        self.proj = linear(inputs, outputs, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        return self.form(self.proj(x))


class FeedForward(nnx.Module):
    """Two layers with four times the channels inside, the first of them GEGLU or GELU."""

    def __init__(self, channels: int, first=GEGLU, *, bias: bool = True, dtype, rngs: nnx.Rngs):
        # Checkpoints number the layers of a PyTorch Sequential; its number 1 is a dropout.
        self.net = nnx.Dict(
            {
                "0": first(channels, 4 * channels, dtype=dtype, rngs=rngs),
                "2": linear(4 * channels, channels, bias=bias, dtype=dtype, rngs=rngs),
            }
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        last: Any = self.net["2"]
        return by_rows(lambda x: last(self.net["0"](x)), x, whole=last.by_picture)


class JointTransformerBlock(nnx.Module):
    """Joint attention and feed-forward layers of picture and text, each with weights of its own, in
    a `dual` block with self-attention of the picture beside the former; after the `last` one
    nothing follows for the text."""

    def __init__(
        self,
        width: int,
        heads: int,
        norm_eps: float | None,
        *,
        dual: bool = False,
        last: bool = False,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm1 = Modulations(width, 3 if dual else 2, **layer)
        self.attn = JointAttention(width, heads, norm_eps, last=last, **layer)
        if dual:
            self.attn2 = SelfAttention(width, heads, norm_eps, **layer)
        self.ff = FeedForward(width, GELU, **layer)
        if last:
            self.norm1_context = AdaLayerNormContinuous(width, **layer)
        else:
            self.norm1_context = Modulations(width, 2, **layer)
            self.ff_context = FeedForward(width, GELU, **layer)

    def __call__(
        self, x: jax.Array, text: jax.Array, condition: jax.Array, by: Rotation | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, N, width], text [B, L, width], condition [B, width], by [1, L + N, pairs] -> like
        x, like text."""
        joint, feed, *dual = self.norm1(condition)
        if isinstance(self.norm1_context, AdaLayerNormContinuous):
            attended, _ = self.attn(joint.norm(x), self.norm1_context(text, condition), by)
        else:
            joint_text, feed_text = self.norm1_context(condition)
            attended, attended_text = self.attn(joint.norm(x), joint_text.norm(text), by)
            text = text + joint_text.gated(attended_text)
            text = text + feed_text.gated(self.ff_context(feed_text.norm(text)))
        change = joint.gated(attended)
        for alone in dual:
            change += alone.gated(self.attn2(alone.norm(x)))
        x = x + change
        return x + feed.gated(self.ff(feed.norm(x))), text
