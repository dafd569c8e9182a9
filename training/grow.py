"""Grows the autoencoder by a level, to twice the size: python -m training.grow [--help]

The grown encoder learns to find the latents that the first one finds in a picture of half the size,
so what was trained on those holds; the grown decoder to draw the whole picture from them. The
drawings are vectors: what a latent's thing looks like at twice the size can be known.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import DictKey, keystr, tree_leaves_with_path, tree_map_with_path

from sd_tpu.runtime.mesh import make_mesh
from training import autoencoder, recipe
from training.autoencoder import difference, halved, to_unit
from training.trainer import Tree, ahead, compiled, from_command_line, latest, train

FOLDER = recipe.CACHE / "growing"
ENCODED = 2  # one in so many pictures teaches the encoder, whose part is the easier one
SPREAD_WEIGHT = 0.1  # of the latents' log-variance beside their mean


def build() -> tuple[nnx.GraphDef, Tree]:
    """Return the grown autoencoder's graph and its initial parameters, none of them learned."""
    return autoencoder.build(config())


def beginning(first: Tree) -> Tree:
    """Return parameters to begin with: the first autoencoder's wherever they fit.

    Levels correspond by the size of their pictures, so the encoder's move on by one.

    Args:
        first: parameters of an autoencoder of recipe.FIRST_VAE.
    """
    known = {keystr(path): leaf for path, leaf in tree_leaves_with_path(first)}

    def learned(path, new: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if "down_blocks" in names:
            names[2] -= 1
        old = known.get(keystr(tuple(map(DictKey, names))))
        return new if old is None or old.shape != new.shape else old

    return tree_map_with_path(learned, build()[1])


def make_loss(graph: nnx.GraphDef):
    """Return the loss: the difference of pictures and its square, and that of latents.

    A batch is pictures [B, H, W, 3] u8, and the means and log-variances [B, h, w, C] of the latents
    that the first autoencoder finds in them.
    """

    def loss(params, batch, key):
        pictures, wanted, spread = batch
        images = to_unit(pictures)
        model = nnx.merge(graph, params)
        noise = jax.random.normal(key, wanted.shape)
        decoded = model.decode(wanted + jnp.exp(0.5 * spread) * noise)
        found, found_spread = model.encode(images[::ENCODED])
        latents = jnp.mean(jnp.square(found - wanted[::ENCODED]))
        latents += SPREAD_WEIGHT * jnp.mean(jnp.square(found_spread - spread[::ENCODED]))
        return difference(decoded, images) + jnp.mean(jnp.square(decoded - images)) + latents

    return loss


def main() -> None:
    """Train to the end of the schedule, or resume."""
    run = from_command_line(recipe.GROWING_RUN, __doc__)
    (first_graph, first), (graph, _) = autoencoder.trained(), build()
    kept = jax.device_put(first)
    recipe.composer()  # renders the drawings, which else every process would

    @compiled
    def encode(first, pictures):
        return nnx.merge(first_graph, first).encode(halved(to_unit(pictures)))

    def batches(steps: range) -> Iterator[tuple]:
        stream = recipe.Stream.GROWING
        for pictures in ahead(
            partial(recipe.pictures, stream, recipe.IMAGE_SIZE, run.batch), steps
        ):
            yield pictures, *encode(kept, pictures)

    def on_checkpoint(step: int, average) -> None:
        found = autoencoder.show(graph, average, recipe.IMAGE_SIZE, FOLDER / "samples.png")
        print(f"step {step}: {found}", flush=True)

    train(
        FOLDER,
        run,
        beginning(first),
        make_loss(graph),
        batches,
        make_mesh(),
        on_checkpoint=on_checkpoint,
    )


def trained() -> tuple[nnx.GraphDef, Tree]:
    """Return the grown autoencoder's graph and the averaged parameters in FOLDER."""
    graph, params = build()
    return graph, latest(FOLDER, params)


def config() -> dict:
    """Return recipe.VAE with the scaling factor of its latents.

    Raises FileNotFoundError before `autoencoder.trained`.
    """
    return {**recipe.VAE, "scaling_factor": autoencoder.scale()}


if __name__ == "__main__":
    main()
