"""The text half of CLIP (Radford et al. 2021, arXiv:2103.00020), as Stable Diffusion uses it."""

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.config import TextEncoderConfig
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import ACTIVATIONS, LayerNorm, linear


class CLIPTextModel(nnx.Module):
    """Token ids -> text embeddings: a causal transformer and its final norm."""

    def __init__(self, config: TextEncoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.text_model = TextTransformer(config, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [B, L] int32 -> embeddings [B, L, hidden_size]."""
        return self.text_model(ids)


class TextTransformer(nnx.Module):
    """Embeddings, encoder layers and the final norm."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)
        self.final_layer_norm = LayerNorm(
            config.hidden_size, config.layer_norm_eps, dtype=dtype, rngs=rngs
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [B, L] int32 -> [B, L, hidden_size]."""
        return self.final_layer_norm(self.encoder(self.embeddings(ids)))


class Embeddings(nnx.Module):
    """Learned token and position embeddings, added."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        embed = dict(
            features=config.hidden_size,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.token_embedding = nnx.Embed(config.vocab_size, **embed)
        self.position_embedding = nnx.Embed(config.max_position_embeddings, **embed)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [B, L] int32 -> [B, L, hidden_size]."""
        return self.token_embedding(ids) + self.position_embedding(jnp.arange(ids.shape[1]))


class Encoder(nnx.Module):
    """A stack of encoder layers."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [EncoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, C] -> [B, L, C]."""
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderLayer(nnx.Module):
    """Causal self-attention and an MLP, each normed first and added to its input."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        layer = dict(dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(size, eps, **layer)
        self.self_attn = SelfAttention(size, config.num_attention_heads, **layer)
        self.layer_norm2 = LayerNorm(size, eps, **layer)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, C] -> [B, L, C]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SelfAttention(nnx.Module):
    """Causal multi-head attention with biases, under CLIP's names."""

    def __init__(self, size: int, heads: int, *, dtype, rngs: nnx.Rngs):
        self.heads = heads
        self.q_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.k_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.v_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.out_proj = linear(size, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, C] -> [B, L, C]; position i sees positions up to i."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attention(q, k, v, self.heads, causal=True))


class MLP(nnx.Module):
    """Two dense layers around the config's activation."""

    def __init__(self, size: int, hidden: int, activation: str, *, dtype, rngs: nnx.Rngs):
        self.activation = activation
        self.fc1 = linear(size, hidden, dtype=dtype, rngs=rngs)
        self.fc2 = linear(hidden, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
