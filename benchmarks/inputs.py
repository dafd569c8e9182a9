"""What pictures that are handed in cost: `python -m benchmarks.inputs`.

A step with a start picture, a mask, a ControlNet or an IP-Adapter beside one without; eight
pictures in one batch that each begin with another; image to image against diffusers' PyTorch; and
the memory of drawing a picture larger. Networks beside the checkpoint have random weights too, and
the sizes of the published ones where it has.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import cpu
from benchmarks.make_checkpoint import MODELS, checkpoint_folder, random_parameters
from benchmarks.report import (
    count_compilations,
    forget_peak,
    in_fresh_process,
    memory,
    parser,
    report,
    seconds_of,
    side_by_side,
)
from sd_tpu.checkpoint.config import ControlNetConfig, ProjectedVisionEncoderConfig
from sd_tpu.checkpoint.ip_adapter import TOKENS, IPAdapterConfig
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.extra import ExtraNetwork
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request, larger
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import SEEN
from sd_tpu.sampling.samplers import steps_taken
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.settings import MAX_PROMPTS

CONTESTANTS = cpu.OURS, cpu.PYTORCH, cpu.CHANNELS_LAST  # those that need nothing more
PLAIN, START, MASK, CONTROLLED, REFERRING = KINDS = (
    "a picture", "with a start picture", "with a mask", "with a ControlNet", "with an IP-Adapter")
NEARLY_ALL = 0.99  # the strength at which a picture takes as many steps as can be timed
HALF = 0.5  # that of the picture that is compared with PyTorch's
# Of the published adapters: OpenCLIP's ViT-H/14.
ENCODER = ProjectedVisionEncoderConfig(
    hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16,
    image_size=224, patch_size=14, projection_dim=1024, hidden_act="gelu")
TINY_ENCODER = ProjectedVisionEncoderConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=28, patch_size=7, projection_dim=16)
CONTROL_WIDTHS = (16, 32, 96, 256)  # of the layers that bring control pictures to latents' size


# --- steps --------------------------------------------------------------------------------------


def beside(model: LatentDiffusion, configs: Mapping[str, Any]) -> list[ExtraNetwork]:
    """A ControlNet for the model, and an IP-Adapter of the plain kind."""
    unet, levels = model.unet_config, int(math.log2(model.downscale)) + 1
    encoder = ENCODER if unet.cross_attention_dim >= 768 else TINY_ENCODER
    own = dict(name="random", source=Path(), dtype=model.dtype)
    found = [
        ControlNet(**own, config=ControlNetConfig.from_dict({
            **configs["unet"],
            "conditioning_embedding_out_channels": CONTROL_WIDTHS[:levels]})),
        IPAdapter(**own, encoder=Path(), config=IPAdapterConfig(
            embed_dim=encoder.projection_dim, cross_attention_dim=unet.cross_attention_dim,
            tokens=TOKENS, widths=unet.attending_widths, image_encoder=encoder)),
    ]
    for extra in found:
        extra.check(model)
    return found


def operations(model: LatentDiffusion, params: Params, size: int) -> float:
    """Operations of one guided evaluation as XLA counts them, two to a multiplication with its
    addition, before it has optimised anything."""
    latent_shape = model.latent_shape(size, size)

    def both(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), shapes)

    of_each = jax.ShapeDtypeStruct((2,), np.float32)
    strength = {"strength": of_each} if model.steered else {}
    x = jax.ShapeDtypeStruct((2, *latent_shape), np.float32)
    lowered = jax.jit(partial(model.denoise, shallow=False)).lower(
        params, x, of_each, both(model.cond_shapes), both(model.cache_shapes(latent_shape)),
        **strength)
    return lowered.cost_analysis()["flops"]


def single_steps(folder: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table of steps; each kind takes its turn in every round."""
    mesh, noise, sizes = make_mesh(1), np.random.default_rng(0), dict(height=size, width=size)
    checkpoint, params = Checkpoint.from_pretrained(folder, sharding=replicated(mesh))
    _, sees = extras = beside(checkpoint.model, checkpoint.configs)
    side = sees.config.image_encoder.image_size
    encoders = [
        ImageEncoder(checkpoint.model.encode, mesh, checkpoint.parameters.shapes,
                     network_dtype=checkpoint.model.dtype, **sizes),
        ImageEncoder(sees.tokens, mesh, {sees.part: sees.shapes}, height=side, width=side,
                     network_dtype=sees.dtype, dtype=np.uint8, names=(SEEN,))]
    drawn = dict.fromkeys((PLAIN, START, MASK), (checkpoint.model, params))
    for kind, extra in zip((CONTROLLED, REFERRING), extras, strict=True):
        own = jax.tree.map(lambda x, like: jax.device_put(x.astype(like.dtype)),
                           random_parameters(extra.shapes), extra.shapes)
        drawn[kind] = extra.joined(checkpoint.model, **sizes), {**params, extra.part: own}
    programs = {model: Programs(model, mesh, slots=1, **sizes) for model, _ in drawn.values()}
    slots = {kind: cpu.OneSlot(checkpoint, own, programs[model], encoders)
             for kind, (model, own) in drawn.items()}

    image = noise.uniform(-1, 1, (size, size, 3)).astype(np.float32)
    values = {
        START: dict(start=cpu.Start(image, NEARLY_ALL)),
        MASK: dict(start=cpu.Start(image, NEARLY_ALL, np.tri(size, dtype=np.float32))),
        CONTROLLED: dict(told={"control": noise.integers(0, 256, (size, size, 3), np.uint8)},
                         control_scale=1.0),
        REFERRING: dict(told={"reference_scale": np.ones(1, np.float32)},
                        seen=noise.integers(0, 256, (side, side, 3), np.uint8)),
    }
    entering = side_by_side({kind: partial(slot.enter, cpu.LONG, **values.get(kind, {}))
                             for kind, slot in slots.items()}, 1)
    timings = side_by_side({kind: slot.step for kind, slot in slots.items()}, rounds)
    least, plain = timings[PLAIN].median, operations(*drawn[PLAIN], size)
    return [{"": kind, "s a step": timings[kind].median,
             "times a picture's": timings[kind].median / least,
             "times its operations": operations(*drawn[kind], size) / plain,
             "s to enter": entering[kind].median} for kind in KINDS]


