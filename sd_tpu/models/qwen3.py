"""Qwen3 (Yang et al. 2025, arXiv:2505.09388) as a text encoder: a causal transformer whose states
after some of its layers are taken."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sd_tpu.checkpoint.config import Qwen3Config
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.layers import RMSNorm, linear
from sd_tpu.models.rotary import Rotation, rotate_halves, text_rotation


class Qwen3Model(nnx.Module):
    """Token ids -> states. No token sees those after it, so padding at the end changes nothing."""

    def __init__(
        self, config: Qwen3Config, *, layers: int | None = None, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        """Make the layers and the final norm.

        Args:
            config: of them all.
            layers: how many of the first layers to make, without the norm; by default all.
            dtype: of the parameters.
            rngs: of their initial values.
        """
        self.config = config
        count = config.num_hidden_layers if layers is None else layers
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List([DecoderLayer(config, **layer) for _ in range(count)])
        if layers is None:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        layer, config = r"layers\.\d+", self.config
        return TensorParallelPlan(
            heads=(config.num_attention_heads, config.num_key_value_heads),
            columns={rf"{layer}\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)": ()},
            rows={rf"{layer}\.(self_attn\.o_proj|mlp\.down_proj)": ()},
        )

    def __call__(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """ids [B, T] int32 -> normed states after the last layer [B, T, hidden_size]."""
        return self.norm(self.states(ids, [len(self.layers)])[0])

    def states(
        self, ids: Int[Array, "b t"], taken: Sequence[int], lengths: Int[Array, " b"] | None = None
    ) -> list[Float[Array, "b t d"]]:
        """Return the output of some layers, without the final norm.

        Args:
            ids: [B, T] int32.
            taken: after how many layers states are taken, rising.
            lengths: [B] int32, how many tokens of each text no other looks beyond; None is all.

        Returns:
            Of each [B, T, hidden_size], transformers' `hidden_states`, the last of which is normed
            there.
        """
        x = self.embed_tokens(ids)
        by = text_rotation(ids.shape[1], self.config.head_dim, self.config.rope_theta)
        states = []
        for number, layer in enumerate(self.layers[: taken[-1]], 1):
            x = layer(x, by, lengths)
            if number in taken:
                states.append(x)
        return states


class DecoderLayer(nnx.Module):
    """Causal self-attention and a feed-forward layer, each normed first and added to its input."""

    def __init__(self, config: Qwen3Config, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **layer)
        self.self_attn = Attention(config, **layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **layer)
        self.mlp = MLP(config, **layer)

    def __call__(self, x: jax.Array, by: Rotation, lengths: jax.Array | None) -> jax.Array:
        """x [B, T, hidden_size], by [T, head_dim / 2], lengths [B] -> like x."""
        x = x + self.self_attn(self.input_layernorm(x), by, lengths)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with normed heads."""

    def __init__(self, config: Qwen3Config, *, dtype, rngs: nnx.Rngs):
        self.size = config.head_dim
        queries = config.num_attention_heads * self.size
        keys = config.num_key_value_heads * self.size
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.q_proj = linear(config.hidden_size, queries, bias=False, **layer)
        self.k_proj = linear(config.hidden_size, keys, bias=False, **layer)
        self.v_proj = linear(config.hidden_size, keys, bias=False, **layer)
        self.o_proj = linear(queries, config.hidden_size, bias=False, **layer)
        self.q_norm = RMSNorm(self.size, config.rms_norm_eps, **layer)
        self.k_norm = RMSNorm(self.size, config.rms_norm_eps, **layer)

    def __call__(self, x: jax.Array, by: Rotation, lengths: jax.Array | None) -> jax.Array:
        """x [B, T, hidden_size], by [T, head_dim / 2], lengths [B] -> like x."""

        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, self.size)

        q = rotate_halves(self.q_norm(heads(self.q_proj(x))), by)
        k = rotate_halves(self.k_norm(heads(self.k_proj(x))), by)
        out = jax.nn.dot_product_attention(
            q, k, heads(self.v_proj(x)), is_causal=True, key_value_seq_lengths=lengths
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Qwen3Config, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, bias=False, **layer)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, bias=False, **layer)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=False, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden_size] -> the same."""
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))
