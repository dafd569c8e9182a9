"""Prompts -> token ids of Qwen's language models, as a person's turn in a conversation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.words import FILE, read_words

START, END = "<|im_start|>", "<|im_end|>"  # of a turn
PAD = "<|endoftext|>"


class Template(NamedTuple):
    """Text that is written around a prompt.

    Attributes:
        before: text before the prompt.
        after: text after it.
        dropped: how many of the first tokens' states are not taken.
        keeps_end: whether what is after the prompt stays where a turn is too long.
    """

    before: str
    after: str
    dropped: int = 0
    keeps_end: bool = False


# What transformers' apply_chat_template writes with add_generation_prompt, by enable_thinking
THINKS = Template(f"{START}user\n", f"{END}\n{START}assistant\n")
ANSWERS = Template(f"{START}user\n", f"{THINKS.after}<think>\n\n</think>\n\n")
ALONE = Template("", "")  # no turn


class QwenTokenizer:
    """A checkpoint's Qwen2 or Qwen3 tokenizer."""

    def __init__(self, words: tokenizers.Tokenizer):
        """Wrap a tokenizer of the library that has Qwen's marks."""
        self._words = words
        self.pad = words.token_to_id(PAD)

    @classmethod
    def from_folder(cls, folder: Path) -> "QwenTokenizer":
        """Read a folder's `tokenizer.json`, or Qwen3's own where there is none.

        Raises:
            CheckpointError: it is damaged, or another model's.
        """
        words = read_words(folder, "qwen3")
        if None in map(words.token_to_id, (START, END, PAD)):
            raise CheckpointError(f"{folder / FILE} is not that of Qwen, which has {START}.")
        return cls(words)

    @property
    def size(self) -> int:
        """How many tokens it knows."""
        return self._words.get_vocab_size()

    def turn(self, prompt: str, template: Template) -> list[int]:
        """Token ids of a prompt with what a template writes around it."""
        return self._ids(f"{template.before}{prompt}{template.after}")

    def cut(self, turn: list[int], most: int, template: Template) -> list[int]:
        """Return a turn of so many tokens at most."""
        if len(turn) <= most:
            return turn
        end = self._ids(template.after) if template.keeps_end else []
        return turn[: most - len(end)] + end

    def lost(self, turn: Sequence[int], most: int, template: Template) -> str:
        """Return the end of a turn's prompt that `cut` cuts off."""
        end = len(self._ids(template.after))
        most -= end if template.keeps_end else 0
        return self._words.decode(turn[most : max(most, len(turn) - end)], skip_special_tokens=True)

    def _ids(self, text: str) -> list[int]:
        return self._words.encode(text, add_special_tokens=False).ids

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, as transformers reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self._words.to_str(), encoding="utf-8")
        config = {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": PAD}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
