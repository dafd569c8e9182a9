"""sd_tpu against diffusers on PyTorch and OpenVINO, on the CPU: `python -m benchmarks.cpu`.

The same weights, the same latents and all cores for each contestant, in one process after another,
as memory does not hold all of them; peak memory is that of a process that loads the model and makes
one picture. OpenVINO (`pip install openvino`) runs diffusers' UNet and decoder, converted; the text
encoder beside it is PyTorch's. Contestants that are not installed are left out.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np

from benchmarks.make_checkpoint import MODELS, checkpoint_folder
from benchmarks.report import (
    Timing,
    add_rounds,
    forget_peak,
    in_fresh_process,
    memory,
    parser,
    report,
    seconds_of,
    side_by_side,
)
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import SlotInputs, StartImage, gaussian, is_guided
from sd_tpu.sampling.samplers import make_table, steps_taken

PROMPT = "a castle in the clouds, watercolour"
GUIDANCE = 7.5
KEY = np.zeros(2, np.uint32)  # of all noise
LONG = 100  # steps of the picture whose single steps are timed: more than there are rounds
TEXT, STEP, DECODE, IMAGE = PARTS = ("text", "UNet step", "autoencoder, decoding", "whole image")
Calls = dict[str, Callable[[], Any]]  # by part; that of the whole image returns it as uint8


class Start(NamedTuple):
    """A picture to begin with, float32 [H, W, 3] in [-1, 1], how much of it becomes noise, and the
    mask [H, W] of what is drawn anew."""

    image: np.ndarray
    strength: float
    mask: np.ndarray | None = None


class OneSlot:
    """Our programs with one slot on one device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        params: Params,
        programs: Programs,
        encoders: Sequence[ImageEncoder] = (),
    ):
        """Begin with no picture; the encoders are those of start pictures."""
        self._checkpoint, self._params, self._programs = checkpoint, params, programs
        self._encoders, self._slots = encoders, programs.empty()

    def enter(
        self, steps: int, guidance: float = GUIDANCE, start: Start | None = None, **values: Any
    ) -> None:
        """Put a picture of so many steps with DDIM into the slot.

        Args:
            steps: of the whole table.
            guidance: the scale.
            start: its start picture, which is encoded each time.
            values: of `SlotInputs.of`; "added" are inputs beside the texts.
        """
        programs, begin = self._programs, 0
        height, width = (side * programs.model.downscale for side in programs.latent_shape[:2])
        inputs = self._checkpoint.prompt_inputs(
            PROMPT, height=height, width=width, guidance=guidance
        )
        if start:
            begin = steps - steps_taken(steps, start.strength)
            values["start_image"] = StartImage.of(
                programs.model, programs.latent_shape, start.image, start.mask, start.strength
            )
        else:
            values["latents"] = first_latents(programs.latent_shape)
        slot_inputs = SlotInputs.of(
            make_table("ddim", self._checkpoint.schedule, steps, begin=begin),
            {**inputs, **values.pop("added", {})},
            key=KEY,
            guidance=programs.model.cfg_scale(guidance),
            **values,
        )
        entering = {0: slot_inputs}
        for encoder in self._encoders:
            entering = encoder.encode(self._params, entering, programs.replica)
        self._slots = jax.block_until_ready(programs.encode(self._params, self._slots, entering))

    def step(self, count: int = 1) -> None:
        """Advance the slot by `count` steps."""
        self._slots = jax.block_until_ready(
            self._programs.advance(self._params, self._slots, count)
        )

    def pixels(self) -> np.ndarray:
        """Decode the slot as it is now, uint8 [H, W, 3]."""
        return np.asarray(
            self._programs.decode(self._params, self._slots.latents, np.ones(1, bool))
        )[0]


