"""The grown autoencoder: what it begins with, and which half learns what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training import autoencoder, grow, recipe


@pytest.fixture(scope="module")
def networks():
    """Two graphs with parameters: of an autoencoder of two levels, and of three."""
    small = {**recipe.VAE, "latent_channels": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "FIRST_VAE", {**small, "block_out_channels": [4, 8]})
        patch.setattr(recipe, "VAE", {**small, "block_out_channels": [4, 8, 8]})
        patch.setattr(autoencoder, "scale", lambda: 1.0)
        first_graph, first = autoencoder.build(autoencoder.config())
        first = jax.tree.map(lambda x: x + 1, first)
        return first_graph, first, grow.build()[0], grow.beginning(first)


@pytest.fixture(scope="module")
def batch(networks):
    """Pictures, and what the first encoder makes of them."""
    first_graph, first, *_ = networks
    pictures = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    images = autoencoder.halved(autoencoder.to_unit(pictures))
    return pictures, *autoencoder.nnx.merge(first_graph, first).encode(images)


@pytest.fixture(scope="module")
def loss(networks):
    """The loss and its gradient, compiled once."""
    _, _, graph, _ = networks
    return jax.jit(jax.value_and_grad(grow.make_loss(graph)))


def test_levels_for_pictures_of_the_same_size_begin_alike(networks):
    _, first, _, grown = networks

    def kernel(half, blocks, level):
        return half[blocks][level]["resnets"][0]["conv2"]["kernel"]

    coded, drawn = ((first[half], grown[half]) for half in ("encoder", "decoder"))
    assert np.array_equal(kernel(coded[0], "down_blocks", 1), kernel(coded[1], "down_blocks", 2))
    assert np.array_equal(kernel(drawn[0], "up_blocks", 0), kernel(drawn[1], "up_blocks", 0))
    for one, other in (coded, drawn):
        assert jax.tree.all(jax.tree.map(np.array_equal, one["mid_block"], other["mid_block"]))
    assert set(grown["decoder"]["up_blocks"]) == {0, 1, 2}


@pytest.mark.slow("compiles a training step")
def test_the_encoder_learns_latents_and_the_decoder_pictures(networks, batch, loss):
    """Neither from what the other gets wrong."""
    params, key = networks[-1], jax.random.key(0)
    _, learned = loss(params, batch, key)
    for half, other in (("encoder", "decoder"), ("decoder", "encoder")):
        assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(learned[half]))
        worse = {**params, other: jax.tree.map(lambda x: 2 * x, params[other])}
        found = loss(worse, batch, key)[1][half]
        assert jax.tree.all(jax.tree.map(np.array_equal, learned[half], found))


def test_latents_that_agree_cost_nothing(networks, batch, loss):
    _, _, graph, params = networks
    pictures, _, spread = batch
    found = autoencoder.nnx.merge(graph, params).encode(autoencoder.to_unit(pictures))
    known, unknown = (
        float(loss(params, (pictures, mean, jnp.full_like(spread, -30.0)), jax.random.key(0))[0])
        for mean in (found[0], found[0] + 3.0)
    )
    assert unknown > known + 5
