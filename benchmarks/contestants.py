"""Our programs and diffusers' networks on one machine's devices, for `benchmarks.accelerators` and
`benchmarks.cpu_step`.

All in bfloat16, with random weights that are drawn on the device, in a process for each. A
contestant is made of a case and gives its figures; time does not depend on the values of weights.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.make_checkpoint import MODELS, moments, without_parameters
from benchmarks.report import Timing, side_by_side
from benchmarks.tpu_compile import GUIDANCE, as_trained, built
from sd_tpu import BUNDLED_MODEL
from sd_tpu.checkpoint.adapters import LowRank
from sd_tpu.checkpoint.weights import SCALE, Params, shapes
from sd_tpu.families import FamilyModel
from sd_tpu.families.flux2_klein import TOKENS
from sd_tpu.families.tokenizer import LENGTH
from sd_tpu.families.z_image import ZImage
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import Programs
from sd_tpu.runtime.slots import SlotInputs, is_guided, lanes_of
from sd_tpu.runtime.weights import merge
from sd_tpu.sampling.samplers import make_table
from sd_tpu.sampling.schedule import read_schedule
from sd_tpu.serving.engine import ACCELERATOR_GROUP

PROMPT = "a castle in the clouds, watercolour"
LONG = 200  # steps at least of the table whose single steps are timed
RANK = 16  # of the LoRA
ADAPTED = re.compile(r"(attn\d?|attention)\..*weight$")  # what it changes
KERNEL_SCALE = 2**-12  # of int8 kernels: about what rounding those of some thousand inputs gives


@dataclasses.dataclass(frozen=True)
class Workload:
    """Work that is measured.

    Attributes:
        model: a key of MODELS in `benchmarks.make_checkpoint`.
        side: of the pictures, in pixels.
        pictures: that are drawn at once.
        steps: of a whole picture.
        evaluations: of the network in each timed call.
        rounds: of which the median is taken.
    """

    model: str
    side: int
    pictures: int
    steps: int
    evaluations: int
    rounds: int

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """The model's configs, by folder."""
        return MODELS[self.model]


class Figures(NamedTuple):
    """Seconds of a part and of the first call, which compiles; bytes at the peak, if known."""

    seconds: float
    first: float
    memory: int | None


def evaluations_of(model: str, pictures: int) -> int:
    """Return how many rows of the network's batch a step of so many pictures takes."""
    return lanes_of(pictures, is_guided(built(model)[2]))


# --- ours ---------------------------------------------------------------------------------------


