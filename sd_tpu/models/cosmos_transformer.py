"""The transformer of Cosmos-Predict2 (NVIDIA 2025, arXiv:2511.00062), as Anima has it: tokens of a
picture attend to each other and to a text, modulated by the time alone through matrices of low
rank."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import CosmosTransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.layers import RMSNorm, gelu, linear, pack, timestep_encoding
from sd_tpu.models.rotary import Rotation, grid_rotation
from sd_tpu.models.transformer_blocks import (
    EPS,
    GELU,
    JOINT_COLUMNS,
    JOINT_ROWS,
    CrossAttention,
    FeedForward,
    HalvesAttention,
    Modulation,
    modulated,
)

PATCH = 2  # latents along a side
HEAD_EPS = 1e-5


class CosmosTransformer3DModel(nnx.Module):
    """A network that predicts the velocity of the latents of one picture at a time for a text."""

    def __init__(self, config: CosmosTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        taken = config.in_channels + config.concat_padding_mask
        self.patch_embed = nnx.Dict({"proj": linear(PATCH**2 * taken, config.width, **layer)})
        self.time_embed = TimeEmbedding(config.width, dtype=dtype, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm_out = LowRankModulation(config, 2, dtype=dtype, rngs=rngs)
        self.proj_out = linear(config.width, PATCH**2 * config.out_channels, **layer)

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        return TensorParallelPlan(
            heads=(self.config.num_attention_heads,),
            columns={JOINT_COLUMNS: ()},
            rows={JOINT_ROWS: ()},
        )

    def __call__(
        self, x: Float[Array, "b h w c"], timesteps: Real[Array, " b"], text: Float[Array, "b l d"]
    ) -> Float[Array, "b h w c_out"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            x: latents [B, h, w, in_channels].
            timesteps: [B] from 0 to 1, all noise.
            text: [B, L, text_embed_dim] text embeddings, all of which count.

        Returns:
            [B, h, w, out_channels] float32.

        Raises:
            ValueError: height or width does not divide into patches, or has more of them than the
                network has positions for.
        """
        config, (batch, height, width, _) = self.config, x.shape
        rows, columns = height // PATCH, width // PATCH
        if height % PATCH or width % PATCH:
            raise ValueError(f"{height}x{width} latents do not divide into patches of {PATCH}.")
        if max(rows, columns) > config.positions:
            raise ValueError(
                f"{height}x{width} latents are too many: this network has positions for "
                f"{config.positions * PATCH}x{config.positions * PATCH}."
            )
        # The mask marks padding; here there is none.
        mask = ((0, 0), (0, 0), (0, 0), (0, int(config.concat_padding_mask)))
        patches = pack(jnp.pad(x.astype(self.dtype), mask)).reshape(batch, rows * columns, -1)
        tokens = self.patch_embed["proj"](patches)
        condition, shared = self.time_embed(timesteps)
        by = grid_rotation((1, rows, columns), config.axes, config.thetas)
        text = text.astype(self.dtype)
        for block in self.transformer_blocks:
            tokens = block(tokens, text, condition, shared, by)
        shift, scale = self.norm_out(condition, shared)
        out = self.proj_out(modulated(tokens, shift, scale)).astype(jnp.float32)
        out = out.reshape(batch, rows, columns, PATCH, PATCH, -1)
        return out.swapaxes(2, 3).reshape(batch, height, width, -1)


class TimeEmbedding(nnx.Module):
    """The sinusoids of a timestep, normed, and what two dense layers make of them."""

    def __init__(self, width: int, *, dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.t_embedder = nnx.Dict(
            {
                "linear_1": linear(width, width, **layer),
                "linear_2": linear(width, 3 * width, **layer),
            }
        )
        self.norm = RMSNorm(width, EPS, dtype=dtype, rngs=rngs)

    def __call__(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B] -> the condition [B, width], to which SiLU was applied, and what all modulations
        share [B, 3 width]."""
        width = self.t_embedder["linear_1"].in_features
        encoded = timestep_encoding(timesteps, width).astype(self.dtype)
        shared = self.t_embedder["linear_2"](nnx.silu(self.t_embedder["linear_1"](encoded)))
        return nnx.silu(self.norm(encoded)), shared


class LowRankModulation(nnx.Module):
    """Numbers that a condition gives a normed layer by two matrices, and those that all share."""

    def __init__(self, config: CosmosTransformerConfig, parts: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.parts = parts
        self.linear_1 = linear(config.width, config.adaln_lora_dim, **layer)
        self.linear_2 = linear(config.adaln_lora_dim, parts * config.width, **layer)

    def __call__(self, condition: jax.Array, shared: jax.Array) -> list[jax.Array]:
        """condition [B, width], shared [B, 3 width] -> shift, scale and, if there is a third part,
        gate, each [B, 1, width]."""
        made = self.linear_2(self.linear_1(condition))
        return jnp.split((made + shared[:, : made.shape[1]])[:, None], self.parts, axis=-1)


class Block(nnx.Module):
    """Self-attention, attention to the text and a feed-forward layer, each normed and modulated."""

    def __init__(self, config: CosmosTransformerConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        heads: dict[str, Any] = dict(bias=False, **layer)
        width, count = config.width, config.num_attention_heads
        self.norm1, self.norm2, self.norm3 = (
            LowRankModulation(config, 3, **layer) for _ in range(3)
        )
        self.attn1 = HalvesAttention(width, count, HEAD_EPS, **heads)
        self.attn2 = CrossAttention(width, count, HEAD_EPS, context=config.text_embed_dim, **heads)
        self.ff = FeedForward(width, partial(GELU, form=gelu, bias=False), **heads)

    def __call__(
        self, x: jax.Array, text: jax.Array, condition: jax.Array, shared: jax.Array, by: Rotation
    ) -> jax.Array:
        """x [B, N, width], text [B, L, text_embed_dim], condition and shared as the time's, by [1,
        N, pairs] -> like x."""
        own, cross, feed = (
            Modulation(*norm(condition, shared)) for norm in (self.norm1, self.norm2, self.norm3)
        )
        x = x + own.gated(self.attn1(own.norm(x), by))
        x = x + cross.gated(self.attn2(cross.norm(x), text))
        return x + feed.gated(self.ff(feed.norm(x)))
