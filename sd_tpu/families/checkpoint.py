"""A checkpoint of any family: read from a folder or the hub, and written."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint import single_file, weights
from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import (
    BUNDLED_MODEL,
    WEIGHTS,
    CheckpointError,
    TrainingConfig,
    is_file,
    read_json,
)
from sd_tpu.checkpoint.division import WHOLE, bytes_of
from sd_tpu.checkpoint.single_file import SUFFIX, SingleFile
from sd_tpu.checkpoint.weights import Params, Stored
from sd_tpu.families import FamilyModel, find_family
from sd_tpu.families.decoder import TinyDecoder
from sd_tpu.families.latent_diffusion import CHECKER
from sd_tpu.families.prompt import words_of
from sd_tpu.families.stable_diffusion_3 import T5
from sd_tpu.families.text import Count, PromptOptions
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.folders import cache_folder, keep_within
from sd_tpu.reading import expanded
from sd_tpu.sampling.samplers import default_sampler
from sd_tpu.sampling.schedule import FlowSchedule, read_schedule

MAX_COMPILED_BYTES = 4 << 30  # of programs that are kept for the next start
LEAVING_OUT = {CHECKER: "--no-safety-checker", T5: "--no-t5"}
SAFETY_CHECKERS = ("StableDiffusionSafetyChecker", "FlaxStableDiffusionSafetyChecker")


class Checkpoint:
    """All of a checkpoint but its parameters, which `load` reads where they are wanted."""

    def __init__(
        self,
        model: FamilyModel,
        tokenizers: Mapping[str, Any],
        configs: Mapping[str, dict[str, Any]],
        card: ModelCard,
        parameters: "Parameters | None" = None,
    ):
        """Join the parts; `tokenizers` and `configs` are the checkpoint's own, by folder name.

        Raises:
            CheckpointError: a config asks for what is not supported.
        """
        self.model, self.tokenizers, self.configs, self.card = model, tokenizers, configs, card
        self.schedule = read_schedule(configs["scheduler"], even_sigmas=model.even_sigmas)
        if isinstance(self.schedule, FlowSchedule) != model.flow:
            wanted = "flow matching" if model.flow else "noise by alphas_cumprod"
            raise CheckpointError(
                f"The scheduler {self.schedule.scheduler!r} does not fit a model that was trained "
                f"by {wanted}."
            )
        self.sampler, self.spacing = default_sampler(configs["scheduler"])
        height, width = TrainingConfig.from_dict(configs[model.denoiser]).size
        # Of the pictures it was trained on
        self.default_size = height * model.downscale, width * model.downscale
        model.schedule_of(self.schedule, *self.default_size, card.steps)  # or it is refused
        self.parameters: Any = parameters  # None of one that has just been made

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype=jnp.float32,
        sharding: jax.sharding.Sharding | None = None,
        **options: Any,
    ) -> tuple[Self, Params]:
        """Read a checkpoint with its parameters.

        JAX keeps the programs that it compiles from then on in the user's cache folder, unless the
        program or the environment has said where, or not to.

        Args:
            name: as `open` takes it.
            dtype: of the parameters and the arithmetic.
            sharding: where the parameters go; by default on JAX's default device.
            options: other arguments of `open`.

        Returns:
            The checkpoint, and its parameters as nested dictionaries of arrays.

        Raises:
            CheckpointError: what is wrong with the checkpoint, in one message.
            ValueError: the downsampling is no whole number from 1.
        """
        checkpoint = cls.open(name, dtype=dtype, **options)
        return checkpoint, checkpoint.parameters.load(sharding)

    @classmethod
    def open(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        variant: str | None = None,
        dtype=jnp.float32,
        token_downsampling: int = 1,
        decoder: TinyDecoder | None = None,
        prediction_type: str | None = None,
        zero_snr: bool | None = None,
        safety_checker: bool = False,
        t5: bool = True,
        weights: str | None = None,
        parts: Sequence[str | Path] = (),
        tensor_parallel: int = 1,
    ) -> Self:
        """Read a checkpoint without its parameters.

        Args:
            name: a folder in the diffusers layout, a single file, or a hub id.
            revision: branch, tag or commit on the hub.
            variant: of the weight files, such as "fp16".
            dtype: of the parameters and the arithmetic.
            token_downsampling: the UNet's finest self-attention takes its keys and values from
                every so many rows and columns only; 1 is exact.
            decoder: of its previews or pictures; one of another family's is left out.
            prediction_type: what the UNet predicts, as in a scheduler's config; None is what the
                checkpoint says.
            zero_snr: whether the noise schedule is scaled to end without any signal; None is what
                the checkpoint says.
            safety_checker: read the checkpoint's, if it brings one.
            t5: read Stable Diffusion 3's third text encoder, if the checkpoint brings it.
            weights: "int8" has the dense layers of transformers and language models rounded to it
                while they are read, of families that say so, and "w8a8" the transformer's tokens,
                too, where it draws; by default they are of `dtype`.
            parts: files of the text encoders and the autoencoder, of a file that holds a
                transformer alone.
            tensor_parallel: chips of a replica, over which transformers and language models are
                divided if all can have equal shares of their heads and channels.

        Raises:
            CheckpointError: what is wrong with the checkpoint, in one message.
            ValueError: the downsampling is no whole number from 1, or there are no such weights.
        """
        if weights not in (None, *WEIGHTS):
            raise ValueError(f"weights={weights!r} is not one of {', '.join(WEIGHTS)}.")
        keep_compiled()
        overrides = {"prediction_type": prediction_type, "rescale_betas_zero_snr": zero_snr}
        options = dict(
            dtype=dtype,
            token_downsampling=token_downsampling,
            decoder=decoder,
            weights=weights,
            tensor_parallel=tensor_parallel,
            scheduler={name: value for name, value in overrides.items() if value is not None},
        )
        path = expanded(name)
        if is_file(path) and path.suffix == SUFFIX:
            beside = [expanded(part) for part in parts]
            return cls._open_file(single_file.read(path, t5=t5, parts=beside), **options)
        if parts:
            raise CheckpointError(
                f"{name} is no single file: text encoders and an autoencoder are named for a file "
                "that holds a transformer alone."
            )
        folder = checkpoint.find(
            name, partial(_components, safety_checker=safety_checker, t5=t5), revision, variant
        )
        # A folder's whole path would travel in every picture.
        shown = folder.resolve().name if path.is_dir() else str(name)
        return cls._open_folder(folder, shown, variant, safety_checker, t5, **options)

    @classmethod
    def _open_folder(
        cls,
        folder: Path,
        name: str,
        variant: str | None,
        safety_checker: bool,
        t5: bool,
        **options: Any,
    ) -> Self:
        index = read_json(checkpoint.index_file(folder))
        family = find_family(index)
        has_checker = safety_checker and is_file(folder / CHECKER / "config.json")
        components = _components(index, safety_checker=has_checker, t5=t5)
        configs = {part: read_json(folder / part / "config.json") for part in components}
        configs["model_index"] = index
        configs["scheduler"] = read_json(folder / "scheduler" / "scheduler_config.json")
        tokenizers = family.tokenizers(
            components, lambda part, kind: kind.from_folder(folder / part)
        )

        def stored(part: str) -> Mapping[str, Stored]:
            try:
                files = checkpoint.weight_files(folder / part, components[part], variant)
                found = weights.contents(files)
            except CheckpointError as error:
                flag = LEAVING_OUT.get(part)
                way_out = f" Or leave it out with {flag}." if flag else ""
                raise CheckpointError(f"{error}{way_out}") from error
            return {name: each for name, each in found.items() if not family.unread(part, name)}

        return cls._assembled(
            folder,
            configs,
            stored,
            tokenizers,
            ModelCard.read(folder, name, family.defaults(configs)),
            **options,
        )

    @classmethod
    def _open_file(cls, file: SingleFile, **options: Any) -> Self:
        family = find_family(file.configs["model_index"])
        if file.class_name not in family.pipelines:
            asked = file.configs["model_index"]["_class_name"]
            raise CheckpointError(
                f"{(file.folder or Path()) / 'model_index.json'} asks for {asked}, but "
                f"{file.path} holds a {file.class_name}."
            )
        tokenizers = family.tokenizers(file.configs, partial(_tokenizer, file))
        card = ModelCard.read(
            file.path.with_suffix(""), file.path.stem, family.defaults(file.configs)
        )

        def stored(part: str) -> Mapping[str, Stored]:
            found = file.stored[part]
            return {name: each for name, each in found.items() if not family.unread(part, name)}

        return cls._assembled(
            file.path, file.configs, stored, tokenizers, card, beside=file.beside, **options
        )

    @classmethod
    def _assembled(
        cls,
        source: Path,
        configs: dict[str, Any],
        stored: Callable,
        tokenizers: Mapping[str, Any],
        card: ModelCard,
        *,
        dtype,
        decoder: TinyDecoder | None,
        scheduler: dict[str, Any],
        weights: str | None,
        tensor_parallel: int,
        beside: tuple[Path, ...] = (),
        **options: int,
    ) -> Self:
        """Assemble the contents of a folder or a file.

        The decoder is used if it is of this family; `scheduler` overrides values of its config.
        `beside` are the files of parts beside a source that is a file.
        """
        family = find_family(configs["model_index"])
        configs = family.mended(configs)
        configs["scheduler"] = configs["scheduler"] | scheduler
        if decoder and decoder.families and family not in decoder.families:
            decoder = None
        if decoder:
            configs = decoder.beside(configs)
        model, expected = family.build(
            configs, dtype, previewer=decoder.part if decoder else "", **options
        )
        _check_vocabularies(source, family, tokenizers, configs)
        if weights:
            model, expected = model.in_int8(expected, weights)
        divisions = model.divisions(expected, tensor_parallel)
        parameters = Parameters(source, expected, divisions, stored, decoder, beside)
        return cls(model, tokenizers, configs, card, parameters)

    def save_pretrained(self, folder: str | Path, params: Params, dtype=None) -> None:
        """Write the diffusers layout, which PyTorch's pipeline reads as well.

        Args:
            folder: made if absent.
            params: without a leading device axis.
            dtype: of the files; by default that of the parameters.

        Raises:
            CheckpointError: parts of the model were not read, or were rounded to int8.
        """
        if self.model.weights:
            raise CheckpointError("A model whose weights were rounded to int8 is not written.")
        if not self.model.whole:
            raise CheckpointError(
                "This model is read without parameters that no picture depends on, and cannot be "
                "written whole."
            )
        folder = Path(folder)
        for part, stem in self.model.components.items():
            if part in params:
                weights.save(params[part], folder / part / f"{stem}.safetensors", dtype)
                _write_json(folder / part / "config.json", self.configs[part])
        scheduler = self.schedule.scheduler  # not by its name of Flax, which diffusers had before
        _write_json(
            folder / "scheduler" / "scheduler_config.json",
            {**self.configs["scheduler"], "_class_name": scheduler},
        )
        for part, tokenizer in self.tokenizers.items():
            tokenizer.save(folder / part)
        _write_json(folder / "sd_tpu.json", self.card.model_dump(), in_order=True)
        _write_json(
            folder / "model_index.json",
            {**self.model.model_index, "scheduler": ["diffusers", scheduler]},
        )

    @property
    def texts(self) -> "Parameters":
        """Where the parameters of its text encoders lie."""
        return self.parameters.of(self.model.text_parts())

    @property
    def drawing(self) -> "Parameters":
        """Where all other parameters lie, which pictures are drawn with."""
        return self.parameters.of(self.parameters.shapes.keys() - self.model.text_parts())

    def memory_on(self, chips: int) -> int:
        """Return the bytes of its parameters that each chip has at once in a replica of so many.

        Its text encoders need not lie beside what draws.
        """
        parts = self.texts.shapes, self.drawing.shapes
        return max(bytes_of(shapes, self.model.divisions(shapes, chips)) for shapes in parts)

    def is_divided(self, chips: int) -> bool:
        """Whether so many chips have shares of what takes noise out of latents."""
        denoiser, shapes = self.model.denoiser, self.parameters.shapes
        divisions = self.model.divisions({denoiser: shapes[denoiser]}, chips)
        return any(each != WHOLE for each in jax.tree.leaves(divisions))

    @property
    def leaves_out_checker(self) -> bool:
        """Whether it brings a safety checker that was not read."""
        named = self.configs["model_index"].get(CHECKER) or [None]
        return named[-1] in SAFETY_CHECKERS and not self.model.checks_safety

    def count(self, prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens, as `Model.count`."""
        return self.model.count(self.tokenizers, prompt, options)

    def unknown_words(self, prompt: str) -> list[str]:
        """Words of the prompt that the model was never shown, if its card tells those it was;
        raises PromptError."""
        return self.card.unknown_words(words_of(prompt)) if self.card.words else []

    def prompt_inputs(self, prompt: str, negative_prompt: str = "", **settings: Any) -> Any:
        """Return a picture's prompts as `SlotInputs` takes them.

        Settings are those of `Model.prompt_inputs`; the size is the model's own by default.
        """
        height, width = self.default_size
        settings = {"height": height, "width": width, **settings}
        return self.model.prompt_inputs(self.tokenizers, prompt, negative_prompt, **settings)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Where a checkpoint's parameters lie; nothing of them has been read.

    Attributes:
        source: the folder or the single file.
        shapes: of all of them, with the type that they are read in, by component.
        divisions: of each over the chips of a replica.
        stored: gives where those of a component lie, by their names in the checkpoint.
        decoder: what holds those of a component in the checkpoint's stead.
        beside: files of parts beside a source that is a file.
    """

    source: Path
    shapes: Params
    divisions: Params
    stored: Callable[[str], Mapping[str, Stored]]
    decoder: TinyDecoder | None = None
    beside: tuple[Path, ...] = ()

    def of(self, parts: Collection[str]) -> "Parameters":
        """Return where those of some components lie."""
        shapes, divisions = (
            {part: of for part, of in each.items() if part in parts}
            for each in (self.shapes, self.divisions)
        )
        return dataclasses.replace(self, shapes=shapes, divisions=divisions)

    @property
    def memory(self) -> int:
        """Bytes that they take on each chip of a replica."""
        return bytes_of(self.shapes, self.divisions)

    @property
    def is_divided(self) -> bool:
        """Whether chips have but shares of some of them."""
        return any(each != WHOLE for each in jax.tree.leaves(self.divisions))

    def load(
        self, sharding: jax.sharding.Sharding | None = None, *, leading: bool = False
    ) -> Params:
        """Read the parameters, one by one.

        Args:
            sharding: where they go; by default on JAX's default device.
            leading: with an axis of 1 in front, as `ReplicaWeights.record` wants them.

        Raises:
            CheckpointError: files are missing or damaged, or do not fit the model.
        """
        stored = self.check()  # all, before minutes go into loading one
        return {
            part: weights.load_stored(
                stored[part],
                expected,
                sharding=sharding,
                source=self._source(part),
                leading=leading,
                divisions=self.divisions[part],
            )
            for part, expected in self.shapes.items()
        }

    def check(self) -> dict[str, Mapping[str, Stored]]:
        """Return what is stored of each component; raises CheckpointError if it does not fit."""
        stored = {part: self._stored(part) for part in self.shapes}
        for part, expected in self.shapes.items():
            weights.check(stored[part], weights.shapes(expected), self._source(part))
        return stored

    def _decodes(self, part: str) -> bool:
        return self.decoder is not None and self.decoder.part == part

    def _stored(self, part: str) -> Mapping[str, Stored]:
        if self.decoder and self._decodes(part):
            return weights.contents(self.decoder.files)
        return self.stored(part)

    def _source(self, part: str) -> Path:
        if self.decoder and self._decodes(part):
            return self.decoder.folder
        if self.source.is_file():  # whose parts may lie in files of their own
            return next((each.file for each in self.stored(part).values()), self.source)
        return self.source / part

    def written(self) -> tuple[tuple[int, int], ...]:
        """Return a value that changes when the checkpoint is written anew; empty if it is gone.

        Other files in its folder do not count: somebody may be training there.
        """
        source = self.source
        files = (
            [source, *self.beside]
            if source.is_file()
            else sorted(
                [
                    *source.glob("*.json"),
                    *source.glob("*/*.json"),
                    *(file for part in self.shapes for file in source.glob(f"{part}/*{SUFFIX}")),
                ]
            )
        )
        return tuple(stamps for file in files if (stamps := weights.written(file)))

    def hash(self) -> str:
        """Return A1111's hash of a model: ten digits of the single file's SHA-256.

        Folders and missing files have "".
        """
        try:
            with self.source.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:10]
        except OSError:
            return ""


def _components(index: dict[str, Any], *, safety_checker: bool, t5: bool) -> checkpoint.Components:
    """Return the components of a checkpoint; raises CheckpointError for one of no family."""
    family = find_family(index)
    named = {part: entry[-1] for part, entry in index.items() if isinstance(entry, list) and entry}
    known = {
        part: stem
        for part, stem in family.components.items()
        if part not in family.optional or (t5 and named.get(part))
    }
    if safety_checker and named.get(CHECKER) in SAFETY_CHECKERS:
        known[CHECKER] = "model"
    return known


def _tokenizer(file: SingleFile, part: str, kind: Any) -> Any:
    """Return the tokenizer beside the file, else its kind's own, CLIP's padded as the layout's."""
    folder = (file.folder or file.path.with_suffix("")) / part
    if kind is not Tokenizer or folder.is_dir():
        return kind.from_folder(folder)
    return Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer", pad=file.tokenizers[part])


