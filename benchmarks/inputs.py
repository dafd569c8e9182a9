"""The cost of input pictures, and of drawing larger: `python -m benchmarks.inputs`.

A step with a start picture, a mask, a ControlNet or an IP-Adapter beside a plain one; eight
pictures in one batch with a start picture each; whole pictures against diffusers on PyTorch; and
the memory of drawing a picture larger. ControlNets and adapters have random weights, too, and the
sizes of the published ones where the checkpoint has a published size.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import cpu
from benchmarks.make_checkpoint import MODELS, checkpoint_folder, random_parameters
from benchmarks.report import (
    add_rounds,
    count_compilations,
    forget_peak,
    in_fresh_process,
    memory,
    parser,
    report,
    seconds_of,
    side_by_side,
)
from sd_tpu.checkpoint.config import BUNDLED_MODEL, ControlNetConfig, ProjectedVisionEncoderConfig
from sd_tpu.checkpoint.ip_adapter import TOKENS, IPAdapterConfig
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.extra_network import ExtraNetwork
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.models import tiles
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request, larger
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import REFERENCE_PICTURE
from sd_tpu.sampling.samplers import steps_taken
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.settings import LARGER_STRENGTH, MAX_PROMPTS

CONTESTANTS = cpu.OURS, cpu.PYTORCH, cpu.CHANNELS_LAST  # those that need nothing more
PLAIN, START, MASK, CONTROLLED, REFERRING = KINDS = (
    "a picture",
    "with a start picture",
    "with a mask",
    "with a ControlNet",
    "with an IP-Adapter",
)
COMPARED = [START, MASK, CONTROLLED]  # with PyTorch's
BUNDLED = "bundled"  # the model that comes with sd_tpu, beside those of MODELS
NEARLY_ALL = 0.99  # the strength at which a picture takes as many steps as can be timed
HALF = 0.5  # that of the picture that is compared with PyTorch's
# Of the published adapters: OpenCLIP's ViT-H/14.
ENCODER = ProjectedVisionEncoderConfig(
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=32,
    num_attention_heads=16,
    image_size=224,
    patch_size=14,
    projection_dim=1024,
    hidden_act="gelu",
)
TINY_ENCODER = ProjectedVisionEncoderConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=7,
    projection_dim=16,
)
CONTROL_WIDTHS = (16, 32, 96, 256)  # of the layers that bring control pictures to latents' size


# --- steps --------------------------------------------------------------------------------------


def beside(model: LatentDiffusion, configs: Mapping[str, Any]) -> list[ExtraNetwork]:
    """Return a ControlNet for the model, and an IP-Adapter of the plain kind."""
    unet, levels = model.unet_config, int(math.log2(model.downscale)) + 1
    encoder = ENCODER if unet.cross_attention_dim >= 768 else TINY_ENCODER
    own = dict(name="random", source=Path(), dtype=model.dtype)
    found = [
        ControlNet(
            **own,
            config=ControlNetConfig.from_dict(
                {**configs["unet"], "conditioning_embedding_out_channels": CONTROL_WIDTHS[:levels]}
            ),
        ),
        IPAdapter(
            **own,
            encoder=Path(),
            config=IPAdapterConfig(
                embed_dim=encoder.projection_dim,
                cross_attention_dim=unet.cross_attention_dim,
                tokens=TOKENS,
                widths=unet.attending_widths,
                image_encoder=encoder,
            ),
        ),
    ]
    for network in found:
        network.check(model)
    return found


def operations(model: LatentDiffusion, params: Params, size: int) -> float:
    """Operations of one guided evaluation as XLA counts them, two to a multiplication with its
    addition, before it has optimised anything."""
    latent_shape = model.latent_shape(size, size)

    def both(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), shapes)

    of_each = jax.ShapeDtypeStruct((2,), np.float32)
    strength = {"strength": of_each} if model.uses_controlnet else {}
    x = jax.ShapeDtypeStruct((2, *latent_shape), np.float32)
    lowered = jax.jit(model.denoise).lower(params, x, of_each, both(model.cond_shapes), **strength)
    return lowered.cost_analysis()["flops"]


def single_steps(folder: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table of steps; each kind takes its turn in every round."""
    mesh, noise, sizes = make_mesh(1), np.random.default_rng(0), dict(height=size, width=size)
    checkpoint, params = Checkpoint.from_pretrained(folder, sharding=replicated(mesh))
    _, sees = networks = beside(checkpoint.model, checkpoint.configs)
    side = sees.config.image_encoder.image_size
    encoders = [
        ImageEncoder(
            checkpoint.model.encode,
            mesh,
            checkpoint.parameters.shapes,
            network_dtype=checkpoint.model.dtype,
            **sizes,
        ),
        ImageEncoder(
            sees.tokens,
            mesh,
            {sees.part: sees.shapes},
            height=side,
            width=side,
            network_dtype=sees.dtype,
            dtype=np.uint8,
            names=(REFERENCE_PICTURE,),
        ),
    ]
    drawn = dict.fromkeys((PLAIN, START, MASK), (checkpoint.model, params))
    for kind, network in zip((CONTROLLED, REFERRING), networks, strict=True):
        own = jax.tree.map(
            lambda x, like: jax.device_put(x.astype(like.dtype)),
            random_parameters(network.shapes),
            network.shapes,
        )
        drawn[kind] = network.joined(checkpoint.model, **sizes), {**params, network.part: own}
    programs = {model: Programs(model, mesh, slots=1, **sizes) for model, _ in drawn.values()}
    slots = {
        kind: cpu.OneSlot(checkpoint, own, programs[model], encoders)
        for kind, (model, own) in drawn.items()
    }

    image = noise.uniform(-1, 1, (size, size, 3)).astype(np.float32)
    values = {
        START: dict(start=cpu.Start(image, NEARLY_ALL)),
        MASK: dict(start=cpu.Start(image, NEARLY_ALL, np.tri(size, dtype=np.float32))),
        CONTROLLED: dict(
            added={"control": noise.integers(0, 256, (size, size, 3), np.uint8)}, control_scale=1.0
        ),
        REFERRING: dict(
            added={"reference_scale": np.ones(1, np.float32)},
            references=[noise.integers(0, 256, (side, side, 3), np.uint8)],
        ),
    }
    entering = side_by_side(
        {
            kind: partial(slot.enter, cpu.LONG, **values.get(kind, {}))
            for kind, slot in slots.items()
        },
        1,
    )
    timings = side_by_side({kind: slot.step for kind, slot in slots.items()}, rounds)
    least, plain = timings[PLAIN].median, operations(*drawn[PLAIN], size)
    return [
        {
            "": kind,
            "s a step": timings[kind].median,
            "times a picture's": timings[kind].median / least,
            "times its operations": operations(*drawn[kind], size) / plain,
            "s to enter": entering[kind].median,
        }
        for kind in KINDS
    ]


