"""Prompts -> token ids."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import CLIPTokenizer

from sd_tpu.checkpoint.config import CheckpointError

LENGTH = 77  # the beginning and the end mark included


class Tokenizer:
    """The checkpoint's CLIP tokenizer at the length that the text encoder was trained on."""

    def __init__(self, tokenizer: CLIPTokenizer, folder: Path | None = None):
        """Takes transformers' own, and the folder that it was read from, if there is one."""
        self.clip, self._folder = tokenizer, folder

    @classmethod
    def from_folder(cls, folder: Path, pad: str | None = None) -> "Tokenizer":
        """Reads `tokenizer.json`, or `vocab.json` and `merges.txt`, with the configs beside them.

        `pad` is the token that fills prompts up, in place of the one that the configs name.

        Raises:
            CheckpointError: they are missing or damaged.
        """
        forms = (["tokenizer.json"], ["vocab.json", "merges.txt"])
        if not any(all((folder / name).is_file() for name in form) for form in forms):
            # Without them transformers makes up a tokenizer that knows no words.
            raise CheckpointError(f"{folder} holds no tokenizer: there is neither tokenizer.json, "
                                  "nor vocab.json with merges.txt.")
        try:
            named = {} if pad is None else {"pad_token": pad}
            # With another padding than its files say, saving it must not be to copy them.
            return cls(CLIPTokenizer.from_pretrained(folder, **named), None if named else folder)
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            message = f"The tokenizer in {folder} cannot be read ({reason})."
            raise CheckpointError(message) from error

    def save(self, folder: Path) -> None:
        """Copies the files that the tokenizer was read from, or writes its own."""
        if self._folder is None:
            self.clip.save_pretrained(folder)
        elif folder.resolve() != self._folder.resolve():
            shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def __call__(self, prompts: Sequence[str]) -> np.ndarray:
        """Token ids [B, 77] int32: begin, words, end, padding; longer prompts are cut."""
        begin, end, pad = self.marks
        ids = np.full((len(prompts), LENGTH), pad, np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            words = self.encode(prompt)[0][: LENGTH - 2]
            row[: len(words) + 2] = [begin, *words, end]
        return ids

    @property
    def marks(self) -> tuple[int, int, int]:
        """The tokens before the words, after them, and those that fill up the rest."""
        marks = self.clip
        return marks.bos_token_id, marks.eos_token_id, marks.pad_token_id

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, without marks, and where each token's text begins and ends."""
        # Padding and cutting are done above: asking the tokenizer for them switches its state,
        # which is shared by all threads. `verbose=False` spares a warning of its own limit.
        encoding = self.clip(text, add_special_tokens=False, return_offsets_mapping=True,
                             verbose=False)
        return encoding.input_ids, encoding.offset_mapping
