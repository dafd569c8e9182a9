"""The CLIP tokenizer's files, derived from the byte-pair merges inside open-clip-torch (MIT).

Run as `python -m training.tokenizer assets/model/tokenizer`.
"""

import gzip
import json
import sys
import zipfile
from pathlib import Path

from training import sprites

VERSION = "3.3.0"
WHEEL = f"open_clip_torch-{VERSION}-py3-none-any.whl"
MERGES = "open_clip/bpe_simple_vocab_16e6.txt.gz"
START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 49_408
LENGTH = 77


def build_tokenizer(cache: Path, out: Path) -> None:
    """Write the folder that transformers' CLIPTokenizer.from_pretrained(out) reads.

    `cache` keeps the downloaded wheel. Padding is <|endoftext|>, as in Stable Diffusion 1.x.
    """
    merges = read_merges(_wheel(cache))
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "vocab.json", vocabulary(merges))
    text = "\n".join(["#version: 0.2", *merges, ""])
    (out / "merges.txt").write_text(text, encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    _write_json(out / "special_tokens_map.json", special)
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": LENGTH,
        "do_lower_case": True,
        "add_prefix_space": False,
        "errors": "replace",
    }
    _write_json(out / "tokenizer_config.json", settings | special)


def read_merges(wheel: Path) -> list[str]:
    """Read the 48,894 merges CLIP uses, most frequent first, two pieces with a blank between.

    The file holds more of them: CLIP's vocabulary stops where it has VOCABULARY entries.
    """
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(MERGES)).decode("utf-8").split("\n")
    return lines[1 : 1 + VOCABULARY - 2 * 256 - 2]  # the first line names the file


def vocabulary(merges: list[str]) -> dict[str, int]:
    """Map pieces to ids: 256 bytes, the same ending a word, merges, start and end of the text."""
    letters = byte_letters()
    pieces = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *("".join(merge.split()) for merge in merges),
        START,
        END,
    ]
    return {piece: number for number, piece in enumerate(pieces)}


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte, in the order of GPT-2's vocabulary.

    Printable bytes stand for themselves and come first; the others are shifted past 255.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(others)]


def _wheel(cache: Path) -> Path:
    wheel = cache / WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        sprites.fetch([*command, f"open-clip-torch=={VERSION}", "--dest"], wheel)
    return wheel


def _write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build_tokenizer(sprites.training_folder(), Path(sys.argv[1]))