# --- a batch ------------------------------------------------------------------------------------


def draw(engine: Engine, given: Mapping[str, Input], **values: Any) -> dict[int, np.ndarray]:
    """Draw a request for eight; return the pictures by index."""
    request = Request.check(
        {"prompts": [cpu.PROMPT] * MAX_PROMPTS, "sampler": "ddim", "seed": 0, **values},
        engine.catalog,
    )
    return {
        event.index: event.pixels
        for event in engine.submit(request, previews=False, inputs=given).events()
        if isinstance(event, ImageReady)
    }


def batch(folder: Path, size: int, steps: int) -> list[dict[str, Any]]:
    """Rows of the table of eight pictures: without start pictures, the first with one, and each
    with a start picture, a mask and a strength of its own."""
    engine = Engine.open(folder, devices=1, size=(size, size))
    engine.ready.wait()
    noise, down, rows = np.random.default_rng(0), np.arange(size)[:, None].repeat(size, 1), []
    starts = [
        Input.of_pixels(noise.integers(0, 256, (size, size, 3), np.uint8))
        for _ in range(MAX_PROMPTS)
    ]
    masks = [
        Input.of_pixels(255 * (down * (MAX_PROMPTS + 1) < size * number).astype(np.uint8))
        for number in range(1, MAX_PROMPTS + 1)
    ]
    strengths = np.linspace(0.3, 1, MAX_PROMPTS).round(2).tolist()
    own = [
        dict(init_image=start.name, mask=mask.name, strength=strength)
        for start, mask, strength in zip(starts, masks, strengths, strict=True)
    ]
    given = {each.name: each for each in (*starts, *masks)}
    taken = sum(steps_taken(steps, strength) for strength in strengths)
    for what, values, count in (
        ("eight pictures", {}, MAX_PROMPTS * steps),
        (
            "one with a start picture and a mask, the first",
            dict(prompts=[cpu.PROMPT], **own[-1]),
            steps,
        ),
        ("eight with others, and strengths of their own", dict(overrides=own), taken),
    ):
        compiled, pictures = count_compilations(), {}
        seconds = seconds_of(lambda: pictures.update(draw(engine, given, steps=steps, **values)))  # noqa: B023
        rows.append(
            {
                "": what,
                "steps in all": count,
                "seconds": seconds,
                "s a step": seconds / count,
                "compiled": compiled(),
            }
        )
    alike = [
        np.array_equal(
            pictures[index],
            draw(
                engine,
                given,
                steps=steps,
                overrides=[*[None] * index, own[index]],
                prompts=[*[""] * index, cpu.PROMPT],
            )[index],
        )
        for index in pictures
    ]
    engine.close()
    rows[-1]["bytes as alone"] = f"{sum(alike)} of {len(alike)}"
    return rows


