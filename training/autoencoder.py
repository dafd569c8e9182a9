"""Trains the autoencoder, whose latents the UNet learns: python -m training.autoencoder [--steps N]

Its decoder is trained once more, by training.sharpen, when the UNet can draw.
"""

import json
from functools import partial
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
from training.trainer import ahead, asked_for, compiled, latest, train

FOLDER = recipe.CACHE / "autoencoder"
SCALE_FILE = FOLDER / "scale.json"
KL_WEIGHT = 1e-3
SCALES = 3  # the picture's size, a half and a quarter of it


def to_unit(pictures):
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


def difference(drawn: jax.Array, wanted: jax.Array) -> jax.Array:
    """Absolute error of pictures, of their gradients and of their contrasts, at SCALES sizes.

    Where a decoder is unsure of an edge's place, the first two allow for a blur. That has too
    little contrast: the root of the gradients' mean square in 4x4 pixels, wherever they lie.
    """
    total = 0.0
    for _ in range(SCALES):
        total += jnp.mean(jnp.abs(drawn - wanted))
        for axis in (1, 2):
            edges, wanted_edges = (x - jnp.roll(x, 1, axis) for x in (drawn, wanted))
            total += jnp.mean(jnp.abs(edges - wanted_edges))
            total += jnp.mean(jnp.abs(_contrast(edges) - _contrast(wanted_edges)))
        drawn, wanted = halved(drawn), halved(wanted)
    return total / SCALES


def _contrast(edges: jax.Array) -> jax.Array:
    return jnp.sqrt(halved(halved(jnp.square(edges))) + 1e-4)


def make_loss(graph: nnx.GraphDef):
    """The picture's difference, its squared error, and a little of the KL term (Kingma 2013)."""

    def loss(params, batch, key):
        images = to_unit(batch[0])
        model = nnx.merge(graph, params)
        mean, logvar = model.encode(images)
        scale = model.config.scaling_factor
        noise = jax.random.normal(key, mean.shape)
        decoded = model.decode(mean + jnp.exp(0.5 * logvar) * noise)
        # The prior is that of unscaled latents.
        kl = 0.5 * jnp.mean(jnp.square(mean / scale) + jnp.exp(logvar) / scale**2
                            - logvar + 2 * jnp.log(scale) - 1)
        return (difference(decoded, images) + jnp.mean(jnp.square(decoded - images))
                + KL_WEIGHT * kl)

    return loss


def decibels(pictures: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio of pictures in [-1, 1]."""
    return float(10 * np.log10(4 / np.mean(np.square(pictures - truth))))


def gradient_energy(pictures: np.ndarray) -> float:
    """Mean square of the differences between neighbours in pictures [..., H, W, 3]: sharpness."""
    wide = pictures.astype(np.float32)
    return sum(float(np.mean(np.square(np.diff(wide, axis=axis)))) for axis in (-3, -2))


@partial(compiled, static_argnums=0)
def _through(graph: nnx.GraphDef, params, images: jax.Array) -> jax.Array:
    model = nnx.merge(graph, params)
    return model.decode(model.encode(images)[0])


def show(graph: nnx.GraphDef, params, file: Path) -> str:
    """Saves pictures held out above their reconstructions and tells how near these come."""
    images = to_unit(recipe.held_out(16))
    decoded = np.asarray(_through(graph, params, images)).clip(-1, 1)
    rows = np.concatenate([np.concatenate(list(row), axis=1) for row in (images, decoded)])
    Image.fromarray(((rows + 1) * 127.5).round().astype(np.uint8)).save(file)
    sharpness = gradient_energy(decoded) / gradient_energy(images)
    return f"{decibels(decoded, images):.2f} dB, gradients {sharpness:.3f} on pictures held out"


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    run = asked_for(recipe.AUTOENCODER_RUN, __doc__)
    graph, params = build(recipe.VAE)

    def on_checkpoint(step: int, average) -> None:
        print(f"step {step}: {show(graph, average, FOLDER / 'samples.png')}", flush=True)

    train(FOLDER, run, params, make_loss(graph),
          partial(ahead, partial(recipe.composed, 0, run.batch)), make_mesh(),
          on_checkpoint=on_checkpoint)


def trained():
    """A graph whose latents have unit variance, and the averaged parameters of the run in FOLDER.

    The variance is measured once: what was trained on the latents relies on their scale.
    """
    graph, params = build(recipe.VAE)
    params = latest(FOLDER, params)
    if not SCALE_FILE.is_file():
        @compiled
        def encode(params, images):
            model = nnx.merge(graph, params)
            return model.encode(images)[0] / model.config.scaling_factor

        latents = np.asarray(encode(params, to_unit(recipe.composed(5, 512, 0)[0])))
        SCALE_FILE.write_text(json.dumps(float(1 / latents.std())), encoding="utf-8")
    return build({**recipe.VAE, "scaling_factor": scale()})[0], params


def scale() -> float:
    """The scaling factor of latents of unit variance. Raises FileNotFoundError before `trained`."""
    return json.loads(SCALE_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
