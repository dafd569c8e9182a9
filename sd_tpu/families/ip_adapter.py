"""IP-Adapters with files of their own, which draw after a reference picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import (
    CheckpointError,
    ProjectedVisionEncoderConfig,
    is_file,
    read_json,
)
from sd_tpu.checkpoint.ip_adapter import IPAdapterConfig
from sd_tpu.checkpoint.single_file import SUFFIX
from sd_tpu.checkpoint.weights import Params, Stored
from sd_tpu.families.extra_network import ExtraNetwork, check_equal
from sd_tpu.families.latent_diffusion import REFERENCE, LatentDiffusion
from sd_tpu.models import IPAdapterModel
from sd_tpu.reading import expanded

ENCODER, STEM = "image_encoder", "model"
# Where h94/IP-Adapter, from its top, has the encoder of most of its adapters.
SHARED = PurePosixPath("models", ENCODER)
EXAMPLE = "h94/IP-Adapter/models/ip-adapter_sd15.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IPAdapter(ExtraNetwork):
    """An IP-Adapter, which has its file's stem for its name, with the encoder that sees for it."""

    config: IPAdapterConfig
    encoder: Path  # the folder of the image encoder

    kind: ClassVar = "IP-Adapter"
    part: ClassVar = REFERENCE
    module: ClassVar = IPAdapterModel

    @classmethod
    def open(
        cls,
        name: str | Path,
        *,
        image_encoder: Path | None = None,
        dtype: Any = jnp.float32,
        variant: str | None = None,
    ) -> Self:
        """Find an IP-Adapter here or on the hub, with an image encoder that fits it.

        Args:
            name: a file, or a hub id and the path of the file there.
            image_encoder: the folder of one that is looked at before those where h94/IP-Adapter has
                them: beside the file, and in `models` beside its folder.
            dtype: of the parameters.
            variant: of the encoder's files, such as "fp16".

        Raises:
            CheckpointError: it is not there, is no adapter that can be used here, or has no image
                encoder.
        """
        if image_encoder is not None:
            image_encoder = expanded(image_encoder)
            if not is_file(image_encoder / "config.json"):
                raise CheckpointError(
                    f"{image_encoder} holds no image encoder: it has no config.json."
                )
        file, top, repository = _find(name)
        config = IPAdapterConfig.read(weights.contents([file]), file)
        folders = [file.parent / ENCODER, top / SHARED]
        encoder, config = _with_encoder(
            config, file, [image_encoder, *folders] if image_encoder else folders
        )
        if repository and encoder in folders:
            place = encoder.relative_to(top).as_posix()
            checkpoint.fetch(repository, [f"{place}/{STEM}*{SUFFIX}", f"{place}/{STEM}*.json"])
        checkpoint.weight_files(encoder, STEM, variant)  # or it would fail at the first picture
        return cls(
            name=file.stem,
            source=file,
            config=config,
            encoder=encoder,
            dtype=dtype,
            variant=variant,
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where its files lie."""
        return self.source, self.encoder

    def _stored(self) -> Mapping[str, Stored]:
        encoder = weights.contents(checkpoint.weight_files(self.encoder, STEM, self.variant))
        return {
            **weights.contents([self.source]),
            **{f"{ENCODER}.{name}": entry for name, entry in encoder.items()},
        }

    def _check(self, model: LatentDiffusion) -> None:
        """Raise CheckpointError if it cannot draw with this model, as `ExtraNetwork.check`."""
        config, unet = self.config, model.unet_config
        check_equal(
            f"The IP-Adapter {self.name}",
            (
                (
                    "makes tokens of {} numbers",
                    config.cross_attention_dim,
                    unet.cross_attention_dim,
                ),
                ("is attended to by {} layers", len(config.widths), len(unet.attending_widths)),
                ("is attended to by layers of {} channels", config.widths, unet.attending_widths),
            ),
        )

    def tokens(self, params: Params, picture: UInt8[Array, "side side 3"]) -> Float[Array, "2 t d"]:
        """Return the tokens of a reference picture that the UNet attends to."""
        return nnx.merge(self.graph, params[self.part]).tokens(picture)

    def joined(self, model: LatentDiffusion, height: int, width: int) -> LatentDiffusion:
        """Return the model with this network, as `ExtraNetwork.joined`, for any size."""
        return model.with_ip_adapter(self.graph, self.config)


def _find(name: str | Path) -> tuple[Path, Path, str]:
    """Return an adapter's file, the folder from which SHARED counts, and the hub id.

    The id is "" for a file that lies here. Of the hub's encoders only the configs come with it:
    each takes gigabytes, and one is used.
    """
    path = expanded(name)
    if is_file(path) and path.suffix != SUFFIX:
        raise CheckpointError(
            f"{path} is no {SUFFIX} file; pickles (.bin, .pt) can run code when "
            f"opened. h94/IP-Adapter's own are there as {SUFFIX} files as well."
        )
    if path.is_file():
        return path, path.parent.parent, ""
    parts = PurePosixPath(name).parts
    if len(parts) < 3 or path.suffix != SUFFIX or str(name).startswith(("/", "~", ".")):
        raise CheckpointError(
            f"There is no IP-Adapter {str(name)!r}: name a {SUFFIX} file here, "
            f"or a hub id and a file there, as in {EXAMPLE}."
        )
    repository, place = "/".join(parts[:2]), PurePosixPath(*parts[2:])
    configs = [f"{folder}/config.json" for folder in (place.parent / ENCODER, SHARED)]
    top = checkpoint.fetch(repository, [str(place), *configs])
    if not is_file(top / place):
        raise CheckpointError(f"There is no file {str(place)!r} in {repository}.")
    return top / place, top, repository


def _with_encoder(
    config: IPAdapterConfig, file: Path, folders: Sequence[Path]
) -> tuple[Path, IPAdapterConfig]:
    """Return the first folder whose encoder fits the adapter, and the config with that encoder."""
    there = [folder for folder in folders if is_file(folder / "config.json")]
    for folder in there:
        encoder_config = read_json(folder / "config.json")
        if (
            "vision_config" in encoder_config
        ):  # beside whose size others stand that are not the encoder's
            raise CheckpointError(
                f"{folder} holds a whole CLIP; an image encoder is a CLIPVisionModelWithProjection."
            )
        if joined := config.of(ProjectedVisionEncoderConfig.from_dict(encoder_config)):
            return folder, joined
    if there:
        raise CheckpointError(
            f"The IP-Adapter {file} takes vectors of {config.embed_dim} "
            f"numbers; the image encoder in {there[0]} gives others. Name the "
            "folder of its own with --image-encoder."
        )
    raise CheckpointError(
        f"The IP-Adapter {file} needs its image encoder: lay the folder "
        f"{ENCODER} beside it, or name it with --image-encoder."
    )
