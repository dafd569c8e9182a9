"""The LoRAs and embeddings that prompts may name, from the folders where they lie."""

import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.adapters import (
    Delta,
    LowRank,
    changed_by_lora,
    listing,
    read_alias,
    read_embedding,
    read_lora,
)
from sd_tpu.checkpoint.config import CheckpointError, paths_within
from sd_tpu.checkpoint.division import bytes_of
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.latent_model import LatentModel
from sd_tpu.families.model import Model
from sd_tpu.families.prompt import PromptError, parse
from sd_tpu.families.text import PromptOptions
from sd_tpu.models.factors import Scaled

log = logging.getLogger(__name__)

RESCAN_SECONDS = 5.0  # after which a folder is looked through again
MAX_FITTING = 256  # combinations of LoRAs and models that are known to fit
MAX_ALIASES = 2048  # LoRAs that are asked what they call themselves, which takes 6 ms each, once
MAX_HASHES = 1024  # that are remembered: a file may take a second to read

# To which the ranks of a picture's LoRAs are filled up, so that most share programs: on TPUs a
# product of any rank up to 128 takes as long (decision 0034).
RANKS = 64, 128

Strengths = tuple[tuple[str, float], ...]  # names of LoRAs and how strong they are
Deltas = dict[str, dict[str, list[tuple[Delta, float]]]]  # by component and parameter


class Cost(NamedTuple):
    """Rank and memory that LoRAs take beside a checkpoint.

    Attributes:
        rank: of the factors that a slot brings, one of RANKS; 0 for none.
        memory: bytes on each chip of a replica of the parameters that are merged into copies, by
            component.
    """

    rank: int
    memory: Mapping[str, int]


class _Lora(dict[str, LowRank]):
    """Factors that a file adds to dense layers, by their names, of its own rank and without a
    strength.

    Attributes:
        lock: held while it is read.
        is_read: whether it was.
        merged: layers that it changes by more than factors of slots can be, which is merged.
    """

    def __init__(self):
        super().__init__()
        self.lock, self.is_read = threading.Lock(), False
        self.merged: set[str] = set()
        self._largest: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, deltas: Mapping[str, Delta]) -> None:
        """Take the differences of parameters by their names."""
        for name, delta in deltas.items():
            layer = name.removesuffix(".weight")
            if not _rank([_rank_of(delta)]):
                self.merged.add(layer)
                continue
            assert isinstance(delta, LowRank)
            self[layer] = delta
            self._largest[layer] = weights.largest(delta.left), weights.largest(delta.right)
        self.is_read = True

    def rank(self, layer: str) -> int | None:
        """Return the rank of what it adds to a layer that it changes; None if that is merged."""
        return None if layer in self.merged else _rank_of(self[layer])

    def is_finite(self, layer: str, strength: float, dtype: Any) -> bool:
        """Whether its factors are so in a dtype, as `factors.joined` computes them."""
        left, right = self._largest[layer]
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.asarray(strength * self[layer].scale * right.astype(np.float32))
            return all(np.isfinite(each.astype(dtype)) for each in (left, scaled))


def _rank(ranks: Iterable[int | None]) -> int:
    """Return the smallest of RANKS that holds the ranks of several LoRAs together.

    It is 0 if there is none, or if one of them has no rank: they are merged.
    """
    found = [*ranks]
    if None in found:
        return 0
    return next((rank for rank in RANKS if rank >= sum(found)), 0)  # ty: ignore[no-matching-overload]


