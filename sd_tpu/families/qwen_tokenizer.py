"""Prompts -> token ids of Qwen's language models, as a person's turn in a conversation."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.words import FILE, read_words

START, END = "<|im_start|>", "<|im_end|>"  # of a turn
PAD = "<|endoftext|>"
# What transformers' apply_chat_template writes with add_generation_prompt around a prompt, by
# enable_thinking; None is no template.
TEMPLATES = {
    True: (f"{START}user\n", f"{END}\n{START}assistant\n"),
    False: (f"{START}user\n", f"{END}\n{START}assistant\n<think>\n\n</think>\n\n"),
    None: ("", ""),
}


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

    def turn(self, prompt: str, *, thinking: bool | None) -> list[int]:
        """Token ids of a prompt as a person's turn, after which the model may think or answers; or
        of the prompt alone, if `thinking` is None."""
        before, after = TEMPLATES[thinking]
        return self._ids(f"{before}{prompt}{after}")

    def lost(self, turn: Sequence[int], most: int, *, thinking: bool | None) -> str:
        """Return the end of a turn's prompt that is cut where so many tokens are kept at most."""
        _, after = TEMPLATES[thinking]
        prompt = turn[: len(turn) - len(self._ids(after))]
        return self._words.decode(prompt[most:], skip_special_tokens=True)

    def _ids(self, text: str) -> list[int]:
        return self._words.encode(text, add_special_tokens=False).ids

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, as transformers reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self._words.to_str(), encoding="utf-8")
        config = {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": PAD}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