class _WithoutText:
    """A model whose slots are given all conditions, so that it needs no text encoder."""

    def __init__(self, model: FamilyModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def entry_shapes(self) -> Any:
        return self._model.cond_shapes

    @property
    def text_cond_shapes(self) -> Any:
        return self._model.cond_shapes

    def encode_added_cond(self, params: Params, inputs: Any) -> Any:
        return {}


def our_step(load: Workload) -> Figures:
    """Measure a step of all pictures: the network, guidance and the sampler's update."""
    mesh, (model, params, scale) = make_mesh(1), built(load.model)
    programs = Programs(
        _WithoutText(model),  # ty: ignore[invalid-argument-type]
        mesh,
        slots=load.pictures,
        height=load.side,
        width=load.side,
        group=min(load.pictures, ACCELERATOR_GROUP),
        guided=is_guided(scale),
    )
    configs = MODELS[as_trained(load.model)]
    steps = max(LONG, load.evaluations * (load.rounds + 2))  # more than are taken
    schedule = model.schedule_of(
        read_schedule(configs["scheduler"], even_sigmas=model.even_sigmas),
        load.side,
        load.side,
        steps,
    )
    table, inputs = make_table("euler", schedule, steps), jax.tree.map(_random, model.cond_shapes)
    entering = {
        slot: SlotInputs.of(table, inputs, guidance=scale, key=np.array([0, slot], np.uint32))
        for slot in range(load.pictures)
    }
    weights = {model.denoiser: on_device(params[model.denoiser], mesh)}
    slots = programs.encode({}, programs.empty(), entering)

    def advance() -> None:
        nonlocal slots
        slots = jax.block_until_ready(programs.advance(weights, slots, load.evaluations))

    return _figures(advance, load.rounds, load.evaluations)


def _random(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return a condition: random numbers, or the greatest length of a text."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return np.full(shape.shape, ZImage.buckets[0], shape.dtype)
    return np.random.default_rng(0).standard_normal(shape.shape, np.float32).astype(shape.dtype)


def our_decoder(load: Workload) -> Figures:
    """Measure the decoding of latents to uint8 pictures, which stay on the device."""
    mesh, (model, params, _) = make_mesh(1), built(load.model)
    programs = Programs(model, mesh, slots=load.pictures, height=load.side, width=load.side)
    weights = {model.autoencoder: on_device(params[model.autoencoder], mesh)}
    latents, wanted = programs.empty().latents, np.ones(load.pictures, bool)
    return _figures(
        lambda: jax.block_until_ready(programs.decode(weights, latents, wanted)), load.rounds
    )


def our_pictures(load: Workload) -> Figures:
    """Measure whole pictures on all devices, from prompts to uint8 on the host."""
    mesh = make_mesh()
    checkpoint, params = without_parameters(load.model, jnp.bfloat16)
    programs = Programs(
        checkpoint.model,
        mesh,
        slots=load.pictures,
        height=load.side,
        width=load.side,
        group=min(ACCELERATOR_GROUP, max(1, load.pictures // mesh.size)),
    )
    weights = on_device(params, mesh)
    wanted = np.arange(programs.slots) < load.pictures

    def draw() -> None:
        inputs = checkpoint.prompt_inputs(PROMPT)
        table = make_table("ddim", checkpoint.schedule, load.steps)
        entering = {
            slot: SlotInputs.of(
                table, inputs, guidance=GUIDANCE, key=np.array([0, slot], np.uint32)
            )
            for slot in range(load.pictures)
        }
        slots = programs.encode(weights, programs.empty(), entering)
        slots = programs.advance(weights, slots, load.steps)
        np.asarray(programs.decode(weights, slots.latents, wanted))

    return _figures(draw, load.rounds)


def our_lora(load: Workload) -> Figures:
    """Measure how long a LoRA takes to be merged, on all attention layers of the network."""
    mesh, (model, params, _) = make_mesh(1), built(load.model)
    part, draw = model.denoiser, np.random.default_rng(0)
    changed = {
        name: [(_low_rank(shape, draw), 1.0)]
        for name, shape in shapes(params[part]).items()
        if ADAPTED.search(name) and len(shape) == 2
    }
    led = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), params[part])
    weights = {part: on_device(led, mesh)}
    return _figures(lambda: jax.block_until_ready(merge(weights, {part: changed})), load.rounds)


def _low_rank(shape: tuple[int, ...], draw: np.random.Generator) -> LowRank:
    left, right = (
        draw.standard_normal(factor, np.float32) / 100
        for factor in ((shape[1], RANK), (RANK, shape[0]))
    )
    return LowRank(left, right, np.float32(1))


def on_device(params: Params, mesh: Mesh) -> Params:
    """Draw parameters of these shapes on each device of a mesh, one after the other."""
    key = jax.random.key(0)

    @partial(jax.jit, static_argnums=(1, 2), out_shardings=replicated(mesh))
    def draw(number: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        own = jax.random.fold_in(key, number)
        if dtype == jnp.int8:
            return jax.random.randint(own, shape, -127, 128, jnp.int8)
        return jax.random.normal(own, shape, dtype)

    def leaf(number: int, path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.int8:
            return draw(number, shape.shape, jnp.int8)
        name = path[-1].key
        mean, deviation = (KERNEL_SCALE, 0) if name == SCALE else moments(name, shape.shape)
        if not deviation:
            return jnp.full(shape.shape, mean, shape.dtype, device=replicated(mesh))
        return draw(number, shape.shape, shape.dtype) * jnp.asarray(deviation, shape.dtype)

    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    return tree.unflatten([leaf(number, *each) for number, each in enumerate(leaves)])


def _figures(call: Callable[[], Any], rounds: int, parts: int = 1) -> Figures:
    """Time a call of so many equal parts."""
    timing = _timing(call, rounds)
    stats = jax.devices()[0].memory_stats() or {}
    return Figures(timing.median / parts, timing.first, stats.get("peak_bytes_in_use"))


def _timing(call: Callable[[], Any], rounds: int) -> Timing:
    return side_by_side({"": call}, rounds)[""]


# --- diffusers on PyTorch -----------------------------------------------------------------------
# Imported inside, as a machine may be without them.


def their_step(load: Workload) -> Figures:
    """Measure a step of all pictures without a sampler: the compiled network, and guidance."""
    import torch

    count = evaluations_of(load.model, load.pictures)
    network, arguments = their_network(load, count, _device())
    network = _compiled(network)

    def evaluate() -> None:
        for _ in range(load.evaluations):
            out = network(**arguments, return_dict=False)[0]
            if count > load.pictures:
                negative, positive = out.chunk(2)
                torch.lerp(negative, positive, GUIDANCE)

    return _on_pytorch(evaluate, load.rounds, load.evaluations)


def their_decoder(load: Workload) -> Figures:
    """Measure the decoding of latents to uint8 pictures, which stay on the device."""
    import torch

    vae, latents = their_autoencoder(load, _device())
    decode = _compiled(vae.decode)

    def draw() -> None:
        images = decode(latents, return_dict=False)[0]
        (images / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)

    return _on_pytorch(draw, load.rounds)


def their_pictures(load: Workload) -> Figures:
    """Measure whole pictures, from prompts to uint8 on the host."""
    import torch
    import transformers
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    configs, device = load.configs, _device()
    unet, _ = their_network(load, 1, device)
    vae, _ = their_autoencoder(load, device)
    with torch.device(device):
        encoder = transformers.CLIPTextModel(
            transformers.CLIPTextConfig.from_dict(configs["text_encoder"])
        )
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder.to(torch.bfloat16),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler.from_config(configs["scheduler"], clip_sample=False),
        safety_checker=None,  # ty: ignore[invalid-argument-type]
        feature_extractor=None,  # ty: ignore[invalid-argument-type]
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.unet, pipe.vae.decode = _compiled(unet), _compiled(vae.decode)

    def draw() -> None:
        images = pipe(
            [PROMPT] * load.pictures,
            num_inference_steps=load.steps,
            guidance_scale=GUIDANCE,
            height=load.side,
            width=load.side,
            output_type="pt",
        ).images
        (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()

    return _on_pytorch(draw, load.rounds)


def their_network(load: Workload, count: int, device: str) -> tuple[Any, dict[str, Any]]:
    """Return diffusers' network of a model, and the arguments of one evaluation of `count` rows.

    Args:
        load: whose network.
        count: of rows.
        device: "cuda", "cpu", or "meta", where nothing is allocated.
    """
    import torch

    part = "unet" if "unet" in load.configs else "transformer"
    config = load.configs[part]
    network = _module(config, device)
    h = load.side // 2 ** (len(load.configs["vae"]["block_out_channels"]) - 1)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    t = torch.full((count,), 0.5, device=device, dtype=torch.bfloat16)
    match config["_class_name"]:
        case "UNet2DConditionModel":
            network.to(memory_format=torch.channels_last)
            arguments = dict(
                sample=normal(count, 4, h, h).to(memory_format=torch.channels_last),
                timestep=1000 * t,
                encoder_hidden_states=normal(count, LENGTH, config["cross_attention_dim"]),
            )
            if size := config.get("addition_time_embed_dim"):
                pooled = config["projection_class_embeddings_input_dim"] - 6 * size
                arguments["added_cond_kwargs"] = dict(
                    text_embeds=normal(count, pooled), time_ids=normal(count, 6)
                )
        case "Flux2Transformer2DModel":
            tokens = (h // 2) ** 2
            positions = partial(torch.zeros, device=device)
            arguments = dict(
                hidden_states=normal(count, tokens, config["in_channels"]),
                encoder_hidden_states=normal(count, TOKENS, config["joint_attention_dim"]),
                timestep=t,
                img_ids=positions(count, tokens, 4),
                txt_ids=positions(count, TOKENS, 4),
            )
        case _:
            arguments = dict(
                x=[normal(config["in_channels"], 1, h, h) for _ in range(count)],
                t=t,
                cap_feats=[normal(ZImage.buckets[0], config["cap_feat_dim"]) for _ in range(count)],
            )
    return network, arguments


def their_autoencoder(load: Workload, device: str) -> tuple[Any, Any]:
    """Return diffusers' autoencoder of a model, and latents of all pictures."""
    import torch

    config = load.configs["vae"]
    vae = _module(config, device).to(memory_format=torch.channels_last)
    h = load.side // 2 ** (len(config["block_out_channels"]) - 1)
    shape = load.pictures, config["latent_channels"], h, h
    return vae, torch.randn(shape, device=device, dtype=torch.bfloat16)


def operations(call: Callable[[], Any]) -> int:
    """Count the operations of PyTorch's products and convolutions, two to a multiplication with
    its addition."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        call()
    return counter.get_total_flops()


def _module(config: dict[str, Any], device: str) -> Any:
    """Return a network of diffusers in bfloat16, as it is initialized there."""
    import diffusers
    import torch

    diffusers.logging.set_verbosity_error()  # of what a config has beside
    with torch.device(device):
        network = getattr(diffusers, config["_class_name"]).from_config(config)
    return network.to(torch.bfloat16).eval()


def _compiled(function: Any) -> Any:
    """Compile for a GPU; a CPU only shows that it works."""
    import torch

    return torch.compile(function, mode="reduce-overhead") if pytorch_sees_gpu() else function


def pytorch_sees_gpu() -> bool:
    """Whether PyTorch has a GPU to compute on; raises ImportError without PyTorch."""
    import torch

    return torch.cuda.is_available()


def _device() -> str:
    return "cuda" if pytorch_sees_gpu() else "cpu"


def _on_pytorch(call: Callable[[], Any], rounds: int, parts: int = 1) -> Figures:
    """Time a call of so many equal parts."""
    import torch

    on_gpu = pytorch_sees_gpu()

    def whole() -> None:
        with torch.inference_mode():
            call()
        if on_gpu:
            torch.cuda.synchronize()

    timing = _timing(whole, rounds)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Figures(timing.median / parts, timing.first, peak)
