"""Trains text encoder and UNet together on the autoencoder's latents:
python -m training.diffusion [--steps N]"""

import argparse
import dataclasses
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from sd_tpu.checkpoint.config import BUNDLED_MODEL, TextEncoderConfig, UNetConfig
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.models import CLIPTextModel, UNet2DConditionModel
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.runtime.programs import Programs
from sd_tpu.runtime.slots import Entry
from sd_tpu.sampling.samplers import make_table
from sd_tpu.sampling.schedule import NoiseSchedule
from training import autoencoder, recipe
from training.trainer import latest, train

FOLDER = recipe.CACHE / "diffusion"
POOL = 65_536  # pictures encoded once and drawn from ever after
UNCONDITIONED = 0.1  # share of captions left out, for classifier-free guidance
SHOWN = (
    "a cat", "a castle on a blue background", "a 3d rocket on a black background",
    "a green car on a yellow background", "a cat and a dog", "a star above a house",
    "three apples on a pink background", "an owl to the left of a tree on a purple background",
)


def make_pool(tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Latents [N, h, w, C] of unit variance and token ids [N, 77]."""
    graph, params = autoencoder.trained()
    composer = recipe.composer(size=recipe.SMALL_SIZE)

    def compose(i: int):
        return composer.batch(np.random.default_rng([1, i]), 64)

    file = recipe.CACHE / f"pool-{digest(params, compose(0))}.safetensors"
    if not file.is_file():
        encode = jax.jit(lambda images: nnx.merge(graph, params).encode(images)[0])
        latents, captions = [], []
        for i in range(POOL // 64):
            pictures, texts = compose(i)
            latents.append(np.asarray(encode(autoencoder.to_unit(pictures))))
            captions += texts
        unfinished = file.with_suffix(".unfinished")
        save_file({"latents": np.concatenate(latents), "ids": tokenizer(captions)}, unfinished)
        os.replace(unfinished, file)
    with safe_open(file, framework="np") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}


def digest(params, sample: tuple[np.ndarray, list[str]]) -> str:
    """Tells latents that these networks make of one composer's pictures from others."""
    content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    pictures, texts = sample
    return hashlib.sha256(content + pictures.tobytes() + repr(texts).encode()).hexdigest()[:12]


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


def make_drawer(tokenizer: Tokenizer, schedule: NoiseSchedule):
    """A function that draws SHOWN with given parameters into a file, as the page would."""
    vae = autoencoder.trained()[1]
    configs = {"text_encoder": recipe.TEXT_ENCODER, "unet": recipe.UNET,
               "vae": {**recipe.SMALL_VAE, "scaling_factor": autoencoder.scale()}}
    model, _ = StableDiffusion.build(configs, jnp.float32)
    programs = Programs(model, make_mesh(1), slots=len(SHOWN), height=recipe.SMALL_SIZE,
                        width=recipe.SMALL_SIZE)
    table = make_table("ddim", schedule, 25)
    entries = {
        i: Entry.of(table, model.prompt_inputs({"tokenizer": tokenizer}, prompt), guidance=3.0,
                    key=np.asarray(jax.random.PRNGKey(i)))
        for i, prompt in enumerate(SHOWN)
    }

    def draw(params, file) -> None:
        everything = jax.device_put({**params, "vae": vae}, jax.devices()[0])
        slots = programs.encode(everything, programs.empty(), entries)
        slots = programs.advance(everything, slots, len(table.rows))
        images = np.asarray(programs.decode(everything, slots.latents, np.ones(len(SHOWN), bool)))
        rows = [np.concatenate(list(images[i : i + 4]), axis=1) for i in (0, 4)]
        Image.fromarray(np.concatenate(rows)).save(file)

    return draw


def main() -> None:
    """Trains to the end of the schedule, or resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=recipe.DIFFUSION_RUN.steps)
    run = dataclasses.replace(recipe.DIFFUSION_RUN, steps=parser.parse_args().steps)
    tokenizer = Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")
    pool = make_pool(tokenizer)
    graphs, params = build()
    schedule = NoiseSchedule.from_config(recipe.SCHEDULER)
    nothing = tokenizer([""])[0]
    draw = make_drawer(tokenizer, schedule)

    def batch_at(step: int):
        rng = np.random.default_rng([2, step])
        chosen = rng.integers(len(pool["ids"]), size=run.batch)
        ids = np.where(rng.random((run.batch, 1)) < UNCONDITIONED, nothing, pool["ids"][chosen])
        return pool["latents"][chosen], ids

    train(FOLDER, run, params, make_loss(graphs, schedule), batch_at, make_mesh(),
          checkpoint_seconds=240,
          on_checkpoint=lambda step, average: draw(average, FOLDER / "samples.png"))


def trained():
    """The averaged parameters of the run in FOLDER: {"text_encoder": ..., "unet": ...}."""
    return latest(FOLDER, build()[1])


if __name__ == "__main__":
    main()
