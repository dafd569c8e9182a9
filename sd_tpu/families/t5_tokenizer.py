"""Prompts -> token ids of T5, as Stable Diffusion 3, FLUX.1 and Anima use it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.text import Count
from sd_tpu.families.words import FILE, read_words

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PAD, END = 0, 1  # ids, the same for every T5
MAX_TOKENS = 512  # what T5 was trained on; transformers warns of more


class T5Tokenizer:
    """A checkpoint's T5 tokenizer."""

    def __init__(self, words: tokenizers.Tokenizer):
        """Wrap a tokenizer of `read_words`, which neither cuts nor fills up."""
        self._words = words

    @classmethod
    def from_folder(cls, folder: Path) -> "T5Tokenizer":
        """Read a folder's `tokenizer.json`, or T5's own where there is none.

        Raises:
            CheckpointError: it is damaged, or another model's.
        """
        words = read_words(folder, "t5")
        if (words.token_to_id("<pad>"), words.token_to_id("</s>")) != (PAD, END):
            raise CheckpointError(
                f"{folder / FILE} is not that of T5, where <pad> is token {PAD} and </s> token "
                f"{END}."
            )
        return cls(words)

    @property
    def size(self) -> int:
        """How many tokens it knows."""
        return self._words.get_vocab_size()

    def ids(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Token ids [N, length] int32: the words, the end, padding; longer texts are cut."""
        ids = np.full((len(texts), length), PAD, np.int32)
        for row, text in zip(ids, texts, strict=True):
            words = self._words.encode(text, add_special_tokens=False).ids[: length - 1]
            row[: len(words) + 1] = [*words, END]
        return ids

    def count(self, text: str, length: int) -> Count:
        """Count a text's tokens and its end, and find what is cut where so many are kept."""
        offsets = self._words.encode(text, add_special_tokens=False).offsets
        lost = text[offsets[length - 1][0] :] if len(offsets) >= length else ""
        return Count(len(offsets) + 1, length, lost)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, as transformers reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self._words.to_str(), encoding="utf-8")
        # Transformers adds tokens till there are so many.
        fill_ins = sum(word.startswith("<extra_id_") for word in self._words.get_vocab())
        config = SPECIAL | {
            "extra_ids": fill_ins,
            "model_max_length": MAX_TOKENS,
            "tokenizer_class": "T5Tokenizer",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def lengths(ids: np.ndarray) -> np.ndarray:
    """Return how many tokens each text has of ids [N, length] that are filled up: [N] int32."""
    return (ids.shape[1] - np.argmax(ids[:, ::-1] != PAD, axis=1)).astype(np.int32)
