"""Trains the autoencoder for pictures twice as large, on the latents of the small one:
python -m training.enlarge [--steps N]

The UNet keeps its latents. The encoder is taught to give the small encoder's, the decoder to draw
from them, and from what the UNet makes of them, what the composer draws at twice the size.
"""

import argparse
import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, diffusion, recipe
from training.autoencoder import halved, to_unit
from training.trainer import latest, train

FOLDER = recipe.CACHE / "enlarging"
NOISIEST = 300  # timestep up to which latents are noised, and restored by the UNet
SCALES = 3  # the picture's size, a half and a quarter of it
ASYMMETRY = 0.05  # relative noise by which channels that began as one are told apart
LOGVAR_WEIGHT = 0.01


def grown(small, large, key: jax.Array):
    """Parameters for `large` with which it draws what `small` draws, enlarged.

    Channels are repeated and the weights of what they lead to divided (Chen et al. 2015, Net2Net,
    arXiv:1511.05641). The level that is new, next to the pixels, begins as the identity, and its
    change of size as that to the nearest neighbour or the mean of four.

    Args:
        small: parameters of an autoencoder.
        large: initial parameters of one with a multiple of its channels and one level more.
        key: of the noise by which repeated channels are told apart.
    """
    known = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(small)}

    def grow(path, leaf):
        keys = _keys(path)
        if keys[:2] == ("encoder", "down_blocks"):  # counted from the pixels
            keys = *keys[:2], keys[2] - 1, *keys[3:]
        if keys in known:
            wide = _repeated(known[keys], leaf.shape)
            if "to_q" in keys:  # longer vectors are divided by a larger root of their length
                wide = wide * (known[keys].shape[-1] / leaf.shape[-1]) ** 0.5
            if wide.shape != known[keys].shape:
                own_key = jax.random.fold_in(key, zlib.crc32(repr(keys).encode()))
                wide = wide * (1 + ASYMMETRY * jax.random.normal(own_key, leaf.shape))
            return wide
        return _as_identity(keys, leaf)

    return jax.tree_util.tree_map_with_path(grow, large)


def _keys(path) -> tuple:
    return tuple(entry.key for entry in path)


def _repeated(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each channel of `leaf` as often as `shape` has room for; over inputs the sum is the same."""
    for axis, (before, after) in enumerate(zip(leaf.shape, shape, strict=True)):
        leaf = jnp.repeat(leaf, after // before, axis)
        if leaf.ndim > 1 and axis == leaf.ndim - 2:
            leaf = leaf * (before / after)
    return leaf


def _as_identity(keys: tuple, leaf: jax.Array) -> jax.Array:
    """A parameter of the level that is new, such that its resnet changes nothing."""
    if "conv2" in keys:
        return jnp.zeros_like(leaf)
    if keys[-1] == "bias" or not {"conv_shortcut", "upsamplers", "downsamplers"} & set(keys):
        return leaf
    same = _repeated(jnp.eye(min(leaf.shape[2:])), leaf.shape[2:])
    if "downsamplers" in keys:
        return jnp.zeros_like(leaf).at[:2, :2].set(same / 4)
    centre = leaf.shape[0] // 2
    return jnp.zeros_like(leaf).at[centre, centre].set(same)


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
    """The decoder's difference from what was drawn, the encoder's from the small encoder.

    The encoder has less to learn, and sees a quarter of the pictures.
    """

    def loss(params, batch, key):
        latents, logvar, restored, pictures = batch
        model = nnx.merge(graph, params)
        few = max(1, len(pictures) // 4)
        mean, spread = model.encode(pictures[:few])
        taught = (jnp.mean(jnp.square(mean - latents[:few]))
                  + LOGVAR_WEIGHT * jnp.mean(jnp.square(spread - logvar[:few])))
        return difference(model.decode(restored), pictures) + taught

    return loss


def make_restorer():
    """A function: (its parameters, latents [B, h, w, C], token ids [B, 77], key) -> latents; and
    the parameters.

    It gives what the UNet restores from latents to which noise was added: what it draws has errors
    of the same kind.
    """
    graphs, params = diffusion.build()[0], diffusion.trained()
    alphas = jnp.asarray(NoiseSchedule.from_config(recipe.SCHEDULER).alphas_cumprod, jnp.float32)

    def restore(params, latents, ids, key):
        for_noise, for_time = jax.random.split(key)
        t = diffusion.spread_timesteps(for_time, len(latents), NOISIEST)
        signal, spread = (jnp.sqrt(x)[:, None, None, None] for x in (alphas[t], 1 - alphas[t]))
        noisy = signal * latents + spread * jax.random.normal(for_noise, latents.shape)
        text = nnx.merge(graphs["text_encoder"], params["text_encoder"])(ids)
        velocity = nnx.merge(graphs["unet"], params["unet"])(noisy, t, text)
        return signal * noisy - spread * velocity

    return restore, params


def make_teacher():
    """A function: (pictures [B, 2H, 2W, 3], token ids [B, 77], key) -> what is to be learned.

    That is the small encoder's mean and log-variance, and what the UNet restores of the mean.
    """
    graph, small = autoencoder.trained()
    restore, drawing = make_restorer()

    @jax.jit
    def teach(small, drawing, pictures, ids, key):
        latents, logvar = nnx.merge(graph, small).encode(halved(pictures))
        return latents, logvar, restore(drawing, latents, ids, key)

    return lambda pictures, ids, key: teach(small, drawing, pictures, ids, key)


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=recipe.ENLARGING_RUN.steps)
    run = dataclasses.replace(recipe.ENLARGING_RUN, steps=parser.parse_args().steps)
    tokenizer = Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")
    small = autoencoder.trained()[1]
    composer, teach = recipe.composer(), make_teacher()
    graph, params = autoencoder.build({**recipe.VAE, "scaling_factor": autoencoder.scale()})
    params = grown(small, params, jax.random.key(0))
    held_out = to_unit(recipe.composer(unseen=True).batch(np.random.default_rng(1 << 40), 16)[0])

    def batch_at(step: int):
        pictures, texts = composer.batch(np.random.default_rng([6, step]), run.batch)
        pictures = to_unit(pictures)
        return *teach(pictures, tokenizer(texts), jax.random.key(step)), pictures

    def on_checkpoint(step: int, average) -> None:
        found = autoencoder.show(graph, average, held_out, FOLDER / "samples.png")
        print(f"step {step}: {found}", flush=True)

    train(FOLDER, run, params, make_loss(graph), batch_at, make_mesh(),
          checkpoint_seconds=240, on_checkpoint=on_checkpoint)


def trained():
    """The averaged parameters of the run in FOLDER."""
    return latest(FOLDER, autoencoder.build(recipe.VAE)[1])


if __name__ == "__main__":
    main()
