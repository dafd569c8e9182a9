"""Trains the autoencoder: python -m training.autoencoder [--steps N]"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from sd_tpu.config import VAEConfig
from sd_tpu.models import AutoencoderKL
from sd_tpu.sharding import make_mesh
from training import recipe
from training.trainer import latest, train

FOLDER = recipe.CACHE / "autoencoder"
KL_WEIGHT = 1e-3


def to_unit(pictures: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] -> float32 in [-1, 1]."""
    return pictures.astype(np.float32) / 127.5 - 1


def build(config: dict, seed: int = 0):
    """An autoencoder's graph and its initial parameters."""
    model = AutoencoderKL(VAEConfig.from_dict(config), rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state)


def make_loss(graph: nnx.GraphDef):
    """Absolute and squared error of the picture, and a little of the KL term (Kingma 2013)."""

    def loss(params, images, key):
        model = nnx.merge(graph, params)
        mean, logvar = model.encode(images)
        scale = model.config.scaling_factor
        noise = jax.random.normal(key, mean.shape)
        error = model.decode(mean + jnp.exp(0.5 * logvar) * noise) - images
        # The prior is that of unscaled latents.
        kl = 0.5 * jnp.mean(jnp.square(mean / scale) + jnp.exp(logvar) / scale**2
                            - logvar + 2 * jnp.log(scale) - 1)
        return jnp.mean(jnp.abs(error)) + jnp.mean(jnp.square(error)) + KL_WEIGHT * kl

    return loss


def decibels(pictures: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio of pictures in [-1, 1]."""
    return float(10 * np.log10(4 / np.mean(np.square(pictures - truth))))


def show(graph: nnx.GraphDef, params, images: np.ndarray, file: Path) -> float:
    """Saves originals above their reconstructions and returns the PSNR in decibels."""
    model = nnx.merge(graph, params)
    decoded = np.asarray(model.decode(model.encode(images)[0])).clip(-1, 1)
    rows = np.concatenate([np.concatenate(list(row), axis=1) for row in (images, decoded)])
    Image.fromarray(((rows + 1) * 127.5).round().astype(np.uint8)).save(file)
    return decibels(decoded, images)


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=recipe.AUTOENCODER_RUN.steps)
    steps = parser.parse_args().steps
    schedule = dataclasses.replace(recipe.AUTOENCODER_RUN, steps=steps)
    composer = recipe.composer()
    graph, params = build(recipe.VAE)
    held_out = to_unit(composer.batch(np.random.default_rng(1 << 40), 16)[0])

    def batch_at(step: int) -> np.ndarray:
        return to_unit(composer.batch(np.random.default_rng(step), schedule.batch)[0])

    def on_checkpoint(step: int, average) -> None:
        psnr = show(graph, average, held_out, FOLDER / "samples.png")
        print(f"step {step}: {psnr:.2f} dB on pictures held out", flush=True)

    train(FOLDER, schedule, params, make_loss(graph), batch_at, make_mesh(),
          on_checkpoint=on_checkpoint)


def trained():
    """The graph and the averaged parameters of the run in FOLDER."""
    graph, params = build(recipe.VAE)
    return graph, latest(FOLDER, params)


if __name__ == "__main__":
    main()
