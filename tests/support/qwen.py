"""Tiny language models of Qwen's kind, and a tokenizer of bytes with its marks and template."""

from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sd_tpu.families.qwen_tokenizer import END, START, QwenTokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_config(width: int, **values) -> transformers.Qwen3Config:
    """Return the config of a tiny language model with states of this width."""
    tiny = dict(intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, head_dim=16)
    tiny |= dict(num_key_value_heads=2, vocab_size=300, rope_theta=1e6)
    return transformers.Qwen3Config(hidden_size=width, **{**tiny, **values})


def make_tokenizer(folder: Path, *more: str) -> transformers.Qwen2TokenizerFast:
    """Write the tokenizer into a folder, with more words of one token if any, and read it as
    transformers does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<|endoftext|>", START, END)]
    )
    words.add_tokens([AddedToken(each, normalized=False) for each in more])
    QwenTokenizer(words).save(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
