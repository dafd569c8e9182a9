"""The autoencoder of Qwen-Image (Wu et al. 2025, arXiv:2508.02324), made from that of Wan 2.1, for
single pictures.

It is one for videos, whose convolutions see a frame and those before it. A picture is a first
frame, with zeros before it, so that each kernel is its last slice in time; that slice alone is read
(`weights.header`), and all convolutions are of two dimensions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint.config import QwenImageVAEConfig
from sd_tpu.models.attention import attention
from sd_tpu.models.convolution import convolve_enlarged
from sd_tpu.models.layers import conv, pointwise, rms_norm
from sd_tpu.models.platform import row_major
from sd_tpu.models.vae import AutoencoderKL

EPS = 1e-24  # of a mean square: what is all zeros stays so


class AutoencoderKLQwenImage(AutoencoderKL):
    """Images [-1, 1] <-> whitened latents at 1/8 of the size; large ones by tiles."""

    @staticmethod
    def halves(config: QwenImageVAEConfig, **layer: Any) -> tuple[nnx.Module, nnx.Module]:
        """Return the encoder and the decoder."""
        return Encoder(config, **layer), Decoder(config, **layer)


class PixelNorm(nnx.Module):
    """Normalization of each pixel by the float32 root mean square of its channels, whose scale has
    as many axes of length 1 as pixels have in the checkpoint."""

    def __init__(self, channels: int, axes: int = 3, *, dtype, rngs: nnx.Rngs):
        self.gamma = nnx.Param(jnp.ones((channels, *[1] * axes), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x [..., C]; keeps its dtype."""
        return rms_norm(x, EPS, self.gamma[...].reshape(-1))


class ResidualBlock(nnx.Module):
    """Two normed convolutions beside a residual."""

    def __init__(self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm1 = PixelNorm(inputs, **layer)
        self.conv1 = conv(inputs, outputs, **layer)
        self.norm2 = PixelNorm(outputs, **layer)
        self.conv2 = conv(outputs, outputs, **layer)
        if inputs != outputs:
            self.conv_shortcut = conv(inputs, outputs, 1, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H, W, outputs]."""
        h = self.conv1(nnx.silu(self.norm1(x)))
        h = self.conv2(nnx.silu(self.norm2(h)))
        return h + (self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x)


class AttentionBlock(nnx.Module):
    """Single-head attention over the pixels beside a residual."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm = PixelNorm(channels, axes=2, **layer)
        self.to_qkv = pointwise(channels, 3 * channels, **layer)
        self.proj = pointwise(channels, channels, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, C] -> [B, h, w, C]."""
        pixels = self.to_qkv(self.norm(x)).reshape(x.shape[0], -1, 3 * x.shape[-1])
        attended = attention(*jnp.split(pixels, 3, axis=-1), 1)
        return x + self.proj(attended.reshape(x.shape))


class MidBlock(nnx.Module):
    """A residual block, attention, a residual block."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.resnets = nnx.List([ResidualBlock(channels, channels, **layer) for _ in range(2)])
        self.attentions = nnx.List([AttentionBlock(channels, **layer)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, C] -> [B, h, w, C]."""
        return self.resnets[1](self.attentions[0](row_major(self.resnets[0](x))))


class Resample(nnx.Module):
    """A convolution that halves height and width, or one of what is twice as high and wide."""

    def __init__(self, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs, **of_conv: Any):
        # Checkpoints number the layers of a PyTorch Sequential; its number 0 pads or enlarges.
        self.resample = nnx.Dict({"1": conv(inputs, outputs, dtype=dtype, rngs=rngs, **of_conv)})

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H', W', outputs]."""
        return self.resample["1"](x)


class UpBlock(nnx.Module):
    """Residual blocks, then twice the height and width and half the channels, but in the last."""

    def __init__(self, widths: list[int], channels: int, *, upsample: bool, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.resnets = nnx.List([ResidualBlock(width, channels, **layer) for width in widths])
        if upsample:
            self.upsamplers = nnx.List(
                [Resample(channels, channels // 2, by=convolve_enlarged, **layer)]
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, widths[0]] -> [B, H', W', C]."""
        for resnet in self.resnets:
            x = resnet(x)
        return self.upsamplers[0](x) if hasattr(self, "upsamplers") else x


class Encoder(nnx.Module):
    """Images -> moments of the latents."""

    def __init__(self, config: QwenImageVAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        widths = config.block_out_channels
        self.conv_in = conv(config.in_channels, config.base_dim, **layer)
        self.down_blocks = nnx.List(list(self._down_blocks(config, layer)))
        self.mid_block = MidBlock(widths[-1], **layer)
        self.norm_out = PixelNorm(widths[-1], **layer)
        self.conv_out = conv(widths[-1], 2 * config.latent_channels, **layer)

    @staticmethod
    def _down_blocks(config: QwenImageVAEConfig, layer: dict[str, Any]):
        """Yield residual blocks and what is between levels, in one row as in the checkpoint."""
        width = config.base_dim
        for level, channels in enumerate(config.block_out_channels):
            for _ in range(config.layers_per_block):
                yield ResidualBlock(width, channels, **layer)
                width = channels
            if level < config.halvings:
                yield Resample(width, width, strides=2, padding=((0, 1), (0, 1)), **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, H/8, W/8, 2 * latent_channels]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    """Latents -> images."""

    def __init__(self, config: QwenImageVAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        widths = config.block_out_channels[::-1]
        self.conv_in = conv(config.latent_channels, widths[0], **layer)
        self.mid_block = MidBlock(widths[0], **layer)
        self.up_blocks = nnx.List(
            [
                UpBlock(
                    # Upsampling leaves half of the channels.
                    [widths[level - 1] // 2 if level else channels]
                    + [channels] * config.layers_per_block,
                    channels,
                    upsample=level < config.halvings,
                    **layer,
                )
                for level, channels in enumerate(widths)
            ]
        )
        self.norm_out = PixelNorm(widths[-1], **layer)
        self.conv_out = conv(widths[-1], config.out_channels, **layer)

    def __call__(self, z: jax.Array) -> jax.Array:
        """[B, h, w, latent_channels] -> [B, 8h, 8w, 3]."""
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.norm_out(x)))
