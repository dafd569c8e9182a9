"""ControlNet (Zhang et al. 2023, arXiv:2302.05543): a copy of a UNet's way down that is told what a
control picture shows, and adds what follows from it to the UNet's maps."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from sd_tpu.checkpoint.config import ControlNetConfig
from sd_tpu.models.layers import conv, pointwise
from sd_tpu.models.unet import Added, WayDown

ZEROS = nnx.initializers.zeros_init()


class ControlNetModel(WayDown):
    """A network whose output, added to a UNet's maps, makes its picture follow another's lines."""

    config: ControlNetConfig

    def __init__(self, config: ControlNetConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        """Layers with random parameters; those that reach the UNet are zeros, so that nothing is
        added before training.

        Args:
            config: of the checkpoint.
            dtype: of the parameters and the arithmetic.
            rngs: for the parameters.
        """
        super().__init__(config, dtype=dtype, rngs=rngs)
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        deepest = config.block_out_channels[-1]
        self.controlnet_cond_embedding = ControlEmbedding(config, **layer)
        self.controlnet_down_blocks = nnx.List(
            [pointwise(width, width, kernel_init=ZEROS, **layer) for width in config.skip_widths]
        )
        self.controlnet_mid_block = pointwise(deepest, deepest, kernel_init=ZEROS, **layer)

    def embed(self, picture: Float[Array, "b H W 3"]) -> Float[Array, "b h w features"]:
        """Embed control pictures in [0, 1] in this model's dtype, the same for all timesteps."""
        if self.config.controlnet_conditioning_channel_order == "bgr":
            picture = picture[..., ::-1]
        return self.controlnet_cond_embedding(picture.astype(self.dtype))

    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        timesteps: Real[Array, " b"],
        text: Float[Array, "b l d"],
        embedded: Float[Array, "b h w features"],
        added: Added | None = None,
    ) -> list[jax.Array]:
        """Return the control of `UNet2DConditionModel`, at full strength.

        Args:
            latents: [B, h, w, in_channels].
            timesteps: [B], in steps of the training schedule, fractions allowed.
            text: [B, L, cross_attention_dim] text embeddings.
            embedded: what `embed` made of the control pictures.
            added: as the UNet takes it.

        Returns:
            A map for each output of the way down, the outermost first, and that of the middle, of
            this model's dtype.

        Raises:
            ValueError: a condition that the config asks for is not among those added.
        """
        time, context = self._conditions(timesteps, text, added or {})
        x = self.conv_in(latents.astype(self.dtype)) + embedded
        middle, skips = self._descend(x, time, context)
        return [
            *(block(skip) for block, skip in zip(self.controlnet_down_blocks, skips, strict=True)),
            self.controlnet_mid_block(middle),
        ]


class ControlEmbedding(nnx.Module):
    """Convolutions that bring a control picture to the size and the channels of the first map."""

    def __init__(self, config: ControlNetConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        widths = config.conditioning_embedding_out_channels
        self.conv_in = conv(config.conditioning_channels, widths[0], **layer)
        self.blocks = nnx.List()
        for inputs, outputs in itertools.pairwise(widths):
            self.blocks += [
                conv(inputs, inputs, **layer),
                conv(inputs, outputs, strides=2, **layer),
            ]
        self.conv_out = conv(widths[-1], config.block_out_channels[0], kernel_init=ZEROS, **layer)

    def __call__(self, picture: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, h, w, block_out_channels[0]]."""
        x = nnx.silu(self.conv_in(picture))
        for block in self.blocks:
            x = nnx.silu(block(x))
        return self.conv_out(x)
