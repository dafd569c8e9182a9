"""The critic that teaches the decoder to be crisp: who learns what from whom."""

import jax
import numpy as np
import optax
import pytest

from training import recipe, sharpen

TINY = {**recipe.VAE, "latent_channels": 4, "block_out_channels": [4, 8]}


@pytest.fixture(scope="module")
def networks():
    """Graphs and parameters of a tiny decoder and a small critic; two batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "VAE", TINY)
        patch.setattr(sharpen.autoencoder, "scale", lambda: 1.0)
        patch.setattr(sharpen, "CHANNELS", (8, 8, 8))
        graphs, params = sharpen.build()
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((4, 16, 16, 4)).astype(np.float32)
    # As softly as a decoder would draw, and with edges
    pictures = 255 * rng.integers(0, 2, (4, 8, 8, 3), np.uint8).repeat(4, 1).repeat(4, 2)
    return graphs, params, (latents, pictures)


def gradients(networks, heard: float, critic_scale: float = 1.0):
    graphs, params, (latents, pictures) = networks
    params = {**params, "critic": jax.tree.map(lambda x: critic_scale * x, params["critic"])}
    batch = latents, pictures, np.full(4, heard, np.float32)
    return jax.jit(jax.grad(sharpen.make_loss(graphs)))(params, batch, None)


def same(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-7), one, other)))


def test_the_decoder_hears_of_the_critic_when_it_is_told_to(networks):
    alone, heard = gradients(networks, 0.0), gradients(networks, 1.0)
    assert same(alone["decoder"], gradients(networks, 0.0, critic_scale=3.0)["decoder"])
    assert not same(alone["decoder"], heard["decoder"])
    assert same(alone["critic"], heard["critic"]), "it learns from its own errors alone"


def test_the_critic_learns_to_tell_decoded_pictures_from_drawn_ones(networks):
    graphs, params, (latents, pictures) = networks
    loss = jax.jit(jax.value_and_grad(sharpen.make_loss(graphs)))
    optimizer = optax.adam(3e-3)
    critic, state, values = params["critic"], optimizer.init(params["critic"]), []
    for _ in range(12):
        value, found = loss({**params, "critic": critic},
                            (latents, pictures, np.zeros(4, np.float32)), None)
        values.append(float(value))
        updates, state = optimizer.update(found["critic"], state)
        critic = optax.apply_updates(critic, updates)
    assert values[-1] < values[0] - 0.5, "nothing but its own errors has changed"
