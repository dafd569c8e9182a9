"""Prompts -> token ids, and which words of a prompt the model will not see."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import CLIPTokenizer

from sd_tpu.config import CheckpointError

LENGTH = 77  # the beginning and the end mark included


class Tokenizer:
    """The checkpoint's CLIP tokenizer at the length that the text encoder was trained on."""

    def __init__(self, tokenizer: CLIPTokenizer, folder: Path):
        self._tokenizer, self._folder = tokenizer, folder

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, or `vocab.json` and `merges.txt`, with the configs beside them.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        forms = (["tokenizer.json"], ["vocab.json", "merges.txt"])
        if not any(all((folder / name).is_file() for name in form) for form in forms):
            # Without them transformers makes up a tokenizer that knows no words.
            raise CheckpointError(f"{folder} holds no tokenizer: there is neither tokenizer.json, "
                                  "nor vocab.json with merges.txt.")
        try:
            return cls(CLIPTokenizer.from_pretrained(folder), folder)
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            message = f"The tokenizer in {folder} cannot be read ({reason})."
            raise CheckpointError(message) from error

    def save(self, folder: Path) -> None:
        """Copies the files that the tokenizer was read from."""
        if folder.resolve() != self._folder.resolve():
            shutil.copytree(self._folder, folder, dirs_exist_ok=True)

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
