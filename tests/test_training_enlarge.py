"""The autoencoder that is grown from the small one: what it begins with, and what it learns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from training import autoencoder, enlarge, recipe

SMALL = {**recipe.SMALL_VAE, "latent_channels": 4, "block_out_channels": [4, 8]}
LARGE = {**SMALL, "block_out_channels": [4, 8, 16]}


@pytest.fixture(scope="module")
def networks():
    """The small and the large graph and the small parameters, whose ends see single pixels."""
    small, params = autoencoder.build(SMALL)
    for part, layer in (("encoder", "conv_in"), ("decoder", "conv_out")):
        kernel = params[part][layer]["kernel"]
        params[part][layer]["kernel"] = jnp.zeros_like(kernel).at[1, 1].set(kernel[1, 1])
    return small, autoencoder.build(LARGE)[0], params


def grow(small_params, seed: int = 1):
    return enlarge.grown(small_params, autoencoder.build(LARGE, seed)[1], jax.random.key(0))


def test_it_begins_as_the_small_one_between_a_reduction_and_an_enlargement(networks, monkeypatch):
    monkeypatch.setattr(enlarge, "ASYMMETRY", 0.0)
    small, large, params = networks

    @partial(jax.jit, static_argnums=0)
    def both(graph, params, pictures, latents):
        return nnx.merge(graph, params).encode(pictures), nnx.merge(graph, params).decode(latents)

    pictures = jax.random.normal(jax.random.key(2), (2, 16, 16, 3))
    latents = jax.random.normal(jax.random.key(3), (2, 4, 4, 4))
    before, decoded = both(small, params, autoencoder.halved(pictures), latents)
    after, enlarged = both(large, grow(params), pictures, latents)
    for mine, theirs in zip(after, before, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    expected = np.asarray(decoded).repeat(2, axis=1).repeat(2, axis=2)
    np.testing.assert_allclose(enlarged, expected, atol=2e-4)


def test_channels_that_were_repeated_are_told_apart(networks):
    kernel = grow(networks[2])["decoder"]["mid_block"]["resnets"][0]["conv1"]["kernel"]
    assert float(jnp.abs(kernel[..., 0::2, :] - kernel[..., 1::2, :]).min(axis=(0, 1, 3)).max()) > 0
    assert float(jnp.abs(kernel[..., 0::2] - kernel[..., 1::2]).mean()) > 0


def test_a_sharp_guess_costs_less_than_a_blur_where_an_edge_may_lie_in_two_places():
    columns = np.arange(16)[None, None, :, None]
    either, other = (jnp.where(columns < edge, 1.0, -1.0) + jnp.zeros((1, 16, 16, 3))
                     for edge in (5, 7))
    blur = (either + other) / 2

    def mean_cost(guess):
        return float(enlarge.difference(guess, either) + enlarge.difference(guess, other)) / 2

    assert enlarge.difference(either, either) == 0
    assert mean_cost(either) < 0.95 * mean_cost(blur)


def test_encoder_and_decoder_both_learn_from_what_the_teacher_shows(networks):
    graph, params = networks[1], grow(networks[2])
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((4, 4, 4, 4)).astype(np.float32)
    pictures = rng.uniform(-1, 1, (4, 16, 16, 3)).astype(np.float32)
    batch = latents, np.zeros_like(latents), latents, pictures
    loss, optimizer = enlarge.make_loss(graph), optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params, batch, None)
        updates, state = optimizer.update(gradients, state)
        norms = [optax.global_norm(gradients[part]) for part in ("encoder", "decoder")]
        return optax.apply_updates(params, updates), state, value, norms

    state, values = optimizer.init(params), []
    for _ in range(15):
        params, state, value, norms = step(params, state)
        values.append(float(value))
        assert min(norms) > 0
    assert values[-1] < 0.9 * values[0]
