"""Ours against diffusers on PyTorch, on the CPU: `python -m benchmarks.cpu`.

The same weights in float32, the same latents, all cores for each. Times are taken side by side in
one process; peak memory is that of a process that loads the model and makes one picture.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.make_checkpoint import MODELS, checkpoint_folder
from benchmarks.report import forget_peak, in_fresh_process, memory, parser, report, side_by_side
from sd_tpu import FlaxStableDiffusionPipeline
from sd_tpu.denoise import Slots
from sd_tpu.programs import Arrival, Programs
from sd_tpu.samplers import make_table
from sd_tpu.sharding import make_mesh, replicated
from sd_tpu.tokenizer import Tokenizer

PROMPT = "a castle in the clouds, watercolour"
GUIDANCE = 7.5
STEPS = 4  # of the whole picture, with DDIM on both sides
LONG = 100  # steps of the picture whose single steps are timed: more than there are rounds
TEXT, STEP, DECODE, IMAGE = PARTS = (
    "text encoder, both prompts", "UNet step, guided", "autoencoder, decoding",
    f"whole image, {STEPS} steps",
)
Calls = dict[str, Callable[[], Any]]  # by part; that of the whole image returns it as uint8


def ours(folder: Path, size: int) -> Calls:
    """Calls of our three programs, with one slot on one device. The parts come in their order."""
    mesh = make_mesh(1)
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        folder, sharding=replicated(mesh))
    programs = Programs(pipeline.models, mesh, slots=1, height=size, width=size)
    slots = programs.empty()

    def entered(steps: int) -> Slots:
        arrival = Arrival(
            ids=pipeline.prepare_inputs(["", PROMPT]),
            table=make_table("ddim", pipeline.schedule, steps),
            guidance=GUIDANCE,
            key=np.zeros(2, np.uint32),
            latents=first_latents(programs.latent_shape),
        )
        return programs.encode(params, programs.empty(), {0: arrival})

    def pixels(slots: Slots) -> np.ndarray:
        return np.asarray(programs.decode(params, slots.latents, np.ones(1, bool)))[0]

    def text() -> None:
        nonlocal slots
        slots = jax.block_until_ready(entered(LONG))

    def step() -> None:
        nonlocal slots
        slots = jax.block_until_ready(programs.advance(params, slots, 1))

    def image() -> np.ndarray:
        return pixels(programs.advance(params, entered(STEPS), STEPS))

    return {TEXT: text, STEP: step, DECODE: lambda: pixels(slots), IMAGE: image}


def pytorch(folder: Path, size: int, layout: str) -> Calls:
    """The same calls of diffusers' pipeline; the layout is that of the networks' weights."""
    # Here, because the process that measures our own memory must not hold PyTorch.
    import torch
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count())
    layout = getattr(torch, layout)
    pipe = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    pipe.unet.to(memory_format=layout)
    pipe.vae.to(memory_format=layout)
    ids = torch.tensor(Tokenizer.from_folder(folder / "tokenizer")(["", PROMPT])).long()
    scale = 2 ** (len(pipe.vae.config.block_out_channels) - 1)
    shape = (size // scale, size // scale, pipe.unet.config.in_channels)
    start = torch.tensor(first_latents(shape).transpose(2, 0, 1)[None])
    latents, embeddings = start, None
    pipe.scheduler.set_timesteps(LONG)
    timesteps = iter(pipe.scheduler.timesteps)

    def text() -> None:
        nonlocal embeddings
        embeddings = pipe.text_encoder(ids)[0]

    def step() -> None:
        nonlocal latents
        timestep = next(timesteps)
        out = pipe.unet(torch.cat([latents] * 2), timestep, embeddings).sample
        negative, positive = out.chunk(2)
        guided = negative + GUIDANCE * (positive - negative)
        latents = pipe.scheduler.step(guided, timestep, latents).prev_sample

    def decode() -> None:
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample
        (image / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).numpy()

    def image() -> np.ndarray:
        image = pipe(PROMPT, num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=start,
                     height=size, width=size, output_type="np").images[0]
        return (image * 255).round().astype(np.uint8)

    calls = {TEXT: text, STEP: step, DECODE: decode, IMAGE: image}
    return {part: torch.inference_mode()(call) for part, call in calls.items()}


def first_latents(shape: tuple[int, int, int]) -> np.ndarray:
    """Noise (h, w, C), the same for everybody."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


OURS = "sd_tpu"
PYTORCH = "PyTorch"
CONTESTANTS: dict[str, Callable[[Path, int], Calls]] = {
    OURS: ours,
    PYTORCH: partial(pytorch, layout="contiguous_format"),
    f"{PYTORCH}, channels last": partial(pytorch, layout="channels_last"),
}


def peak_memory(contestant: str, folder: Path, size: int) -> dict[str, float]:
    """Gigabytes that this process takes at the most while it loads, and while it makes a picture.
    """
    _on_cpu()
    calls = CONTESTANTS[contestant](folder, size)
    loading = memory("VmHWM")
    forget_peak()
    calls[IMAGE]()
    return {"loading, GB": loading / 1e9, "a picture, GB": memory("VmHWM") / 1e9}


def _on_cpu() -> None:
    """Settles where JAX works, and that it compiles: kept programs would hide what that takes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures times and peak memory."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", choices=MODELS, default="sd14", help="(%(default)s)")
    flags.add_argument("--size", type=int, default=512, metavar="PIXELS",
                       help="sides of the picture (%(default)s)")
    flags.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    args = flags.parse_args(arguments)
    if not 0 < args.rounds < LONG - 1:
        flags.error(f"--rounds should be from 1 to {LONG - 2}, not {args.rounds}")
    _on_cpu()
    folder = checkpoint_folder(args.model)
    picture = f"{args.model}, {args.size}x{args.size}, float32"

    peaks = [{"": name, **in_fresh_process(peak_memory, name, folder, args.size)}
             for name in CONTESTANTS]
    report(f"CPU against PyTorch, peak memory: {picture}", peaks, args.results,
           notes=["Of a process that loads the float16 checkpoint and makes one picture, with all "
                  "that it has imported and compiled. PyTorch loads without `accelerate`, which "
                  "takes more memory than with it."])

    calls = {name: load(folder, args.size) for name, load in CONTESTANTS.items()}
    rows = []
    for part in PARTS:
        seconds = side_by_side({name: calls[name][part] for name in CONTESTANTS}, args.rounds)
        medians = {name: timing.median for name, timing in seconds.items()}
        best = min(median for name, median in medians.items() if name != OURS)
        rows.append({"seconds": part, **medians, "ours / the better PyTorch": medians[OURS] / best,
                     "ours, compiling": max(0.0, seconds[OURS].first - medians[OURS])})
    images = {name: calls[name][IMAGE]().astype(int) for name in (OURS, PYTORCH)}
    differing = np.mean(np.abs(images[OURS] - images[PYTORCH]) > 1)
    report(f"CPU against PyTorch, times: {picture}", rows, args.results,
           notes=[f"Medians of {args.rounds} rounds side by side. The two pictures differ by more "
                  f"than 1 of 255 in {differing:.2%} of their values."])


if __name__ == "__main__":
    main()
