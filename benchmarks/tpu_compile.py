"""The programs as the TPU compiler sees them: `python -m benchmarks.tpu_compile`.

No TPU is needed: libtpu holds the compiler and runs it on any x86 Linux machine (`pip install
libtpu`). Weights are shapes only. The results are bounds and the compiler's own figures, not
measured times:

- "HBM" is what the program moves to and from main memory, counted by benchmarks.hlo; XLA's own
  "bytes accessed" also counts what stays on the core.
- "roofline" is max(flops / peak, HBM / bandwidth): no run can be faster.
- HBM and cycles of advance are those of an exact step. XLA's own counts (GFLOP, accessed, estimate)
  have what is done once for many steps as well.
- "cycles" adds up what the compiler expects of each operation, without Pallas kernels, for which it
  expects nothing; "kernels" is their arithmetic by their own estimates.
- "old Flax" is what the guide ran, of diffusers 0.35.2: one guided evaluation of its UNet, without
  the scheduler, and its decoder. It has no kernels, so its attention is among its cycles.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from benchmarks import hlo, old_flax
from benchmarks.make_checkpoint import MODELS
from benchmarks.records import Record
from benchmarks.report import in_fresh_process, parser, report
from sd_tpu.checkpoint import division
from sd_tpu.checkpoint.config import WEIGHTS
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families import FamilyModel, find_family
from sd_tpu.runtime.mesh import mesh_of, replicas, replicated, split
from sd_tpu.runtime.programs import Programs, placed_shapes
from sd_tpu.runtime.slots import empty_slots, is_guided
from sd_tpu.sampling.schedule import read_schedule
from sd_tpu.training.encoding import Encoded
from sd_tpu.training.factors import Adaptation
from sd_tpu.training.options import Options
from sd_tpu.training.step import BATCHES, Pool, State, first_state, make_step

PUBLISHED = (
    "Published: 7.07 s for eight pictures of SD 1.4 on v2-8, 50 steps (the guide's old "
    "Flax pipeline); 2.33 s for four of SDXL on v5e-4, 20 steps (the sdxl_jax blog), of "
    "which each device makes one, as it does of eight here."
)
# Million cycles of an evaluation of MaxDiffusion's transformers (snapshot 7cfb8801, 2026-08) at
# 1024x1024 by the same compiler (libtpu 0.0.51), kernels not counted; and seconds a picture, or for
# eight on as many chips, that its authors published.
MAXDIFFUSION = {
    ("klein", "v5e-8"): 468.1,
    ("klein", "v6e-8"): 244.4,
    ("zimage", "v5e-8"): 659.6,
    ("zimage", "v6e-8"): 383.7,
}
MAXDIFFUSION_SECONDS = {("klein", "v6e-8"): 3.65 / 4, ("zimage", "v6e-8"): 2.29}
DISTILLED_STEPS = {"klein": 4, "schnell": 4, "zimage": 9}
TITLE = "TPU compiler: one device"
ROOFLINES = "TPU rooflines: the guide's eight pictures"
PICTURES = 8  # of the guide
PROGRAMS = ("encode", "advance", "decode")
TEACH = "teach"  # a step of training, of a picture on each device
STEPS = (50, 20)


@dataclass(frozen=True)
class Chip:
    """A JAX device of a kind of TPU: how to compile for it, and its limits."""

    topology: str
    accelerator: str
    flops: float  # a second, bf16
    bandwidth: float  # bytes a second
    memory: float  # bytes
    units: int  # matrix units
    config: str = "default"  # how its cores make devices
    estimates: bool = False  # XLA says how long a program takes; what it says elsewhere is no time
    side: int = 128  # of a matrix unit

    @property
    def clock(self) -> float:
        """Cycles a second: the peak over what matrix units do in one."""
        return self.flops / (self.units * self.side**2 * 2)


# Google Cloud's page of each version (cloud.google.com/tpu/docs/v2 and so on). Those of v2 and v3
# are for a chip, here halved: there a device is one of its two cores; on v4 both make one device.
# v6e is given four matrix units: with two, operations would take less than at the chip's peak.
CHIPS = {
    "v2-8": Chip("v2:2x2", "v2-8", 46e12 / 2, 700e9 / 2, 16 * 2**30 / 2, 1, estimates=True),
    "v3-8": Chip("v3:2x2", "v3-8", 123e12 / 2, 900e9 / 2, 32 * 2**30 / 2, 2, estimates=True),
    "v4-8": Chip("v4:2x2x1", "v4-8", 275e12, 1228e9, 32 * 2**30, 8, "megacore"),
    "v5e-8": Chip("v5e:2x4", "v5litepod-8", 197e12, 819e9, 16 * 2**30, 4),
    "v6e-8": Chip("v6e:2x4", "v6e-8", 918e12, 1640e9, 32 * 2**30, 4, side=256),
}


# The side of each model's pictures in pixels; both sizes of SD 2.1 have the same networks.
SIDES = {
    "sd14": 512,
    "sd21": 512,
    "sdxl": 1024,
    "sd35m": 1024,
    "sd35m-t5": 1024,
    "zimage": 1024,
    "klein": 1024,
    "klein-short": 1024,
    "zimage-short": 1024,
    "zimage-short-int8": 1024,
    "zimage-short-w8a8": 1024,
    "sd35m-short": 1024,
    "schnell-short": 1024,
    "anima": 1024,
    "krea2": 1024,
    "schnell": 1024,
    "schnell-int8": 1024,
    "zimage-int8": 1024,
    "klein-int8": 1024,
    "krea2-int8": 1024,
    "zimage-w8a8": 1024,
    "klein-w8a8": 1024,
    "tiny": 32,
    "tinyxl": 32,
    "tiny3": 32,
    "tinyzimage": 32,
    "tinyzimage-int8": 32,
    "tinyzimage-w8a8": 32,
    "tinyklein": 32,
    "tinyklein-int8": 32,
    "tinyklein-w8a8": 32,
}


# Models with few of their blocks, at full width: a step is compiled in a minute.
SHORT = "-short"
FEW_BLOCKS = {
    "klein": dict(num_layers=1, num_single_layers=2),
    "sd35m": dict(num_layers=3, dual_attention_layers=[0, 1]),
    "schnell": dict(num_layers=1, num_single_layers=2),
    "zimage": dict(n_layers=2, n_refiner_layers=1),
}
GUIDANCE = 7.5  # of models that say nothing


@dataclass(frozen=True)
class Compiled:
    """One program on one device."""

    program: str
    fits: str  # "yes", or what the compiler says
    flops: float = 0
    accessed: float = 0  # bytes, XLA's count
    hbm: float = 0  # bytes
    temporary: float = 0  # bytes
    resident: float = 0  # bytes of arguments, among them the weights
    cycles: float = 0
    kernel_flops: float = 0  # which the cycles leave out
    estimate: float = 0  # seconds
    replicas: int = 0
    operations: tuple[dict, ...] = ()


def main(arguments: list[str] | None = None) -> None:
    """Compile the cases asked for and report their tables."""
    flags = parser("tpu_compile", __doc__.splitlines()[0])
    flags.add_argument("--models", nargs="+", choices=SIDES, default=["sd14", "sd21", "sdxl"])
    flags.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    flags.add_argument(
        "--images",
        nargs="+",
        type=int,
        default=[1, 4],
        metavar="N",
        help="pictures a device makes at a time (%(default)s)",
    )
    flags.add_argument(
        "--tensor-parallel-size",
        type=int,
        choices=division.CHIPS,
        default=1,
        metavar="N",
        help="devices over which transformers and language models are divided (%(default)s)",
    )
    flags.add_argument(
        "--adapter-rank",
        type=int,
        default=0,
        metavar="N",
        help="of low-rank factors that each picture brings, for models with a transformer "
        "(%(default)s, none)",
    )
    flags.add_argument(
        "--programs",
        nargs="+",
        choices=(*PROGRAMS, TEACH),
        default=list(PROGRAMS),
        help=f"(%(default)s); {TEACH} is a step of training at the options' defaults",
    )
    flags.add_argument(
        "--by-operation",
        type=int,
        default=0,
        metavar="N",
        help="also the N operations of each program that take the most cycles",
    )
    flags.add_argument(
        "--old-flax",
        type=Path,
        metavar="FOLDER",
        help=f"also the old Flax networks: pip install --no-deps --target FOLDER "
        f"{old_flax.PACKAGE}",
    )
    options = flags.parse_args(arguments)
    if options.old_flax:
        try:
            old_flax.check(options.old_flax)
        except FileNotFoundError as error:
            sys.exit(str(error))
    if find_spec("libtpu") is None:
        sys.exit("The TPU compiler is missing: pip install libtpu")
    jax.config.update("jax_platforms", "cpu")  # there is no TPU to look for
    run(options)


def run(options: argparse.Namespace) -> None:
    """Report the tables of the cases in `options`."""
    rows, predictions = [], []
    for model, chip, images in product(options.models, options.chips, options.images):
        shared = options.tensor_parallel_size
        named = f"{model}, divided over {shared}" if shared > 1 else model
        rank = options.adapter_rank
        named = f"{named}, adapters of rank {rank}" if rank else named
        case = {"model": named, "chip": chip, "images a device": images}
        compiled = compile_apart(model, chip, images, options.programs, shared, None, rank)
        rows += _rows(case, compiled, options)
        if {one.program for one in compiled if one.fits == "yes"} == set(PROGRAMS):
            predictions.append({**case, **_prediction(CHIPS[chip], images, compiled)})
        if options.old_flax:
            old = compile_apart(model, chip, images, old_flax.PROGRAMS, 1, options.old_flax)
            rows += _rows({**case, "model": f"{model}, old Flax"}, old, options)
    report(TITLE, rows, options, notes=[__doc__.split("\n\n", 2)[2].strip()])
    if predictions:
        report(ROOFLINES, predictions, options, notes=[PUBLISHED])


def rows(records: Sequence[Record]) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """Return the newest row of each model, chip, number of images a device and program."""
    return {
        (row["model"], row["chip"], row["images a device"], row["program"]): row
        for record in records
        if record.title == TITLE
        for row in record.by_column()
    }


def _rows(
    case: dict[str, Any], compiled: list[Compiled], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a case's rows; print its operations as well if they are asked for."""
    for one in compiled:
        if options.by_operation and one.operations:
            report(
                f"{one.program} of {case['model']} on {case['chip']}, "
                f"{case['images a device']} a device, by operation",
                one.operations[: options.by_operation],
                options,
            )
    return [{**case, **_row(CHIPS[case["chip"]], one)} for one in compiled]


