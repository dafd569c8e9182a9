"""The wait for a picture after switching: `python -m benchmarks.choose`.

How much longer than a plain picture the first and the second one take after switching to another
fine-tune, LoRA or size.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.make_checkpoint import checkpoint_folder, lora, single_file
from benchmarks.report import in_fresh_process, parser, report, seconds_of
from benchmarks.start import loading_peak
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import Done

ROOM = 2.2  # models that the devices have memory for, so that the third has one leave
RANK = 16
ROUNDS = 3  # of pictures without a choice
FILE, LORAS = "file", ("one", "two")


def waits(folder: Path, shelf: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table, of a model in a folder and what lies on a shelf."""
    checkpoint = Checkpoint.open(folder)
    parameters, side = checkpoint.parameters.memory, checkpoint.default_size[0] // 2
    engine = Engine.open(
        folder,
        models=shelf,
        lora_dir=shelf / "loras",
        devices=1,
        size=(side, side),
        memory=max(int(ROOM * parameters), 1 << 28),
    )
    engine.ready.wait()

    def picture(prompt: str = "a cat", **values: Any) -> float:
        return seconds_of(lambda: _draw(engine, prompt, **values))

    picture()
    plain = median(picture() for _ in range(ROUNDS))
    try:
        for name in LORAS:
            tag = f"a cat <lora:{name}:0.8>"
            yield {
                "choice": f"LoRA {name}",
                "first": picture(tag) - plain,
                "second": picture(tag) - plain,
            }
        reading = seconds_of(lambda: (shelf / f"{FILE}.safetensors").read_bytes())
        yield {
            "choice": "another fine-tune",
            "first": picture(model=FILE) - plain,
            "second": picture(model=FILE) - plain,
            "reading its file": reading,
        }
        wide = [picture(width=side * 3 // 2) for _ in range(3)]
        yield {"choice": "another size", "first": wide[0] - wide[2], "second": wide[1] - wide[2]}
    finally:
        engine.close()


def _draw(engine: Engine, prompt: str, **values: Any) -> None:
    request = Request.check(
        {"prompts": [prompt], "steps": 2, "sampler": "euler", **values}, engine.catalog
    )
    *_, end = engine.submit(request, previews=False).events()
    assert isinstance(end, Done), end


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cost of each choice."""
    flags = parser("choose", __doc__.splitlines()[0])
    flags.add_argument(
        "--model",
        choices=("sd14", "tiny"),
        default="sd14",
        help="made by make_checkpoint (%(default)s)",
    )
    args = flags.parse_args(arguments)
    folder = checkpoint_folder(args.model)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        shelf = Path(made)
        (shelf / "loras").mkdir()
        (shelf / "kept").mkdir()
        single_file(folder, shelf / f"{FILE}.safetensors")
        for seed, name in enumerate(LORAS):
            lora(folder, shelf / "loras" / f"{name}.safetensors", RANK, seed)
        peaks = [
            in_fresh_process(loading_peak, shelf / f"{FILE}.safetensors", dtype)
            for dtype in ("float32", "bfloat16")
        ]
        kept = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", str(shelf / "kept"))
        try:
            rows = list(waits(folder, shelf))
        finally:
            jax.config.update("jax_compilation_cache_dir", kept)
    report(f"Memory while loading: {args.model}, a single float16 file", peaks, args)
    report(
        f"Switching: {args.model}",
        rows,
        args,
        notes=[
            "Seconds from the request to the picture, less those of a picture without the choice, "
            "at half the model's sides, so that drawing counts little; the other size is half as "
            "wide again. "
            f"LoRAs have rank {RANK} on all attention and feed-forward layers of both networks; "
            "the other fine-tune is a float16 file in the original layout, in the system's cache; "
            "nothing compiled was kept."
        ],
    )


if __name__ == "__main__":
    main()
