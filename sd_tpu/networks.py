"""The three networks of a checkpoint, without their parameters, and how they fit together."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from sd_tpu.config import CheckpointError, TextEncoderConfig, UNetConfig, VAEConfig
from sd_tpu.models import AutoencoderKL, CLIPTextModel, UNet2DConditionModel
from sd_tpu.tokenizer import LENGTH
from sd_tpu.weights import Params, abstract


@dataclasses.dataclass(frozen=True)
class Models:
    """The three networks without their parameters, and how large their inputs are."""

    text_encoder: nnx.GraphDef
    unet: nnx.GraphDef
    vae: nnx.GraphDef
    text_config: TextEncoderConfig
    unet_config: UNetConfig
    vae_config: VAEConfig
    dtype: jnp.dtype
    token_downsampling: int

    @classmethod
    def build(cls, configs: Mapping[str, Any], dtype, *,
              token_downsampling: int = 1) -> tuple["Models", Params]:
        """The networks and the shapes of their parameters; nothing is allocated.

        Args:
            configs: the contents of a checkpoint's config.json files, by folder.
            dtype: of the parameters.
            token_downsampling: as the UNet takes it; 1 is exact.

        Raises:
            ValueError: the downsampling is no whole number from 1.
            CheckpointError: a part is not supported, or the parts do not fit one another, as in
                an inpainting checkpoint.
        """
        text = TextEncoderConfig.from_dict(configs["text_encoder"])
        unet = UNetConfig.from_dict(configs["unet"])
        vae = VAEConfig.from_dict(configs["vae"])
        if not unet.in_channels == unet.out_channels == vae.latent_channels:
            raise CheckpointError(
                f"The UNet takes {unet.in_channels} channels and gives {unet.out_channels}, the "
                f"autoencoder's latents have {vae.latent_channels}: only text-to-image models, "
                "where all three are the same, are supported."
            )
        if text.hidden_size != unet.cross_attention_dim or text.max_position_embeddings < LENGTH:
            raise CheckpointError(
                f"The text encoder gives {text.max_position_embeddings} embeddings of "
                f"{text.hidden_size}, the UNet takes {LENGTH} of {unet.cross_attention_dim}."
            )
        classes = dict(
            text_encoder=(CLIPTextModel, text),
            unet=(partial(UNet2DConditionModel, token_downsampling=token_downsampling), unet),
            vae=(AutoencoderKL, vae),
        )
        parts = {name: abstract(partial(module, config, dtype=dtype))
                 for name, (module, config) in classes.items()}
        graphs = {name: graph for name, (graph, _) in parts.items()}
        params = {name: shapes for name, (_, shapes) in parts.items()}
        return cls(**graphs, text_config=text, unet_config=unet, vae_config=vae,
                   dtype=jnp.dtype(dtype), token_downsampling=token_downsampling), params

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(h, w, C) of the latents of a picture; raises ValueError for sizes it cannot have."""
        # The UNet halves the latents at every level but the last and must return to their size.
        unit = self.vae_config.downscale * 2 ** (len(self.unet_config.block_out_channels) - 1)
        if min(height, width) < unit or height % unit or width % unit:
            raise ValueError(
                f"A picture of {width}x{height} is not possible: this model makes pictures whose "
                f"sides are multiples of {unit}."
            )
        scale = self.vae_config.downscale
        return height // scale, width // scale, self.unet_config.in_channels
