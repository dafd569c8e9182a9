"""A tiny autoencoder with files of its own, for previews or for pictures as well.

Where it draws pictures it encodes their start pictures, too.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Self

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint.config import CheckpointError, TinyVAEConfig, read_json
from sd_tpu.families import FAMILIES, Family
from sd_tpu.families.latent_model import vae_config
from sd_tpu.reading import expanded

STEM = "diffusion_pytorch_model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyDecoder:
    """An AutoencoderTiny of whose parameters nothing has been read.

    Attributes:
        name: of the folder, or the hub id.
        folder: where it lies.
        config: the contents of its config.json.
        pictures: whether it takes the place of a checkpoint's autoencoder; else it draws the
            previews alone.
        families: whose latents it decodes; none where its name does not say it.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    pictures: bool
    families: tuple[Family, ...]

    @classmethod
    def open(cls, name: str | Path, *, pictures: bool) -> Self:
        """Find a tiny autoencoder in a folder or on the hub.

        TAESD and TAESDXL have the same shapes: their names alone tell them apart.

        Raises:
            CheckpointError: it is not there, or is no AutoencoderTiny.
        """
        folder = checkpoint.fetch(name, ["config.json", f"{STEM}.safetensors"])
        config = read_json(folder / "config.json")
        if (kind := config.get("_class_name")) != "AutoencoderTiny":
            raise CheckpointError(
                f"The decoder {str(name)!r} is {kind or 'of an unknown class'}; "
                "AutoencoderTiny, such as TAESD and TAESDXL, is supported."
            )
        shown = folder.resolve().name if expanded(name).is_dir() else str(name)
        return cls(
            name=shown,
            folder=folder,
            config=config,
            pictures=pictures,
            families=_families_of(f"{shown} {config.get('_name_or_path')}"),
        )

    @property
    def part(self) -> str:
        """The component that it is of a checkpoint."""
        return "vae" if self.pictures else "preview_vae"

    @property
    def files(self) -> list[Path]:
        """Files of its parameters; raises CheckpointError if there are none."""
        return checkpoint.weight_files(self.folder, STEM)

    def of(self, family: Family) -> Self:
        """Return the decoder for this family, unless its name says another."""
        return dataclasses.replace(self, families=self.families or (family,))

    def beside(self, configs: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's configs with the decoder's.

        Raises:
            CheckpointError: the checkpoint's latents are of another shape.
        """
        own, tiny = vae_config(configs["vae"]), TinyVAEConfig.from_dict(self.config)
        if (own.channels, own.downscale) != (tiny.channels, tiny.downscale):
            raise CheckpointError(
                f"The decoder {self.name} takes latents of {tiny.channels} channels at "
                f"1/{tiny.downscale} of the picture's size; this model's have "
                f"{own.channels} at 1/{own.downscale}."
            )
        return {**configs, self.part: self.config}


def _families_of(name: str) -> tuple[Family, ...]:
    """Return the families whose decoders have such a name, if any; the longest match counts."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    marks = {mark for family in FAMILIES for mark in family.decoders if mark in letters}
    longest = max(marks, key=len, default="")
    return tuple(family for family in FAMILIES if longest in family.decoders)
