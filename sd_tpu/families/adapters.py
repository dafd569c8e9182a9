"""The LoRAs and embeddings that prompts may name, from the folders where they lie."""

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.adapters import (
    Delta,
    changed_by_lora,
    listing,
    read_alias,
    read_embedding,
    read_lora,
)
from sd_tpu.checkpoint.config import CheckpointError, paths_within
from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.model import Model
from sd_tpu.families.prompt import PromptError, parse
from sd_tpu.families.text import PromptOptions

log = logging.getLogger(__name__)

RESCAN_SECONDS = 5.0  # after which a folder is looked through again
MAX_FITTING = 256  # combinations of LoRAs and models that are known to fit
MAX_ALIASES = 2048  # LoRAs that are asked what they call themselves, which takes 6 ms each, once
MAX_HASHES = 1024  # that are remembered: a file may take a second to read

Strengths = tuple[tuple[str, float], ...]  # names of LoRAs and how strongly they are merged


class Adapters:
    """Everything beside a checkpoint that a prompt can use."""

    def __init__(
        self,
        loras: Path | None = None,
        embeddings: Path | None = None,
        chunks: int = PromptOptions.chunks,
    ):
        """Look through the folders; None is none.

        Args:
            loras: whose files `<lora:name:strength>` names.
            embeddings: whose files' stems stand for their vectors.
            chunks: how many of 75 tokens a prompt may have.

        Raises:
            CheckpointError: a folder cannot be read.
        """
        self._loras, self._embeddings, self._chunks = Folder(loras), Folder(embeddings), chunks
        self._memory: dict[tuple, dict[str, int]] = {}  # by the state of files that fit

    def options(self, model: Model) -> PromptOptions:
        """Return the options of prompts for this model."""
        return PromptOptions(self._chunks, _Embeddings(self._embeddings, model.text_widths))

    @property
    def takes_loras(self) -> bool:
        """Whether there is a folder of them, be it empty by now."""
        return self._loras.path is not None

    def loras(self) -> Mapping[str, Path]:
        """Return the LoRAs by name."""
        return self._loras.files()

    def look_again(self) -> None:
        """Find LoRAs that have just been written, or removed, at once."""
        self._loras.look()

    def embeddings(self) -> Mapping[str, Path]:
        """Return the embeddings by name."""
        return self._embeddings.files()

    def asked(self, *texts: str) -> Strengths:
        """Return the LoRAs that a picture's texts ask for, in the order of their names.

        Strengths of LoRAs that are asked for twice add up.

        Raises:
            PromptError: a tag is damaged, or there is no LoRA of such a name, or several.
        """
        strengths: dict[str, float] = defaultdict(float)
        for lora in (lora for text in texts for lora in parse(text).loras):
            named = self._named(lora.name)
            if len(named) > 1:
                raise PromptError(
                    "Several LoRAs call themselves {name!r}: ask for one by the name "
                    "of its file, such as {known!r}.",
                    name=lora.name,
                    known=named[0],
                )
            if not named:
                raise PromptError(
                    "There is no LoRA {name!r} here."
                    if self.takes_loras
                    else "The prompt asks for the LoRA {name!r}, but no folder of LoRAs was given.",
                    name=lora.name,
                )
            strengths[named[0]] += lora.strength
        return tuple(sorted((name, value) for name, value in strengths.items() if value))

    def _named(self, name: str) -> list[str]:
        """Return the LoRAs of this name, or else those whose files give themselves that name."""
        files = self._loras.files()
        return (
            [name]
            if name in files
            else [
                other
                for other, file in islice(files.items(), MAX_ALIASES)
                if _alias(file, weights.written(file)) == name
            ]
        )

    def states(self, asked: Strengths) -> tuple[tuple[int, int] | None, ...]:
        """Return values that change when somebody writes one of the LoRAs' files anew."""
        return tuple(weights.written(self._loras.file(name)) for name, _ in asked)

    def deltas(
        self, asked: Strengths, shapes: Params
    ) -> dict[str, dict[str, list[tuple[Delta, float]]]]:
        """Return the differences that `runtime.weights.merge` adds for LoRAs.

        Args:
            asked: as the method of that name returns it.
            shapes: of the checkpoint's parameters, by component.

        Raises:
            CheckpointError: a file is damaged or gone, is not understood, or is for other models.
        """
        named = _named_shapes(shapes)
        added: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        for name, strength in asked:
            with paths_within(self._loras.path):
                deltas_by_part = read_lora(self._loras.file(name), named)
            for part, deltas in deltas_by_part.items():
                for parameter, delta in deltas.items():
                    added[part][parameter].append((delta, strength))
        return added

    def memory(self, asked: Strengths, shapes: Params, divisions: Params) -> dict[str, int]:
        """Return the bytes of the parameters that LoRAs change, which lie beside the checkpoint's,
        on each chip of a replica, by component.

        No weights are read, and of files that were found good nothing is read again.

        Args:
            asked: as `deltas` takes it.
            shapes: of the checkpoint's parameters, by component.
            divisions: theirs.

        Raises:
            CheckpointError: as `deltas`, but for values that are no numbers.
        """
        files = [self._loras.file(name) for name, _ in asked]
        key = *files, *self.states(asked), *jax.tree.leaves((shapes, divisions))
        if key not in self._memory:
            if len(self._memory) >= MAX_FITTING:
                self._memory.pop(next(iter(self._memory)))
            named, changed = _named_shapes(shapes), defaultdict(set)
            for file in files:
                with paths_within(self._loras.path):
                    for part, names in changed_by_lora(file, named).items():
                        changed[part].update(names)
            self._memory[key] = {
                part: sum(
                    jax.tree.leaves(
                        weights.map_named(
                            lambda name, *leaf, part=part: (
                                bytes_of(*leaf) if name in changed[part] else 0
                            ),
                            of,
                            divisions[part],
                        )
                    )
                )
                for part, of in shapes.items()
            }
        return self._memory[key]

    def hashes(self, *texts: str) -> dict[str, str]:
        """Return A1111's `Lora hashes` of the LoRAs that a picture's texts ask for, by name.

        They are twelve digits of the SHA-256 of a file's tensors; missing files are left out.
        """
        names = dict.fromkeys(lora.name for text in texts for lora in parse(text).loras)
        files = {
            name: self._loras.file(next(iter(self._named(name)), name))
            for name in names
            if self._loras.path
        }
        hashes = {name: _hash(file, weights.written(file)) for name, file in files.items()}
        return {name: value for name, value in hashes.items() if value}


