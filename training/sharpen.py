"""Trains the decoder to draw crisply what the UNet makes: python -m training.sharpen [--help]

Where latents do not say where an edge is to the pixel, every error of pixels is least for a blur.
So a critic is trained beside the decoder, to tell patches of what it draws from patches of drawings
(Isola et al. 2016, arXiv:1611.07004), and the decoder to be taken for them. It draws from latents
that were noised and restored by the UNet, whose errors are those of what the UNet draws. Encoder
and UNet, and with them the latents, stay as they are.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sd_tpu.checkpoint.config import VAEConfig
from sd_tpu.models import AutoencoderKL
from sd_tpu.models.layers import GroupNorm, conv
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, diffusion, grow, recipe
from training.autoencoder import difference, to_unit
from training.diffusion import Noised
from training.trainer import ahead, compiled, from_command_line, latest, train

FOLDER = recipe.CACHE / "sharpening"
NOISIEST = 300  # timestep up to which latents are noised
CHANNELS = (32, 64, 128)  # of the critic, at 1/2, 1/4 and 1/8 of the picture's size
ALONE = 200  # steps in which the critic learns and the decoder does not hear of it
OPINION, LIKENESS = 0.05, 1.0  # weights of what the critic says, and of what it sees


class Critic(nnx.Module):
    """Whether each patch of a picture was drawn or decoded."""

    def __init__(self, *, rngs: nnx.Rngs):
        layer = dict(dtype=jnp.float32, rngs=rngs)
        self.halve = nnx.List(
            conv(a, b, strides=2, **layer) for a, b in zip((3, *CHANNELS), CHANNELS, strict=False)
        )
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
    """Graphs and initial parameters of the critic and of the autoencoder's decoder."""
    decoder = AutoencoderKL(VAEConfig.from_dict(grow.config()), rngs=nnx.Rngs(0))
    del decoder.encoder, decoder.quant_conv
    modules = {"decoder": decoder, "critic": Critic(rngs=nnx.Rngs(1))}
    return (
        {name: nnx.graphdef(module) for name, module in modules.items()},
        {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()},
    )


def beginning(vae: dict) -> dict:
    """Return initial parameters whose decoder is that of an autoencoder of recipe.VAE."""
    params = build()[1]
    return {**params, "decoder": {name: vae[name] for name in params["decoder"]}}


def make_loss(graphs: dict[str, nnx.GraphDef]):
    """Return the loss of the decoder and the critic.

    The decoder's is its difference from the pictures and from what the critic takes for them, the
    critic's a hinge loss (Lim and Ye 2017, arXiv:1705.02894). Each of the two networks has no
    gradient from the other's terms.
    """

    def loss(params, batch, key):
        latents, pictures, heard = batch
        pictures = to_unit(pictures)
        decoded = nnx.merge(graphs["decoder"], params["decoder"]).decode(latents)
        critic = nnx.merge(graphs["critic"], params["critic"])
        known = nnx.merge(graphs["critic"], jax.lax.stop_gradient(params["critic"]))
        (opinion, seen), (_, wanted) = known(decoded), known(pictures)
        likeness = sum(jnp.mean(jnp.abs(a - b)) for a, b in zip(seen, wanted, strict=True))
        drawing = difference(decoded, pictures) + jnp.mean(heard) * (
            LIKENESS * likeness / len(seen) - OPINION * jnp.mean(opinion)
        )
        of_drawn, of_decoded = critic(pictures)[0], critic(jax.lax.stop_gradient(decoded))[0]
        judging = jnp.mean(nnx.relu(1 - of_drawn)) + jnp.mean(nnx.relu(1 + of_decoded))
        return drawing + judging

    return loss


def make_restorer():
    """Return a function that noises pictures up to NOISIEST and restores them by the UNet.

    It maps (pictures [B, H, W, 3] u8, token ids [B, 77], key) -> latents [B, h, w, C].
    """
    graph, vae = grow.trained()
    graphs, schedule = diffusion.build()[0], NoiseSchedule.from_config(recipe.SCHEDULER)

    @compiled
    def restore(vae, params, pictures, ids, key):
        latents = nnx.merge(graph, vae).encode(to_unit(pictures))[0]
        noised = Noised.of(latents, schedule, NOISIEST, key)
        return noised.signal * noised.noisy - noised.spread * noised.velocity(graphs, params, ids)

    return partial(restore, *jax.device_put((vae, diffusion.trained())))


def main() -> None:
    """Train to the end of the schedule, or resume."""
    run = from_command_line(recipe.SHARPENING_RUN, __doc__)
    (graph, vae), restore = grow.trained(), make_restorer()

    def batches(steps: range) -> Iterator[tuple]:
        stream, key = recipe.Stream.SHARPENING, jax.random.key(recipe.Stream.RESTORING)
        coming = ahead(partial(recipe.captioned, stream, run.batch), steps)
        for step, (pictures, ids) in zip(steps, coming, strict=True):
            latents = restore(pictures, ids, jax.random.fold_in(key, step))
            yield latents, pictures, np.full(run.batch, step >= ALONE, np.float32)

    def on_checkpoint(step: int, average) -> None:
        params = {**vae, **average["decoder"]}
        found = autoencoder.show(graph, params, recipe.IMAGE_SIZE, FOLDER / "samples.png")
        print(f"step {step}: {found}", flush=True)

    train(
        FOLDER,
        run,
        beginning(vae),
        make_loss(build()[0]),
        batches,
        make_mesh(),
        on_checkpoint=on_checkpoint,
    )


def trained():
    """Return the autoencoder's parameters, their decoder sharpened."""
    return {**grow.trained()[1], **latest(FOLDER, build()[1])["decoder"]}


if __name__ == "__main__":
    main()