# --- a batch ------------------------------------------------------------------------------------


def draw(engine: Engine, given: Mapping[str, Input], **values: Any) -> dict[int, np.ndarray]:
    """The pictures of a request for eight, by place."""
    request = Request.check({"prompts": [cpu.PROMPT] * MAX_PROMPTS, "sampler": "ddim", "seed": 0,
                             **values}, engine.offer)
    return {event.place: event.pixels for event in
            engine.submit(request, previews=False, inputs=given).events()
            if isinstance(event, ImageReady)}


def batch(folder: Path, size: int, steps: int) -> list[dict[str, Any]]:
    """Rows of the table of eight pictures: without start pictures, the first with one, and each
    with a start picture, a mask and a strength of its own."""
    engine = Engine.open(folder, devices=1, size=(size, size))
    engine.ready.wait()
    noise, down, rows = np.random.default_rng(0), np.arange(size)[:, None].repeat(size, 1), []
    starts = [Input.of_pixels(noise.integers(0, 256, (size, size, 3), np.uint8))
              for _ in range(MAX_PROMPTS)]
    masks = [Input.of_pixels(255 * (down * (MAX_PROMPTS + 1) < size * number).astype(np.uint8))
             for number in range(1, MAX_PROMPTS + 1)]
    strengths = np.linspace(0.3, 1, MAX_PROMPTS).round(2).tolist()
    own = [dict(init_image=start.name, mask=mask.name, strength=strength)
           for start, mask, strength in zip(starts, masks, strengths, strict=True)]
    given = {each.name: each for each in (*starts, *masks)}
    taken = sum(steps_taken(steps, strength) for strength in strengths)
    for what, values, count in (
        ("eight pictures", {}, MAX_PROMPTS * steps),
        ("one with a start picture and a mask, the first", dict(prompts=[cpu.PROMPT], **own[-1]),
         steps),
        ("eight with others, and strengths of their own", dict(own=own), taken),
    ):
        compiled, pictures = count_compilations(), {}
        seconds = seconds_of(
            lambda: pictures.update(draw(engine, given, steps=steps, **values)))  # noqa: B023
        rows.append({"": what, "steps in all": count, "seconds": seconds,
                     "s a step": seconds / count, "compiled": compiled()})
    alike = [np.array_equal(pictures[place], draw(
        engine, given, steps=steps, own=[*[None] * place, own[place]],
        prompts=[*[""] * place, cpu.PROMPT])[place]) for place in pictures]
    engine.close()
    rows[-1]["bytes as alone"] = f"{sum(alike)} of {len(alike)}"
    return rows


# --- image to image -----------------------------------------------------------------------------


