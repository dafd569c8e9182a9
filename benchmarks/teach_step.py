"""A step of training a LoRA on the CPU beside PyTorch's: `python -m benchmarks.teach_step`.

Random weights in float32, one picture, all cores for each, in one process after another. PyTorch is
diffusers' network with peft's factors on the same layers, in channels last, and its AdamW, with and
without gradient checkpointing, which saves memory as ours does always. Peak memory is that of a
process from its first weight on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contestants import on_device
from benchmarks.cpu import OURS, PYTORCH, on_cpu
from benchmarks.make_checkpoint import MODELS
from benchmarks.report import (
    add_rounds,
    forget_peak,
    in_fresh_process,
    memory,
    parser,
    report,
    side_by_side,
)
from benchmarks.tpu_compile import training_step
from sd_tpu.families.tokenizer import LENGTH
from sd_tpu.memory import return_freed_memory
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.training.options import OPTIMIZERS, Options
from sd_tpu.training.step import CLIPPED, WEIGHT_DECAY, put_batch

TITLE = "Teaching, a step on the CPU: "  # and the model and its size
LAYERS = ["to_k", "to_q", "to_v", "to_out.0"]  # as diffusers' own scripts name them
TIME, MEMORY = "a step, s", "peak memory, GB"
RATIOS = {TIME: "time / PyTorch's", MEMORY: "memory / PyTorch's"}
CHECKPOINTED = f"{PYTORCH}, gradient checkpointing"


def our_step(model: str, side: int) -> Callable[[], Any]:
    """Return a call that takes a step of `sd_tpu teach`."""
    mesh = make_mesh(1)
    step, shapes, batch, taken = training_step(model, mesh, side, jnp.float32)
    params = on_device(taken, mesh)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=replicated(mesh)), shapes)
    given = put_batch(batch, mesh), np.uint32(0), np.float32(OPTIMIZERS["adamw"])
    compiled = step.lower(state, params, *given).compile()
    return_freed_memory()  # as `Trainer` does

    def take() -> None:
        nonlocal state
        state, loss = compiled(state, params, *given)
        loss.block_until_ready()

    return take


def with_factors(model: str) -> Any:
    """Return diffusers' UNet with peft's factors, which alone take gradients."""
    import peft
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_config(MODELS[model]["unet"])
    unet.requires_grad_(False)
    unet.add_adapter(
        peft.LoraConfig(r=Options.rank, lora_alpha=Options.rank, target_modules=LAYERS)
    )
    return unet.to(memory_format=torch.channels_last)


def their_step(model: str, side: int, *, checkpointing: bool) -> Callable[[], Any]:
    """Return a call that takes a step of diffusers' training script."""
    import torch
    from diffusers import DDPMScheduler

    unet, config = with_factors(model), MODELS[model]["unet"]
    if checkpointing:
        unet.enable_gradient_checkpointing()
    unet.train()
    factors = [each for each in unet.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(factors, OPTIMIZERS["adamw"], weight_decay=WEIGHT_DECAY)
    scheduler = DDPMScheduler.from_config(MODELS[model]["scheduler"])
    latents = torch.zeros(1, config["in_channels"], side // 8, side // 8)
    text = torch.randn(1, LENGTH, config["cross_attention_dim"])

    def take() -> None:
        noise = torch.randn_like(latents)
        t = torch.randint(0, scheduler.config["num_train_timesteps"], (1,))
        noisy = scheduler.add_noise(latents, noise, t).to(memory_format=torch.channels_last)
        answer = unet(noisy, t, text).sample
        torch.nn.functional.mse_loss(answer, noise).backward()
        torch.nn.utils.clip_grad_norm_(factors, CLIPPED)
        optimizer.step()
        optimizer.zero_grad()

    return take


def alone(by: str, model: str, side: int, rounds: int) -> dict[str, Any]:
    """Measure one contestant in this process; returns its row."""
    on_cpu()
    if by != OURS:  # what it imports is there before, as JAX is
        with_factors("tiny")
    before = memory("VmRSS")
    forget_peak()
    if by == OURS:
        take = our_step(model, side)
    else:
        take = their_step(model, side, checkpointing=by == CHECKPOINTED)
    timing = side_by_side({"": take}, rounds)[""]
    return {"": by, TIME: timing.median, MEMORY: (memory("VmHWM") - before) / 1e9}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a step's time and peak memory."""
    flags = parser("teach_step", __doc__.splitlines()[0])
    flags.add_argument("--model", choices=["sd14", "tiny"], default="sd14", help="(%(default)s)")
    flags.add_argument(
        "--side", type=int, default=512, metavar="PIXELS", help="of the picture (%(default)s)"
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)
    rows = [
        in_fresh_process(alone, by, args.model, args.side, args.rounds)
        for by in (OURS, PYTORCH, CHECKPOINTED)
    ]
    plain = rows[1]
    for column, ratio in RATIOS.items():
        rows = [{**row, ratio: row[column] / plain[column]} for row in rows]
    report(
        f"{TITLE}{args.model}, {args.side}x{args.side}",
        rows,
        args,
        notes=[
            f"Medians of {args.rounds} steps of one picture after a first one, rank "
            f"{Options.rank}, float32."
        ],
    )


if __name__ == "__main__":
    main()
