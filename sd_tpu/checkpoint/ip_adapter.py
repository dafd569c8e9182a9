"""The sizes of an IP-Adapter, which its file alone tells: no config.json lies beside it."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from sd_tpu.checkpoint.config import MAX_BLOCKS, CheckpointError, ProjectedVisionEncoderConfig
from sd_tpu.checkpoint.weights import Stored

PROJECTION, ATTENTION = "image_proj.", "ip_adapter."
TOKENS = 4  # that a picture's single vector becomes; no file says it
# A name in files of other kinds -> what they are.
OTHERS = {
    "proj.3.weight": "of the kind that is called full",
    "perceiver_resampler.proj_in.weight": "for faces that InsightFace has found (FaceID)",
    "norm.weight": "for faces that InsightFace has found (FaceID)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResamplerConfig:
    """The resampler that makes tokens of a picture's patches, in adapters called plus."""

    width: int
    hidden: int
    heads: int
    depth: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPAdapterConfig:
    """Config of an adapter.

    Attributes:
        embed_dim: numbers in each vector that it takes of an image encoder.
        cross_attention_dim: numbers in each token that it makes of them.
        tokens: of a picture.
        widths: channels of the transformer blocks that attend to them, as
            `UNetConfig.attending_widths` counts them.
        resampler: makes the tokens of the patches; None where they come of the whole picture.
        image_encoder: its config.
    """

    embed_dim: int
    cross_attention_dim: int
    tokens: int
    widths: tuple[int, ...]
    resampler: ResamplerConfig | None = None
    image_encoder: ProjectedVisionEncoderConfig | None = None

    HEAD: ClassVar = 64  # channels of each of the resampler's heads

    @classmethod
    def read(cls, stored: Mapping[str, Stored], file: Path) -> "IPAdapterConfig":
        """Read the config from a file's tensors; the image encoder is not known yet.

        Raises:
            CheckpointError: it is no adapter of a kind that can be used here.
        """
        shapes = {name: entry.shape for name, entry in stored.items()}
        if not all(
            any(name.startswith(part) for name in shapes) for part in (PROJECTION, ATTENTION)
        ):
            raise CheckpointError(
                f"{file} holds no IP-Adapter: its names should begin with "
                f"{PROJECTION} and {ATTENTION}"
            )

        def shape(name: str, axes: int = 2) -> tuple[int, ...]:
            shape = shapes.get(name, ())
            if len(shape) != axes or not all(shape):
                raise CheckpointError(
                    f"{file} holds no IP-Adapter that can be used here: {name} "
                    f"is missing, or has other axes than {axes}."
                )
            return shape

        count = sum(name.endswith(".to_k_ip.weight") for name in shapes)
        layers = {
            match[1]
            for name in shapes
            if (match := re.match(rf"{re.escape(PROJECTION)}layers\.(\d+)\.", name))
        }
        if count + len(layers) > MAX_BLOCKS:
            raise CheckpointError(
                f"{file} holds no IP-Adapter that can be used here: it has "
                f"{count + len(layers)} layers; at most {MAX_BLOCKS} are "
                "supported."
            )
        widths = tuple(
            shape(f"{ATTENTION}{2 * number + 1}.to_k_ip.weight")[0] for number in range(count)
        )
        if f"{PROJECTION}proj.weight" in shapes:
            tokens, embed_dim = shape(f"{PROJECTION}proj.weight")
            return cls(
                embed_dim=embed_dim,
                cross_attention_dim=tokens // TOKENS,
                tokens=TOKENS,
                widths=widths,
            )
        if f"{PROJECTION}latents" not in shapes:
            kind = next(
                (what for mark, what in OTHERS.items() if PROJECTION + mark in shapes),
                "of an unknown kind",
            )
            raise CheckpointError(
                f"{file} is an IP-Adapter {kind}; the plain ones and those that "
                "are called plus are supported."
            )
        _, tokens, width = shape(f"{PROJECTION}latents", 3)
        return cls(
            embed_dim=shape(f"{PROJECTION}proj_in.weight")[1],
            cross_attention_dim=shape(f"{PROJECTION}proj_out.weight")[0],
            tokens=tokens,
            widths=widths,
            resampler=ResamplerConfig(
                width=width,
                hidden=shape(f"{PROJECTION}layers.0.1.1.weight")[0],
                heads=max(1, shape(f"{PROJECTION}layers.0.0.to_q.weight")[0] // cls.HEAD),
                depth=len(layers),
            ),
        )

    def of(self, encoder: ProjectedVisionEncoderConfig) -> "IPAdapterConfig | None":
        """Return the config with this image encoder; None if its vectors do not fit."""
        width = encoder.hidden_size if self.resampler else encoder.projection_dim
        fits = width == self.embed_dim
        return dataclasses.replace(self, image_encoder=encoder) if fits else None
