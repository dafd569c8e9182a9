"""Prompts -> token ids, and which words of a prompt the model will not see."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import CLIPTokenizer

from sd_tpu.config import CheckpointError

LENGTH = 77  # the beginning and the end mark included


class Tokenizer:
    """The checkpoint's CLIP tokenizer at the length that the text encoder was trained on."""

    def __init__(self, tokenizer: CLIPTokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads `vocab.json`, `merges.txt` and the configs; raises CheckpointError if it cannot."""
        try:
            return cls(CLIPTokenizer.from_pretrained(folder))
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"The tokenizer in {folder} cannot be read ({reason}).") from error

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)

    def __call__(self, prompts: Sequence[str]) -> np.ndarray:
        """Token ids [B, 77] int32: begin, words, end, padding; longer prompts are cut."""
        encoded = self._tokenizer(list(prompts), padding="max_length", max_length=LENGTH,
                                  truncation=True, return_tensors="np")
        return encoded.input_ids.astype(np.int32)

    def count(self, prompt: str) -> int:
        """Tokens that the prompt takes, its two marks included; more than 77 are cut."""
        return len(self._offsets(prompt)) + 2

    def lost(self, prompt: str) -> str:
        """The end of the prompt that lies beyond the 77th token; empty if all of it fits."""
        offsets = self._offsets(prompt)
        kept = LENGTH - 2
        return prompt[offsets[kept][0]:].strip() if len(offsets) > kept else ""

    def _offsets(self, prompt: str) -> list[tuple[int, int]]:
        # `verbose=False` keeps transformers from warning of what is being asked here.
        return self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True,
                               verbose=False).offset_mapping