def img2img(folder: Path, size: int, steps: int, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """Rows of the table of whole pictures that begin with others, and the share of values in which
    ours and PyTorch's differ by more than 1 of 255."""
    noise = np.random.default_rng(0).uniform(-1, 1, (size // 8, size // 8, 3)).astype(np.float32)
    start = cpu.Start(noise.repeat(8, 0).repeat(8, 1), HALF)
    calls = {name: cpu.CONTESTANTS[name](folder, size, steps, start)[cpu.IMAGE]
             for name in CONTESTANTS}
    timings = side_by_side(calls, rounds)
    best = min(timing.median for name, timing in timings.items() if name != cpu.OURS)
    differing = np.abs(calls[cpu.OURS]().astype(int) - calls[cpu.PYTORCH]()) > 1
    return [{"": name, "seconds": timing.median, "times the better PyTorch": timing.median / best}
            for name, timing in timings.items()], float(np.mean(differing))


# --- larger -------------------------------------------------------------------------------------


def larger_peak(folder: Path, size: int, times: int, steps: int, at_once: bool) -> dict[str, Any]:
    """Seconds, and gigabytes that this process takes at the most, of drawing a picture again so
    many times as large, at once or by tiles, or for 1 of drawing it; it must do nothing else
    before."""
    side = times * size
    engine = Engine.open(folder, devices=1, size=(size, size),
                         max_pixels=(side if at_once else size) ** 2)
    engine.ready.wait()
    forget_peak()
    start = Input.of_pixels(np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8))
    picture, = Request.check({"prompts": [cpu.PROMPT], "steps": steps, "seed": 0},
                             engine.offer).pictures
    if times > 1:
        picture = dataclasses.replace(larger(picture, side, side), init_image=start.name)
    job = engine.submit(Request((picture,)), previews=False, inputs={start.name: start})
    seconds = seconds_of(lambda: list(job.events()))
    tiles = engine.offer.tiling(picture)
    engine.close()
    return {"": f"{side}x{side}", "tiles": len(tiles) if tiles else "",
            "seconds, compiling": seconds, "peak, GB": memory("VmHWM") / 1e9}


def apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What is measured, on the CPU."""
    cpu.on_cpu()
    return measure(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all of it, each table in a process that holds nothing of the others."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", choices=MODELS, default="sd14", help="(%(default)s)")
    flags.add_argument("--size", type=int, default=512, metavar="PIXELS",
                       help="sides of the pictures (%(default)s)")
    flags.add_argument("--steps", type=int, default=4, help="of whole pictures (%(default)s)")
    flags.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    flags.add_argument("--larger", type=int, nargs="*", default=[1, 2], metavar="TIMES",
                       help="as large as --size, drawn to see their memory (%(default)s)")
    args = flags.parse_args(arguments)
    if not 0 < args.rounds < cpu.LONG - 2:  # of a picture that begins with another, one row less
        flags.error(f"--rounds should be from 1 to {cpu.LONG - 3}, not {args.rounds}")
    cpu.on_cpu()
    folder = in_fresh_process(checkpoint_folder, args.model)
    case, of = (folder, args.size), f"{args.model}, {args.size}x{args.size}, float32"

    def tell(what: str, rows: Sequence[Mapping[str, Any]], note: str) -> None:
        report(f"Pictures in, {what}: {of}", rows, args.results, notes=[note])

    tell("single steps", in_fresh_process(apart, single_steps, *case, args.rounds),
         f"Medians of {args.rounds} rounds side by side, with guidance, one slot on one device. "
         "Operations are XLA's count of one evaluation. To enter is to encode texts and pictures, "
         "once.")
    tell("eight in one batch", in_fresh_process(apart, batch, *case, args.steps),
         "Seconds from request to pictures on one device, with texts, decoding and, in the first "
         "of its kind, compiling what encodes start pictures.")
    rows, differing = in_fresh_process(apart, img2img, *case, args.steps, args.rounds)
    tell("image to image against PyTorch", rows,
         f"Medians of {args.rounds} rounds side by side; {args.steps} steps at a strength of "
         f"{HALF}. The two pictures differ by more than 1 of 255 in {differing:.2%} of their "
         "values.")
    if args.larger:
        tell("drawn larger",
             [in_fresh_process(apart, larger_peak, *case, times, args.steps, at_once)
              for times in args.larger for at_once in (True, False)[:times]],
             "Each in a process that serves, from when it is ready; a picture begins with one of "
             f"{args.size}x{args.size}, but for one as large as that, which is drawn from noise.")


if __name__ == "__main__":
    main()