def compile_apart(
    model: str,
    chip: str,
    images: int,
    programs: Sequence[str],
    tensor_parallel: int = 1,
    old: Path | None = None,
    rank: int = 0,
) -> list[Compiled]:
    """Run `compile_case` in a process of its own.

    libtpu takes one kind of TPU from the environment.
    """
    return in_fresh_process(compile_case, model, chip, images, programs, tensor_parallel, old, rank)


def compile_case(
    model: str,
    chip: str,
    images: int,
    programs: Sequence[str],
    tensor_parallel: int = 1,
    old: Path | None = None,
    rank: int = 0,
) -> list[Compiled]:
    """Compile programs of a model with `images` slots on each replica of a chip's topology.

    Each `tensor_parallel` devices are one. Slots bring factors of `rank`, unless it is 0. With
    `old`, the folder of a diffusers that has Flax, its programs instead of ours.
    """
    os.environ.update(
        TPU_ACCELERATOR_TYPE=CHIPS[chip].accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    topology = topologies.get_topology_desc(
        CHIPS[chip].topology, "tpu", chip_config_name=CHIPS[chip].config
    )
    mesh = mesh_of(topology.devices, tensor_parallel)
    if old is None:
        lowered = _lowered(model, mesh, images, rank)
    else:
        lowered = old_flax.lowered(old, model, mesh, images, SIDES[model])
    return [_compile(program, lowered[program], replicas(mesh)) for program in programs]


def built(model: str, dtype: Any = jnp.bfloat16) -> tuple[FamilyModel, Params, float]:
    """Return a model of SIDES, the shapes of its parameters, and the scale of guidance that its
    pictures mostly have."""
    configs = _configs(model)
    family = find_family(configs["model_index"])
    network, params = family.build(configs, dtype)
    if (weights := model.rpartition("-")[2]) in WEIGHTS:
        network, params = network.in_int8(params, weights)
    scale = network.cfg_scale(family.defaults(configs).get("guidance", GUIDANCE))
    return network, params, scale


def as_trained(model: str) -> str:
    """Return the name of a model of SIDES without what its weights are read as."""
    name, _, weights = model.rpartition("-")
    return name if weights in WEIGHTS else model


def _configs(model: str) -> dict[str, dict[str, Any]]:
    trained = as_trained(model)
    configs = MODELS[name := trained.removesuffix(SHORT)]
    if name == trained:
        return configs
    return {**configs, "transformer": {**configs["transformer"], **FEW_BLOCKS[name]}}


def training_step(
    model: str, mesh: Mesh, side: int, dtype: Any = jnp.bfloat16
) -> tuple[jax.stages.Wrapped, State, Any, Params]:
    """Return a step of training of one picture on each replica, by the options' defaults.

    With it come the shapes of its first state, a batch of zeros, and the shapes of the parameters
    that it takes.
    """
    network, params, _ = built(model, dtype)
    options = Options(name="", batch=replicas(mesh))
    taken = {network.denoiser: params[network.denoiser]}
    adaptation = Adaptation.of(network, taken, options.rank, pixels=side * side)
    texts = jax.eval_shape(network.encode_prompt, params, network.input_shapes)
    text = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), texts)
    picture = Encoded(np.zeros(network.latent_shape(side, side), np.float32), text, text)
    step = make_step(
        adaptation,
        read_schedule(_configs(model)["scheduler"], even_sigmas=network.even_sigmas),
        mesh,
        optimizer=options.optimizer,
        accumulate=options.accumulate,
    )
    state = jax.eval_shape(partial(first_state, adaptation, options))
    return step, state, Pool([picture], options).batch(0), taken


