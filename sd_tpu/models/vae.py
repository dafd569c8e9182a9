"""The autoencoder of latent diffusion (Rombach et al. 2021, arXiv:2112.10752).

The scaling factor lives in here: latents outside have about unit variance.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sd_tpu.checkpoint.config import Flux2VAEConfig, VAEConfig
from sd_tpu.models.layers import (
    Attention,
    Downsample,
    GroupNorm,
    ResnetBlock,
    Upsample,
    conv,
    pack,
    unpack,
)
from sd_tpu.models.platform import row_major
from sd_tpu.models.tiles import by_tiles

EPS = 1e-6


class AutoencoderKL(nnx.Module):
    """Images [-1, 1] <-> latents at 1/8 of the size (for the four levels of SD); large ones by
    tiles, within the memory that smaller ones take."""

    def __init__(self, config: VAEConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        moments = 2 * config.latent_channels
        self.encoder, self.decoder = self.halves(config, **layer)
        if config.use_quant_conv:
            self.quant_conv = conv(moments, moments, 1, **layer)
        if config.use_post_quant_conv:
            self.post_quant_conv = conv(config.latent_channels, config.latent_channels, 1, **layer)

    @staticmethod
    def halves(config: Any, **layer: Any) -> tuple[nnx.Module, nnx.Module]:
        """Return the encoder and the decoder."""
        return Encoder(config, **layer), Decoder(config, **layer)

    def encode(
        self, images: Float[Array, "b height width c"]
    ) -> tuple[Float[Array, "b h w latent"], Float[Array, "b h w latent"]]:
        """Mean and log-variance of the latents' normal distribution.

        images [B, H, W, 3] in [-1, 1] -> two of [B, H/8, W/8, latent_channels] float32, the mean
        scaled, the log-variance that of the scaled latents and clipped to [-30, 20] before that.
        """

        def moments_of(x: jax.Array) -> jax.Array:
            x = self.encoder(x.astype(self.dtype))
            x = self.quant_conv(x) if self.config.use_quant_conv else x
            return x.astype(jnp.float32)

        moments = by_tiles(moments_of, images, 2**self.config.halvings)
        mean, logvar = jnp.split(moments, 2, axis=-1)
        scale = self.config.scaling_factor
        if self.config.latents_mean is not None:
            mean = mean - jnp.asarray(self.config.latents_mean)
            scale = scale / jnp.asarray(self.config.latents_std)
        elif self.config.shift_factor:
            mean = mean - self.config.shift_factor
        return mean * scale, jnp.clip(logvar, -30, 20) + 2 * jnp.log(scale)

    def decode(self, latents: Float[Array, "b h w latent"]) -> Float[Array, "b height width c"]:
        """latents [B, h, w, latent_channels] -> images [B, 8h, 8w, 3] float32, about [-1, 1]."""
        scale = self.config.scaling_factor
        if self.config.latents_mean is None:
            z = latents / scale
            z = z + self.config.shift_factor if self.config.shift_factor else z
        else:
            z = latents * jnp.asarray(self.config.latents_std) / scale + jnp.asarray(
                self.config.latents_mean
            )

        def picture_of(z: jax.Array) -> jax.Array:
            z = z.astype(self.dtype)
            z = self.post_quant_conv(z) if self.config.use_post_quant_conv else z
            return self.decoder(z).astype(jnp.float32)

        return by_tiles(picture_of, z)


class AutoencoderKLFlux2(AutoencoderKL):
    """Images [-1, 1] <-> whitened patches of two by two latents, at 1/16 of the size."""

    def __init__(self, config: Flux2VAEConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.bn = BatchStatistics(config)

    def encode(
        self, images: Float[Array, "b height width c"]
    ) -> tuple[Float[Array, "b h w latent"], Float[Array, "b h w latent"]]:
        """Mean and log-variance of the latents' normal distribution.

        images [B, H, W, 3] in [-1, 1] -> two of [B, H/16, W/16, 4 latent_channels] float32.
        """
        mean, logvar = map(pack, super().encode(images))
        return (mean - self.bn.mean) / self.bn.deviation, logvar - 2 * jnp.log(self.bn.deviation)

    def decode(self, latents: Float[Array, "b h w latent"]) -> Float[Array, "b height width c"]:
        """latents [B, h, w, 4 latent_channels] -> images [B, 16h, 16w, 3], about [-1, 1]."""
        return super().decode(unpack(latents * self.bn.deviation + self.bn.mean))


class BatchStatistics(nnx.Module):
    """Mean and variance of each channel of patches, from training; float32."""

    def __init__(self, config: Flux2VAEConfig):
        self.eps = config.batch_norm_eps
        self.running_mean = nnx.Param(jnp.zeros(config.channels, jnp.float32))
        self.running_var = nnx.Param(jnp.ones(config.channels, jnp.float32))

    @property
    def mean(self) -> jax.Array:
        """[channels] float32."""
        return self.running_mean[...]

    @property
    def deviation(self) -> jax.Array:
        """[channels] float32."""
        return jnp.sqrt(self.running_var[...] + self.eps)


class Level(nnx.Module):
    """Resnets at one resolution, then a change of resolution if there is one."""

    def __init__(
        self,
        config: VAEConfig,
        widths: list[int],
        channels: int,
        *,
        downsample: bool = False,
        upsample: bool = False,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        norm: dict[str, Any] = dict(groups=config.norm_num_groups, eps=EPS)
        self.resnets = nnx.List([ResnetBlock(w, channels, **norm, **layer) for w in widths])
        if downsample:
            self.downsamplers = nnx.List([Downsample(channels, 0, **layer)])
        if upsample:
            self.upsamplers = nnx.List([Upsample(channels, **layer)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, widths[0]] -> [B, H', W', channels]."""
        for resnet in self.resnets:
            x = resnet(x)
        if hasattr(self, "downsamplers"):
            x = self.downsamplers[0](x)
        return self.upsamplers[0](x) if hasattr(self, "upsamplers") else x


