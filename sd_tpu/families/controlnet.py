"""ControlNets with files of their own, which steer a checkpoint by another picture."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import (
    CheckpointError,
    ControlNetConfig,
    UNetConfig,
    is_file,
    read_json,
)
from sd_tpu.checkpoint.weights import Stored
from sd_tpu.families.extra_network import ExtraNetwork, check_equal
from sd_tpu.families.latent_diffusion import CONTROL, LatentDiffusion
from sd_tpu.models import ControlNetModel
from sd_tpu.reading import expanded

STEM = "diffusion_pytorch_model"
CLASS = "ControlNetModel"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ControlNet(ExtraNetwork):
    """A ControlNet, which has the last part of its folder's or its hub id for its name."""

    config: ControlNetConfig

    kind: ClassVar = "ControlNet"
    part: ClassVar = CONTROL
    module: ClassVar = ControlNetModel

    @classmethod
    def open(
        cls, name: str | Path, *, dtype: Any = jnp.float32, variant: str | None = None
    ) -> Self:
        """Find a ControlNet in a folder or on the hub.

        Raises:
            CheckpointError: it is not there, or is no ControlNet that can be used here.
        """
        named = f"{STEM}.{variant}.safetensors" if variant else f"{STEM}.safetensors"
        folder = checkpoint.fetch(name, ["config.json", named])
        if not is_file(folder / named):
            checkpoint.fetch(name, [f"{STEM}.safetensors"])
        config = read_json(folder / "config.json")
        if (kind := str(config.get("_class_name")).removeprefix("Flax")) != CLASS:
            raise CheckpointError(f"The ControlNet {str(name)!r} is {kind}; {CLASS} is supported.")
        checkpoint.weight_files(folder, STEM, variant)  # or it would fail at the first picture
        shown = folder.resolve().name if expanded(name).is_dir() else str(name)
        return cls(
            name=shown.rpartition("/")[2],
            source=folder,
            dtype=dtype,
            variant=variant,
            config=ControlNetConfig.from_dict(config),
        )

    def _stored(self) -> Mapping[str, Stored]:
        return weights.contents(checkpoint.weight_files(self.source, STEM, self.variant))

    def _check(self, model: LatentDiffusion) -> None:
        """Raise CheckpointError if it cannot draw with this model, as `ExtraNetwork.check`."""
        check(self.config, model, f"The ControlNet {self.name}")

    def joined(self, model: LatentDiffusion, height: int, width: int) -> LatentDiffusion:
        """Return the model with this network, as `ExtraNetwork.joined`."""
        return model.with_controlnet(self.graph, height, width)


def check(config: ControlNetConfig, model: LatentDiffusion, whose: str) -> None:
    """Raise CheckpointError if a ControlNet of this config cannot steer the model.

    The message begins with `whose`.
    """
    unet = model.unet_config
    check_equal(
        whose,
        (
            ("takes latents of {} channels", config.in_channels, model.vae_config.latent_channels),
            (
                "takes texts of {} numbers a token",
                config.cross_attention_dim,
                unet.cross_attention_dim,
            ),
            ("takes {} pixels along a side for each latent", config.downscale, model.downscale),
            (
                "is made for another family: it is told {} numbers beside the text",
                _added_widths(config),
                _added_widths(unet),
            ),
            ("adds to maps of {} channels", config.skip_widths, unet.skip_widths),
        ),
    )


def _added_widths(config: UNetConfig) -> tuple[int | None, ...]:
    """Return how many numbers a network takes beside the text, for each size and in all."""
    return (
        (config.addition_time_embed_dim, config.projection_class_embeddings_input_dim)
        if (config.addition_embed_type)
        else (0,)
    )