def _check_vocabularies(
    source: Path, family: Any, tokenizers: Mapping[str, Any], configs: Mapping[str, Any]
) -> None:
    """Raise CheckpointError for a tokenizer whose tokens a language model does not have."""
    beside = source if source.is_dir() else source.with_suffix("")
    for part, (folder, kind) in family.tokenizer_classes().items():
        if kind is Tokenizer or folder not in tokenizers:
            continue
        known, config = tokenizers[folder].size, configs[part]
        config = config.get("text_config") or config  # of a language model that sees
        there = config.get("vocab_size") or config.get("target_vocab_size", 0)
        if there and known > there:
            raise CheckpointError(
                f"The tokenizer {folder} of {source} has {known} tokens, and {part} knows {there}: "
                f"put the tokenizer.json that belongs to it into {beside / folder}."
            )


def keep_compiled() -> None:
    """Have JAX keep its programs in the user's cache folder, unless it was told where."""
    if jax.config.jax_compilation_cache_dir is None:  # ty: ignore[missing-attribute]
        folder = cache_folder() / "compiled"
        keep_within(folder, MAX_COMPILED_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _write_json(file: Path, content: Mapping[str, Any], *, in_order: bool = False) -> None:
    """Write JSON sorted by names as diffusers' configs are, or in the order that it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, sort_keys=not in_order, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
