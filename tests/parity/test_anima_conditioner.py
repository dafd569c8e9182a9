"""Anima's text conditioner against diffusers', at random weights."""

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sd_tpu.checkpoint.config import AnimaConditionerConfig
from sd_tpu.models import AnimaTextConditioner
from tests.support.parity import assert_agrees, relative
from tests.support.transformer_network import NetworkTests

TOKENS = 512  # to which diffusers' fills up what it makes


def inputs(lengths=(7, TOKENS), state_lengths=(9, 30), room=40) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, 50, (2, TOKENS)).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "states": rng.standard_normal((2, room, 20), np.float32),
        "state_lengths": np.array(state_lengths, np.int32),
    }


def of_diffusers(reference, ids, lengths, states, state_lengths) -> np.ndarray:
    """Embed each text by a call of its own, as its pipeline does."""
    rows = []
    for row, (length, count) in enumerate(zip(lengths, state_lengths, strict=True)):
        given = torch.tensor(states[row : row + 1, : max(count, 1)]) * bool(count)
        rows.append(
            reference(
                given,
                torch.tensor(ids[row : row + 1, :length]).long(),
                torch.ones(1, length),
                torch.full((1, max(count, 1)), bool(count)),
            )[0]
        )
    return torch.stack(rows).numpy()


class TestAnimaTextConditioner(NetworkTests):
    network = AnimaTextConditioner
    theirs = diffusers.AnimaTextConditioner
    config = AnimaConditionerConfig
    tiny = dict(
        source_dim=20,
        target_dim=32,
        model_dim=32,
        num_layers=2,
        num_attention_heads=2,
        mlp_ratio=2.0,
        target_vocab_size=50,
    )
    kinds = {"Anima": {}}
    published = {"Anima": {}}
    result = jnp.bfloat16
    refused = [
        ("use_self_attention", False),
        ("use_layer_norm", True),
        ("min_sequence_length", 256),
        ("model_dim", 64),
        ("num_attention_heads", 32),
        ("num_attention_heads", 3),
        ("num_layers", 0),
    ]

    @pytest.fixture
    def given(self, kind):
        return inputs()

    @pytest.mark.parametrize(
        "lengths, state_lengths",
        [((7, TOKENS), (9, 30)), ((1, 3), (0, 1)), ((511, 64), (40, 39))],
        ids=str,
    )
    def test_each_text_is_that_of_diffusers_alone(self, reference, ours, lengths, state_lengths):
        given = inputs(lengths, state_lengths)
        found = ours(given)
        for row, theirs in enumerate(of_diffusers(reference, **given)):
            name = f"AnimaTextConditioner, {lengths[row]} and {state_lengths[row]} tokens"
            assert_agrees(name, found[row], theirs)
            assert np.all(found[row][lengths[row] :] == 0)

    def test_what_is_beyond_either_text_does_not_matter(self, ours):
        given = inputs()
        before = ours(given)
        for row in range(2):
            given["ids"][row, given["lengths"][row] :] = 0
            given["states"][row, given["state_lengths"][row] :] = np.nan
        np.testing.assert_array_equal(ours(given), before)

    @pytest.mark.parametrize("name", ["ids", "lengths", "states", "state_lengths"])
    def test_every_input_of_a_text_matters_to_that_text_alone(self, ours, name):
        given = inputs(lengths=(7, 60))
        before = ours(given)
        changed = given[name].copy()
        changed[1] = (changed[1] + 1) % 50 if name == "ids" else changed[1] + 1
        after = ours(given | {name: changed})
        assert relative(after[0], before[0]) < 1e-6
        assert relative(after[1], before[1]) > 1e-3

    def test_the_order_of_words_and_of_states_matters(self, ours):
        given = inputs((TOKENS, TOKENS), (40, 40))
        before = ours(given)
        for name in ("ids", "states"):
            assert relative(ours(given | {name: given[name][:, ::-1]}), before) > 1e-3