def _rank_of(delta: Delta) -> int | None:
    """Return the rank of a difference between dense kernels, as `changed_by_lora` has it."""
    low_rank = isinstance(delta, LowRank) and delta.left.ndim == 2
    return delta.left.shape[1] if low_rank else None


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
        self._costs: dict[tuple, Cost] = {}  # by the state of files that fit
        # By what they are read from; gone with the last picture that has them.
        self._read: WeakValueDictionary[tuple, _Lora] = WeakValueDictionary()
        self._lock = threading.Lock()  # of these

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

    def merged(
        self, asked: Strengths, model: LatentModel, shapes: Params, parts: Container[str]
    ) -> Deltas:
        """Return the differences that `runtime.weights.merge` adds for LoRAs, but for what is in
        `factors`.

        Args:
            asked: as the method of that name returns it.
            model: for which they are.
            shapes: of its parameters, by component.
            parts: components whose differences are read.

        Raises:
            CheckpointError: a file is damaged or gone, is not understood, or is for other models.
        """
        return {
            part: {
                name: deltas
                for name, deltas in named.items()
                if part != model.adapter_part or not _rank(_rank_of(delta) for delta, _ in deltas)
            }
            for part, named in self._deltas(asked, shapes, parts).items()
        }

    def factors(
        self, asked: Strengths, rank: int, model: LatentModel, shapes: Params
    ) -> dict[str, list[Scaled]]:
        """Return the LoRAs that bring factors to layers, with their strengths, by the layers.

        A file is read once as long as somebody has what it holds, whatever it is asked for with.

        Args:
            asked: as `merged` takes it, like model and shapes.
            rank: as `cost` said it.
            model: for which they are.
            shapes: of its parameters, by component.

        Raises:
            CheckpointError: as `merged`, or their rank is another by now.
        """
        found: dict[str, list[tuple[_Lora, float]]] = defaultdict(list)
        for name, strength in asked:
            lora = self._lora(self._loras.file(name), model, shapes)
            for layer in {*lora, *lora.merged}:
                found[layer].append((lora, strength))
        ranks = {
            layer: _rank(lora.rank(layer) for lora, _ in each) for layer, each in found.items()
        }
        if max(ranks.values(), default=0) != rank:
            raise CheckpointError("A LoRA has been written anew; please ask for it again.")
        factors: dict[str, list[Scaled]] = {}
        for layer, each in found.items():
            if not ranks[layer]:
                continue
            # Nothing times these, for others, is no number.
            if not all(lora.is_finite(layer, strength, model.dtype) for lora, strength in each):
                raise CheckpointError(
                    f"The LoRAs' factors of {layer} are too large for {model.dtype}."
                )
            factors[layer] = [*each]
        return factors

    def _lora(self, file: Path, model: LatentModel, shapes: Params) -> _Lora:
        """Return what a file adds to a model's dense layers; files are read beside one another."""
        key = file, weights.written(file), model.adapter_part, *jax.tree.leaves(shapes)
        with self._lock:
            lora = self._read.get(key)
            if lora is None:
                lora = self._read[key] = _Lora()
        with lora.lock:
            if not lora.is_read:
                deltas = self._deltas_of(file, _named_shapes(shapes), [model.adapter_part])
                lora.read(deltas.get(model.adapter_part, {}))
        return lora

    def _deltas(self, asked: Strengths, shapes: Params, parts: Container[str]) -> Deltas:
        """Return the differences of LoRAs, each with its strength, by component and parameter."""
        named = _named_shapes(shapes)
        added: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        for name, strength in asked:
            for part, deltas in self._deltas_of(self._loras.file(name), named, parts).items():
                for parameter, delta in deltas.items():
                    added[part][parameter].append((delta, strength))
        return added

    def _deltas_of(
        self, file: Path, named: Mapping[str, Any], parts: Container[str]
    ) -> dict[str, dict[str, Delta]]:
        with paths_within(self._loras.path):
            return read_lora(file, named, parts)

    def known_rank(self, *texts: str, shapes: Params, divisions: Params) -> int:
        """Return `Cost.rank` of the LoRAs that texts ask for, or 0 where `cost` was not asked yet;
        no file is read."""
        try:
            names = {lora.name for text in texts for lora in parse(text).loras}
            if not names <= self._loras.files().keys():  # else others' files may be asked for it
                return 0
            asked = self.asked(*texts)
        except PromptError:
            return 0
        return self._costs.get(self._cost_key(asked, shapes, divisions), Cost(0, {})).rank

    def _cost_key(self, asked: Strengths, shapes: Params, divisions: Params) -> tuple:
        files = (self._loras.file(name) for name, _ in asked)
        return *files, *self.states(asked), *jax.tree.leaves((shapes, divisions))

    def cost(self, asked: Strengths, model: LatentModel, shapes: Params, divisions: Params) -> Cost:
        """Return what LoRAs take beside a checkpoint.

        No weights are read, and of files that were found good nothing is read again.

        Args:
            asked: as `merged` takes it.
            model: for which they are.
            shapes: of its parameters, by component.
            divisions: theirs.

        Raises:
            CheckpointError: as `merged`, but for values that are no numbers.
        """
        key = self._cost_key(asked, shapes, divisions)
        if key not in self._costs:
            if len(self._costs) >= MAX_FITTING:
                self._costs.pop(next(iter(self._costs)))
            ranks: Any = defaultdict(lambda: defaultdict(list))
            named = _named_shapes(shapes)
            for lora, _ in asked:
                with paths_within(self._loras.path):
                    changed_by_part = changed_by_lora(self._loras.file(lora), named)
                    for part, changed in changed_by_part.items():
                        for name, rank in changed.items():
                            ranks[part][name].append(rank)
            factors = {name: _rank(each) for name, each in ranks[model.adapter_part].items()}
            merged = {
                part: {name for name in names if part != model.adapter_part or not factors[name]}
                for part, names in ranks.items()
            }
            each = {
                part: weights.map_named(
                    lambda name, *leaf, part=part: bytes_of(*leaf) if name in merged[part] else 0,
                    shapes[part],
                    divisions[part],
                )
                for part in merged
                if part in shapes
            }
            memory = {part: sum(jax.tree.leaves(of)) for part, of in each.items()}
            self._costs[key] = Cost(max(factors.values(), default=0), memory)
        return self._costs[key]

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
