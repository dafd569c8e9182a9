"""sd_tpu against diffusers on PyTorch, on a CUDA GPU: `python -m benchmarks.gpu`.

SD 1.4 in bfloat16 at 512x512, from prompts to uint8 pictures on the host. PyTorch gets its fastest
settings: SDPA, channels last, and the UNet and decoder through `torch.compile`. Without a GPU both
run a tiny model on the CPU, to show that the script works, and the rows say "not measured yet".
"""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.make_checkpoint import checkpoint_folder
from benchmarks.report import add_rounds, parser, report, side_by_side
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import Programs
from sd_tpu.runtime.slots import SlotInputs
from sd_tpu.sampling.samplers import make_table
from sd_tpu.serving.engine import ACCELERATOR_GROUP

PROMPT = "a castle in the clouds, watercolour"
GUIDANCE = 7.5
PYTORCH = "diffusers, PyTorch"
UNMEASURED = "not measured yet"

# Operations of SD 1.4 for one picture of 512x512, two to a multiplication with its addition, as
# torch.utils.flop_counter counts the convolutions and matrix products of diffusers' networks.
UNET, DECODER, TEXT_ENCODER = 0.803e12, 2.515e12, 0.0133e12

# Peak of dense bfloat16 matrix products by what is in the device's name, from NVIDIA's data sheets;
# float16 where a chip has no bfloat16. The first that fits counts.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
    "T4": 65e12,
}


def operations(steps: int) -> float:
    """Operations of one guided picture with a sampler that evaluates the model once a step."""
    return steps * 2 * UNET + DECODER + 2 * TEXT_ENCODER


def peak(device: jax.Device) -> float | None:
    """Operations a second that the device can do at most, if it is known."""
    return next(
        (peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device.device_kind)),
        None,
    )


class Ours:
    """Our pipeline on one device."""

    def __init__(self, folder: Path, dtype: str):
        """Load the checkpoint."""
        self._mesh = make_mesh(1)
        self._pipeline, self._params = Checkpoint.from_pretrained(
            folder, dtype=dtype, sharding=replicated(self._mesh)
        )

    def calls(self, batch: int, group: int) -> Callable[[int], np.ndarray]:
        """Return a function from steps to uint8 pictures, compiled when it is first called."""
        pipeline, params = self._pipeline, self._params
        height, width = pipeline.default_size
        programs = Programs(
            pipeline.model, self._mesh, slots=batch, height=height, width=width, group=group
        )

        def draw(steps: int) -> np.ndarray:
            inputs = pipeline.prompt_inputs(PROMPT)
            table = make_table("ddim", pipeline.schedule, steps)
            entering = {
                i: SlotInputs.of(table, inputs, guidance=GUIDANCE, key=np.array([0, i], np.uint32))
                for i in range(batch)
            }
            slots = programs.encode(params, programs.empty(), entering)
            slots = programs.advance(params, slots, steps)
            wanted = np.arange(programs.slots) < batch
            return np.asarray(programs.decode(params, slots.latents, wanted))[:batch]

        return draw


class PyTorch:
    """diffusers' pipeline on the GPU, compiled, or on the CPU as it comes."""

    def __init__(self, folder: Path, on_gpu: bool):
        """Load the checkpoint; raises ImportError without PyTorch or diffusers."""
        # Here, because a machine may be without them: then our own figures are still taken.
        import torch
        from diffusers import DDIMScheduler, StableDiffusionPipeline

        pipe = StableDiffusionPipeline.from_pretrained(
            folder, dtype=torch.bfloat16 if on_gpu else torch.float32, safety_checker=None
        )
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
        pipe.unet.to(memory_format=torch.channels_last)
        pipe.vae.to(memory_format=torch.channels_last)
        if on_gpu:
            pipe.to("cuda")
            compiled = dict(mode="reduce-overhead", fullgraph=True, dynamic=False)
            pipe.unet = torch.compile(pipe.unet, **compiled)
            pipe.vae.decode = torch.compile(pipe.vae.decode, **compiled)
        self._pipe, self._uint8 = pipe, torch.uint8

    def calls(self, batch: int) -> Callable[[int], np.ndarray]:
        """Return a function from steps to uint8 pictures, compiled when it is first called."""

        def draw(steps: int) -> np.ndarray:
            images = self._pipe(
                [PROMPT] * batch,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE,
                output_type="pt",
            ).images
            return (images * 255).round().to(self._uint8).permute(0, 2, 3, 1).cpu().numpy()

        return draw


def measure(
    contestants: dict[str, Callable[[int], Any]], batch: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table: each contestant at so many steps of so many pictures."""
    calls = {name: partial(draw, steps) for name, draw in contestants.items()}
    times = side_by_side(calls, rounds)
    most = peak(jax.devices()[0])
    rows = []
    for name, timing in times.items():
        speed = batch / timing.median
        share = 100 * speed * operations(steps) / most if most else "peak unknown"
        row = {
            "pictures": batch,
            "steps": steps,
            "": name,
            "seconds": timing.median,
            "pictures/s": speed,
            "share of peak, %": share,
        }
        if PYTORCH in times:
            row["times PyTorch's"] = times[PYTORCH].median / timing.median
        rows.append({**row, "first call, s": timing.first})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or show that it would work."""
    flags = parser("gpu", __doc__.splitlines()[0])
    flags.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=(1, 8, 16),
        metavar="N",
        help="pictures at a time (default: 1 8 16)",
    )
    flags.add_argument(
        "--steps", type=int, nargs="+", default=(20, 50), metavar="N", help="(default: 20 50)"
    )
    add_rounds(flags, 5)
    args = flags.parse_args(arguments)
    # JAX would take most of the GPU's memory at its start, and PyTorch needs some beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_compilation_cache", False)  # to see what compiling takes
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu:
        args.batches, args.steps, args.rounds = (1, 2), (2,), 1

    folder = checkpoint_folder("sd14" if on_gpu else "tiny")
    ours, notes = Ours(folder, "bfloat16" if on_gpu else "float32"), []
    try:
        pytorch = PyTorch(folder, on_gpu)
    except ImportError as error:
        pytorch = None
        notes.append(
            f"PyTorch is not measured ({error}). To have it: pip install torch "
            '"diffusers>=0.42,<0.43" "transformers>=5.23,<6" accelerate'
        )
    rows = []
    for batch in args.batches:
        contestants = {
            f"sd_tpu, slots by {group}": ours.calls(batch, group)
            for group in sorted({min(batch, ACCELERATOR_GROUP), batch})
        }
        if pytorch:
            contestants[PYTORCH] = pytorch.calls(batch)
        for steps in args.steps:
            rows += measure(contestants, batch, steps, args.rounds)
    notes.append(
        f"Medians of {args.rounds} rounds, in turn. The first call compiles, or finds "
        "compiled what the other number of steps compiled before."
    )
    if not on_gpu:
        known = ("pictures", "steps", "")
        rows = [
            {name: cell if name in known else UNMEASURED for name, cell in row.items()}
            for row in rows
        ]
        notes[-1] = "There was no GPU: the script ran a tiny model on the CPU to see that it works."
    report("GPU: sd14, 512x512, bfloat16", rows, args, notes=notes)


if __name__ == "__main__":
    main()
