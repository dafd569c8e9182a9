"""Networks with files of their own, which pictures may use beside a checkpoint's."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.checkpoint.weights import Params, Stored
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.families.latent_model import LatentModel


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExtraNetwork(abc.ABC):
    """A network of whose parameters nothing has been read.

    Attributes:
        name: by which pictures ask for it.
        source: the folder or the file where it lies.
        config: of its layers.
        dtype: of its parameters.
        variant: of its files, such as "fp16".
    """

    name: str
    source: Path
    config: Any
    dtype: Any = jnp.float32
    variant: str | None = None

    kind: ClassVar[str]  # name of such networks for people
    part: ClassVar[str]  # the component that it is of the parameters that it draws with
    module: ClassVar[type[nnx.Module]]

    @cached_property
    def _structure(self) -> tuple[nnx.GraphDef, Params]:
        return weights.architecture(self.module, self.config, dtype=self.dtype)

    @property
    def graph(self) -> nnx.GraphDef:
        """Structure without parameters, equal for networks of one architecture."""
        return self._structure[0]

    @property
    def shapes(self) -> Params:
        """Shapes of its parameters, with the type that they are read in."""
        return self._structure[1]

    @property
    def memory(self) -> int:
        """Bytes that they take on a device."""
        return bytes_of(self.shapes)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where its files lie."""
        return (self.source,)

    def load(
        self, sharding: jax.sharding.Sharding | None = None, *, leading: bool = False
    ) -> Params:
        """Read the parameters, as `Parameters.load`; raises CheckpointError."""
        return weights.load_stored(
            self._stored(), self.shapes, sharding=sharding, source=self.source, leading=leading
        )

    @abc.abstractmethod
    def _stored(self) -> Mapping[str, Stored]:
        """Return where the parameters lie; raises CheckpointError."""

    def check(self, model: LatentModel) -> None:
        """Raise CheckpointError, in a sentence, if it cannot draw with this model."""
        if not isinstance(model, LatentDiffusion):
            raise CheckpointError(f"The {self.kind} {self.name} is for models with a UNet.")
        self._check(model)

    @abc.abstractmethod
    def _check(self, model: LatentDiffusion) -> None:
        """Raise CheckpointError, in a sentence, if it cannot draw with this model."""

    @abc.abstractmethod
    def joined(self, model: Any, height: int, width: int) -> LatentDiffusion:
        """Return the model with this network, for pictures of this size."""


def check_equal(whose: str, facts: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise CheckpointError for the first property that differs between network and model.

    Args:
        whose: the beginning of the sentence.
        facts: a text with `{}` for the network's value, that value, and the model's.
    """
    for what, own, others in facts:
        if own != others:
            shown = [str(value).strip("(,)") for value in (own, others)]
            raise CheckpointError(
                f"{whose} {what.format(shown[0])}; for this model it should be {shown[1]}."
            )
