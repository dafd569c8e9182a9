"""Trains text encoder and UNet together on the autoencoder's latents:
python -m training.diffusion [--help]"""

import hashlib
import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from sd_tpu.checkpoint.config import TextEncoderConfig, UNetConfig
from sd_tpu.models import CLIPTextModel, UNet2DConditionModel
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, grow, recipe
from training.trainer import ahead, from_command_line, latest, train

FOLDER = recipe.CACHE / "diffusion"
POOL = 131_072  # pictures encoded once and drawn from ever after
CODED_TOGETHER = 128
UNCONDITIONED = 0.1  # share of captions left out, for classifier-free guidance


def make_pool() -> dict[str, np.ndarray]:
    """Latents [N, h, w, C] f16 of unit variance and token ids [N, 77] i32: POOL of them, composed
    and encoded if that was not done yet by these networks."""
    graph, params = grow.trained()
    compose = partial(recipe.captioned, recipe.Stream.POOL, CODED_TOGETHER)
    name = _digest(params, *compose(0), np.array([POOL, autoencoder.scale()]))
    file = recipe.CACHE / f"pool-{name}.safetensors"
    if not file.is_file():
        encode, params = autoencoder.halves(graph)[0], jax.device_put(params)
        coded = [
            (np.asarray(encode(params, pictures), np.float16), ids)
            for pictures, ids in ahead(compose, range(POOL // CODED_TOGETHER))
        ]
        columns = zip(("latents", "ids"), zip(*coded, strict=True), strict=True)
        unfinished = file.with_suffix(".unfinished")
        save_file({name: np.concatenate(column) for name, column in columns}, unfinished)
        os.replace(unfinished, file)
    return load_file(file)


def _digest(params, *arrays: np.ndarray) -> str:
    content = b"".join(np.asarray(leaf).tobytes() for leaf in (*jax.tree.leaves(params), *arrays))
    return hashlib.sha256(content).hexdigest()[:12]


def build():
    """Graphs and initial parameters of the text encoder and the UNet."""
    modules = {
        "text_encoder": CLIPTextModel(
            TextEncoderConfig.from_dict(recipe.TEXT_ENCODER), rngs=nnx.Rngs(0)
        ),
        "unet": UNet2DConditionModel(UNetConfig.from_dict(recipe.UNET), rngs=nnx.Rngs(1)),
    }
    graphs = {name: nnx.graphdef(module) for name, module in modules.items()}
    params = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}
    return graphs, jax.tree_util.tree_map_with_path(_start_as_identity, params)


def _start_as_identity(path, leaf):
    """Zero residual branches and the output, which steadies the first steps."""
    names = {getattr(key, "key", None) for key in path}
    return jnp.zeros_like(leaf) if names & {"conv2", "proj_out", "conv_out"} else leaf


def make_loss(graphs, schedule: NoiseSchedule):
    """Return the squared error of the velocity (Salimans and Ho 2022, arXiv:2202.00512).

    All timesteps count alike.

    Min-SNR weighting (arXiv:2303.09556) would give the last timestep, where the signal is zero, no
    weight, and it is there that the colour of the background is decided.
    """

    def loss(params, batch, key):
        latents, ids = batch
        latents = latents.astype(jnp.float32)
        noised = Noised.of(latents, schedule, len(schedule.alphas_cumprod), key)
        wanted = noised.signal * noised.noise - noised.spread * latents
        return jnp.mean(jnp.square(noised.velocity(graphs, params, ids) - wanted))

    return loss


class Noised(NamedTuple):
    """Latents with noise: `noisy` = `signal` * latents + `spread` * `noise`, at the timesteps t."""

    noisy: jax.Array
    noise: jax.Array
    signal: jax.Array
    spread: jax.Array
    t: jax.Array

    @classmethod
    def of(cls, latents: jax.Array, schedule: NoiseSchedule, end: int, key: jax.Array) -> "Noised":
        """Noise each of the latents [B, h, w, C] to a timestep below `end`."""
        for_noise, for_time = jax.random.split(key)
        noise = jax.random.normal(for_noise, latents.shape)
        t = spread_timesteps(for_time, len(latents), end)
        alphas = jnp.asarray(schedule.alphas_cumprod, jnp.float32)[t]
        signal, spread = (jnp.sqrt(x)[:, None, None, None] for x in (alphas, 1 - alphas))
        return cls(signal * latents + spread * noise, noise, signal, spread, t)

    def velocity(self, graphs, params, ids: jax.Array) -> jax.Array:
        """Return the UNet's output, given captions' token ids [B, 77]."""
        text = nnx.merge(graphs["text_encoder"], params["text_encoder"])(ids)
        return nnx.merge(graphs["unet"], params["unet"])(self.noisy, self.t, text)


def spread_timesteps(key: jax.Array, count: int, end: int) -> jax.Array:
    """Draw timesteps [count] i32 in [0, end), each uniform, together evenly spread.

    One offset for the batch (Kingma et al. 2021, arXiv:2107.00630, appendix I.1): the mean loss of
    a small batch then varies less than with independent draws.
    """
    places = (jnp.arange(count) + jax.random.uniform(key)) / count
    return jnp.minimum(places * end, end - 1).astype(jnp.int32)  # rounding may reach the end


def main() -> None:
    """Train to the end of the schedule, or resume."""
    run = from_command_line(recipe.DIFFUSION_RUN, __doc__)
    pool, nothing = make_pool(), recipe.tokenizer()([""])[0]
    graphs, params = build()

    def batch_at(step: int):
        rng = np.random.default_rng([recipe.Stream.DIFFUSION, step])
        chosen = rng.integers(len(pool["ids"]), size=run.batch)
        ids = np.where(rng.random((run.batch, 1)) < UNCONDITIONED, nothing, pool["ids"][chosen])
        return pool["latents"][chosen], ids

    train(
        FOLDER,
        run,
        params,
        make_loss(graphs, NoiseSchedule.from_config(recipe.SCHEDULER)),
        partial(map, batch_at),
        make_mesh(),
    )


def trained():
    """Return the averaged parameters in FOLDER: {"text_encoder": ..., "unet": ...}."""
    return latest(FOLDER, build()[1])


if __name__ == "__main__":
    main()
