"""Prompts -> token ids."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import tokenizers

from sd_tpu.checkpoint.config import CheckpointError, is_file
from sd_tpu.reading import read_bytes

if TYPE_CHECKING:  # importing it takes a second or two
    from transformers import CLIPTokenizer

LENGTH = 77  # the beginning and the end mark included
FORMS = (["tokenizer.json"], ["vocab.json", "merges.txt"])  # files that a tokenizer is read from
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# The ids of a text, without marks, and where each token's text begins and ends.
Encoded = tuple[list[int], list[tuple[int, int]]]


class Marks(NamedTuple):
    """The tokens before the words, after them, and those that fill up the rest."""

    begin: int
    end: int
    pad: int


class Tokenizer:
    """The checkpoint's CLIP tokenizer at the length that the text encoder was trained on."""

    def __init__(
        self,
        encode: Callable[[str], Encoded],
        marks: Marks,
        source: tuple[Path, str | None] | None = None,
    ):
        """Wrap an encoder of texts.

        Args:
            encode: returns the ids of a text.
            marks: the special tokens.
            source: the folder and the padding that it was read with, if it was.
        """
        self.encode, self.marks, self._source = encode, marks, source

    @classmethod
    def of(cls, clip: "CLIPTokenizer") -> "Tokenizer":
        """Wrap a tokenizer of transformers.

        `verbose=False` spares a warning of its own limit.
        """

        def encode(text: str) -> Encoded:
            encoding = clip(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            return encoding.input_ids, encoding.offset_mapping

        return cls(encode, _marks(clip))

    @classmethod
    def from_folder(cls, folder: Path, pad: str | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, or `vocab.json` and `merges.txt`, with the configs beside them.

        The tokenizer that transformers builds is kept beside the programs that JAX compiled, so
        that later starts need not import transformers, which takes a tenth of their time.

        Args:
            folder: of the files.
            pad: the token that fills prompts up, in place of the one that the configs name.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        cache_file = _cache_file(folder, pad)
        content = _read_cache(cache_file) if cache_file else None
        if not content:
            clip = clip_tokenizer(folder, pad)
            content = clip.backend_tokenizer.to_str(), _marks(clip)
            if cache_file:
                _write_cache(cache_file, json.dumps(content))
        words, marks = _built(content[0]), content[1]

        def encode(text: str) -> Encoded:
            encoding = words.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

        return cls(encode, marks, (folder, pad))

    def save(self, folder: Path) -> None:
        """Copy the files that the tokenizer was read from.

        One with another padding than theirs is written by transformers.
        """
        if self._source is None:
            raise ValueError("This tokenizer was read from no folder.")
        source, pad = self._source
        if pad is not None:
            clip_tokenizer(source, pad).save_pretrained(folder)
        elif folder.resolve() != source.resolve():
            folder.mkdir(parents=True, exist_ok=True)
            _write(_contents(source), folder)

    def __call__(self, prompts: Sequence[str]) -> np.ndarray:
        """Token ids [B, 77] int32: begin, words, end, padding; longer prompts are cut."""
        begin, end, pad = self.marks
        ids = np.full((len(prompts), LENGTH), pad, np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            words = self.encode(prompt)[0][: LENGTH - 2]
            row[: len(words) + 2] = [begin, *words, end]
        return ids


@lru_cache(maxsize=4)
def _built(words: str) -> tokenizers.Tokenizer:
    """Build the library's tokenizer of this JSON once.

    Fine-tunes have the words of the model that they came from, and each copy takes megabytes and a
    quarter of a second.
    """
    tokenizer = tokenizers.Tokenizer.from_str(words)
    # Our `Tokenizer` cuts and fills up itself: these settings would be shared by all threads.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def clip_tokenizer(folder: Path, pad: str | None = None) -> "CLIPTokenizer":
    """Read a tokenizer of transformers; arguments and errors are those of `from_folder`."""
    from transformers import CLIPTokenizer

    if not any(all(is_file(folder / name) for name in form) for form in FORMS):
        # Without them transformers makes up a tokenizer that knows no words.
        raise CheckpointError(
            f"{folder} holds no tokenizer: there is neither tokenizer.json, "
            "nor vocab.json with merges.txt."
        )
    contents = _contents(folder)
    try:
        with tempfile.TemporaryDirectory() as copied:  # transformers reads files of any size
            _write(contents, Path(copied))
            padding: dict[str, Any] = {} if pad is None else {"pad_token": pad}
            return CLIPTokenizer.from_pretrained(copied, **padding)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        message = f"The tokenizer in {folder} cannot be read ({reason})."
        raise CheckpointError(message) from error


def _contents(folder: Path) -> dict[str, bytes]:
    """Read the files of a tokenizer; raises CheckpointError if one cannot be read."""
    names = [name for names in (*FORMS, CONFIGS) for name in names]
    try:
        return {
            name: read_bytes(folder / name)
            for name in names
            if is_file(folder / name) or (folder / name).exists()
        }
    except OSError as error:
        raise CheckpointError(
            f"The tokenizer in {folder} cannot be read: {error.filename}, {error.strerror}."
        ) from None


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def _marks(clip: "CLIPTokenizer") -> Marks:
    marks = Marks(clip.bos_token_id, clip.eos_token_id, clip.pad_token_id)
    if None in marks:
        raise CheckpointError("The tokenizer lacks its bos_token, eos_token or pad_token.")
    return marks


def _cache_file(folder: Path, pad: str | None) -> Path | None:
    """Return the file that keeps a folder's tokenizer, named by all that it depends on, or None."""
    cache = jax.config.jax_compilation_cache_dir  # ty: ignore[missing-attribute]
    if cache is None or not jax.config.jax_enable_compilation_cache:  # ty: ignore[missing-attribute]
        return None
    digest = hashlib.sha256(repr([pad, version("transformers"), version("tokenizers")]).encode())
    for name, content in _contents(folder).items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return Path(cache) / f"tokenizer-{digest.hexdigest()}.json"


def _write_cache(file: Path, content: str) -> None:
    """Write the tokenizer at once; where that fails, later starts take longer."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # gone if the disk is full
            draft = Path(folder) / file.name
            draft.write_text(content)
            draft.replace(file)


def _read_cache(file: Path) -> tuple[str, Marks] | None:
    """Read the kept tokenizer; None if there is none, or something else writes there."""
    try:
        words, marks = json.loads(file.read_text())
        return words, Marks(*marks)
    except (OSError, ValueError, TypeError):
        return None
