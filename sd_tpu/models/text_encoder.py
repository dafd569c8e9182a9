"""The text half of CLIP (Radford et al. 2021, arXiv:2103.00020), as Stable Diffusion uses it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sd_tpu.checkpoint.config import (
    ProjectedTextEncoderConfig,
    TextEncoderConfig,
    VisionEncoderConfig,
)
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import ACTIVATIONS, LayerNorm, linear


class Learned(NamedTuple):
    """Vectors that take the places of tokens', as textual inversion learns them."""

    vectors: jax.Array  # [V, hidden_size]
    rows: jax.Array  # [B, L] int32: 1 + the row in `vectors`, 0 where the token's own counts


Skip = int | Int[Array, ""]  # layers that are left out at the end; it may be traced


class CLIPTextModel(nnx.Module):
    """Token ids -> text embeddings: a causal transformer and its final norm."""

    def __init__(self, config: TextEncoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.text_model = TextTransformer(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, ids: Int[Array, "b l"], learned: Learned | None = None, skip: Skip = 0
    ) -> Float[Array, "b l d"]:
        """Return the output of the layers but the last `skip`, after the final norm.

        ids [B, L] int32 -> embeddings [B, L, hidden_size].
        """
        return self.text_model(ids, learned, skip)

    def hidden_state(
        self, ids: Int[Array, "b l"], skip: Skip = 1, learned: Learned | None = None
    ) -> Float[Array, "b l d"]:
        """Return the output of the layers but the last `skip`, without the final norm, as for SDXL.

        ids [B, L] int32 -> [B, L, hidden_size].
        """
        return _without_last(self.text_model.hidden_states(ids, learned), skip)

    def pooled(self, ids: Int[Array, "b l"], end_token: int) -> Float[Array, "b d"]:
        """Return the output at the end of each text, after the final norm.

        ids [B, L] int32 -> [B, hidden_size].
        """
        return at_end(self.text_model(ids), ids, end_token)


class CLIPTextModelWithProjection(nnx.Module):
    """Token ids -> text embeddings, and one vector for the whole text."""

    def __init__(self, config: ProjectedTextEncoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.end_token = config.eos_token_id
        self.text_model = TextTransformer(config, dtype=dtype, rngs=rngs)
        self.text_projection = linear(
            config.hidden_size, config.projection_dim, bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, ids: Int[Array, "b l"], skip: Skip = 1, learned: Learned | None = None
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b p"]]:
        """Return the output of the layers but the last `skip`, unnormalized, and the pooled text.

        ids [B, L] int32 -> [B, L, hidden_size], [B, projection_dim].
        """
        hidden = self.text_model.hidden_states(ids, learned)
        last = self.text_model.final_layer_norm(hidden[-1])
        pooled = at_end(last, ids, self.end_token)
        return _without_last(hidden, skip), self.text_projection(pooled)


def at_end(states: jax.Array, ids: Int[Array, "b l"], end_token: int) -> jax.Array:
    """Return the states [B, L, D] of texts at their ends: ids [B, L] int32 -> [B, D]."""
    return states[jnp.arange(len(ids)), end_of_text(ids, end_token)]


def end_of_text(ids: Int[Array, "b l"], end_token: int) -> Int[Array, " b"]:
    """Return the first position of the end token in each text: ids [B, L] int32 -> [B] int32.

    Configs from before transformers 4.31 say wrongly that it is 2: the end is then the highest id.
    """
    return jnp.argmax(ids if end_token == 2 else ids == end_token, axis=-1)


def _without_last(states: list[jax.Array], skip: Skip) -> jax.Array:
    """Return the state without the last `skip` layers; the first where there are fewer."""
    last = len(states) - 1
    if isinstance(skip, int):
        return states[max(last - skip, 0)]
    # One of a stack of them all, the TPU compiler moves twice the bytes of SDXL's encoders
    # (decision 0027).
    chosen = states[0]
    for number, state in enumerate(states[1:], start=1):
        chosen = jnp.where(number == last - skip, state, chosen)
    return chosen


class TextTransformer(nnx.Module):
    """Embeddings, encoder layers and the final norm."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.encoder = Encoder(config, causal=True, dtype=dtype, rngs=rngs)
        self.final_layer_norm = LayerNorm(
            config.hidden_size, config.layer_norm_eps, dtype=dtype, rngs=rngs
        )

    def __call__(self, ids: jax.Array, learned: Learned | None = None, skip: Skip = 0) -> jax.Array:
        """ids [B, L] int32 -> [B, L, hidden_size]."""
        return self.final_layer_norm(_without_last(self.hidden_states(ids, learned), skip))

    def hidden_states(self, ids: jax.Array, learned: Learned | None = None) -> list[jax.Array]:
        """ids [B, L] int32 -> the embeddings and what each layer gives, [B, L, hidden_size]."""
        return self.encoder(self.embeddings(ids, learned))


class Embeddings(nnx.Module):
    """Learned token and position embeddings, added."""

    def __init__(self, config: TextEncoderConfig, *, dtype, rngs: nnx.Rngs):
        embed: dict[str, Any] = dict(
            features=config.hidden_size,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.token_embedding = nnx.Embed(config.vocab_size, **embed)
        self.position_embedding = nnx.Embed(config.max_position_embeddings, **embed)

    def __call__(self, ids: jax.Array, learned: Learned | None = None) -> jax.Array:
        """ids [B, L] int32 -> [B, L, hidden_size]."""
        tokens = self.token_embedding(ids)
        if learned is not None:
            vectors = learned.vectors[learned.rows - 1].astype(tokens.dtype)
            tokens = jnp.where(learned.rows[..., None] > 0, vectors, tokens)
        return tokens + self.position_embedding(jnp.arange(ids.shape[1]))


class Encoder(nnx.Module):
    """A stack of encoder layers, of texts or of pictures."""

    def __init__(
        self,
        config: TextEncoderConfig | VisionEncoderConfig,
        *,
        causal: bool,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.layers = nnx.List(
            [
                EncoderLayer(config, causal=causal, dtype=dtype, rngs=rngs)
                for _ in range(config.num_hidden_layers)
            ]
        )

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """[B, L, C] -> that and what each layer gives, [B, L, C]."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states


class EncoderLayer(nnx.Module):
    """Self-attention and an MLP, each normed first and added to its input."""

    def __init__(
        self,
        config: TextEncoderConfig | VisionEncoderConfig,
        *,
        causal: bool,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(size, eps, **layer)
        self.self_attn = SelfAttention(size, config.num_attention_heads, causal=causal, **layer)
        self.layer_norm2 = LayerNorm(size, eps, **layer)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, C] -> [B, L, C]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SelfAttention(nnx.Module):
    """Multi-head attention with biases, under CLIP's names."""

    def __init__(self, size: int, heads: int, *, causal: bool, dtype, rngs: nnx.Rngs):
        self.heads, self.causal = heads, causal
        self.q_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.k_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.v_proj = linear(size, size, dtype=dtype, rngs=rngs)
        self.out_proj = linear(size, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, C] -> [B, L, C]; where it is causal, position i sees positions up to i."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attention(q, k, v, self.heads, causal=self.causal))


class MLP(nnx.Module):
    """Two dense layers around the config's activation."""

    def __init__(self, size: int, hidden: int, activation: str, *, dtype, rngs: nnx.Rngs):
        self.activation = activation
        self.fc1 = linear(size, hidden, dtype=dtype, rngs=rngs)
        self.fc2 = linear(hidden, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
