"""The critic that teaches the decoder to be crisp: who learns what from whom, and on what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, diffusion, grow, recipe, sharpen

TINY = {**recipe.VAE, "latent_channels": 4, "block_out_channels": [4, 8]}


@pytest.fixture(scope="module")
def networks():
    """The loss of a tiny decoder and a small critic with its gradients, compiled once, and their
    parameters; two batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "VAE", TINY)
        patch.setattr(autoencoder, "scale", lambda: 1.0)
        patch.setattr(sharpen, "CHANNELS", (8, 8, 8))
        graphs, params = sharpen.build()
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((4, 16, 16, 4)).astype(np.float32)
    pictures = 255 * rng.integers(0, 2, (4, 8, 8, 3), np.uint8).repeat(4, 1).repeat(4, 2)
    return jax.jit(jax.value_and_grad(sharpen.make_loss(graphs))), params, (latents, pictures)


def gradients(networks, heard: float, critic_scale: float = 1.0):
    loss, params, (latents, pictures) = networks
    params = {**params, "critic": jax.tree.map(lambda x: critic_scale * x, params["critic"])}
    batch = latents, pictures, np.full(4, heard, np.float32)
    return loss(params, batch, None)[1]


def same(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-7), one, other)))


@pytest.mark.slow("compiles a training step")
def test_the_decoder_hears_of_the_critic_when_it_is_told_to(networks):
    alone, heard = gradients(networks, 0.0), gradients(networks, 1.0)
    assert same(alone["decoder"], gradients(networks, 0.0, critic_scale=3.0)["decoder"])
    assert not same(alone["decoder"], heard["decoder"])
    assert same(alone["critic"], heard["critic"]), "it learns from its own errors alone"


def test_the_critic_learns_to_tell_decoded_pictures_from_drawn_ones(networks):
    loss, params, (latents, pictures) = networks
    optimizer = optax.adam(3e-3)
    critic, state, values = params["critic"], optimizer.init(params["critic"]), []
    for _ in range(12):
        value, found = loss(
            {**params, "critic": critic}, (latents, pictures, np.zeros(4, np.float32)), None
        )
        values.append(float(value))
        updates, state = optimizer.update(found["critic"], state)
        critic = optax.apply_updates(critic, updates)
    assert values[-1] < values[0] - 0.5, "nothing but its own errors has changed"


def test_what_is_drawn_from_are_latents_that_the_unet_restored(monkeypatch):
    """Those of the pictures, if it knows them; with what it gets wrong, if not."""
    known = np.random.default_rng(1).standard_normal((4, 2, 2, 8)).astype(np.float32)
    alphas = jnp.asarray(NoiseSchedule.from_config(recipe.SCHEDULER).alphas_cumprod, jnp.float32)

    class Unet:
        def __init__(self, error):
            self.error = error

        def __call__(self, noisy, t, text):
            signal, spread = (jnp.sqrt(x)[:, None, None, None] for x in (alphas[t], 1 - alphas[t]))
            assert t.shape == (4,)
            return signal * (noisy - signal * known) / spread - spread * known + self.error

    class Encoder:
        @staticmethod
        def encode(images):
            return jnp.asarray(known), None

    parts = {"vae": Encoder, "text_encoder": lambda ids: ids}
    monkeypatch.setattr(diffusion.nnx, "merge", lambda graph, params: parts[graph])
    monkeypatch.setattr(grow, "trained", lambda: ("vae", {}))
    monkeypatch.setattr(
        diffusion, "build", lambda: ({"unet": "unet", "text_encoder": "text_encoder"}, None)
    )
    monkeypatch.setattr(diffusion, "trained", lambda: {"unet": {}, "text_encoder": {}})
    pictures, ids = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((4, 77), np.int32)
    off = []
    for error in (0.0, 1.0):
        parts["unet"] = Unet(error)
        restored = sharpen.make_restorer()(pictures, ids, jax.random.key(0))
        off.append(np.abs(restored - known).max((1, 2, 3)))
    assert off[0].max() < 1e-5
    # An error of the velocity counts by the noise, which is what the latest timestep allows at most
    assert 0 < off[1].max() <= float(jnp.sqrt(1 - alphas[sharpen.NOISIEST])) + 1e-5
