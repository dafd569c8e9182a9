"""The transformer of Z-Image and Z-Image-Turbo (Z-Image Team 2025, arXiv:2511.22699): tokens of the
picture and of the text pass a few layers alone, and then all layers as one sequence.

Prompts of different lengths share a program: how many tokens are the prompt's is data, and each row
is what it would be alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Real

from sd_tpu.checkpoint.config import ZImageTransformerConfig
from sd_tpu.checkpoint.division import TensorParallelPlan
from sd_tpu.models.layers import RMSNorm, linear, swiglu, timestep_encoding
from sd_tpu.models.products import by_rows, finished
from sd_tpu.models.rotary import Rotation, rotation
from sd_tpu.models.transformer_blocks import SelfAttention, modulated

PATCH = 2  # latents along a side
PATCHES = f"{PATCH}-1"  # and in time: what layers of patches are called in files
MULTIPLE = 32  # to which tokens of the picture and of the text are filled up
HEAD_EPS = 1e-5
SINUSOIDS, TIME_WIDTH = 256, 1024  # of a timestep


class ZImageTransformer2DModel(nnx.Module):
    """A network that predicts the negated velocity of latents at a timestep for a text."""

    def __init__(self, config: ZImageTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        channels = PATCH**2 * config.in_channels
        self.all_x_embedder = nnx.Dict({PATCHES: linear(channels, config.dim, **layer)})
        self.x_pad_token = nnx.Param(jnp.zeros((1, config.dim), dtype))
        self.noise_refiner = nnx.List(
            [Block(config, **layer) for _ in range(config.n_refiner_layers)]
        )
        self.cap_embedder = nnx.Dict(
            {
                "0": RMSNorm(config.cap_feat_dim, config.norm_eps, **layer),
                "1": linear(config.cap_feat_dim, config.dim, **layer),
            }
        )
        self.cap_pad_token = nnx.Param(jnp.zeros((1, config.dim), dtype))
        self.context_refiner = nnx.List(
            [Block(config, modulated=False, **layer) for _ in range(config.n_refiner_layers)]
        )
        self.t_embedder = TimestepEmbedder(config, **layer)
        self.layers = nnx.List([Block(config, **layer) for _ in range(config.n_layers)])
        self.all_final_layer = nnx.Dict({PATCHES: FinalLayer(config, channels, **layer)})

    @property
    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Rules for its division over chips."""
        block = r"(noise_refiner|context_refiner|layers)\.\d+"
        return TensorParallelPlan(
            heads=(self.config.n_heads,),
            columns={rf"{block}\.(attention\.to_[qkv]|feed_forward\.w[13])": ()},
            rows={rf"{block}\.(attention\.to_out\.0|feed_forward\.w2)": ()},
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
            x: latents [B, h, w, in_channels].
            timesteps: [B] from 0, all noise, to 1.
            text: [B, T, cap_feat_dim] text embeddings.
            lengths: [B] int32 from 0 to T, how many of them are the text's, the first ones. The
                others do not matter.

        Returns:
            [B, h, w, in_channels] float32.

        Raises:
            ValueError: height or width does not divide into patches, T is no multiple of 32, or
                there are more of any than the network has positions for.
        """
        self._check(x, text)
        batch, height, width, _ = x.shape
        grid = height // PATCH, width // PATCH
        condition = self.t_embedder(timesteps * self.config.t_scale)
        filled = lengths + -lengths % MULTIPLE

        patches = x.astype(self.dtype).reshape(batch, grid[0], PATCH, grid[1], PATCH, -1)
        picture = patches.swapaxes(2, 3).reshape(batch, grid[0] * grid[1], -1)
        picture = _filled_up(self.all_x_embedder[PATCHES](picture), self.x_pad_token[...])
        by_patch = self._rotation(_picture_positions(filled + 1, *grid))
        for block in self.noise_refiner:
            picture = block(picture, by_patch, condition=condition)

        words = self.cap_embedder["1"](self.cap_embedder["0"](text.astype(self.dtype)))
        is_text = jnp.arange(text.shape[1]) < lengths[:, None]
        words = jnp.where(is_text[..., None], words, self.cap_pad_token[...])
        by_word = self._rotation(_text_positions(batch, text.shape[1]))
        attended = jnp.maximum(filled, 1)  # without a text there is nothing to attend to
        for block in self.context_refiner:
            words = block(words, by_word, keys=attended)

        tokens = jnp.concatenate([picture, words], axis=1)
        pairs = zip(by_patch, by_word, strict=True)
        by_token = Rotation(*(jnp.concatenate(pair, axis=1) for pair in pairs))
        for block in self.layers:
            tokens = block(tokens, by_token, keys=picture.shape[1] + filled, condition=condition)
        out = self.all_final_layer[PATCHES](tokens[:, : grid[0] * grid[1]], condition)
        out = out.astype(jnp.float32).reshape(batch, *grid, PATCH, PATCH, -1)
        return out.swapaxes(2, 3).reshape(x.shape)

    def _check(self, x: jax.Array, text: jax.Array) -> None:
        (height, width), words = x.shape[1:3], text.shape[1]
        if height % PATCH or width % PATCH:
            raise ValueError(f"{height}x{width} latents do not divide into patches of {PATCH}.")
        if words % MULTIPLE:
            raise ValueError(f"Room for {words} tokens of text should be a multiple of {MULTIPLE}.")
        text_axis, rows, columns = self.config.axes_lens
        if height > rows * PATCH or width > columns * PATCH:
            raise ValueError(
                f"{height}x{width} latents are too large: this network has positions for "
                f"{rows * PATCH}x{columns * PATCH}."
            )
        if words + 1 >= text_axis:  # the picture comes after the text
            raise ValueError(
                f"Room for {words} tokens of text is too much: this network has positions for "
                f"{text_axis - 2}."
            )

    def _rotation(self, positions: jax.Array) -> Rotation:
        return rotation(positions, self.config.axes_dims, self.config.rope_theta)


def _filled_up(tokens: jax.Array, token: jax.Array) -> jax.Array:
    """Fill tokens [B, N, dim] up to a multiple of tokens with copies of one [1, dim]."""
    batch, count, dim = tokens.shape
    fill = jnp.broadcast_to(token, (batch, -count % MULTIPLE, dim))
    return jnp.concatenate([tokens, fill], axis=1)


def _picture_positions(first: jax.Array, height: int, width: int) -> jax.Array:
    """Return positions of patches at `first` [B] along the text's axis, and of what fills them up,
    which is at 0: [B, N, 3] int32."""
    rows, columns = jnp.indices((height, width), jnp.int32).reshape(2, 1, -1)
    after = jnp.broadcast_to(first[:, None], (len(first), height * width))
    positions = jnp.stack(jnp.broadcast_arrays(after, rows, columns), axis=-1)
    return jnp.pad(positions, ((0, 0), (0, -height * width % MULTIPLE), (0, 0)))


def _text_positions(batch: int, count: int) -> jax.Array:
    """Return positions of a text's tokens, from 1 on along their axis: [B, T, 3] int32."""
    along = jnp.broadcast_to(jnp.arange(1, count + 1, dtype=jnp.int32), (batch, count))
    return jnp.pad(along[..., None], ((0, 0), (0, 0), (0, 2)))


class TimestepEmbedder(nnx.Module):
    """Two dense layers on the sinusoids of a timestep."""

    def __init__(self, config: ZImageTransformerConfig, *, dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        self.mlp = nnx.Dict(
            {
                "0": linear(SINUSOIDS, TIME_WIDTH, dtype=dtype, rngs=rngs),
                "2": linear(TIME_WIDTH, config.condition_dim, dtype=dtype, rngs=rngs),
            }
        )

    def __call__(self, timesteps: jax.Array) -> jax.Array:
        """[B] -> [B, condition_dim]."""
        x = timestep_encoding(timesteps, SINUSOIDS)
        return self.mlp["2"](nnx.silu(self.mlp["0"](x.astype(self.dtype))))


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, normed before and after and added to their input;
    a condition scales what they are given and what they add."""

    def __init__(
        self, config: ZImageTransformerConfig, *, modulated: bool = True, dtype, rngs: nnx.Rngs
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        dim, eps = config.dim, config.norm_eps
        self.attention = SelfAttention(
            dim, config.n_heads, HEAD_EPS if config.qk_norm else None, bias=False, **layer
        )
        self.feed_forward = FeedForward(dim, config.feed_forward_dim, **layer)
        self.attention_norm1, self.attention_norm2 = (RMSNorm(dim, eps, **layer) for _ in range(2))
        self.ffn_norm1, self.ffn_norm2 = (RMSNorm(dim, eps, **layer) for _ in range(2))
        if modulated:
            self.adaLN_modulation = nnx.Dict({"0": linear(config.condition_dim, 4 * dim, **layer)})

    def __call__(
        self,
        x: jax.Array,
        by: Rotation,
        *,
        keys: jax.Array | None = None,
        condition: jax.Array | None = None,
    ) -> jax.Array:
        """x [B, N, dim], keys [B] of those to attend to, condition [B, condition_dim] -> like x."""
        scale, gate, feed_scale, feed_gate = self._modulation(condition)
        attended = self.attention(scale * self.attention_norm1(x), by, keys)
        x = x + gate * self.attention_norm2(finished(attended))
        fed = self.feed_forward(feed_scale * self.ffn_norm1(x))
        return x + feed_gate * self.ffn_norm2(finished(fed))

    def _modulation(self, condition: jax.Array | None) -> tuple[jax.Array | int, ...]:
        """Return scale and gate of attention and of the feed-forward layer, each [B, 1, dim]."""
        if condition is None:
            return 1, 1, 1, 1
        parts = jnp.split(self.adaLN_modulation["0"](condition)[:, None], 4, axis=-1)
        scale, gate, feed_scale, feed_gate = parts
        return 1 + scale, jnp.tanh(gate), 1 + feed_scale, jnp.tanh(feed_gate)


class FeedForward(nnx.Module):
    """SwiGLU and a dense layer."""

    def __init__(self, channels: int, inside: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        self.w1 = linear(channels, inside, **layer)
        self.w2 = linear(inside, channels, **layer)
        self.w3 = linear(channels, inside, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., channels] -> the same."""
        return by_rows(
            lambda x: self.w2(finished(swiglu(self.w1(x), self.w3(x)))), x, whole=self.w1.by_picture
        )


class FinalLayer(nnx.Module):
    """A layer norm that a condition scales, and the patches."""

    def __init__(self, config: ZImageTransformerConfig, outputs: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.linear = linear(config.dim, outputs, **layer)
        # Checkpoints number the layers of a PyTorch Sequential; its number 0 is SiLU.
        self.adaLN_modulation = nnx.Dict({"1": linear(config.condition_dim, config.dim, **layer)})

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """x [B, N, dim], condition [B, condition_dim] -> [B, N, outputs]."""
        scale = self.adaLN_modulation["1"](nnx.silu(condition))[:, None]
        return self.linear(modulated(x, jnp.zeros(1), scale))
