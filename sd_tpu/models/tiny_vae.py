"""The tiny autoencoder TAESD, distilled from Stable Diffusion's (Ollin Boer Bohan 2023,
github.com/madebyollin/taesd): plain convolutions, for previews and for slow machines."""

from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sd_tpu.checkpoint.config import TinyVAEConfig
from sd_tpu.models.convolution import convolve_enlarged
from sd_tpu.models.layers import conv


class AutoencoderTiny(nnx.Module):
    """Images [-1, 1] <-> latents at 1/8 of the size (for the four levels of TAESD)."""

    def __init__(self, config: TinyVAEConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)
        self.decoder = Decoder(config, dtype=dtype, rngs=rngs)

    def encode(self, images: Float[Array, "b height width c"]) -> Float[Array, "b h w latent"]:
        """images [B, H, W, 3] in [-1, 1] -> latents [B, H/8, W/8, latent_channels] float32."""
        z = self.encoder((images.astype(self.dtype) + 1) / 2)
        return z.astype(jnp.float32) * self.config.scaling_factor

    def decode(self, latents: Float[Array, "b h w latent"]) -> Float[Array, "b height width c"]:
        """latents [B, h, w, latent_channels] -> images [B, 8h, 8w, 3] float32, about [-1, 1]."""
        z = latents / self.config.scaling_factor
        images = self.decoder((3 * jnp.tanh(z / 3)).astype(self.dtype))
        return 2 * images.astype(jnp.float32) - 1


class Encoder(nnx.Module):
    """Images in [0, 1] -> latents."""

    def __init__(self, config: TinyVAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.encoder_block_out_channels[0]
        layers: list[nnx.Module] = []
        for level, blocks in enumerate(config.num_encoder_blocks):
            layers.append(
                conv(width, width, strides=2, bias=False, **layer)
                if level
                else conv(config.in_channels, width, **layer)
            )
            layers += [Block(width, **layer) for _ in range(blocks)]
        self.layers = nnx.List([*layers, conv(width, config.latent_channels, **layer)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, H/8, W/8, latent_channels]."""
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nnx.Module):
    """Latents -> images in [0, 1]."""

    def __init__(self, config: TinyVAEConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.decoder_block_out_channels[0]
        # Checkpoints number the layers of a PyTorch Sequential: its number 1 is a ReLU, and each
        # enlargement has a number of its own before the convolution that follows it.
        numbers = count(2)
        self.layers = nnx.Dict({"0": conv(config.latent_channels, width, **layer)})
        *levels, last = config.num_decoder_blocks
        for blocks in levels:
            for _ in range(blocks):
                self.layers[str(next(numbers))] = Block(width, **layer)
            next(numbers)
            self.layers[str(next(numbers))] = conv(
                width, width, bias=False, by=convolve_enlarged, **layer
            )
        for _ in range(last):
            self.layers[str(next(numbers))] = Block(width, **layer)
        self.layers[str(next(numbers))] = conv(width, config.out_channels, **layer)

    def __call__(self, z: jax.Array) -> jax.Array:
        """[B, h, w, latent_channels] -> [B, 8h, 8w, 3]."""
        first, *others = sorted(self.layers, key=int)
        x = jax.nn.relu(self.layers[first](z))
        for number in others:
            x = self.layers[number](x)
        return x


class Block(nnx.Module):
    """Three convolutions beside a residual, rectified."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        # Checkpoints number the layers of a PyTorch Sequential; its numbers 1 and 3 are ReLUs.
        self.conv = nnx.Dict(
            {number: conv(channels, channels, dtype=dtype, rngs=rngs) for number in "024"}
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, C]."""
        h = jax.nn.relu(self.conv["0"](x))
        h = jax.nn.relu(self.conv["2"](h))
        return jax.nn.relu(self.conv["4"](h) + x)
