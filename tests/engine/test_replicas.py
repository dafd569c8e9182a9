"""Engines whose replicas have several chips: the same pictures, whatever the shape of the mesh."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.report import count_compilations
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.replicas import fewest_chips
from tests.support import flux, flux2

DEVICES, SIDE, HEADS = 8, 32, 8
CHIPS = 1, 2, 4, 8
KINDS = {
    "FLUX.1": lambda folder: flux.make_pipeline(
        folder, dev=False, num_attention_heads=HEADS, num_single_layers=1
    ),
    "FLUX.2 klein": lambda folder: flux2.make_pipeline(folder, distilled=False, heads=HEADS),
}
SKIPPED = {"FLUX.1": 0, "FLUX.2 klein": 2}  # of PICTURES: how rows are made is not the kind's
# Chips of a replica: beside single ones, one replica of all, and two of four.
SHAPES = {"FLUX.1": (1, 8), "FLUX.2 klein": (1, 4)}
ADAPTED = {
    "FLUX.1": ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out"),
    "FLUX.2 klein": (
        "transformer_blocks.0.ff.linear_in",
        "single_transformer_blocks.1.attn.to_qkv_mlp_proj",
    ),
}
PHOTO = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
# Mixed settings: other steps, another sampler, other guidance, a LoRA, a start picture.
PICTURES = [
    dict(prompt="a cat", seed=1),
    dict(prompt="a red fox in the snow", seed=2, steps=4, sampler="heun"),
    dict(prompt="a castle", seed=3, guidance=1.0),
    dict(prompt="a castle <lora:ink:0.8>", seed=3, steps=2),
    dict(prompt="a boat", seed=4, init_image=PHOTO, strength=0.7, steps=5),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> Iterator[str]:
    """Each kind of model in turn, with small texts."""
    with flux2.few_layers(), flux2.few_tokens():
        yield request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """A folder with a model and a LoRA."""
    folder = tmp_path_factory.mktemp("replicas")
    pipeline = KINDS[kind](folder / "words")
    pipeline.save_pretrained(folder / "model")
    torch.manual_seed(5)
    tensors = {}
    for name in ADAPTED[kind]:
        layer = pipeline.transformer.get_submodule(name)
        tensors |= {
            f"transformer.{name}.lora_A.weight": torch.randn(4, layer.in_features) / 4,
            f"transformer.{name}.lora_B.weight": torch.randn(layer.out_features, 4) / 4,
        }
    save_file(tensors, folder / "ink.safetensors")
    return folder


def drawn(engine: Engine, *pictures: dict) -> list[np.ndarray]:
    found = engine.draw(list(pictures), steps=3, guidance=3.0)
    return [np.asarray(picture).astype(int) for picture in found]


def opened(folder, chips: int) -> Engine:
    options = dict(size=(SIDE, SIDE), lora_dir=folder)
    return Engine.open(folder / "model", devices=DEVICES, tensor_parallel=chips, **options)


def assert_held(engine: Engine, chips: int) -> None:
    """Each chip has of the parameters what is said, and its share of heads."""
    held = dict.fromkeys(engine.mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(engine.params):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    parameters = engine.checkpoint.parameters
    assert set(held.values()) == {parameters.memory}
    assert parameters.memory == engine.weights.memory + engine.texts.memory
    queries = engine.params["transformer"]["transformer_blocks"][0]["attn"]["to_q"]["kernel"]
    _, *shape = queries.shape
    assert {shard.data.shape for shard in queries.addressable_shards} == {
        (1, shape[0], shape[1] // chips)
    }
    assert engine.status().tensor_parallel == chips


@pytest.mark.slow("compiles the programs for each shape of the mesh")
def test_pictures_are_the_same_for_each_shape_of_the_mesh(kind, folder):
    expected, pictures = None, PICTURES[SKIPPED[kind] :]
    for chips in SHAPES[kind]:
        with opened(folder, chips) as engine:
            ours = drawn(engine, *pictures)
            assert_held(engine, chips)
            expected = expected or ours
            for one, other in zip(ours, expected, strict=True):
                assert one.std() > 2 and np.mean(np.abs(one - other) <= 2) >= 0.995
            again = drawn(engine, *pictures[::-1])[::-1]  # in other slots
            assert all(map(np.array_equal, ours, again))
            assert np.array_equal(ours[1], drawn(engine, pictures[1])[0])
            compiled = count_compilations()
            drawn(engine, *({**picture, "seed": 9, "steps": 5} for picture in pictures[:3]))
            assert not compiled()


def test_replicas_have_the_fewest_chips_that_hold_a_model(folder):
    checkpoint = Checkpoint.open(folder / "model")
    memory = {chips: checkpoint.memory_on(chips) for chips in CHIPS}
    # Over eight chips text encoders of four heads are whole again.
    assert memory[1] > memory[2] > memory[4] and memory[1] >= memory[8]
    for chips in (1, 2, 4):
        assert fewest_chips(checkpoint, 8, memory[chips]) == chips
    assert fewest_chips(checkpoint, 8, memory[2], lambda chips: 100 // chips) == 4
    assert fewest_chips(checkpoint, 8, 1) == min(CHIPS, key=lambda chips: memory[chips])
    assert fewest_chips(checkpoint, 6, 1) == 2


@pytest.mark.parametrize(
    ("heads", "complaint"),
    [
        (6, "not divided over 4 chips: it has heads and channels for 2"),
        (3, "not divided over 4 chips: only transformers are"),
    ],
)
def test_a_transformer_whose_heads_do_not_divide_is_refused(tmp_path, heads, complaint):
    pipeline = flux2.make_pipeline(tmp_path / "words", distilled=True, heads=heads)
    pipeline.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=complaint):
        Engine.open(tmp_path / "model", devices=4, tensor_parallel=4)