def _named_shapes(shapes: Params) -> dict[str, Any]:
    """Return the shapes of each component's parameters by their names in a checkpoint."""
    return {part: weights.shapes(of) for part, of in shapes.items()}


@lru_cache(MAX_ALIASES)
def _alias(file: Path, state: tuple[int, int] | None) -> str:
    """Remember `read_alias` of a file in this state."""
    return read_alias(file)


@lru_cache(MAX_HASHES)
def _hash(file: Path, state: tuple[int, int] | None) -> str:
    """Hash the tensors of a file in this state; "" if it cannot be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(8 + int.from_bytes(opened.read(8), "little"))  # past the header
            return hashlib.file_digest(opened, "sha256").hexdigest()[:12]
    except OSError:
        return ""


class Folder:
    """The safetensors files below a folder, by name."""

    def __init__(self, path: Path | None):
        """List the folder's files; raises CheckpointError if it cannot be read."""
        self.path, self._files = path, listing(path) if path else {}
        self._seen = time.monotonic()

    def files(self) -> Mapping[str, Path]:
        """Return the files by the names that `listing` gives them.

        They are as they were a few seconds ago at most, or when the folder could last be read.
        """
        if time.monotonic() - self._seen >= RESCAN_SECONDS:
            self.look()
        return self._files

    def look(self) -> None:
        """List the folder's files as they are now, if it can be read."""
        if self.path is None:
            return
        try:
            self._files = listing(self.path)
        except CheckpointError as error:  # others need nothing of it
            log.warning("%s", error)
        self._seen = time.monotonic()

    def file(self, name: str) -> Path:
        """Return where a file lies, or lay."""
        return self._files.get(name) or (self.path or Path()) / f"{name}.safetensors"


class _Embeddings(Mapping[str, Mapping[str, np.ndarray]]):
    """Vectors by name, read when they are asked for."""

    def __init__(self, folder: Folder, widths: Mapping[str, int]):
        self._folder, self._files, self._widths = folder.path, folder.files(), widths
        self._read: dict[str, dict[str, np.ndarray]] = {}

    def __getitem__(self, name: str) -> Mapping[str, np.ndarray]:
        if name not in self._read:
            with paths_within(self._folder):
                self._read[name] = read_embedding(self._files[name], self._widths)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
