"""ControlNets from places of their own, which steer what checkpoints draw by another picture."""

import dataclasses
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, ControlNetConfig, UNetConfig, read_json
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import bytes_of
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.models import ControlNetModel

STEM = "diffusion_pytorch_model"
CLASS = "ControlNetModel"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ControlNet:
    """A ControlNet of whose parameters nothing has been read.

    Attributes:
        name: by which pictures ask for it: the last part of the folder's or the hub id.
        folder: where it lies.
        config: what its config.json says.
        dtype: of its parameters.
        variant: of its files, such as "fp16".
    """

    name: str
    folder: Path
    config: ControlNetConfig
    dtype: Any = jnp.float32
    variant: str | None = None

    @classmethod
    def open(cls, name: str | Path, *, dtype: Any = jnp.float32,
             variant: str | None = None) -> Self:
        """Finds it in a folder or on the hub.

        Raises:
            CheckpointError: it is not there, or is no ControlNet that can be used here.
        """
        named = f"{STEM}.{variant}.safetensors" if variant else f"{STEM}.safetensors"
        folder = checkpoint.fetch(name, ["config.json", named])
        if not (folder / named).is_file():
            checkpoint.fetch(name, [f"{STEM}.safetensors"])
        config = read_json(folder / "config.json")
        if (kind := str(config.get("_class_name")).removeprefix("Flax")) != CLASS:
            raise CheckpointError(f"The ControlNet {str(name)!r} is {kind}; {CLASS} is supported.")
        shown = folder.resolve().name if Path(name).expanduser().is_dir() else str(name)
        return cls(name=shown.rpartition("/")[2], folder=folder, dtype=dtype, variant=variant,
                   config=ControlNetConfig.from_dict(config))

    @cached_property
    def _structure(self) -> tuple[nnx.GraphDef, Params]:
        return weights.abstract(partial(ControlNetModel, self.config, dtype=self.dtype))

    @property
    def network(self) -> nnx.GraphDef:
        """Without its parameters; those of one architecture have equal ones."""
        return self._structure[0]

    @property
    def shapes(self) -> Params:
        """Of its parameters, with the type that they are read in."""
        return self._structure[1]

    @property
    def memory(self) -> int:
        """Bytes that they take on a device."""
        return bytes_of(self.shapes)

    def load(self, sharding: jax.sharding.Sharding | None = None, *,
             leading: bool = False) -> Params:
        """Reads the parameters, as `Parameters.load`; raises CheckpointError."""
        files = checkpoint.weight_files(self.folder, STEM, self.variant)
        return weights.load_stored(weights.contents(files), self.shapes, sharding=sharding,
                                   source=self.folder, leading=leading)

    def check(self, model: LatentDiffusion) -> None:
        """Raises CheckpointError, in a sentence, if it cannot steer this model."""
        check(self.config, model, f"The ControlNet {self.name}")


def check(config: ControlNetConfig, model: LatentDiffusion, whose: str) -> None:
    """Raises CheckpointError, in a sentence that begins with `whose`, if a ControlNet of this
    config cannot steer the model."""
    unet = model.unet_config
    for what, own, others in (
        ("takes latents of {} channels", config.in_channels, model.vae_config.latent_channels),
        ("takes texts of {} numbers a token", config.cross_attention_dim,
         unet.cross_attention_dim),
        ("takes {} pixels along a side for each latent", config.downscale, model.downscale),
        ("is made for another family: it is told {} numbers beside the text", _told(config),
         _told(unet)),
        ("adds to maps of {} channels", config.skip_widths, unet.skip_widths),
    ):
        if own != others:
            shown = [str(value).strip("(,)") for value in (own, others)]
            raise CheckpointError(f"{whose} {what.format(shown[0])}; for this model it should be "
                                  f"{shown[1]}.")


def _told(config: UNetConfig) -> tuple[int | None, ...]:
    """How many numbers a network is told beside the text, for each size and in all."""
    return (config.addition_time_embed_dim, config.projection_class_embeddings_input_dim) if (
        config.addition_embed_type) else (0,)
