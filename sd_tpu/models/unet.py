"""The denoising UNet of Stable Diffusion: 1.x and 2.x (Rombach et al. 2021, arXiv:2112.10752), XL
(Podell et al. 2023, arXiv:2307.01952), smaller ones, and latent consistency models."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import UNetConfig
from sd_tpu.models.layers import (
    Attention,
    Downsample,
    GroupNorm,
    ImagePrompt,
    LayerNorm,
    ResnetBlock,
    TimestepEmbedding,
    Upsample,
    conv,
    linear,
    pointwise,
    timestep_encoding,
)
from sd_tpu.models.platform import row_major
from sd_tpu.models.transformer_blocks import FeedForward

Added = Mapping[str, Any]  # arrays, or trees of them
Control = Sequence[jax.Array]  # added to the outputs of the way down, and last to the middle's


class Context(NamedTuple):
    """The tokens that the pixels of a UNet's maps attend to."""

    text: jax.Array  # [B, L, cross_attention_dim]
    # Of a reference picture: keys and values [B, T, channels] for each transformer block, as
    # `UNetConfig.attending_widths` counts them, and how much they count, [B].
    reference: Sequence[tuple[jax.Array, jax.Array]] | None = None
    scale: jax.Array | None = None


class WayDown(nnx.Module):
    """The part that a UNet and its ControlNets share.

    It is the embedding of a timestep, the blocks down to the coarsest level and the middle one.
    """

    def __init__(
        self, config: UNetConfig, *, token_downsampling: int = 1, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        """Layers with random parameters.

        Args:
            config: of the checkpoint.
            token_downsampling: the self-attention of the finest level that has any takes its keys
                and values from every so many rows and columns only, its queries from all (ToDo,
                Smith et al. 2024, arXiv:2402.13573); 1 is exact (decision 0020).
            dtype: of the parameters and the arithmetic.
            rngs: for the parameters.

        Raises:
            ValueError: the downsampling is no whole number from 1.
        """
        if not isinstance(token_downsampling, int) or token_downsampling < 1:
            raise ValueError(
                f"Token downsampling should be a whole number from 1, not {token_downsampling}."
            )
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        channels = config.block_out_channels
        time_channels = 4 * channels[0]
        steps = _token_steps(config, token_downsampling)

        self.conv_in = conv(config.in_channels, channels[0], **layer)
        self.time_embedding = TimestepEmbedding(
            channels[0], time_channels, config.time_cond_proj_dim, **layer
        )
        if config.addition_embed_type == "text_time":
            self.add_embedding = TimestepEmbedding(
                config.projection_class_embeddings_input_dim or 0, time_channels, **layer
            )

        last = len(channels) - 1
        self.down_blocks = nnx.List()
        for level, kind in enumerate(config.down_block_types):
            widths = [channels[max(0, level - 1)]] + [channels[level]] * (config.layers[level] - 1)
            self.down_blocks.append(
                self._block(
                    kind,
                    level,
                    widths,
                    config.down_depths[level],
                    token_downsampling=steps[level],
                    downsample=level < last,
                    **layer,
                )
            )

        if config.mid_block_type is not None:
            resnets = 2 if "CrossAttn" in config.mid_block_type else 1
            self.mid_block = self._block(
                config.mid_block_type, last, [channels[-1]] * resnets, (config.mid_depth,), **layer
            )

    def _block(self, kind: str, level: int, widths, depths, **rest) -> "Block":
        channels = self.config.block_out_channels
        return Block(
            self.config,
            widths,
            channels[level],
            4 * channels[0],
            heads=self.config.heads[level],
            depths=depths if "CrossAttn" in kind else (),
            **rest,
        )

    def _descend(
        self, x: jax.Array, time: jax.Array, context: Context
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the middle's output, and the maps to skip across, the outermost first.

        x [B, h, w, block_out_channels[0]] is the first of these maps.
        """
        skips = [x]
        for block in self.down_blocks:
            x, outputs = block.down(x, time, context)
            skips += outputs
        if hasattr(self, "mid_block"):
            x, _ = self.mid_block.down(x, time, context)
        return x, skips

    def _conditions(
        self, timesteps: jax.Array, text: jax.Array, added: Added
    ) -> tuple[jax.Array, Context]:
        """Embed timesteps and added conditions [B, 4 * block_out_channels[0]]; wrap the text."""
        config = self.config
        wanted = {
            "text_embeds": config.addition_embed_type,
            "time_ids": config.addition_embed_type,
            "timestep_cond": config.time_cond_proj_dim,
        }
        missing = [name for name, asked in wanted.items() if asked and name not in added]
        if missing:
            raise ValueError(f"This network takes {', '.join(missing)} as well.")
        time = self._encoded(timesteps, config.block_out_channels[0])
        guidance = added["timestep_cond"].astype(self.dtype) if config.time_cond_proj_dim else None
        time = self.time_embedding(time.astype(self.dtype), guidance)
        if config.addition_embed_type == "text_time":
            time += self._added(added["text_embeds"], added["time_ids"])
        return time, Context(text.astype(self.dtype))

    def _added(self, pooled: jax.Array, ids: jax.Array) -> jax.Array:
        """Embed a pooled text [B, P] and numbers [B, N]: [B, 4 * block_out_channels[0]].

        Each number is encoded as a timestep is.
        """
        sizes = self._encoded(ids.reshape(-1), self.config.addition_time_embed_dim or 0)
        sizes = sizes.reshape(len(pooled), -1).astype(self.dtype)
        return self.add_embedding(jnp.concatenate([pooled.astype(self.dtype), sizes], axis=-1))

    def _encoded(self, numbers: jax.Array, size: int) -> jax.Array:
        config = self.config
        return timestep_encoding(numbers, size, config.flip_sin_to_cos, config.freq_shift)


class UNet2DConditionModel(WayDown):
    """A network that predicts the noise, velocity or image in latents at a timestep for a text."""

    def __init__(
        self, config: UNetConfig, *, token_downsampling: int = 1, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        """Build the layers of `WayDown`, and the way up."""
        super().__init__(config, token_downsampling=token_downsampling, dtype=dtype, rngs=rngs)
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        channels = config.block_out_channels
        steps = _token_steps(config, token_downsampling)
        skips = [*config.skip_widths]

        self.up_blocks = nnx.List()
        width = channels[-1]
        for level, kind, depths in zip(
            range(len(channels))[::-1], config.up_block_types, config.up_depths, strict=True
        ):
            widths = []
            for _ in depths:
                widths.append(width + skips.pop())
                width = channels[level]
            self.up_blocks.append(
                self._block(
                    kind,
                    level,
                    widths,
                    depths,
                    token_downsampling=steps[level],
                    upsample=level > 0,
                    **layer,
                )
            )

        self.conv_norm_out = GroupNorm(
            channels[0], config.norm_num_groups, config.norm_eps, **layer
        )
        self.conv_out = conv(channels[0], config.out_channels, **layer)
        middle = [self.mid_block] if hasattr(self, "mid_block") else []
        attending = [
            each
            for block in (*self.down_blocks, *self.up_blocks, *middle)
            for transformer in block.attentions
            for each in transformer.transformer_blocks
        ]
        for number, each in enumerate(attending):
            each.number = number

    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b l d"],
        added: Added | None = None,
        control: Control | None = None,
    ) -> Float[Array, "b h w c_out"]:
        """Predict the model output for a batch in which every image has its own timestep.

        Args:
            latents: [B, h, w, in_channels].
            timesteps: [B], in steps of the training schedule, fractions allowed.
            text: [B, L, cross_attention_dim] text embeddings.
            added: what else the config asks for, by diffusers' names: with `addition_embed_type`
                the pooled `text_embeds` [B, P] and the `time_ids` [B, N] (heights and widths), with
                `time_cond_proj_dim` the `timestep_cond` [B, time_cond_proj_dim], which is the
                `guidance_encoding` of the guidance scale. Beside that, a `reference` with its
                `reference_scale`, as `Context` has them, or neither.
            control: what a ControlNet adds to the maps to skip across and to that of the middle.

        Returns:
            [B, h, w, out_channels] float32.

        Raises:
            ValueError: a condition that the config asks for is not among those added.
        """
        added = added or {}
        time, context = self._conditions(timesteps, text, added)
        context = context._replace(
            reference=added.get("reference"), scale=added.get("reference_scale")
        )
        x, skips = self._descend(self.conv_in(latents.astype(self.dtype)), time, context)
        if control is not None:
            *steered, middle = (each.astype(self.dtype) for each in control)
            skips = [skip + each for skip, each in zip(skips, steered, strict=True)]
            x = x + middle
        for block in self.up_blocks:
            x = block.up(x, time, context, skips)
        return self.conv_out(nnx.silu(self.conv_norm_out(x))).astype(jnp.float32)


def _token_steps(config: UNetConfig, token_downsampling: int) -> list[int]:
    """Return for each level of how many rows and columns self-attention takes one."""
    finest = next(
        (
            level
            for level, kind in enumerate(config.down_block_types)
            if kind.startswith("CrossAttn")
        ),
        None,
    )
    return [
        token_downsampling if level == finest else 1
        for level in range(len(config.block_out_channels))
    ]


def guidance_encoding(guidance: jax.Array, size: int) -> jax.Array:
    """Sinusoids of a guidance scale, for a UNet that was distilled with guidance: [B] -> [B, size]
    float32.

    The scale w of Meng et al. 2022, arXiv:2210.03142, where 0 is none: one less than the scale that
    people set.
    """
    return timestep_encoding(1000 * guidance, size, flip_sin_to_cos=False, freq_shift=1)


class Block(nnx.Module):
    """Any level of the UNet: resnets, followed by attention as far as `depths` goes, then a change
    of resolution if there is one.

    `widths` are the input channels of the resnets; on the way up they count the skip as well.
    `depths` are the numbers of transformer blocks after the resnets: none where the level does not
    attend, one fewer than the resnets in the middle.
    """

    def __init__(
        self,
        config: UNetConfig,
        widths: list[int],
        channels: int,
        time_channels: int,
        *,
        heads: int,
        depths: tuple[int, ...],
        token_downsampling: int = 1,
        downsample: bool = False,
        upsample: bool = False,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        norm: dict[str, Any] = dict(groups=config.norm_num_groups, eps=config.norm_eps)
        self.resnets = nnx.List(
            [
                ResnetBlock(width, channels, time_channels=time_channels, **norm, **layer)
                for width in widths
            ]
        )
        self.attentions = nnx.List(
            [
                Transformer2DModel(config, channels, heads, depth, token_downsampling, **layer)
                for depth in depths
            ]
        )
        if downsample:
            self.downsamplers = nnx.List([Downsample(channels, config.downsample_padding, **layer)])
        if upsample:
            self.upsamplers = nnx.List([Upsample(channels, **layer)])

    def _layer(self, i: int, x: jax.Array, time: jax.Array, context: Context) -> jax.Array:
        x = row_major(self.resnets[i](x, time))
        return self.attentions[i](x, context) if i < len(self.attentions) else x

    def down(self, x: jax.Array, time: jax.Array, context: Context):
        """x [B, h, w, widths[0]] -> (x at the next resolution, the outputs to skip across)."""
        outputs = []
        for i in range(len(self.resnets)):
            x = self._layer(i, x, time, context)
            outputs.append(x)
        if hasattr(self, "downsamplers"):
            x = self.downsamplers[0](x)
            outputs.append(x)
        return x, outputs

    def up(
        self, x: jax.Array, time: jax.Array, context: Context, skips: list[jax.Array]
    ) -> jax.Array:
        """x [B, h, w, C] -> x at the next resolution; takes its skips from the end of the list."""
        for i in range(len(self.resnets)):
            x = self._layer(i, jnp.concatenate([x, skips.pop()], axis=-1), time, context)
        return self.upsamplers[0](x) if hasattr(self, "upsamplers") else x


class Transformer2DModel(nnx.Module):
    """Transformer blocks over the pixels of a feature map, projected in and out, with residual."""

    def __init__(
        self,
        config: UNetConfig,
        channels: int,
        heads: int,
        depth: int = 1,
        token_downsampling: int = 1,
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm = GroupNorm(channels, config.norm_num_groups, 1e-6, **layer)
        # The two projections do the same; checkpoints differ in how they store the weight.
        project = linear if config.use_linear_projection else pointwise
        self.proj_in = project(channels, channels, **layer)
        self.transformer_blocks = nnx.List(
            [
                TransformerBlock(config, channels, heads, token_downsampling, **layer)
                for _ in range(depth)
            ]
        )
        self.proj_out = project(channels, channels, **layer)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, h, w, C] -> like x."""
        h = self.proj_in(self.norm(x))
        h = h.reshape(h.shape[0], -1, h.shape[-1])
        for block in self.transformer_blocks:
            h = block(h, context, x.shape[1])
        return x + self.proj_out(h.reshape(x.shape))


class TransformerBlock(nnx.Module):
    """Self-attention, attention to the text, feed-forward; each normed first, with residual."""

    def __init__(
        self,
        config: UNetConfig,
        channels: int,
        heads: int,
        token_downsampling: int = 1,
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.token_downsampling = token_downsampling
        self.number = 0  # of those of a UNet, as `UNetConfig.attending_widths` counts them
        self.norm1 = LayerNorm(channels, **layer)
        self.attn1 = Attention(channels, channels, heads, **layer)
        self.norm2 = LayerNorm(channels, **layer)
        self.attn2 = Attention(channels, config.cross_attention_dim, heads, **layer)
        self.norm3 = LayerNorm(channels, **layer)
        self.ff = FeedForward(channels, **layer)

    def __call__(self, x: jax.Array, context: Context, height: int) -> jax.Array:
        """x [B, N, C], a map of so many rows, row by row -> like x."""
        normed = self.norm1(x)
        x = x + self.attn1(normed, self._seen(normed, height))
        image_prompt = (
            ImagePrompt(*context.reference[self.number], context.scale)  # ty: ignore[invalid-argument-type]
            if context.reference
            else None
        )
        x = x + self.attn2(self.norm2(x), context.text, image_prompt)
        return x + self.ff(self.norm3(x))

    def _seen(self, x: jax.Array, height: int) -> jax.Array:
        """Return the tokens that self-attention takes keys and values from."""
        step, (batch, tokens, channels) = self.token_downsampling, x.shape
        if step == 1:
            return x
        pixels = x.reshape(batch, height, tokens // height, channels)
        return pixels[:, ::step, ::step].reshape(batch, -1, channels)
