"""T5's encoder (Raffel et al. 2019, arXiv:1910.10683), in its versions 1.0 and 1.1.

What is added up from layer to layer is float32: in float16 it would overflow in the largest of
them, for which transformers keeps the last dense layer of each block in float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sd_tpu.checkpoint.config import T5Config
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.layers import RMSNorm, gelu_tanh, linear


class T5EncoderModel(nnx.Module):
    """Token ids -> text embeddings. Every token sees every other, padding too."""

    def __init__(self, config: T5Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.shared = nnx.Embed(
            config.vocab_size, config.d_model, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        attention, fed = "SelfAttention", "DenseReluDense"
        layer = r"encoder\.block\.\d+\.layer\.[01]"
        return TensorParallelPlan(
            heads=(self.config.num_heads,),
            columns={
                rf"{layer}\.({attention}\.([qkv]|relative_attention_bias)|{fed}\.wi(_[01])?)": ()
            },
            rows={rf"{layer}\.({attention}\.o|{fed}\.wo)": ()},
        )

    def __call__(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """ids [B, T] int32 -> [B, T, d_model], in the dtype of the parameters."""
        tokens = self.shared(ids)
        return self.encoder(tokens.astype(jnp.float32)).astype(tokens.dtype)


class Encoder(nnx.Module):
    """A stack of blocks and the final norm. The first block holds the position bias of all."""

    def __init__(self, config: T5Config, *, dtype, rngs: nnx.Rngs):
        self.block = nnx.List(
            [
                Block(config, positions=number == 0, dtype=dtype, rngs=rngs)
                for number in range(config.num_layers)
            ]
        )
        self.final_layer_norm = RMSNorm(
            config.d_model, config.layer_norm_epsilon, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, d_model] float32 -> the same."""
        bias = self.block[0].layer[0].SelfAttention.position_bias(x.shape[1])
        for block in self.block:
            x = block(x, bias)
        return self.final_layer_norm(x)


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, each normed first and added to its input."""

    def __init__(self, config: T5Config, *, positions: bool, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.layer: nnx.List[Any] = nnx.List(
            [
                AttentionLayer(config, positions=positions, **layer),
                FeedForwardLayer(config, **layer),
            ]
        )

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B, T, d_model] float32, bias [1, heads, T, T] float32 -> like x."""
        attention, feed_forward = self.layer
        return feed_forward(attention(x, bias))


class AttentionLayer(nnx.Module):
    """Self-attention, normed first and added to its input."""

    def __init__(self, config: T5Config, *, positions: bool, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.SelfAttention = SelfAttention(config, positions=positions, **layer)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, **layer)

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B, T, d_model] float32, bias [1, heads, T, T] float32 -> like x."""
        return x + self.SelfAttention(self.layer_norm(x), bias)


class FeedForwardLayer(nnx.Module):
    """Dense layers, normed first and added to their input."""

    def __init__(self, config: T5Config, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        gated = config.feed_forward_proj == "gated-gelu"
        self.DenseReluDense = (GatedFeedForward if gated else FeedForward)(config, **layer)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, d_model] float32 -> the same."""
        return x + self.DenseReluDense(self.layer_norm(x))


class SelfAttention(nnx.Module):
    """Multi-head attention whose scores are not scaled, but biased by how far tokens are apart."""

    def __init__(self, config: T5Config, *, positions: bool, dtype, rngs: nnx.Rngs):
        self._all_heads = config.num_heads
        self.max_distance = config.relative_attention_max_distance
        size = config.num_heads * config.d_kv
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.q = linear(config.d_model, size, **layer)
        self.k = linear(config.d_model, size, **layer)
        self.v = linear(config.d_model, size, **layer)
        self.o = linear(size, config.d_model, **layer)
        if positions:
            self.relative_attention_bias = nnx.Embed(
                config.relative_attention_num_buckets,
                config.num_heads,
                dtype=dtype,
                param_dtype=dtype,
                rngs=rngs,
            )

    def position_bias(self, length: int) -> jax.Array:
        """Return what is added to the scores of `length` tokens: [1, heads, T, T] float32."""
        biases = self.relative_attention_bias
        buckets = relative_buckets(length, biases.num_embeddings, self.max_distance)
        return biases(jnp.asarray(buckets)).astype(jnp.float32).transpose(2, 0, 1)[None]

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B, T, d_model], bias [1, heads, T, T] float32 -> [B, T, d_model] float32."""
        heads = self.q.share_of(self._all_heads)
        q, k, v = (layer(x).reshape(*x.shape[:-1], heads, -1) for layer in (self.q, self.k, self.v))
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = product("bqhd,bkhd->bhqk", q, k) + bias
        attended = product("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        return self.o.wide(attended.astype(v.dtype).reshape(*x.shape[:-1], -1))


def relative_buckets(length: int, buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each token as another one sees it: [T, T] int32, by row the other.

    Half of the buckets are for tokens that come after. Of each half, one half has a bucket for
    every distance, the other's widen to `max_distance`, from which on all share the last
    (Raffel et al. 2019, section 2.1). Float32 and its order of operations are transformers'.
    """
    half = buckets // 2
    near = half // 2
    offsets = np.arange(length)[None] - np.arange(length)[:, None]
    distances = np.abs(offsets)
    ratios = np.log(np.maximum(distances, near).astype(np.float32) / np.float32(near))
    widening = ratios / np.float32(np.log(max_distance / near)) * np.float32(half - near)
    far = np.minimum(near + widening.astype(np.int32), half - 1)
    return (half * (offsets > 0) + np.where(distances < near, distances, far)).astype(np.int32)


class FeedForward(nnx.Module):
    """Two dense layers around ReLU, as in T5 1.0."""

    def __init__(self, config: T5Config, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.wi = linear(config.d_model, config.d_ff, **layer)
        self.wo = linear(config.d_ff, config.d_model, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d_model] -> the same in float32."""
        return self.wo.wide(nnx.relu(self.wi(x)))


class GatedFeedForward(nnx.Module):
    """GEGLU (Shazeer 2020, arXiv:2002.05202) and a dense layer, as in T5 1.1."""

    def __init__(self, config: T5Config, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.wi_0 = linear(config.d_model, config.d_ff, **layer)
        self.wi_1 = linear(config.d_model, config.d_ff, **layer)
        self.wo = linear(config.d_ff, config.d_model, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d_model] -> the same in float32."""
        return self.wo.wide(gelu_tanh(self.wi_0(x)) * self.wi_1(x))