class MidBlock(nnx.Module):
    """Resnet, single-head attention over the pixels, resnet."""

    def __init__(self, config: VAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        groups, channels = config.norm_num_groups, config.block_out_channels[-1]
        self.resnets = nnx.List(
            [ResnetBlock(channels, channels, groups=groups, eps=EPS, **layer) for _ in range(2)]
        )
        self.attentions = nnx.List(
            [Attention(channels, channels, 1, bias=True, groups=groups, eps=EPS, **layer)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, C] -> [B, h, w, C]."""
        x = row_major(self.resnets[0](x))
        x = self.attentions[0](x.reshape(x.shape[0], -1, x.shape[-1])).reshape(x.shape)
        return self.resnets[1](x)


class Encoder(nnx.Module):
    """Images -> moments of the latents."""

    def __init__(self, config: VAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        channels = config.block_out_channels
        self.conv_in = conv(config.in_channels, channels[0], **layer)
        self.down_blocks = nnx.List(
            [
                Level(
                    config,
                    [channels[max(i - 1, 0)]] + [width] * (config.layers_per_block - 1),
                    width,
                    downsample=i < len(channels) - 1,
                    **layer,
                )
                for i, width in enumerate(channels)
            ]
        )
        self.mid_block = MidBlock(config, **layer)
        self.conv_norm_out = GroupNorm(channels[-1], config.norm_num_groups, EPS, **layer)
        self.conv_out = conv(channels[-1], 2 * config.latent_channels, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, H/8, W/8, 2 * latent_channels]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    """Latents -> images."""

    def __init__(self, config: VAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        channels = config.block_out_channels[::-1]
        self.conv_in = conv(config.latent_channels, channels[0], **layer)
        self.mid_block = MidBlock(config, **layer)
        self.up_blocks = nnx.List(
            [
                Level(
                    config,
                    [channels[max(i - 1, 0)]] + [width] * config.layers_per_block,
                    width,
                    upsample=i < len(channels) - 1,
                    **layer,
                )
                for i, width in enumerate(channels)
            ]
        )
        self.conv_norm_out = GroupNorm(channels[-1], config.norm_num_groups, EPS, **layer)
        self.conv_out = conv(channels[-1], config.out_channels, **layer)

    def __call__(self, z: jax.Array) -> jax.Array:
        """[B, h, w, latent_channels] -> [B, 8h, 8w, 3]."""
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.conv_norm_out(x)))
