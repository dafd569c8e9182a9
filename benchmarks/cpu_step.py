"""A step of a transformer on the CPU beside diffusers' on PyTorch: `python -m benchmarks.cpu_step`.

Both in bfloat16 with random weights that are drawn in memory, as no disk need hold them; all cores
for each, in one process after another. Peak memory is that of a process from its first weight on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import contestants
from benchmarks.contestants import Figures, Workload
from benchmarks.cpu import OURS, PYTORCH, on_cpu
from benchmarks.report import add_rounds, forget_peak, in_fresh_process, memory, parser, report
from benchmarks.tpu_compile import built
from sd_tpu.checkpoint.division import bytes_of

TITLE = "CPU, a step in bfloat16: "  # and the model and its size
MODELS = "klein", "zimage", "tinyklein", "tinyzimage"
CONTESTANTS: dict[str, Callable[[Workload], Figures]] = {
    OURS: contestants.our_step,
    PYTORCH: contestants.their_step,
}


def alone(by: str, load: Workload) -> dict[str, Any]:
    """Measure one contestant in this process; returns its row."""
    on_cpu()
    if by == PYTORCH:  # whose networks would be made in float32, twice as large
        import torch

        torch.set_default_dtype(torch.bfloat16)
    before = memory("VmRSS")
    forget_peak()
    figures = CONTESTANTS[by](load)
    peak = memory("VmHWM") - before
    return {
        "": by,
        "a step, s": figures.seconds,
        "first step, s": figures.first,
        "peak memory, GB": peak / 1e9,
        "peak / weights": peak / weights_of(load.model),
    }


def weights_of(model: str) -> int:
    """Return the bytes of what takes noise out of latents, in bfloat16."""
    network, params, _ = built(model)
    return bytes_of(params[network.denoiser])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a step's time and peak memory."""
    flags = parser("cpu_step", __doc__.splitlines()[0])
    flags.add_argument("--model", choices=MODELS, default="klein", help="(%(default)s)")
    flags.add_argument(
        "--side", type=int, default=256, metavar="PIXELS", help="of the picture (%(default)s)"
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)
    load = Workload(args.model, args.side, pictures=1, steps=1, evaluations=1, rounds=args.rounds)
    report(
        f"{TITLE}{args.model}, {args.side}x{args.side}",
        [in_fresh_process(alone, by, load) for by in CONTESTANTS],
        args,
        notes=[
            f"One picture, medians of {args.rounds} rounds in one process after another. The text "
            "is as long as the model takes. Memory is beyond what imports take."
        ],
    )


if __name__ == "__main__":
    main()
