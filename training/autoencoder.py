"""Trains the small autoencoder, whose latents the UNet learns:
python -m training.autoencoder [--steps N]"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from sd_tpu.checkpoint.config import VAEConfig
from sd_tpu.models import AutoencoderKL
from sd_tpu.runtime.mesh import make_mesh
from training import recipe
from training.trainer import latest, train

FOLDER = recipe.CACHE / "autoencoder"
SCALE_FILE = FOLDER / "scale.json"
KL_WEIGHT = 1e-3


def to_unit(pictures: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] -> float32 in [-1, 1]."""
    return pictures.astype(np.float32) / 127.5 - 1


def halved(pictures: jax.Array) -> jax.Array:
    """[B, 2H, 2W, C] -> [B, H, W, C]: the means of four pixels."""
    batch, height, width, channels = pictures.shape
    return pictures.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


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


def gradient_energy(pictures: np.ndarray) -> float:
    """Mean square of the differences between neighbours in pictures [..., H, W, 3]: sharpness."""
    wide = pictures.astype(np.float32)
    return sum(float(np.mean(np.square(np.diff(wide, axis=axis)))) for axis in (-3, -2))


def show(graph: nnx.GraphDef, params, images: np.ndarray, file: Path) -> str:
    """Saves originals above their reconstructions and tells how near these come."""
    model = nnx.merge(graph, params)
    decoded = np.asarray(model.decode(model.encode(images)[0])).clip(-1, 1)
    rows = np.concatenate([np.concatenate(list(row), axis=1) for row in (images, decoded)])
    Image.fromarray(((rows + 1) * 127.5).round().astype(np.uint8)).save(file)
    sharpness = gradient_energy(decoded) / gradient_energy(images)
    return f"{decibels(decoded, images):.2f} dB, gradients {sharpness:.3f} on pictures held out"


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=recipe.AUTOENCODER_RUN.steps)
    steps = parser.parse_args().steps
    schedule = dataclasses.replace(recipe.AUTOENCODER_RUN, steps=steps)
    composer = recipe.composer(size=recipe.SMALL_SIZE)
    graph, params = build(recipe.SMALL_VAE)
    held_out = to_unit(composer.batch(np.random.default_rng(1 << 40), 16)[0])

    def batch_at(step: int) -> np.ndarray:
        return to_unit(composer.batch(np.random.default_rng(step), schedule.batch)[0])

    def on_checkpoint(step: int, average) -> None:
        print(f"step {step}: {show(graph, average, held_out, FOLDER / 'samples.png')}", flush=True)

    train(FOLDER, schedule, params, make_loss(graph), batch_at, make_mesh(),
          on_checkpoint=on_checkpoint)


def trained():
    """A graph whose latents have unit variance, and the averaged parameters of the run in FOLDER.

    The variance is measured once: what was trained on the latents relies on their scale.
    """
    graph, params = build(recipe.SMALL_VAE)
    params = latest(FOLDER, params)
    if not SCALE_FILE.is_file():
        pictures, _ = recipe.composer(size=recipe.SMALL_SIZE).batch(np.random.default_rng(5), 1024)
        model = nnx.merge(graph, params)
        latents = np.asarray(model.encode(to_unit(pictures))[0]) / model.config.scaling_factor
        SCALE_FILE.write_text(json.dumps(float(1 / latents.std())), encoding="utf-8")
    return build({**recipe.SMALL_VAE, "scaling_factor": scale()})[0], params


def scale() -> float:
    """The scaling factor of latents of unit variance. Raises FileNotFoundError before `trained`."""
    return json.loads(SCALE_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
