"""Tokenizers as the `tokenizers` library keeps them, in a `tokenizer.json`."""

from pathlib import Path

import tokenizers

from sd_tpu.checkpoint.config import CheckpointError, is_file
from sd_tpu.reading import read_bytes

FILE = "tokenizer.json"


def read_words(folder: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer, which then neither cuts texts nor fills them up.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    file = folder / FILE
    if not is_file(file):
        raise CheckpointError(f"{folder} holds no tokenizer: there is no {FILE}.")
    try:
        words = tokenizers.Tokenizer.from_buffer(read_bytes(file))
    except Exception as error:  # the library raises Exception itself
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(f"{file} cannot be read ({reason.splitlines()[0]}).") from error
    words.no_truncation()
    words.no_padding()
    return words