# --- beside PyTorch -----------------------------------------------------------------------------


def controlnet_folder(folder: Path) -> Path:
    """Return the folder of a ControlNet with random weights beside a checkpoint.

    It is made if it is missing.
    """
    made = folder.with_name(f"{folder.name}-controlnet")
    if not made.is_dir():
        import torch
        from diffusers import ControlNetModel, UNet2DConditionModel

        torch.manual_seed(0)
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        network = ControlNetModel.from_unet(
            UNet2DConditionModel.from_pretrained(folder / "unet", dtype=torch.float32),
            conditioning_embedding_out_channels=CONTROL_WIDTHS[: len(vae["block_out_channels"])],
        )
        for layer in (*network.controlnet_down_blocks, network.controlnet_mid_block):
            torch.nn.init.normal_(layer.weight, std=layer.in_channels**-0.5)  # zeros do nothing
        network.half().save_pretrained(made)
    return made


def against_pytorch(
    kind: str, folder: Path, size: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table of whole pictures of one of KINDS."""
    noise = np.random.default_rng(0).uniform(-1, 1, (size // 8, size // 8, 3)).astype(np.float32)
    mask = np.tri(size, dtype=np.float32) if kind == MASK else None
    start = cpu.Start(noise.repeat(8, 0).repeat(8, 1), HALF, mask)
    given = dict(control=controlnet_folder(folder)) if kind == CONTROLLED else dict(start=start)
    calls = {
        name: cpu.CONTESTANTS[name](folder, size, steps, **given)[cpu.IMAGE] for name in CONTESTANTS
    }
    timings = side_by_side(calls, rounds)
    best = min(timing.median for name, timing in timings.items() if name != cpu.OURS)
    differing = np.abs(calls[cpu.OURS]().astype(int) - calls[cpu.PYTORCH]()) > 1
    return [
        {
            "": f"{kind}: {name}",
            "seconds": timing.median,
            "times the better PyTorch": timing.median / best,
            "values off": f"{np.mean(differing):.2%}" if name == cpu.OURS else "",
        }
        for name, timing in timings.items()
    ]


# --- larger -------------------------------------------------------------------------------------


def trained_at(folder: Path, size: int, parent: str) -> Path:
    """Return a checkpoint as if it had been trained at this size, which is that of its tiles."""
    made = Path(shutil.copytree(folder, Path(parent) / folder.name, copy_function=os.symlink))
    downscale = Checkpoint.open(folder, dtype="float32").model.downscale
    config = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    (made / "unet" / "config.json").unlink()
    (made / "unet" / "config.json").write_text(
        json.dumps({**config, "sample_size": size // downscale}), encoding="utf-8"
    )
    return made


def larger_peak(
    folder: Path, size: int, tile: int, times: int, steps: int, at_once: bool
) -> dict[str, Any]:
    """Measure seconds and peak gigabytes of drawing a picture again `times` as large.

    It is drawn at once or by tiles of `tile` pixels; with `times` 1 it is drawn from noise. The
    process must have done nothing else before.
    """
    with TemporaryDirectory() as parent:
        return _larger_peak(
            trained_at(folder, tile, parent),
            size,
            times,
            steps,
            times * size if at_once else max(size, tile),
        )


def _larger_peak(folder: Path, size: int, times: int, steps: int, most: int) -> dict[str, Any]:
    """Measure `larger_peak` with a model that draws sides of `most` pixels at once."""
    side = times * size
    engine = Engine.open(folder, devices=1, max_pixels=most**2)
    engine.ready.wait()
    forget_peak()
    start = Input.of_pixels(np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8))
    (picture,) = Request.check(
        {"prompts": [cpu.PROMPT], "steps": steps, "seed": 0}, engine.catalog
    ).pictures
    if times > 1:
        again = larger(picture, side, side, LARGER_STRENGTH)
        picture = dataclasses.replace(again, init_image=start.name)
    job = engine.submit(Request((picture,)), previews=False, inputs={start.name: start})
    seconds = seconds_of(lambda: list(job.events()))
    tiling = engine.catalog.tiling(picture)
    engine.close()
    return {
        "": f"{side}x{side}",
        "tiles": len(tiling) if tiling else "",
        "seconds, compiling": seconds,
        "peak, GB": memory("VmHWM") / 1e9,
    }


def decoding_peak(folder: Path, side: int, whole: bool) -> dict[str, Any]:
    """Measure seconds and peak gigabytes of decoding alone, with random weights.

    The autoencoder is all that is in memory. It decodes by tiles above a number of pixels, as
    always, or with `whole` never.
    """
    checkpoint, mesh = Checkpoint.open(folder, dtype="float32"), make_mesh(1)
    programs = Programs(checkpoint.model, mesh, slots=1, height=side, width=side)
    shapes = checkpoint.parameters.shapes[programs.autoencoder]
    params = {
        programs.autoencoder: jax.device_put(
            jax.tree.map(lambda x: x.astype(np.float32), random_parameters(shapes)),
            replicated(mesh),
        )
    }
    latents = jax.device_put(cpu.first_latents(programs.latent_shape)[None], replicated(mesh))
    forget_peak()
    with mock.patch.object(tiles, "SIDE", side if whole else tiles.SIDE):
        seconds = seconds_of(lambda: np.asarray(programs.decode(params, latents, np.ones(1, bool))))
    return {
        "": f"{side}x{side}, decoding alone{', whole' * whole}",
        "seconds, compiling": seconds,
        "peak, GB": memory("VmHWM") / 1e9,
    }


def apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure on the CPU."""
    cpu.on_cpu()
    return measure(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all of it, each table in a process that holds nothing of the others."""
    flags = parser("inputs", __doc__.splitlines()[0])
    flags.add_argument(
        "tables",
        nargs="*",
        default=TABLES,
        metavar="TABLE",
        help=f"some of {', '.join(TABLES)} (default: all)",
    )
    flags.add_argument("--model", choices=[*MODELS, BUNDLED], default="sd14", help="(%(default)s)")
    flags.add_argument(
        "--size",
        type=int,
        default=512,
        metavar="PIXELS",
        help="sides of the pictures (%(default)s)",
    )
    flags.add_argument("--steps", type=int, default=4, help="of whole pictures (%(default)s)")
    add_rounds(flags, 5)
    flags.add_argument(
        "--against",
        nargs="*",
        choices=COMPARED,
        default=COMPARED,
        metavar="KIND",
        help="of pictures beside PyTorch's (%(default)s)",
    )
    flags.add_argument(
        "--tile",
        type=int,
        metavar="PIXELS",
        help="sides of the tiles that larger ones are drawn by (those of --size)",
    )
    flags.add_argument(
        "--larger",
        type=int,
        nargs="*",
        default=[1, 2],
        metavar="TIMES",
        help="as large as --size, drawn to see their memory (%(default)s)",
    )
    flags.add_argument(
        "--at-once",
        type=int,
        default=2,
        metavar="TIMES",
        help="to which that is drawn at once as well (%(default)s)",
    )
    flags.add_argument(
        "--decode",
        type=int,
        nargs="*",
        default=[],
        metavar="PIXELS",
        help="sides of pictures that are decoded alone, as ever and whole, to see their memory",
    )
    args = flags.parse_args(arguments)
    if not 0 < args.rounds < cpu.LONG - 2:  # of a picture that begins with another, one row less
        flags.error(f"--rounds should be from 1 to {cpu.LONG - 3}, not {args.rounds}")
    if unknown := set(args.tables) - set(TABLES):
        flags.error(f"there is no table {', '.join(sorted(unknown))}")
    cpu.on_cpu()
    folder = (
        BUNDLED_MODEL if args.model == BUNDLED else in_fresh_process(checkpoint_folder, args.model)
    )
    for table in args.tables:
        what, rows, note = _TABLES[table](folder, args)
        report(
            f"Input pictures, {what}: {args.model}, {args.size}x{args.size}, float32",
            rows,
            args,
            notes=[note],
        )


Table = tuple[str, list[dict[str, Any]], str]  # what it is of, its rows, and a note below it


def _steps(folder: Path, args: argparse.Namespace) -> Table:
    return (
        "single steps",
        in_fresh_process(apart, single_steps, folder, args.size, args.rounds),
        f"Medians of {args.rounds} rounds, in turn, with guidance, one slot on one device. "
        "Operations are XLA's count of one evaluation. To enter is to encode texts and "
        "pictures, once.",
    )


def _batch(folder: Path, args: argparse.Namespace) -> Table:
    return (
        "eight in one batch",
        in_fresh_process(apart, batch, folder, args.size, args.steps),
        "Seconds from the request to the pictures on one device, with texts, decoding and, for the "
        "first of its kind, compiling the encoder of start pictures.",
    )


def _against(folder: Path, args: argparse.Namespace) -> Table:
    rows = [
        row
        for kind in args.against
        for row in in_fresh_process(
            apart, against_pytorch, kind, folder, args.size, args.steps, args.rounds
        )
    ]
    return (
        "against PyTorch",
        rows,
        f"Medians of {args.rounds} rounds, in turn; {args.steps} steps, with a start "
        f"picture at a strength of {HALF}. Off are values that differ from PyTorch's by more "
        "than 1 of 255.",
    )


def _larger(folder: Path, args: argparse.Namespace) -> Table:
    tile, taken = args.tile or args.size, steps_taken(args.steps, LARGER_STRENGTH)
    rows = [
        in_fresh_process(apart, larger_peak, folder, args.size, tile, times, args.steps, at_once)
        for times in args.larger
        for at_once in (True, False)
        if (times <= args.at_once if at_once else times > 1)
    ]
    rows += [
        in_fresh_process(apart, decoding_peak, folder, side, whole)
        for side in args.decode
        for whole in (False, True)
    ]
    return (
        "drawn larger",
        rows,
        f"Each in a process that serves, from when it is ready; tiles have {tile}x{tile} "
        f"pixels. A picture begins with one of {args.size}x{args.size} and takes {taken} of "
        f"{args.steps} steps, but for one of that size itself, which is drawn from noise.",
    )


_TABLES: dict[str, Callable[[Path, argparse.Namespace], Table]] = {
    "steps": _steps,
    "batch": _batch,
    "pytorch": _against,
    "larger": _larger,
}
TABLES = list(_TABLES)


if __name__ == "__main__":
    main()