def ours(
    folder: Path,
    size: int,
    steps: int,
    guidance: float = GUIDANCE,
    start: Start | None = None,
    control: Path | None = None,
    *,
    dtype: str,
) -> Calls:
    """Return the calls of our three programs, with one slot on one device, in their order.

    Args:
        folder: the checkpoint.
        size: sides of the picture in pixels.
        steps: of the whole image, with DDIM on all sides.
        guidance: the scale; up to 1 it is none.
        start: the start picture of the whole image.
        control: the folder of a ControlNet, which follows `control_picture`.
        dtype: of the parameters and the arithmetic.
    """
    mesh = make_mesh(1)
    checkpoint, params = Checkpoint.from_pretrained(folder, dtype=dtype, sharding=replicated(mesh))
    model, sizes, follows = checkpoint.model, dict(height=size, width=size), {}
    if control:
        network = ControlNet.open(control, dtype=dtype)
        model = network.joined(model, **sizes)
        params = {**params, network.part: network.load(replicated(mesh))}
        follows = dict(added={"control": control_picture(size)}, control_scale=1.0)
    guided = bool(is_guided(model.cfg_scale(guidance)))
    slot = OneSlot(
        checkpoint,
        params,
        Programs(model, mesh, slots=1, guided=guided, **sizes),
        [
            ImageEncoder(
                checkpoint.model.encode,
                mesh,
                checkpoint.parameters.shapes,
                network_dtype=checkpoint.model.dtype,
                **sizes,
            )
        ]
        if start
        else (),
    )

    def image() -> np.ndarray:
        slot.enter(steps, guidance, start, **follows)
        slot.step(steps)
        return slot.pixels()

    return {
        TEXT: partial(slot.enter, LONG, guidance, **follows),
        STEP: slot.step,
        DECODE: slot.pixels,
        IMAGE: image,
    }


