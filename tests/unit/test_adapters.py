"""Embeddings, folders of adapters, and files that are damaged."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sd_tpu.checkpoint import adapters
from tests.support.refusals import refusal


@pytest.mark.parametrize("read", [adapters.read_lora, adapters.read_embedding])
@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "damaged"),
        (b"\x80\x04\x95pickle", "damaged"),
        (b"\xff" * 8 + b"{}", "damaged"),
        (None, "There is no file"),
    ],
)
def test_damaged_and_vanished_files_are_one_sentence(tmp_path, read, content, told):
    if content is not None:
        (tmp_path / "a.safetensors").write_bytes(content)
    assert told in refusal(read, tmp_path / "a.safetensors", {})


# --- embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    [
        {"emb_params": np.arange(128.0, dtype=np.float32).reshape(2, 64)},
        {"<my-word>": np.arange(128.0, dtype=np.float32).reshape(2, 64).astype(np.float16)},
        {"word": np.arange(64.0, dtype=np.float32)},
        {"emb_params": np.arange(64.0, dtype=np.float32), "step": np.array(500)},
    ],
)
def test_both_formats_of_one_encoders_embeddings_are_read(tmp_path, tensors):
    save_file(tensors, tmp_path / "a-b, c.safetensors")
    found = adapters.read_embedding(tmp_path / "a-b, c.safetensors", {"text_encoder": 64})
    expected = next(iter(tensors.values()))
    assert found["text_encoder"].dtype == np.float32
    np.testing.assert_array_equal(
        found["text_encoder"], expected.astype(np.float32).reshape(-1, 64)
    )


@pytest.mark.parametrize(
    "first, second", [("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1")]
)
def test_sdxls_embeddings_have_vectors_for_each_encoder(tmp_path, first, second):
    file = tmp_path / "xl.safetensors"
    save_file({second: np.ones((3, 128), np.float32), first: np.zeros((3, 64), np.float32)}, file)
    found = adapters.read_embedding(file, {"text_encoder": 64, "text_encoder_2": 128})
    assert found["text_encoder"].shape == (3, 64) and found["text_encoder_2"].shape == (3, 128)


@pytest.mark.parametrize(
    "tensors, told",
    [
        ({"emb_params": np.ones((2, 63), np.float32)}, "63 numbers long, this model's 64"),
        (
            {"clip_l": np.ones((2, 64), np.float32), "clip_g": np.ones((2, 128), np.float32)},
            "64 and 128 numbers long",
        ),
        ({"emb_params": np.ones((76, 64), np.float32)}, "76 vectors"),
        ({"emb_params": np.ones((0, 64), np.float32)}, "0 vectors"),
        ({"emb_params": np.ones((1, 1, 64), np.float32)}, "for other models"),
        ({"emb_params": np.full((1, 64), np.nan, np.float32)}, "no finite number"),
        ({"emb_params": np.ones((1, 64), np.int32)}, "I32"),
        ({"a": np.ones((1, 64), np.float32), "b": np.ones((1, 64), np.float32)}, "not understood"),
        ({}, "not understood"),
    ],
)
def test_an_embedding_that_does_not_fit_is_one_sentence(tmp_path, tensors, told):
    save_file(tensors, tmp_path / "bad.safetensors")
    assert told in refusal(
        adapters.read_embedding, tmp_path / "bad.safetensors", {"text_encoder": 64}
    )


# --- folders ------------------------------------------------------------------------------------


def test_files_are_listed_by_stem_and_doubles_by_path(tmp_path):
    for name in (
        "a b.safetensors",
        "x/deep.v1.SAFETENSORS",
        "x/a b.safetensors",
        "c.ckpt",
        "y/a b.safetensors",
        "ü<>:\n.safetensors",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xff.safetensors"))).touch()
    (tmp_path / "x" / "round").symlink_to(tmp_path)
    listing = adapters.listing(tmp_path)
    assert listing == {
        "a b": tmp_path / "a b.safetensors",
        "deep.v1": tmp_path / "x/deep.v1.SAFETENSORS",
        "x/a b": tmp_path / "x/a b.safetensors",
        "y/a b": tmp_path / "y/a b.safetensors",
        "ü<>:\n": tmp_path / "ü<>:\n.safetensors",
    }


@pytest.mark.slow("writes 50,000 files")
def test_fifty_thousand_files_are_listed_in_seconds(tmp_path):
    for number in range(50_000):
        os.close(os.open(tmp_path / f"{number}.safetensors", os.O_CREAT))
    assert len(adapters.listing(tmp_path)) == 50_000


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    assert "No such file" in refusal(adapters.listing, tmp_path / "gone")
