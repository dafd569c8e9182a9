"""Trains text encoder and UNet together on the autoencoder's latents:
python -m training.diffusion [--steps N]"""

import hashlib
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from sd_tpu.checkpoint.config import TextEncoderConfig, UNetConfig
from sd_tpu.models import CLIPTextModel, UNet2DConditionModel
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, recipe
from training.trainer import ahead, asked_for, compiled, latest, train

FOLDER = recipe.CACHE / "diffusion"
POOL = 131_072  # pictures encoded once and drawn from ever after
CODED_TOGETHER = 128
UNCONDITIONED = 0.1  # share of captions left out, for classifier-free guidance


def make_pool() -> dict[str, np.ndarray]:
    """Latents [N, h, w, C] f16 of unit variance and token ids [N, 77]."""
    graph, params = autoencoder.trained()
    compose = partial(recipe.composed, 1, CODED_TOGETHER)
    file = recipe.CACHE / f"pool-{digest(params, *compose(0))}.safetensors"
    if not file.is_file():
        encode = compiled(lambda params, pictures: nnx.merge(graph, params).encode(
            autoencoder.to_unit(pictures))[0].astype(jnp.float16))
        coded = [(np.asarray(encode(params, pictures)), ids)
                 for pictures, ids in ahead(compose, range(POOL // CODED_TOGETHER))]
        latents, ids = map(np.concatenate, zip(*coded, strict=True))
        unfinished = file.with_suffix(".unfinished")
        save_file({"latents": latents, "ids": ids}, unfinished)
        os.replace(unfinished, file)
    return load_file(file)


def digest(params, *arrays: np.ndarray) -> str:
    """Tells latents that these networks make of one composer's pictures from others."""
    content = b"".join(np.asarray(leaf).tobytes() for leaf in (*jax.tree.leaves(params), *arrays))
    return hashlib.sha256(content).hexdigest()[:12]


def build(seed: int = 0):
    """Graphs and initial parameters of the text encoder and the UNet."""
    modules = {
        "text_encoder": CLIPTextModel(TextEncoderConfig.from_dict(recipe.TEXT_ENCODER),
                                      rngs=nnx.Rngs(seed)),
        "unet": UNet2DConditionModel(UNetConfig.from_dict(recipe.UNET), rngs=nnx.Rngs(seed + 1)),
    }
    graphs = {name: nnx.graphdef(module) for name, module in modules.items()}
    params = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}
    return graphs, jax.tree_util.tree_map_with_path(_start_as_identity, params)


def _start_as_identity(path, leaf):
    """Residual branches and the output begin at zero, which steadies the first steps."""
    names = {getattr(key, "key", None) for key in path}
    return jnp.zeros_like(leaf) if names & {"conv2", "proj_out", "conv_out"} else leaf


def make_loss(graphs, schedule: NoiseSchedule):
    """Squared error of the velocity (Salimans and Ho 2022, arXiv:2202.00512), all timesteps alike.

    Min-SNR weighting (arXiv:2303.09556) would give the last timestep, where the signal is zero,
    no weight, and it is there that the colour of the background is decided.
    """
    alphas = jnp.asarray(schedule.alphas_cumprod, jnp.float32)

    def loss(params, batch, key):
        latents, ids = batch
        latents = latents.astype(jnp.float32)
        for_noise, for_time = jax.random.split(key)
        noise = jax.random.normal(for_noise, latents.shape)
        t = spread_timesteps(for_time, len(latents), len(alphas))
        signal, spread = (jnp.sqrt(x)[:, None, None, None] for x in (alphas[t], 1 - alphas[t]))
        text = nnx.merge(graphs["text_encoder"], params["text_encoder"])(ids)
        noisy = signal * latents + spread * noise
        out = nnx.merge(graphs["unet"], params["unet"])(noisy, t, text)
        return jnp.mean(jnp.square(out - (signal * noise - spread * latents)))

    return loss


def spread_timesteps(key: jax.Array, count: int, end: int) -> jax.Array:
    """Timesteps [count] i32 in [0, end), each uniform, together evenly spread over the range.

    One offset for the batch (Kingma et al. 2021, arXiv:2107.00630, appendix I.1): the mean loss of
    a small batch then varies less than with independent draws.
    """
    places = (jnp.arange(count) + jax.random.uniform(key)) / count
    return jnp.minimum(places * end, end - 1).astype(jnp.int32)  # rounding may reach the end


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    run = asked_for(recipe.DIFFUSION_RUN, __doc__)
    pool, nothing = make_pool(), recipe.tokenizer()([""])[0]
    graphs, params = build()

    def batch_at(step: int):
        rng = np.random.default_rng([2, step])
        chosen = rng.integers(len(pool["ids"]), size=run.batch)
        ids = np.where(rng.random((run.batch, 1)) < UNCONDITIONED, nothing, pool["ids"][chosen])
        return pool["latents"][chosen], ids

    train(FOLDER, run, params,
          make_loss(graphs, NoiseSchedule.from_config(recipe.SCHEDULER)),
          partial(map, batch_at), make_mesh())


def trained():
    """The averaged parameters of the run in FOLDER: {"text_encoder": ..., "unet": ...}."""
    return latest(FOLDER, build()[1])


if __name__ == "__main__":
    main()
