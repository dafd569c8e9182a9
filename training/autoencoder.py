"""Trains the autoencoder, whose latents the UNet learns: python -m training.autoencoder [--help]

Its decoder is trained once more, by training.sharpen, when the UNet can draw.
"""

import functools
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
from training.trainer import ahead, compiled, from_command_line, latest, train

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


def build(config: dict):
    """Return an autoencoder's graph and its initial parameters."""
    graph, state = nnx.split(AutoencoderKL(VAEConfig.from_dict(config), rngs=nnx.Rngs(0)))
    return graph, nnx.to_pure_dict(state)


@functools.cache
def halves(graph: nnx.GraphDef):
    """Return two functions.

    They are (parameters, pictures [B, H, W, 3] u8) -> latents, the means, and (parameters, latents
    [B, h, w, C]) -> pictures f32, about [-1, 1].
    """

    def encode(params, pictures):
        return nnx.merge(graph, params).encode(to_unit(pictures))[0]

    def decode(params, latents):
        return nnx.merge(graph, params).decode(latents)

    return compiled(encode), compiled(decode)


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
    """Return the loss: the picture's difference, its square, and a little of the KL term.

    Kingma 2013.
    """

    def loss(params, pictures, key):
        images = to_unit(pictures)
        model = nnx.merge(graph, params)
        mean, logvar = model.encode(images)
        scale = model.config.scaling_factor
        noise = jax.random.normal(key, mean.shape)
        decoded = model.decode(mean + jnp.exp(0.5 * logvar) * noise)
        # The prior is that of unscaled latents.
        kl = 0.5 * jnp.mean(
            jnp.square(mean / scale) + jnp.exp(logvar) / scale**2 - logvar + 2 * jnp.log(scale) - 1
        )
        return difference(decoded, images) + jnp.mean(jnp.square(decoded - images)) + KL_WEIGHT * kl

    return loss


def decibels(pictures: np.ndarray, truth: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of pictures in [-1, 1]."""
    return float(10 * np.log10(4 / np.mean(np.square(pictures - truth))))


def gradient_energy(pictures: np.ndarray) -> float:
    """Mean square of the differences between neighbours in pictures [..., H, W, 3]: sharpness."""
    wide = pictures.astype(np.float32)
    return sum(float(np.mean(np.square(np.diff(wide, axis=axis)))) for axis in (-3, -2))


def show(graph: nnx.GraphDef, params, size: int, file: Path) -> str:
    """Save pictures held out above their reconstructions and tell how near these come."""
    pictures, (encode, decode) = recipe.held_out(size, 16), halves(graph)
    images = to_unit(pictures)
    decoded = np.asarray(decode(params, encode(params, pictures))).clip(-1, 1)
    rows = np.concatenate([np.concatenate(list(row), axis=1) for row in (images, decoded)])
    Image.fromarray(((rows + 1) * 127.5).round().astype(np.uint8)).save(file)
    sharpness = gradient_energy(decoded) / gradient_energy(images)
    return f"{decibels(decoded, images):.2f} dB, gradients {sharpness:.3f} on pictures held out"


def main() -> None:
    """Train to the end of the schedule, or resume."""
    run = from_command_line(recipe.AUTOENCODER_RUN, __doc__)
    graph, params = build(recipe.FIRST_VAE)
    recipe.composer()  # renders the drawings, which else every process would

    def on_checkpoint(step: int, average) -> None:
        print(
            f"step {step}: {show(graph, average, recipe.FIRST_SIZE, FOLDER / 'samples.png')}",
            flush=True,
        )

    train(
        FOLDER,
        run,
        params,
        make_loss(graph),
        partial(
            ahead, partial(recipe.pictures, recipe.Stream.AUTOENCODER, recipe.FIRST_SIZE, run.batch)
        ),
        make_mesh(),
        on_checkpoint=on_checkpoint,
    )


def trained():
    """Return a graph whose latents have unit variance, and the averaged parameters in FOLDER.

    The variance is measured once: what was trained on the latents relies on their scale.
    """
    graph, params = build(recipe.FIRST_VAE)
    params = latest(FOLDER, params)
    if not SCALE_FILE.is_file():
        encode, before = halves(graph)[0], VAEConfig.from_dict(recipe.FIRST_VAE).scaling_factor
        latents = np.stack(
            [
                encode(params, recipe.pictures(recipe.Stream.MEASURING, recipe.FIRST_SIZE, 64, i))
                for i in range(8)
            ]
        )
        SCALE_FILE.write_text(json.dumps(float(before / latents.std())), encoding="utf-8")
    return build(config())[0], params


def config() -> dict:
    """Return recipe.FIRST_VAE with its scaling factor.

    Raises FileNotFoundError before `trained`.
    """
    return {**recipe.FIRST_VAE, "scaling_factor": scale()}


def scale() -> float:
    """Return the scaling factor of latents of unit variance.

    Raises FileNotFoundError before `trained`.
    """
    return json.loads(SCALE_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