class PyTorch:
    """The calls of `ours`, by diffusers' pipeline on PyTorch."""

    def __init__(
        self,
        folder: Path,
        size: int,
        steps: int,
        guidance: float = GUIDANCE,
        start: Start | None = None,
        control: Path | None = None,
        *,
        layout: str,
        dtype: str = "float32",
        prepare: Callable[[Any, int, int], None] = lambda pipe, size, count: None,
    ):
        """Load the pipeline.

        Args:
            folder: the checkpoint.
            size: sides of the picture in pixels.
            steps: of the whole image, with DDIM.
            guidance: the scale; up to 1 it is none.
            start: the start picture of the whole image.
            control: the folder of a ControlNet, which follows `control_picture`.
            layout: memory format of the networks' weights.
            dtype: of the pipeline's weights and arithmetic.
            prepare: replaces the pipeline's networks by something faster, for a size in pixels and
                a number of evaluations at once.
        """
        # Here, because the process that measures our own memory must not hold PyTorch.
        import torch
        from diffusers import DDIMScheduler, DiffusionPipeline
        from diffusers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count())
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
        layout = getattr(torch, layout)
        pipe.unet.to(memory_format=layout)
        pipe.vae.to(memory_format=layout)
        told = pipe.unet.config.time_cond_proj_dim
        self._guided = guidance > 1 and not told
        self._cond = told and pipe.get_guidance_scale_embedding(
            torch.tensor([guidance - 1]), embedding_dim=told, dtype=pipe.dtype
        )
        prepare(pipe, size, 1 + self._guided)
        self._pipe, self._size, self._steps, self._guidance = pipe, size, steps, guidance
        self._shape = (*[size // pipe.vae_scale_factor] * 2, pipe.unet.config.in_channels)
        first = torch.tensor(_channels_first(first_latents(self._shape)))
        self._first = self._latents = first.to(pipe.dtype)
        self._embeddings = self._added = None
        pipe.scheduler.set_timesteps(LONG)
        self._timesteps = iter(pipe.scheduler.timesteps)
        self._whole, self._values = self._beginning(start, control, layout)
        self._starts = start is not None

    def calls(self) -> Calls:
        """Return the calls by part."""
        import torch

        own = {TEXT: self._text, STEP: self._step, DECODE: self._decode, IMAGE: self._image}
        return {part: torch.inference_mode()(call) for part, call in own.items()}

    def _beginning(
        self, start: Start | None, control: Path | None, layout: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the pipeline that draws whole pictures, and its arguments beside the settings."""
        import torch
        from diffusers import (
            AutoPipelineForImage2Image,
            AutoPipelineForInpainting,
            ControlNetModel,
            StableDiffusionControlNetPipeline,
        )

        pipe, sides = self._pipe, dict(height=self._size, width=self._size)
        whole, values = pipe, dict(latents=self._first, **sides)
        if control:
            network = ControlNetModel.from_pretrained(control, dtype=torch.float32)
            whole = StableDiffusionControlNetPipeline(
                **pipe.components, controlnet=network.to(memory_format=layout)
            )
            values |= dict(image=control_picture(self._size)[None] / np.float32(255))
        if start:
            values = dict(image=start.image[None] / 2 + 0.5, strength=start.strength)
            kind = AutoPipelineForImage2Image
            if start.mask is not None:
                kind = AutoPipelineForInpainting
                values |= dict(mask_image=start.mask[None], **sides)
            whole = kind.from_pipe(pipe)
        whole.set_progress_bar_config(disable=True)
        return whole, values

    def _text(self) -> None:
        import torch
        from diffusers import StableDiffusionPipeline

        prompt, negative, *pooled = self._pipe.encode_prompt(
            PROMPT, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=self._guided
        )

        def both(first: Any, second: Any) -> Any:
            return torch.cat([first, second]) if self._guided else second

        self._embeddings = both(negative, prompt)
        if not isinstance(self._pipe, StableDiffusionPipeline):
            size = self._size
            sizes = torch.tensor([[size, size, 0, 0, size, size]] * (1 + self._guided))
            self._added = {"text_embeds": both(*pooled[::-1]), "time_ids": sizes}

    def _step(self) -> None:
        import torch

        timestep = next(self._timesteps)
        out = self._pipe.unet(
            torch.cat([self._latents] * (1 + self._guided)),
            timestep,
            self._embeddings,
            timestep_cond=self._cond,
            added_cond_kwargs=self._added,
        ).sample
        if self._guided:
            negative, positive = out.chunk(2)
            out = negative + self._guidance * (positive - negative)
        self._latents = self._pipe.scheduler.step(out, timestep, self._latents).prev_sample

    def _decode(self) -> None:
        import torch

        vae = self._pipe.vae
        image = vae.decode(self._latents / vae.config.scaling_factor).sample
        (image.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).numpy()

    def _image(self) -> np.ndarray:
        with self._as_ours() if self._starts else nullcontext():
            found = self._whole(
                PROMPT,
                num_inference_steps=self._steps,
                guidance_scale=self._guidance,
                output_type="np",
                **self._values,
            )
        return (found.images[0] * 255).round().astype(np.uint8)

    def _as_ours(self) -> AbstractContextManager:
        """Patch the pipeline to use our noise, and the encoder's likeliest latents."""
        import torch

        drawn = np.asarray(gaussian(jax.numpy.asarray(KEY), self._shape))
        noise = torch.tensor(_channels_first(drawn))
        return patch.multiple(
            type(self._whole).__module__,
            randn_tensor=lambda *_, **__: noise,
            retrieve_latents=lambda found, **_: found.latent_dist.mode(),
        )


def pytorch(*arguments: Any, **options: Any) -> Calls:
    """Return the calls of `PyTorch`, which takes all these arguments."""
    return PyTorch(*arguments, **options).calls()


def compile_networks(pipe, size: int, count: int) -> None:
    """Compile the networks by `torch.compile`, when they are first called."""
    import torch

    pipe.unet = torch.compile(pipe.unet)
    pipe.vae.decode = torch.compile(pipe.vae.decode)


def convert_networks(pipe, size: int, count: int, precision: str) -> None:
    """Let OpenVINO compute UNet and decoder, in "f32" or "bf16"."""
    import openvino
    import torch
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

    class Network(torch.nn.Module):
        def __init__(self, function: Callable[..., torch.Tensor]):
            super().__init__()
            self.networks, self.forward = torch.nn.ModuleList([pipe.unet, pipe.vae]), function

    def converted(function: Callable[..., torch.Tensor], *examples: torch.Tensor) -> Callable:
        with torch.no_grad():
            model = openvino.convert_model(
                Network(function),
                example_input=examples,
                input=[example.shape for example in examples],
            )
        compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
        return lambda *given: torch.from_numpy(compiled([x.numpy() for x in given])[0])

    side, config = size // pipe.vae_scale_factor, pipe.unet.config
    encoders = [pipe.text_encoder, getattr(pipe, "text_encoder_2", None)]
    tokens, told = pipe.tokenizer.model_max_length, {}
    if encoders[1] is not None:
        told = {
            "text_embeds": torch.zeros(count, encoders[1].config.projection_dim),
            "time_ids": torch.zeros(count, 6),
        }
    if config.time_cond_proj_dim:
        told["timestep_cond"] = torch.zeros(count, config.time_cond_proj_dim)
    evaluate, decode = pipe.unet.forward, pipe.vae.decode

    def evaluated(x, t, text, *given: torch.Tensor) -> torch.Tensor:
        values = dict(zip(told, given, strict=True))
        return evaluate(
            x,
            t,
            text,
            timestep_cond=values.pop("timestep_cond", None),
            added_cond_kwargs=values,
            return_dict=False,
        )[0]

    unet = converted(
        evaluated,
        torch.zeros(count, config.in_channels, side, side),
        torch.zeros(1),
        torch.zeros(count, tokens, config.cross_attention_dim),
        *told.values(),
    )
    decoder = converted(
        lambda z: decode(z, return_dict=False)[0],
        torch.zeros(1, pipe.vae.config.latent_channels, side, side),
    )

    def unet_forward(
        x,
        t,
        encoder_hidden_states,
        added_cond_kwargs=None,
        timestep_cond=None,
        return_dict=True,
        **_,
    ):
        values = {**(added_cond_kwargs or {}), "timestep_cond": timestep_cond}
        sample = unet(
            x, t.reshape(1).float(), encoder_hidden_states, *(values[name].float() for name in told)
        )
        return UNet2DConditionOutput(sample) if return_dict else (sample,)

    def vae_decode(z, return_dict=True, **_):
        sample = decoder(z)
        return DecoderOutput(sample) if return_dict else (sample,)

    pipe.unet.forward, pipe.vae.decode = unet_forward, vae_decode


def control_picture(size: int) -> np.ndarray:
    """Return the control picture of all contestants, uint8 [size, size, 3]."""
    return np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)


def _channels_first(latents: np.ndarray) -> np.ndarray:
    """[1, C, h, w] of (h, w, C)."""
    return latents.transpose(2, 0, 1)[None]


def first_latents(shape: tuple[int, int, int]) -> np.ndarray:
    """Noise (h, w, C), the same for everybody."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


OURS, PYTORCH, OPENVINO = "sd_tpu", "PyTorch", "OpenVINO"
CHANNELS_LAST, COMPILED = f"{PYTORCH}, channels last", f"{PYTORCH}, compiled"
IN_BFLOAT16 = "{}, bfloat16"
DTYPES = "float32", "bfloat16"
CONTESTANTS: dict[str, Callable[..., Calls]] = {
    OURS: partial(ours, dtype="float32"),
    PYTORCH: partial(pytorch, layout="contiguous_format"),
    CHANNELS_LAST: partial(pytorch, layout="channels_last"),
    COMPILED: partial(pytorch, layout="channels_last", prepare=compile_networks),
    OPENVINO: partial(
        pytorch, layout="contiguous_format", prepare=partial(convert_networks, precision="f32")
    ),
    IN_BFLOAT16.format(OURS): partial(ours, dtype="bfloat16"),
    IN_BFLOAT16.format(PYTORCH): partial(pytorch, layout="channels_last", dtype="bfloat16"),
    IN_BFLOAT16.format(OPENVINO): partial(
        pytorch, layout="contiguous_format", prepare=partial(convert_networks, precision="bf16")
    ),
}
Timings = dict[str, Timing]  # by part


def dtype_of(contestant: str) -> str:
    """Return the dtype of a contestant by its name."""
    return DTYPES[contestant.endswith(DTYPES[1])]


def left_out() -> dict[str, str]:
    """Return the contestants that cannot take part here, and why."""
    missing = {}
    if find_spec("openvino") is None:
        why = "it is not installed (`pip install openvino`)"
        missing |= {OPENVINO: why, IN_BFLOAT16.format(OPENVINO): why}
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        missing[COMPILED] = "`torch.compile` needs a C++ compiler"
    return missing


def alone(
    contestant: str, folder: Path, size: int, steps: int, guidance: float, rounds: int
) -> tuple[dict[str, float], np.ndarray, Timings]:
    """Measure one contestant in this process.

    Returns peak gigabytes while loading and while drawing, the picture, and each part's seconds.
    """
    on_cpu()
    calls = CONTESTANTS[contestant](folder, size, steps, guidance)
    loading = memory("VmHWM")
    forget_peak()
    pictures = []
    first = seconds_of(lambda: pictures.append(calls[IMAGE]()))
    peaks = {"loading, GB": loading / 1e9, "a picture, GB": memory("VmHWM") / 1e9}
    timings = {part: side_by_side({part: calls[part]}, rounds)[part] for part in PARTS}
    timings[IMAGE] = timings[IMAGE]._replace(first=first)  # for which all was compiled
    return peaks, pictures[0], timings


def on_cpu() -> None:
    """Put JAX on the CPU without its compilation cache, which would hide the time of compiling."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure times and peak memory."""
    flags = parser("cpu", __doc__.splitlines()[0])
    flags.add_argument("--model", choices=MODELS, default="sd14", help="(%(default)s)")
    flags.add_argument(
        "--size", type=int, default=512, metavar="PIXELS", help="sides of the picture (%(default)s)"
    )
    flags.add_argument("--steps", type=int, default=4, help="of the whole image (%(default)s)")
    flags.add_argument(
        "--guidance",
        type=float,
        default=GUIDANCE,
        metavar="SCALE",
        help="up to 1 it is none (%(default)s)",
    )
    flags.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="of the contestants that take part (all)",
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)
    if not 0 < args.rounds < LONG - 1:
        flags.error(f"--rounds should be from 1 to {LONG - 2}, not {args.rounds}")
    on_cpu()
    # Made elsewhere, where need be: large models' contestants need the memory that this takes.
    folder = in_fresh_process(checkpoint_folder, args.model)
    picture = f"{args.model}, {args.size}x{args.size}"
    missing = {name: why for name, why in left_out().items() if dtype_of(name) in args.dtypes}
    found = {
        name: in_fresh_process(
            alone, name, folder, args.size, args.steps, args.guidance, args.rounds
        )
        for name in CONTESTANTS
        if name not in missing and dtype_of(name) in args.dtypes
    }
    report(
        f"CPU, peak memory: {picture}",
        [{"": name, **peaks} for name, (peaks, _, _) in found.items()],
        args,
        notes=[
            "Of a process that loads the float16 checkpoint and makes one picture, with "
            "everything it has imported and compiled. PyTorch loads without `accelerate`, which "
            "takes more memory than with it."
        ],
    )
    (mine, drawn), (other, theirs) = [
        next((name, image) for name, (_, image, _) in found.items() if name.startswith(side))
        for side in (OURS, PYTORCH)
    ]
    differing = np.mean(np.abs(drawn.astype(int) - theirs) > 1)
    report(
        f"CPU, times: {picture}",
        _rows({name: times for name, (*_, times) in found.items()}),
        args,
        notes=[
            f"Seconds, medians of {args.rounds} rounds in one process after another; float32 "
            f"unless it says otherwise. The whole image has {args.steps} steps at a "
            f"guidance of {args.guidance:g}. PyTorch's bfloat16 is channels last. The pictures of "
            f"{mine} and of {other} differ by more than 1 of 255 in {differing:.2%} of their "
            "values.",
            *(f"{name} is left out: {why}." for name, why in missing.items()),
        ],
    )


def _rows(timings: Mapping[str, Timings]) -> list[dict[str, Any]]:
    """Return each part's times by contestant, with ours over the best other's of the same dtype."""
    rows = []
    for part in PARTS:
        medians = {name: timing[part].median for name, timing in timings.items()}
        row = {"seconds": part, **medians}
        for dtype in dict.fromkeys(map(dtype_of, medians)):
            mine, *others = [median for name, median in medians.items() if dtype_of(name) == dtype]
            row[f"ours / best other, {dtype}"] = mine / min(others) if others else None
        first = next(iter(timings))
        compiling = max(0.0, timings[first][part].first - medians[first])
        rows.append({**row, "ours, compiling": compiling if part == IMAGE else None})
    return rows


if __name__ == "__main__":
    main()
