"""Text encoders apart from what draws: in less room than both take, and LoRAs of one of them."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Parameters
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.plan import Weights
from sd_tpu.settings import RequestError
from tests.support.pictures import pictures_of

PROMPTS = ["a cat", "a dog", "two birds"]


def drawn(engine: Engine, *prompts: str) -> dict[int, np.ndarray]:
    request = Request.check({"prompts": [*prompts], "steps": 2, "seed": 3}, engine.catalog)
    return pictures_of(engine.submit(request, previews=False))


@pytest.fixture(scope="module")
def whole(checkpoints):
    engine = Engine.open(checkpoints["sd1"], devices=1)
    yield engine
    engine.close()


def watched(engine: Engine) -> tuple[list[Weights], list[int]]:
    """Return what is loaded from now on, and the bytes of parameters there after each plan."""
    execute, loads, held = engine.worker.execute, [], []

    def watching(plan):
        loads.extend(weights for _, weights in plan.load)
        report = execute(plan)
        there = [engine.worker.weights.of(0, name) for name in engine.worker.weights.names(0)]
        arrays = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(there)}
        held.append(sum(arrays.values()))
        return report

    engine.worker.execute = watching
    return loads, held


@pytest.mark.slow("opens an engine that loads its parts in turns")
def test_a_model_that_does_not_fit_beside_its_text_encoders_draws_the_same(whole, checkpoints):
    expected = drawn(whole, *PROMPTS)
    parts = whole.texts.memory, whole.weights.memory
    room = max(parts)
    assert min(parts) > room / 10, "a bound that both break by far"
    with Engine.open(checkpoints["sd1"], devices=1, memory=whole.batch.memory + room) as engine:
        loads, held = watched(engine)
        ours = drawn(engine, *PROMPTS)
        assert ours.keys() == expected.keys()
        for index, picture in ours.items():
            np.testing.assert_array_equal(picture, expected[index])
        assert {*loads} == {engine.texts, engine.weights} and len(loads) <= 3
        loads.clear()
        again = drawn(engine, *PROMPTS[::-1][:1], *PROMPTS[:1])
        assert len(again) == 2 and not loads, "what was made of prompts is kept"
        assert max(held) <= room
    with (
        pytest.raises(RequestError, match="more memory"),
        Engine.open(checkpoints["sd1"], devices=1, memory=whole.batch.memory + room - 1) as engine,
    ):
        drawn(engine, *PROMPTS)


def test_where_both_fit_a_request_is_encoded_at_once_and_nothing_is_brought(whole):
    loads, _ = watched(whole)
    encode, calls = whole.worker._encode_or_fail, []
    whole.worker._encode_or_fail = lambda prompts: calls.append(len(prompts)) or encode(prompts)
    drawn(whole, "four cats", "five cats", "four cats")
    assert sum(calls) == 2 and not loads
    drawn(whole, "five cats")
    assert sum(calls) == 2


@pytest.mark.parametrize("when", ["before", "while"])
def test_parts_of_two_states_of_a_models_files_are_not_mixed(whole, monkeypatch, when):
    """Text encoders are read long after what draws, and the files may be others by then."""
    opened, name = whole.catalog.opened(""), whole.catalog.first
    states = iter([opened.written] * (when == "while") + [((1, 1),)])
    monkeypatch.setattr(Parameters, "written", lambda self: next(states))
    monkeypatch.setattr(whole.catalog, "_stale", set())
    with pytest.raises(CheckpointError, match="written anew"):
        whole._read(whole.texts, whole.worker.weights.on([0]))
    assert whole.catalog._stale == {name} and not [*states]


def test_a_request_names_its_text_encoders_and_what_draws(whole):
    request = Request.check({"prompts": ["a cat"]}, whole.catalog)
    assert whole.resolver.resolve(request).weights == {whole.texts, whole.weights}


def test_a_request_that_fails_on_its_way_is_not_remembered(whole, monkeypatch):
    monkeypatch.setattr(whole, "_prompt", lambda picture: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawn(whole, "a cat")
    assert not whole._submitting


def test_loras_make_a_variant_of_the_part_that_they_change(checkpoints, tmp_path):
    of = {
        "unet": "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q",
        "text": "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
    }
    with Engine.open(checkpoints["sd1"], devices=1, lora_dir=tmp_path) as engine:
        widths = {
            "unet": engine.checkpoint.model.unet_config.block_out_channels[-1],
            "text": engine.checkpoint.model.text_config.hidden_size,
        }
        for part, key in of.items():
            factors = np.full((1, widths[part]), 0.5, np.float32)
            save_file(
                {f"{key}.lora_down.weight": factors, f"{key}.lora_up.weight": factors.T.copy()},
                tmp_path / f"{part}.safetensors",
            )
        engine.adapters.look_again()
        prompts = ["a cat", "a cat <lora:unet:1>", "a cat <lora:text:1>"]
        request = Request.check({"prompts": prompts, "steps": 2}, engine.catalog)
        plain, unet, text = engine.resolver.resolve(request).pictures.values()
        assert (plain.weights, plain.texts) == (engine.weights, engine.texts)
        assert unet.texts == plain.texts and unet.weights.base == plain.weights
        assert text.weights == plain.weights and text.texts.base == plain.texts
        assert 0 < text.texts.memory < engine.texts.memory
        pictures = drawn(engine, *prompts)
        assert len({picture.tobytes() for picture in pictures.values()}) == 3
        for index, prompt in enumerate(prompts):
            alone = drawn(engine, *[""] * index, prompt)
            np.testing.assert_array_equal(alone[index], pictures[index])