def _lowered_training(model: str, mesh: Mesh) -> jax.stages.Lowered:
    step, state, batch, params = training_step(model, mesh, SIDES[model])
    state, params = _placed((state, params), replicated(mesh))
    return step.lower(
        state, params, _placed(batch, NamedSharding(mesh, BATCHES)), np.uint32(0), np.float32(0)
    )


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    """Return the shapes of arrays that have a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _lowered(
    model: str, mesh: Mesh, images: int, rank: int
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    network, params, scale = built(model)
    network = network.with_adapters(params, rank)
    count, side = images * replicas(mesh), SIDES[model]
    divisions = network.divisions(params, mesh.size // replicas(mesh))
    programs = Programs(
        network,
        mesh,
        slots=count,
        height=side,
        width=side,
        group=images,
        guided=is_guided(scale),
        divisions=divisions,
    )
    slots = jax.eval_shape(partial(empty_slots, network, count, programs.latent_shape))

    drawing = {part: of for part, of in params.items() if part not in network.text_parts()}
    placed_params = placed_shapes(
        mesh, drawing, {part: divisions[part] for part in drawing}, stacked=False
    )
    adapters = jax.tree.map(_placed, slots.adapters, programs.adapter_shardings)
    slots = _placed(dataclasses.replace(slots, adapters={}), split(mesh))
    slots = dataclasses.replace(slots, adapters=adapters)
    steps, wanted = (
        _placed(jax.ShapeDtypeStruct((count,), dtype), split(mesh)) for dtype in (jnp.int32, bool)
    )
    drawn = {
        name: partial(getattr(programs, f"_{name}").lower, placed_params, *arguments)
        for name, arguments in (("advance", (slots, steps)), ("decode", (slots.latents, wanted)))
    }
    # Filling slots with what text encoders made takes no time to speak of.
    encode = partial(programs.texts.lower, params)
    return {"encode": encode, **drawn, TEACH: partial(_lowered_training, model, mesh)}


def _compile(program: str, lower: Callable[[], jax.stages.Lowered], replicas: int) -> Compiled:
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return Compiled(program, f"no: {str(error).splitlines()[0][:120]}")
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    found = list(hlo.operations(text))
    if program == "advance":
        found = hlo.around(found, "evaluation")
    return Compiled(
        program,
        "yes",
        flops=cost["flops"],
        accessed=cost["bytes accessed"],
        hbm=sum(one.hbm_bytes for one in found),
        temporary=memory.temp_size_in_bytes,
        resident=memory.argument_size_in_bytes,
        cycles=sum(one.cycles for one in found),
        kernel_flops=sum(one.kernel_flops for one in found),
        estimate=cost.get("optimal_seconds", 0),
        replicas=replicas,
        operations=tuple(hlo.by_source(found)),
    )


def _row(chip: Chip, one: Compiled) -> dict[str, Any]:
    full = one.resident + one.temporary > chip.memory
    return {
        "program": one.program,
        "fits": "no: memory" if one.fits == "yes" and full else one.fits,
        "GFLOP": one.flops / 1e9,
        "accessed GB": one.accessed / 1e9,
        "HBM GB": one.hbm / 1e9,
        "temporary MB": one.temporary / 1e6,
        "arguments MB": one.resident / 1e6,
        "cycles M": one.cycles / 1e6,
        "kernels GFLOP": one.kernel_flops / 1e9,
        "estimate s": one.estimate if chip.estimates and one.fits == "yes" else None,
        "roofline s": _roofline(chip, one),
    }


def _roofline(chip: Chip, one: Compiled) -> float:
    return max(one.flops / chip.flops, one.hbm / chip.bandwidth)


def _prediction(chip: Chip, images: int, compiled: list[Compiled]) -> dict[str, Any]:
    seconds = {one.program: _roofline(chip, one) for one in compiled}
    rounds = -(-PICTURES // (images * compiled[0].replicas))
    once = images * (seconds["encode"] + seconds["decode"])  # both take pictures one by one
    return {
        "devices": compiled[0].replicas,
        "rounds": rounds,
        **{f"s, {steps} steps": rounds * (once + steps * seconds["advance"]) for steps in STEPS},
    }


if __name__ == "__main__":
    main()
