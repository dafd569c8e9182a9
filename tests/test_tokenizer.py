"""Prompts to token ids, and the words that do not fit."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transformers import CLIPTokenizer

from sd_tpu.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.tokenizer import Tokenizer

FOLDER = BUNDLED_MODEL / "tokenizer"
BEGIN, END = 49406, 49407


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def reference() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(FOLDER)


def test_ids_are_those_of_clip(tokenizer):
    """The ids as every CLIP since 2021 has them, not as the library at hand computes them."""
    ids = tokenizer(["a photo of a cat"])
    assert ids.shape == (1, 77) and ids.dtype == np.int32
    assert ids[0].tolist() == [BEGIN, 320, 1125, 539, 320, 2368] + [END] * 71


@pytest.mark.parametrize("prompt", [
    "", "Labrador in the style of Hokusai", "Çà et là, l'été", "日本の浮世絵", "a 🦊🏽 under ☃️",
    "  spaces\tand\nlines  ", "HAL-9000's 3.14%", "word " * 100,
])
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
    assert tokenizer.lost("cat " * 74 + "a Dog") == "Dog"


def test_padding_is_the_checkpoints_own(tmp_path):
    """SD 2.x pads with the exclamation mark, token 0, where SD 1.x repeats the end mark."""
    reference = CLIPTokenizer.from_pretrained(FOLDER, pad_token="!")
    reference.save_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path)(["cat"])[0, :4].tolist() == [BEGIN, 2368, END, 0]


def test_a_prompt_of_75_tokens_loses_nothing_and_one_more_loses_a_word(tokenizer):
    full = " ".join(["cat"] * 75)
    assert tokenizer.count(full) == 77
    assert tokenizer.lost(full) == ""
    assert tokenizer([full])[0, 75] == 2368 and tokenizer([full])[0, 76] == END
    assert tokenizer.count(f"{full} Dog") == 78
    assert tokenizer.lost(f"{full} Dog") == "Dog"


@pytest.mark.parametrize("tail", [
    "The Cut WORDS,  as   Written", "ÉTÉ à Paris", "日本の絵", "🦊 fox", "e\u0301te\u0301 ICI",
])
def test_the_lost_words_keep_their_spelling(tokenizer, tail):
    assert tokenizer.lost("cat " * 75 + tail) == tail
    assert tokenizer.lost("🦊 É " + "cat " * 80 + tail).endswith(tail)


def test_of_a_word_cut_in_the_middle_the_rest_is_lost(tokenizer):
    word = "Floccinaucinihilipilification"
    assert tokenizer.count(word) > 4
    lost = tokenizer.lost("cat " * 74 + f"{word} Here")
    assert f"{word} Here".endswith(lost)
    assert lost.endswith("Here") and len("Here") < len(lost) < len(f"{word} Here")


def test_many_threads_may_ask_at_once(tokenizer):
    prompts = ["a cat", "very " * 100, ""]
    expected = tokenizer(prompts)

    def ask(_):
        return tokenizer.lost(prompts[1]) != "" and np.array_equal(tokenizer(prompts), expected)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(400)))


def test_count_includes_the_two_marks(tokenizer):
    assert tokenizer.count("") == 2
    assert tokenizer.count("a photo of a cat") == 7


def test_a_prompt_that_is_too_long_raises_no_warning(tokenizer, recwarn, caplog):
    tokenizer.lost("cat " * 200)
    tokenizer(["cat " * 200])
    assert not recwarn.list and not caplog.records


def test_saved_tokenizers_give_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    prompts = ["a photo of a cat", "日本 🦊", ""]
    np.testing.assert_array_equal(Tokenizer.from_folder(tmp_path)(prompts), tokenizer(prompts))


@pytest.mark.parametrize("files", [
    {}, {"vocab.json": '{"cat": 0}'}, {"tokenizer.json": "{"}, {"tokenizer.json": '{"cat": 0}'},
    {"vocab.json": "{", "merges.txt": ""},
])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
