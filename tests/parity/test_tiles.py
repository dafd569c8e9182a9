"""Large pictures by tiles: without seams, in bounded memory, and only where they are large."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sd_tpu import BUNDLED_MODEL
from sd_tpu.checkpoint.config import VAEConfig
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.models import AutoencoderKL, tiles

CONFIG = VAEConfig.from_dict(
    dict(
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
)


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    """One of shapes, which is compiled but does not decode."""
    return nnx.eval_shape(lambda: AutoencoderKL(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def trained() -> AutoencoderKL:
    """That of the bundled model, with 16 pixels along a side for each latent."""
    checkpoint, params = Checkpoint.from_pretrained(BUNDLED_MODEL)
    return nnx.merge(checkpoint.model.vae, params["vae"])


@pytest.fixture
def small(monkeypatch):
    """Tiles of 16 latents a side."""
    monkeypatch.setattr(tiles, "SIDE", 16)
    monkeypatch.setattr(tiles, "OVERLAP", 4)


def gradient(height: int, width: int, channels: int) -> np.ndarray:
    """From -1 to 1 along the diagonal, another way in every channel."""
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    turns = np.linspace(0, np.pi, channels, endpoint=False)
    return np.stack([y * np.cos(t) + x * np.sin(t) for t in turns], -1, dtype="f4")[None] / 2


@pytest.mark.parametrize("shape", [(1, 40, 40, 1), (1, 64, 23, 3), (2, 17, 16, 1), (1, 9, 300, 2)])
def test_what_is_the_same_for_every_tile_is_the_same_for_the_whole(small, shape):
    x = np.random.default_rng(0).standard_normal(shape, np.float32)

    @jax.jit  # as one program: operation by operation each would be compiled alone
    def there_and_back(x):
        twice = tiles.by_tiles(lambda x: 3 * x.repeat(2, 1).repeat(2, 2), x)
        return twice, tiles.by_tiles(lambda x: x[:, ::2, ::2], twice, 2)

    twice, half = there_and_back(x)
    np.testing.assert_allclose(twice, 3 * x.repeat(2, 1).repeat(2, 2), atol=1e-5)
    np.testing.assert_allclose(half, 3 * x, atol=1e-5)


def test_tiles_that_disagree_blend_without_a_seam(small):
    """Each tile has a brightness of its own, as norms that see one tile at a time make it."""
    x = gradient(40, 40, 1)
    means = partial(
        tiles.by_tiles, lambda x: jnp.broadcast_to(x.mean((1, 2), keepdims=True), x.shape)
    )
    flat = np.asarray(jax.jit(means)(x))[0, ..., 0]
    most = max(np.abs(np.diff(flat, axis=axis)).max() for axis in (0, 1))
    assert np.ptp(flat) > 0.5 and most < 0.51 * np.ptp(flat) / tiles.OVERLAP


def compiled(vae: AutoencoderKL, method):
    """A method as a program of the parameters and its argument, for tiles as they are now."""
    graph = nnx.graphdef(vae)
    return jax.jit(lambda params, x: method(nnx.merge(graph, params), x))


def seam(image: np.ndarray, whole: np.ndarray) -> float:
    """The largest step of the difference between two pictures from one line to the next; this
    autoencoder's own borders are left out."""
    off = (image - whole)[64:-64, 64:-64]
    return max(np.abs(np.diff(off, axis=axis)).mean(axis=(1 - axis, 2)).max() for axis in (0, 1))


@pytest.mark.slow("decodes a whole picture beside its tiles")
def test_a_gradient_is_nearly_that_of_the_whole_without_a_seam(trained, monkeypatch):
    def encoded(picture):
        return compiled(trained, AutoencoderKL.encode)(nnx.state(trained), picture)[0]

    def decoded(latents):
        return np.asarray(compiled(trained, AutoencoderKL.decode)(nnx.state(trained), latents))[0]

    picture = gradient(448, 448, 3)
    latents = encoded(picture)
    whole = decoded(latents)
    monkeypatch.setattr(tiles, "SIDE", 12)
    monkeypatch.setattr(tiles, "OVERLAP", 4)
    assert np.corrcoef(encoded(picture).ravel(), latents.ravel())[0, 1] > 0.95
    image, weights = decoded(latents), tiles.weights
    assert np.abs(image - whole).mean() < 0.1
    monkeypatch.setattr(tiles, "weights", lambda *of: (weights(*of) > 0.5).astype(np.float32))
    cut = decoded(latents)
    assert seam(image, whole) < 0.3 * seam(cut, whole), "where tiles are not blended"


def temporary(vae: AutoencoderKL, side: int) -> int:
    """Bytes that decoding takes beside the latents, the parameters and the picture."""
    latents = jax.ShapeDtypeStruct((1, side, side, 4), jnp.float32)
    program = compiled(vae, AutoencoderKL.decode).lower(nnx.state(vae), latents).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_decoding_a_large_picture_takes_little_more_memory_than_a_tile(vae, small, monkeypatch):
    tile, large = temporary(vae, 16), temporary(vae, 64)
    picture = 4 * 3 * 128 * 128
    assert large < 1.5 * tile + 2 * picture
    monkeypatch.setattr(tiles, "SIDE", 64)
    assert temporary(vae, 64) > 8 * tile, "by tiles it is a matter of their size"


@pytest.mark.parametrize("size", [(64, 64), (96, 128), (128, 128), (80, 192), (112, 144)])
def test_the_usual_sizes_are_taken_whole(size):
    seen = []
    tiles.by_tiles(lambda x: (seen.append(x.shape), x)[1], jnp.zeros((1, *size, 1)))
    assert seen == [(1, *size, 1)]
