"""Prompts to token ids, and the words that do not fit."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from transformers import CLIPTokenizer

from sd_tpu.checkpoint.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.families import tokenizer as module
from sd_tpu.families.text import Count, PromptOptions, count
from sd_tpu.families.tokenizer import Tokenizer

FOLDER = BUNDLED_MODEL / "tokenizer"
BEGIN, END = 49406, 49407


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def reference() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(FOLDER)


def told(tokenizer: Tokenizer, prompt: str) -> Count:
    """How long a prompt is where a single chunk is kept."""
    return count(tokenizer, prompt, PromptOptions(chunks=1))


def test_ids_are_those_of_clip(tokenizer):
    """The ids as every CLIP since 2021 has them, not as the library at hand computes them."""
    ids = tokenizer(["a photo of a cat"])
    assert ids.shape == (1, 77) and ids.dtype == np.int32
    assert ids[0].tolist() == [BEGIN, 320, 1125, 539, 320, 2368] + [END] * 71


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "Labrador in the style of Hokusai",
        "Çà et là, l'été",
        "日本の浮世絵",
        "a 🦊🏽 under ☃️",
        "  spaces\tand\nlines  ",
        "HAL-9000's 3.14%",
        "word " * 100,
    ],
)
def test_ids_are_those_of_transformers(tokenizer, reference, prompt):
    theirs = reference(prompt, padding="max_length", max_length=77, truncation=True).input_ids
    assert tokenizer([prompt])[0].tolist() == theirs


def test_every_row_is_77_wide_whatever_the_checkpoint_says(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("model_max_length")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer(["", "cat", "cat " * 200]).shape == (3, 77)
    assert told(tokenizer, "cat " * 74 + "a Dog").lost == "Dog"


def test_padding_is_the_checkpoints_own(tmp_path):
    """SD 2.x pads with the exclamation mark, token 0, where SD 1.x repeats the end mark."""
    reference = CLIPTokenizer.from_pretrained(FOLDER, pad_token="!")
    reference.save_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path)(["cat"])[0, :4].tolist() == [BEGIN, 2368, END, 0]


def test_a_prompt_of_75_tokens_loses_nothing_and_one_more_loses_a_word(tokenizer):
    full = " ".join(["cat"] * 75)
    assert told(tokenizer, full).tokens == 77
    assert told(tokenizer, full).lost == ""
    assert tokenizer([full])[0, 75] == 2368 and tokenizer([full])[0, 76] == END
    assert told(tokenizer, f"{full} Dog").tokens == 78
    assert told(tokenizer, f"{full} Dog").lost == "Dog"


@pytest.mark.parametrize(
    "tail",
    ["The Cut WORDS,  as   Written", "ÉTÉ à Paris", "日本の絵", "🦊 fox", "e\u0301te\u0301 ICI"],
)
def test_the_lost_words_keep_their_spelling(tokenizer, tail):
    assert told(tokenizer, "cat " * 75 + tail).lost == tail
    assert told(tokenizer, "🦊 É " + "cat " * 80 + tail).lost.endswith(tail)


def test_of_a_word_cut_in_the_middle_the_rest_is_lost(tokenizer):
    word = "Floccinaucinihilipilification"
    assert told(tokenizer, word).tokens > 4
    lost = told(tokenizer, "cat " * 74 + f"{word} Here").lost
    assert f"{word} Here".endswith(lost)
    assert lost.endswith("Here") and len("Here") < len(lost) < len(f"{word} Here")


def test_many_threads_may_ask_at_once(tokenizer):
    prompts = ["a cat", "very " * 100, ""]
    expected = tokenizer(prompts)

    def ask(_):
        return told(tokenizer, prompts[1]).lost and np.array_equal(tokenizer(prompts), expected)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(100)))


def test_count_includes_the_two_marks(tokenizer):
    assert told(tokenizer, "").tokens == 2
    assert told(tokenizer, "a photo of a cat").tokens == 7


def test_a_prompt_that_is_too_long_raises_no_warning(tokenizer, recwarn, caplog):
    told(tokenizer, "cat " * 200)
    tokenizer(["cat " * 200])
    assert not recwarn.list and not caplog.records


def test_saved_tokenizers_give_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    prompts = ["a photo of a cat", "日本 🦊", ""]
    np.testing.assert_array_equal(Tokenizer.from_folder(tmp_path)(prompts), tokenizer(prompts))


def test_fine_tunes_share_the_words_of_their_model_and_no_others(tmp_path):
    """A folder of two hundred would take gigabytes otherwise."""
    copy, cut = tmp_path / "copy", tmp_path / "cut"
    for folder in (copy, cut):
        shutil.copytree(FOLDER, folder)
    merges = (cut / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (cut / "merges.txt").write_text("".join(merges[:100]), encoding="utf-8")
    module._built.cache_clear()
    one, other, padded, poorer = (
        Tokenizer.from_folder(FOLDER),
        Tokenizer.from_folder(copy),
        Tokenizer.from_folder(copy, "!"),
        Tokenizer.from_folder(cut),
    )
    assert module._built.cache_info().misses == 3
    ids = one(["a cat"])
    assert (other(["a cat"]) == ids).all() and padded(["a cat"])[0, -1] == 0 != ids[0, -1]
    assert (poorer(["a cat"]) != ids).any()


def test_a_padding_of_its_own_is_saved(tmp_path):
    """As that of SD 2 and SDXL, where a single file's tokenizer is CLIP's own."""
    Tokenizer.from_folder(FOLDER, pad="!").save(tmp_path)
    assert Tokenizer.from_folder(tmp_path)(["cat"])[0, :4].tolist() == [BEGIN, 2368, END, 0]


@pytest.fixture
def kept(tmp_path):
    """An empty folder of what JAX compiles."""
    folder = tmp_path / "kept"
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def read_by_transformers(monkeypatch) -> list:
    """The folders that transformers read, with their padding."""
    asked, read = [], module.clip_tokenizer
    monkeypatch.setattr(
        module, "clip_tokenizer", lambda *given: asked.append(given) or read(*given)
    )
    return asked


PROMPTS = ["a photo of a cat!", "wow!!! <|endoftext|> 日本 🦊", "Çà et là, l'été", ""]


@pytest.mark.parametrize("pad", [None, "!"])
def test_what_transformers_made_is_kept_for_later(kept, read_by_transformers, pad):
    reference = CLIPTokenizer.from_pretrained(FOLDER, **{} if pad is None else {"pad_token": pad})
    theirs = reference(PROMPTS, padding="max_length", max_length=77).input_ids
    for _ in range(2):
        tokenizer = Tokenizer.from_folder(FOLDER, pad=pad)
        assert tokenizer(PROMPTS).tolist() == theirs
    assert read_by_transformers == [(FOLDER, pad)]
    assert len(list(kept.iterdir())) == 1


def test_transformers_reads_anew_what_has_changed(kept, read_by_transformers, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(FOLDER, folder)
    Tokenizer.from_folder(folder)
    Tokenizer.from_folder(folder, pad="!")
    config = json.loads((folder / "special_tokens_map.json").read_text())
    (folder / "special_tokens_map.json").write_text(json.dumps(config | {"pad_token": "!"}))
    assert Tokenizer.from_folder(folder).marks.pad == 0
    assert len(read_by_transformers) == len(list(kept.iterdir())) == 3


def test_what_was_kept_may_be_damaged(kept, read_by_transformers):
    expected = Tokenizer.from_folder(FOLDER)(PROMPTS)
    (file,) = kept.iterdir()
    for number, content in enumerate(("", "[]", "[1", '["", [1, 2]]', "null"), 2):
        file.write_text(content)
        assert np.array_equal(Tokenizer.from_folder(FOLDER)(PROMPTS), expected), content
        assert len(read_by_transformers) == number and len(file.read_text()) > 10**6


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "/dev/null/none"),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_nothing_need_be_kept(kept, read_by_transformers, option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        for _ in range(2):
            assert Tokenizer.from_folder(FOLDER).marks == (BEGIN, END, END)
    finally:
        jax.config.update(option, before)
    assert len(read_by_transformers) == 2 and not kept.exists()


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"vocab.json": '{"cat": 0}'},
        {"tokenizer.json": "{"},
        {"tokenizer.json": '{"cat": 0}'},
        {"vocab.json": "{", "merges.txt": ""},
        {"vocab.json": '{"cat": 0}', "merges.txt": "", "tokenizer_config.json": "[" * 100_000},
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_tokenizers_files_have_a_bound_and_are_all_that_is_copied(tokenizer, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(FOLDER, here)
    (here / "endless").symlink_to("/dev/zero")
    Tokenizer.from_folder(here).save(there)
    assert {file.name for file in there.iterdir()} == {file.name for file in FOLDER.iterdir()}
    with (here / "merges.txt").open("ab") as file:
        file.truncate(1 << 24)
    with pytest.raises(CheckpointError, match=r"merges\.txt, it is larger than 8 MiB"):
        Tokenizer.from_folder(here)
