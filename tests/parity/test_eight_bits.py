"""Files whose weights were rounded to floats of 8 bits or to int8, with scales and without."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError

SHAPE = (6, 4)
EXPECTED = {"layer": {"kernel": np.zeros(SHAPE[::-1], np.float32)}}


@pytest.fixture
def exact() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.manual_seed(0))


def loaded(folder, tensors):
    named = {
        name if name == "scaled_fp8" else f"layer.{name}": each for name, each in tensors.items()
    }
    save_file(named, folder / "a.safetensors")
    return np.asarray(weights.load([folder / "a.safetensors"], EXPECTED)["layer"]["kernel"]).T


def form(name):
    return torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_8_bits_are_the_numbers_that_pytorch_reads(exact, dtype, tmp_path):
    narrow = exact.to(dtype)
    np.testing.assert_array_equal(loaded(tmp_path, {"weight": narrow}), narrow.float())


@pytest.mark.parametrize("rows", [1, SHAPE[0]])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("scale_weight", {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}),
        ("weight_scale", {"comfy_quant": form("float8_e4m3fn"), "input_scale": torch.ones(())}),
    ],
)
def test_floats_of_8_bits_are_multiples_of_their_scales(exact, rows, name, more, tmp_path):
    scale = torch.rand(rows, 1) + 0.5
    narrow = (exact / scale).to(torch.float8_e4m3fn)
    ours = loaded(tmp_path, {"weight": narrow, name: scale if rows > 1 else scale[0, 0], **more})
    np.testing.assert_array_equal(ours, narrow.float() * scale)


@pytest.mark.parametrize("rows", [1, SHAPE[0]])
def test_int8_is_a_multiple_of_its_scales(exact, rows, tmp_path):
    scale = exact.abs().amax(1 if rows > 1 else (0, 1), keepdim=True) / 127
    narrow = (exact / scale).round().to(torch.int8)
    tensors = {"weight": narrow, "weight_scale": scale, "comfy_quant": form("int8_tensorwise")}
    np.testing.assert_array_equal(loaded(tmp_path, tensors), narrow.float() * scale)


def test_a_fused_layer_is_split_with_its_scales(exact, tmp_path):
    scale = torch.rand(SHAPE[0], 1) + 0.5
    narrow = exact.to(torch.float8_e4m3fn)
    save_file({"qkv.weight": narrow, "qkv.weight_scale": scale}, tmp_path / "a.safetensors")
    (stored,) = weights.header(tmp_path / "a.safetensors").values()
    found = weights.load_stored(
        {"weight": stored.rows_between(2, 4)},
        {"kernel": np.zeros((4, 2), np.float32)},
        source=tmp_path,
    )
    np.testing.assert_array_equal(np.asarray(found["kernel"]).T, (narrow.float() * scale)[2:4])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "the file has I8, supported"),
        ({"weight_scale": torch.ones(3, 4)}, "I8 with scales of another kind"),
        ({"weight_scale": torch.ones(()), "comfy_quant": form("int8_convrot")}, "int8_convrot"),
    ],
)
def test_other_int8_is_refused_by_name(more, told, tmp_path):
    with pytest.raises(CheckpointError, match=told):
        loaded(tmp_path, {"weight": torch.ones(SHAPE, dtype=torch.int8), **more})


@pytest.mark.parametrize(
    "quant",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.tensor(list(b"[" * 100_000), dtype=torch.uint8),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
    ],
)
def test_a_format_that_cannot_be_read_is_a_damaged_file(quant, tmp_path):
    with pytest.raises(CheckpointError, match=r"damaged or incomplete .*comfy_quant s"):
        loaded(tmp_path, {"weight": torch.ones(SHAPE, dtype=torch.int8), "comfy_quant": quant})


@pytest.mark.parametrize(
    "scale", [torch.ones(2), torch.ones((), dtype=torch.float8_e4m3fn), torch.ones(1, 2)]
)
def test_a_scale_of_another_kind_is_refused_by_name(scale, tmp_path):
    narrow = torch.ones(SHAPE).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="F8_E4M3 with scales of another kind"):
        loaded(tmp_path, {"weight": narrow, "weight_scale": scale})


def test_numbers_that_are_none_are_refused(exact, tmp_path):
    exact[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="holds what is no finite number"):
        loaded(tmp_path, {"weight": exact.to(torch.float8_e4m3fn)})
