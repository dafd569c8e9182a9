"""Tokenizers as the `tokenizers` library keeps them, in a `tokenizer.json`, and those of language
models that this program carries for checkpoints without one."""

import gzip
from pathlib import Path

import tokenizers

from sd_tpu.checkpoint.config import ASSETS, CheckpointError, is_file
from sd_tpu.reading import read_bytes

FILE = "tokenizer.json"


def read_words(folder: Path, model: str) -> tokenizers.Tokenizer:
    """Read a tokenizer, which then neither cuts texts nor fills them up.

    Args:
        folder: of a checkpoint; without a tokenizer there, it is the one that is carried.
        model: "t5" or "qwen3".

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / FILE
    try:
        if is_file(file):
            content = read_bytes(file)
        else:
            content = gzip.decompress(read_bytes(ASSETS / "tokenizers" / f"{model}.json.gz"))
        words = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(f"{file} cannot be read ({reason.splitlines()[0]}).") from error
    words.no_truncation()
    words.no_padding()
    return words
