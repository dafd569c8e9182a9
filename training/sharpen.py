"""Trains the decoder to draw as crisply as the drawings are:
python -m training.sharpen [--steps N]

Where latents do not say where an edge is to the pixel, every error of pixels is least for a blur.
So a critic is trained beside the decoder, to tell patches of what it draws from patches of drawings
(Isola et al. 2016, arXiv:1611.07004), and the decoder to be taken for them. Encoder and UNet, and
with them the latents, stay as they are.
"""

import argparse
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from sd_tpu.checkpoint.config import BUNDLED_MODEL, VAEConfig
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.models import AutoencoderKL
from sd_tpu.models.layers import GroupNorm, conv
from sd_tpu.runtime.mesh import make_mesh
from training import autoencoder, enlarge, recipe
from training.autoencoder import to_unit
from training.diffusion import digest
from training.trainer import latest, train

FOLDER = recipe.CACHE / "sharpening"
POOL = 6144  # pictures composed, encoded and restored once
CHANNELS = (32, 64, 128)  # of the critic, at 1/2, 1/4 and 1/8 of the picture's size
ALONE = 200  # steps in which the critic learns and the decoder does not hear of it
OPINION, LIKENESS = 0.05, 1.0  # weights of what the critic says, and of what it sees


class Critic(nnx.Module):
    """Whether each patch of a picture was drawn or decoded."""

    def __init__(self, *, rngs: nnx.Rngs):
        layer = dict(dtype=jnp.float32, rngs=rngs)
        self.halve = nnx.List(conv(a, b, strides=2, **layer)
                              for a, b in zip((3, *CHANNELS), CHANNELS, strict=False))
        self.norms = nnx.List(GroupNorm(b, 8, 1e-5, **layer) for b in CHANNELS)
        self.answer = conv(CHANNELS[-1], 1, **layer)

    def __call__(self, pictures: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """[B, H, W, 3] -> answers [B, H/8, W/8, 1], above zero for drawn; what each layer saw."""
        x, seen = pictures, []
        for halve, norm in zip(self.halve, self.norms, strict=True):
            x = nnx.leaky_relu(norm(halve(x)), 0.2)
            seen.append(x)
        return self.answer(x), seen


def build() -> tuple[dict[str, nnx.GraphDef], dict]:
    """Graphs and initial parameters of the critic and of the autoencoder's drawing half."""
    config = {**recipe.VAE, "scaling_factor": autoencoder.scale()}
    decoder = AutoencoderKL(VAEConfig.from_dict(config), rngs=nnx.Rngs(0))
    del decoder.encoder, decoder.quant_conv
    modules = {"decoder": decoder, "critic": Critic(rngs=nnx.Rngs(1))}
    return ({name: nnx.graphdef(module) for name, module in modules.items()},
            {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()})


def beginning(vae: dict) -> dict:
    """Initial parameters whose decoder is that of an autoencoder of recipe.VAE."""
    params = build()[1]
    return {**params, "decoder": {name: vae[name] for name in params["decoder"]}}


def make_loss(graphs: dict[str, nnx.GraphDef]):
    """The decoder's difference from what was drawn and from what the critic takes for drawn, and
    the critic's errors (hinge loss, Lim and Ye 2017, arXiv:1705.02894).

    Each of the two networks has no gradient from the other's terms.
    """

    def loss(params, batch, key):
        latents, pictures, heard = batch
        decoded = nnx.merge(graphs["decoder"], params["decoder"]).decode(latents)
        critic = nnx.merge(graphs["critic"], params["critic"])
        known = nnx.merge(graphs["critic"], jax.lax.stop_gradient(params["critic"]))
        (opinion, seen), (_, wanted) = known(decoded), known(pictures)
        likeness = sum(jnp.mean(jnp.abs(a - b)) for a, b in zip(seen, wanted, strict=True))
        drawing = enlarge.difference(decoded, pictures) + jnp.mean(heard) * (
            LIKENESS * likeness / len(seen) - OPINION * jnp.mean(opinion))
        of_drawn, of_decoded = critic(pictures)[0], critic(jax.lax.stop_gradient(decoded))[0]
        judging = jnp.mean(nnx.relu(1 - of_drawn)) + jnp.mean(nnx.relu(1 + of_decoded))
        return drawing + judging

    return loss


def make_pool() -> dict[str, np.ndarray]:
    """Pictures [N, H, W, 3] u8, and the latents [N, h, w, C] that the UNet restores of them."""
    composer, vae = recipe.composer(), enlarge.trained()
    restore, drawing = enlarge.make_restorer()

    def compose(i: int):
        return composer.batch(np.random.default_rng([7, i]), 64)

    file = FOLDER / f"pool-{digest((vae, drawing), compose(0))}.safetensors"
    if not file.is_file():
        tokenizer = Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")
        graph = autoencoder.build({**recipe.VAE, "scaling_factor": autoencoder.scale()})[0]

        @jax.jit
        def code(vae, drawing, pictures, ids, key):
            return restore(drawing, nnx.merge(graph, vae).encode(pictures)[0], ids, key)

        pool = {"latents": [], "pictures": []}
        for i in range(POOL // 64):
            pictures, texts = compose(i)
            latents = code(vae, drawing, to_unit(pictures), tokenizer(texts), jax.random.key(i))
            pool["latents"].append(np.asarray(latents))
            pool["pictures"].append(pictures)
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        save_file({name: np.concatenate(each) for name, each in pool.items()}, unfinished)
        os.replace(unfinished, file)
    return load_file(file)


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=recipe.SHARPENING_RUN.steps)
    run = dataclasses.replace(recipe.SHARPENING_RUN, steps=parser.parse_args().steps)
    pool, (graphs, _), vae = make_pool(), build(), enlarge.trained()
    graph = autoencoder.build({**recipe.VAE, "scaling_factor": autoencoder.scale()})[0]
    held_out = to_unit(recipe.composer(unseen=True).batch(np.random.default_rng(1 << 40), 16)[0])

    def batch_at(step: int):
        chosen = np.random.default_rng([8, step]).choice(POOL, run.batch, replace=False)
        heard = np.full(run.batch, step >= ALONE, np.float32)
        return pool["latents"][chosen], to_unit(pool["pictures"][chosen]), heard

    def on_checkpoint(step: int, average) -> None:
        found = autoencoder.show(graph, {**vae, **average["decoder"]}, held_out,
                                 FOLDER / "samples.png")
        print(f"step {step}: {found}", flush=True)

    train(FOLDER, run, beginning(vae), make_loss(graphs), batch_at, make_mesh(),
          checkpoint_seconds=240, on_checkpoint=on_checkpoint)


def trained():
    """The autoencoder's parameters: those of training.enlarge, their decoder sharpened."""
    return {**enlarge.trained(), **latest(FOLDER, build()[1])["decoder"]}


if __name__ == "__main__":
    main()
