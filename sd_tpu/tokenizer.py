"""Prompts -> token ids, and which words of a prompt the model will not see."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import BatchEncoding, CLIPTokenizer

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
        marks = self._tokenizer
        ids = np.full((len(prompts), LENGTH), marks.pad_token_id, np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            words = self._encode(prompt).input_ids[: LENGTH - 2]
            row[: len(words) + 2] = [marks.bos_token_id, *words, marks.eos_token_id]
        return ids

    def count(self, prompt: str) -> int:
        """Tokens that the prompt takes, its two marks included; more than 77 are cut."""
        return len(self._encode(prompt).input_ids) + 2

    def lost(self, prompt: str) -> str:
        """The end of the prompt that lies beyond the 77th token; empty if all of it fits."""
        offsets = self._encode(prompt).offset_mapping
        kept = LENGTH - 2
        return prompt[offsets[kept][0]:].strip() if len(offsets) > kept else ""

    def _encode(self, prompt: str) -> BatchEncoding:
        # Padding and cutting are done above: asking the tokenizer for them switches its state,
        # which is shared by all threads. `verbose=False` spares a warning of its own limit.
        return self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True,
                               verbose=False)
