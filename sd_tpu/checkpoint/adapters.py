"""Additions to a checkpoint: LoRA and its kin, and words learned by textual inversion.

LoRA (Hu et al. 2021, arXiv:2106.09685), LoHa (Hyeon-Woo et al. 2021, arXiv:2108.06098) and LoKr
(Yeh et al. 2023, arXiv:2309.14859) all add a product of small factors to a weight. The factors are
read as they are; `difference` makes their product inside a compiled program.
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it, as safetensors asks
import numpy as np
import re2

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.original import Levels, Module, open_clip_name, original_modules, renamed
from sd_tpu.checkpoint.weights import DTYPES, Stored, is_finite, modern, opened
from sd_tpu.reading import composed

Shapes = Mapping[str, tuple[int, ...]]
Modules = Mapping[str, Mapping[str, Stored]]  # as a file calls them -> factor -> where it lies
Factors = Mapping[str, np.ndarray]
Place = tuple[str, Module]  # the component that a module is of, and what it is called there


class Change(NamedTuple):
    """Addition of a file to a parameter; nothing of it has been read.

    Attributes:
        component: of the parameter.
        name: of the parameter, in a checkpoint.
        module: whose the factors are in the file.
        factors: where they lie.
        scale: of a rank, where no alpha is told.
    """

    component: str
    name: str
    module: str
    factors: Mapping[str, Stored]
    scale: Callable[[int], float] = lambda rank: 1.0


INTEGERS = ("I64", "I32", "I16", "I8", "U8")  # which an alpha may be
# What embeddings are called in files, of one text encoder or of two.
EMBEDDINGS = (("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1"), ("emb_params",))
MOST_VECTORS = 75  # of an embedding: what fits between the marks of a prompt


class LowRank(NamedTuple):
    """scale * left @ right, in our order of axes: [in, out] or [height, width, in, out]."""

    left: np.ndarray  # [..., in, rank]
    right: np.ndarray  # [rank, out]
    scale: np.ndarray | np.floating  # [] float32


class Hadamard(NamedTuple):
    """The product of two, element by element."""

    first: LowRank
    second: LowRank


class Kronecker(NamedTuple):
    """scale times the Kronecker product of left and right over their last two axes."""

    left: np.ndarray  # [in1, out1]
    right: np.ndarray  # [..., in2, out2]
    scale: np.ndarray | np.floating  # [] float32


Delta = LowRank | Hadamard | Kronecker

# Component -> what stands before its modules' names, with dots or with underscores: diffusers',
# kohya's, and of LyCORIS and SimpleTuner.
COMPONENTS = {
    "unet": ("unet", "lora_unet", "lycoris_unet", "lycoris"),
    "transformer": ("transformer", "lora_transformer", "unet", "lora_unet", "lycoris"),
    "text_conditioner": ("text_conditioner", "lora_unet_llm_adapter"),
    "text_encoder": ("text_encoder", "lora_te", "lora_te1", "lycoris_te", "lycoris_te1", "lycoris"),
    # FLUX.1's is a T5, which kohya calls the third as in Stable Diffusion 3.
    "text_encoder_2": ("text_encoder_2", "lora_te2", "lycoris_te2", "lora_te3"),
    "text_encoder_3": ("text_encoder_3", "lora_te3"),
}
# Prefixes that come with dots alone: ComfyUI's, OneTrainer's, and those of single files.
PREFIXES = {
    "diffusion_model.llm_adapter.": "text_conditioner.",
    "diffusion_model.": "unet.",
    "model.diffusion_model.": "unet.",
    "clip_l.": "text_encoder.",
    "clip_h.": "text_encoder.",
    "clip_g.": "text_encoder_2.",
    "cond_stage_model.transformer.": "text_encoder.",
    "cond_stage_model.model.": "text_encoder.",
    "conditioner.embedders.0.transformer.": "text_encoder.",
    "conditioner.embedders.1.transformer.": "text_encoder_2.",
    "conditioner.embedders.1.model.": "text_encoder_2.",
}
# A module, and the factor of its weight: LoRA as kohya, diffusers and PEFT spell it, LoHa, LoKr.
KEY = re.compile(
    r"(?P<module>.+?)(?:_lora|\.lora|\.lora_linear_layer)?\."
    r"(?:(?:lora_)?(?P<kohya>down|up|mid)\.weight|lora_(?P<peft>[AB])(?:\.[^.]+)?\.weight"
    r"|(?P<other>alpha|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)))"
)
# Factors of as many rows as the weight, or of a number that divides them: where a file's layer is
# several here, each takes rows of these.
BY_ROWS = ("up", "hada_w1_a", "hada_w2_a", "lokr_w1", "lokr_w1_a")
# Bounds of a file's patterns together: characters, and bytes of memory to match them.
MAX_PATTERNS, PATTERN_BYTES = 1 << 16, 1 << 26
MAX_RANK = 1024  # which trainers let people choose, of small weights as well
DORA = ("dora_scale", "lora_magnitude_vector")
METADATA = "lora_adapter_metadata"  # where diffusers keeps PEFT's configs, if it was asked to
# A part of a module's name -> the family of models that has it.
OTHER_FAMILIES = {
    "double_blocks": "FLUX",
    "single_blocks": "FLUX",
    "single_transformer_blocks": "FLUX",
    "joint_blocks": "Stable Diffusion 3",
    "transformer.transformer_blocks": "a diffusion transformer",
}
FAMILIES_BY_TEXT = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "SDXL"}


# --- files in a folder --------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, Path]:
    """List the safetensors files in a folder and the folders in it, by name.

    A file is called by its stem, in NFC. Where several have the same, that is the one highest up,
    or first in the order of the alphabet; the others are called by their paths within the folder,
    without suffix. Names that are not text in any encoding are left out, as nobody can write them.

    Raises:
        CheckpointError: there is no such folder, or it cannot be read.
    """
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CheckpointError(
            f"The folder {str(folder)!r} cannot be read ({error.strerror})."
        ) from None
    found: dict[str, Path] = {}
    for path in sorted(
        _walked(folder),
        key=lambda path: (
            len(path.parts),
            composed(str(path)),
            composed(path.name) != path.name,
            str(path),
        ),
    ):
        if (stem := composed(path.stem)) in found:
            found.setdefault(composed(path.relative_to(folder).with_suffix("").as_posix()), path)
        else:
            found[stem] = path
    return found


def _walked(folder: Path) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # links may lead round in a circle
            folders.clear()
            continue
        seen.add(real)
        for name in names:
            path = Path(place, name)
            if path.suffix.lower() == ".safetensors" and _is_text(str(path)):
                yield path


def read_alias(path: Path) -> str:
    """Read the name that a LoRA's file gives itself, by which A1111 also knows it.

    It is "" if the file gives none, or cannot be read.
    """
    try:
        with opened(path) as tensors:
            return composed((tensors.metadata() or {}).get("ss_output_name", "")).strip()
    except CheckpointError:
        return ""


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of another encoding, which Python keeps as surrogates
        return False
    return True


# --- LoRA ---------------------------------------------------------------------------------------


def read_lora(
    path: Path, shapes: Mapping[str, Shapes], parts: Container[str] | None = None
) -> dict[str, dict[str, Delta]]:
    """Read a LoRA, LoHa or LoKr for a model.

    Args:
        path: a safetensors file as kohya, LyCORIS, PEFT or diffusers write it.
        shapes: component -> what `weights.shapes` says of its parameters.
        parts: components whose weights are read; by default all.

    Returns:
        Component -> a parameter's name in a checkpoint, as in `shapes` -> what is added to it.

    Raises:
        CheckpointError: the file is damaged, is not understood, or is for other models.
    """
    with opened(path) as tensors:
        deltas: dict[str, dict[str, Delta]] = defaultdict(dict)
        for change in _header(path, tensors, shapes):
            if parts is not None and change.component not in parts:
                continue
            factors = {
                factor: _array(path, tensors, stored) for factor, stored in change.factors.items()
            }
            shape = shapes[change.component][change.name]
            try:
                deltas[change.component][change.name] = _delta(factors, shape, change.scale)
            except (ValueError, ArithmeticError):
                raise CheckpointError(
                    f"{path} is damaged: the scale of {change.module} is no finite number."
                ) from None
    return dict(deltas)


def changed_by_lora(path: Path, shapes: Mapping[str, Shapes]) -> dict[str, dict[str, int | None]]:
    """Return the parameters that a LoRA changes, by component, each with the rank of what is added,
    or None where that is not said by a `LowRank` of two matrices. No weights are read.

    Args:
        path: as `read_lora` takes it, like shapes.
        shapes: of the model's parameters.

    Raises:
        CheckpointError: as `read_lora`, but for weights that are no numbers.
    """
    found: dict[str, dict[str, int | None]] = defaultdict(dict)
    with opened(path) as tensors:
        for change in _header(path, tensors, shapes):
            dense = "down" in change.factors and len(shapes[change.component][change.name]) == 2
            rank = change.factors["down"].shape[0] if dense else None
            found[change.component][change.name] = rank
            for factor, stored in change.factors.items():
                _check_dtype(path, stored)
                if factor == "alpha":
                    _array(path, tensors, stored)
    return dict(found)


def _header(path: Path, tensors, shapes: Mapping[str, Shapes]) -> list[Change]:
    """Return what a LoRA adds to which parameters, as its header says."""
    metadata = _metadata(path, tensors.metadata() or {})
    changes = _changes(path, _modules(path, tensors), shapes)
    alphas = {part: _alphas(path, metadata, part) for part in shapes}
    return [
        change._replace(
            scale=_declared_scale(metadata, alphas[change.component], change.component, change.name)
        )
        for change in changes
    ]


def difference(delta: Delta) -> jax.Array:
    """Return the difference that is added to a weight, float32, in our order of axes."""
    if isinstance(delta, Hadamard):
        return difference(delta.first) * difference(delta.second)
    left, right = (jnp.asarray(factor, jnp.float32) for factor in delta[:2])
    if isinstance(delta, LowRank):
        return jnp.asarray(delta.scale) * jnp.matmul(left, right, precision="highest")
    product = jnp.asarray(delta.scale) * left[:, None, :, None] * right[..., None, :, None, :]
    rows, columns = np.multiply(left.shape, right.shape[-2:])
    return product.reshape(*right.shape[:-2], rows, columns)


def _modules(path: Path, tensors) -> Modules:
    modules: dict[str, dict[str, Stored]] = defaultdict(dict)
    for name in tensors.keys():
        if any(mark in name for mark in DORA):
            raise CheckpointError(_dora(path))
        key = KEY.fullmatch(name)
        if not key:
            raise CheckpointError(
                f"{path} is not understood: it holds {name!r}, which belongs "
                "to no LoRA, LoHa or LoKr."
            )
        factors = modules[key["module"]]
        if twice := factors.get(_factor(key)):
            raise CheckpointError(_twice(path, twice.name, name))
        factors[_factor(key)] = _stored(path, tensors, name)
    found = {
        module: factors for module, factors in modules.items() if {*factors} != {"alpha"}
    }  # which by itself scales nothing
    if not found:
        raise CheckpointError(f"{path} holds no tensors of a LoRA.")
    return found


def _twice(path: Path, one: str, other: str) -> str:
    return (
        f"{path} is not understood: {one} and {other} in it mean the same, which should be "
        "there once."
    )


def _stored(path: Path, tensors, name: str) -> Stored:
    part = tensors.get_slice(name)
    return Stored(path, name, tuple(part.get_shape()), part.get_dtype())


def _changes(path: Path, modules: Modules, shapes: Mapping[str, Shapes]) -> list[Change]:
    """Return what is added to which parameters.

    Raises:
        CheckpointError: one is missing, or its shape does not fit the factors.
    """
    places = _places(_with_unused_block(shapes))
    found, unknown, unfit, known = [], [], [], {}
    for module, factors in modules.items():
        component, known_as = _place(module, places)
        if not known_as:
            unknown.append(module)
            continue
        for part in known_as.parts:
            if (other := known.setdefault((component, part), module)) != module:
                raise CheckpointError(_twice(path, other, module))
        if any(f"{part}.weight" not in shapes[component] for part in known_as.parts):
            continue
        try:
            for part, its in _split(factors, known_as).items():
                name = f"{part}.weight"
                _check(
                    {factor: stored.shape for factor, stored in its.items()},
                    shapes[component][name],
                )
                found.append(Change(component, name, module, its))
        except (LookupError, ValueError, ArithmeticError):
            unfit.append(module)
    if not (unfit or unknown):
        return found
    if "transformer" in shapes:
        strange = [*unfit, *unknown]
        raise CheckpointError(
            f"{path} does not fit this model: {len(strange)} of its {len(modules)} layers differ, "
            f"such as {strange[0]}. LoRAs for its family are read in the names of PEFT, of kohya "
            "and of the original code."
        )
    if unfit or _other_family(modules, shapes) or _are_known(unknown, places):
        strange = [*unfit, *unknown]
        raise CheckpointError(
            f"{path} is a LoRA for {_family(modules, shapes)} and does not fit this model: "
            f"{len(strange)} of its {len(modules)} layers differ, such as {strange[0]}."
        )
    raise CheckpointError(
        f"{path} calls {len(unknown)} of its {len(modules)} layers by names that are not known "
        f"here, such as {unknown[0]}. Known are those that kohya, diffusers, PEFT, LyCORIS, "
        "ComfyUI and OneTrainer write for Stable Diffusion 1, 2 and SDXL."
    )


def _metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        declared = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError, MemoryError):
        raise CheckpointError(f"{path} is damaged: its {METADATA} is no JSON.") from None
    declared = declared if isinstance(declared, dict) else {}
    if any(name.endswith("use_dora") and value for name, value in declared.items()):
        raise CheckpointError(_dora(path))
    return declared


def _dora(path: Path) -> str:
    return f"{path} is a DoRA, which is not supported; LoRA, LoHa and LoKr are."


def _factor(key: re.Match) -> str:
    return key["other"] or key["kohya"] or {"A": "down", "B": "up"}[key["peft"]]


def _check_dtype(path: Path, stored: Stored) -> None:
    name, dtype = stored.name, stored.dtype
    if dtype not in DTYPES and not (name.endswith(".alpha") and dtype in INTEGERS):
        raise CheckpointError(f"{path} holds {name} as {dtype}; supported are {', '.join(DTYPES)}.")


def _array(path: Path, tensors, stored: Stored) -> np.ndarray:
    _check_dtype(path, stored)
    value, dtype = stored.read(tensors), stored.dtype
    if dtype not in INTEGERS and not is_finite(value):
        raise CheckpointError(f"{path} is damaged: {stored.name} holds what is no finite number.")
    return value.astype(np.float32) if dtype in ("F64", *INTEGERS) else value


def _with_unused_block(shapes: Mapping[str, Shapes]) -> Mapping[str, Shapes]:
    """Return the shapes with one block more of the first text encoder.

    SD 2's encoder has a block whose output is not used. No checkpoint in the diffusers layout holds
    it, but files of LoRAs do.
    """
    names = shapes.get("text_encoder", {})
    last = max(map(int, re.findall(r"\.layers\.(\d+)\.", " ".join(names))), default=0)
    unused = {
        name.replace(f".layers.{last}.", f".layers.{last + 1}."): shape
        for name, shape in names.items()
    }
    return {**shapes, "text_encoder": {**names, **unused}}


def _places(shapes: Mapping[str, Shapes]) -> dict[str, Place]:
    """Return the place of each module, by all names that files give it."""
    places = {}
    for component, prefixes in COMPONENTS.items():
        names = shapes.get(component, {})
        levels = Levels.of(names).modules() if component == "unet" else {}
        spelled = original_modules(names) if component == "transformer" else {}
        for name in names:
            if name.endswith(".weight"):
                module = name.removesuffix(".weight")
                known_as = Module({module: 1})
                spellings = module, renamed(module, levels), module.removeprefix("text_model.")
                spelled |= dict.fromkeys(spellings, known_as)
        for spelling, known_as in spelled.items():
            place = component, known_as
            places.setdefault(spelling, place)  # both text encoders have the same
            for prefix in prefixes:
                places[f"{prefix}.{spelling}"] = place
                places[f"{prefix}_{spelling.replace('.', '_')}"] = place
    return places


def _place(module: str, places: Mapping[str, Place]) -> Place | tuple[str, None]:
    """Return the place of a file's module; ("", None) if there is none."""
    module = _normalized(module)
    component, dot, rest = module.partition(".")
    for spelling in (
        module,
        component + dot + modern(rest),
        modern(module),
        component + dot + open_clip_name(f"{rest}.").removesuffix("."),
    ):
        # diffusers called the projections of CLIP as the UNet's for a while.
        for name in (spelling, f"{spelling}.0", re.sub(r"\.to_(\w+)$", r".\1_proj", spelling)):
            if name in places:
                return places[name]
    return "", None


def _split(factors: Mapping[str, Stored], module: Module) -> dict[str, dict[str, Stored]]:
    """Return the factors of each of a module's parts, by part; raises ValueError."""
    found: dict[str, dict[str, Stored]] = {part: {} for part in module.parts}
    for factor, stored in factors.items():
        by_part = module.split(stored) if factor in BY_ROWS else dict.fromkeys(found, stored)
        for part, its in by_part.items():
            found[part][factor] = its
    return found


def _normalized(module: str) -> str:
    """Return a module's name that begins with its component, if it has dots."""
    module = module.replace("base_model.model.", "").replace(".processor", "")
    module = re.sub(r"^(text_encoders\.)?(clip_[lgh]\.)(transformer\.)?", r"\2", module)
    return next(
        (
            component + module.removeprefix(prefix)
            for prefix, component in PREFIXES.items()
            if module.startswith(prefix)
        ),
        module,
    )


def _are_known(modules: Iterable[str], places: Mapping[str, Place]) -> bool:
    """Whether names of modules that are not here begin as those that are."""
    flat = tuple(f"{prefix}_" for prefixes in COMPONENTS.values() for prefix in prefixes)
    begins = {place.partition(".")[0] for place in places}
    return any(
        module.startswith(flat) or module.partition(".")[0] in begins
        for module in map(_normalized, modules)
    )


def _alphas(
    path: Path, metadata: Mapping[str, Any], component: str
) -> tuple[re2.Set | None, list[Any]]:
    """Return PEFT's patterns of modules' names, and their alphas.

    They are whatever a file says, so they are matched by RE2, which takes time in proportion to a
    name's length.
    """
    declared = metadata.get(f"{component}.alpha_pattern")
    if not (declared and isinstance(declared, dict)):
        return None, []
    options = re2.Options()
    options.max_mem, options.log_errors = PATTERN_BYTES, False
    patterns = re2.Set.FullMatchSet(options)
    try:
        if sum(map(len, declared)) > MAX_PATTERNS:
            raise re2.error("there are too many")
        for pattern in declared:
            patterns.Add(rf"(?s)(.*\.)?({pattern})$")
        patterns.Compile()
    except re2.error:
        raise CheckpointError(
            f"{path} is not understood: the alpha_pattern in its metadata, such "
            f"as {next(iter(declared))[:60]!r}, is not in RE2's syntax, or too "
            "long."
        ) from None
    return patterns, [*declared.values()]


def _declared_scale(
    metadata: Mapping[str, Any], alphas: tuple[re2.Set | None, list[Any]], component: str, name: str
) -> Callable[[int], float]:
    """Return the scale of a rank by PEFT's config in the file; 1 where it says nothing.

    The first pattern that matches the name counts.
    """
    patterns, values = alphas
    fitting = patterns.Match(name.removesuffix(".weight")) if patterns else None
    alpha = values[min(fitting)] if fitting else metadata.get(f"{component}.lora_alpha")
    if not isinstance(alpha, int | float):
        return lambda rank: 1.0
    rooted = metadata.get(f"{component}.use_rslora")
    return lambda rank: alpha / (math.sqrt(rank) if rooted else rank)


# --- factors ------------------------------------------------------------------------------------


def _check(factors: Shapes, weight: tuple[int, ...]) -> None:
    """Raise an error unless factors of these shapes give a weight of this shape.

    The weight is [out, in] or [out, in, height, width]. Raises ValueError, LookupError or
    ArithmeticError.
    """
    if len(weight) not in (2, 4) or math.prod(factors.get("alpha", ())) != 1:
        raise ValueError(f"{weight}")
    if "down" in factors:
        _check_product(factors["up"], factors["down"], factors.get("mid"), weight)
    elif "hada_w1_a" in factors:
        for i in (1, 2):
            up, core = factors[f"hada_w{i}_a"], factors.get(f"hada_t{i}")
            _check_product(up if core is None else up[::-1], factors[f"hada_w{i}_b"], core, weight)
    else:
        left, right = (_whole_shape(factors, f"lokr_w{i}") for i in (1, 2))
        (outputs, inputs), (wanted, *rest) = left, weight
        if (
            wanted % outputs
            or rest[0] % inputs
            or right[0] != wanted // outputs
            or (math.prod(right[1:]) * inputs != math.prod(rest))
        ):
            raise ValueError(f"{left} and {right} in place of {weight}")


def _check_product(
    up: tuple[int, ...],
    down: tuple[int, ...],
    core: tuple[int, ...] | None,
    weight: tuple[int, ...],
) -> None:
    """Check the shapes of the factors that `_low_rank` takes; raises as `_check`."""
    (outputs, *inputs), rank = weight, math.prod(up[1:])
    expected = rank, *inputs
    _check_rank(rank, outputs, math.prod(inputs))
    if core is not None:
        _check_rank(max(rank, down[0]), outputs, inputs[0])
        if len(core) != 4 or core != (rank, down[0], *inputs[1:]):
            raise ValueError(f"a core of {core}")
        expected = down[0], inputs[0]
    if (
        up[0] != outputs
        or not rank
        or down[0] != expected[0]
        or (math.prod(down) != math.prod(expected))
    ):
        raise ValueError(f"{up} and {down} in place of {weight}")


def _check_rank(rank: int, outputs: int, inputs: int) -> None:
    """Raise ValueError for a rank that is not low: a small core can make a huge product."""
    if rank > max(outputs, inputs, MAX_RANK):
        raise ValueError(f"a rank of {rank}")


def _whole_shape(factors: Shapes, name: str) -> tuple[int, ...]:
    """Return the shape of the matrix that `_whole` makes; raises as `_check`."""
    if name in factors:
        return factors[name]
    (rows, rank), (other, columns) = a, b = factors[f"{name}_a"], factors[f"{name}_b"]
    if core := factors.get(name.replace("_w", "_t")):
        (rank, rows), (other, columns), (first, second, *kernel) = a, b, core
        _check_rank(max(rank, other), rows, columns)
        if (first, second) != (rank, other) or len(kernel) != 2:
            raise ValueError(f"a core of {core}")
        return rows, columns, *kernel
    if rank != other or not rank:
        raise ValueError(f"ranks {rank} and {other}")
    _check_rank(rank, rows, columns)
    return rows, columns


def _delta(
    factors: Factors, shape: tuple[int, ...], default_scale: Callable[[int], float]
) -> Delta:
    """Return the factors of a weight in our order of axes.

    Args:
        factors: of one weight, as they were trained for PyTorch, of shapes that `_check` has seen.
        shape: of the weight, [out, in] or [out, in, height, width].
        default_scale: of a rank, where no alpha is told.

    Raises:
        ValueError or ArithmeticError: the scale is no finite number.
    """

    def scale(rank: int) -> Any:
        alpha = factors.get("alpha")
        value = default_scale(rank) if alpha is None else float(alpha.item()) / rank
        if not abs(value) <= float(np.finfo(np.float32).max):
            raise ValueError(f"a scale of {value}")
        return np.float32(value)

    if "down" in factors:
        down = factors["down"]
        return _low_rank(factors["up"], down, factors.get("mid"), shape, scale(down.shape[0]))
    if "hada_w1_a" in factors:
        first, second = (
            [factors[f"hada_w{i}_a"], factors[f"hada_w{i}_b"], factors.get(f"hada_t{i}")]
            for i in (1, 2)
        )
        rank = first[1].shape[0]  # ty: ignore[missing-union-attribute]
        return Hadamard(
            _product(*first, shape, scale(rank)), _product(*second, shape, np.float32(1))
        )
    return _kronecker(factors, shape, scale)


def _product(up, down, core, shape, scale) -> LowRank:
    """Return a factor of LoHa: with a core, the outputs' factor is [rank, out]."""
    return _low_rank(up if core is None else up.T, down, core, shape, scale)


def _low_rank(
    up: np.ndarray,
    down: np.ndarray,
    core: np.ndarray | None,
    shape: tuple[int, ...],
    scale: np.ndarray,
) -> LowRank:
    """up [out, rank], down [rank, in...], core [rank of up, rank of down, height, width]."""
    outputs, *inputs = shape
    up = up.reshape(outputs, -1)
    if core is not None:
        down = down.reshape(down.shape[0], inputs[0])
        down = np.einsum(
            "nmhw,mi->nihw", core.astype(np.float32), down.astype(np.float32), optimize=True
        )
    return LowRank(_channels_last(down.reshape(-1, *inputs)), up.T, scale)


def _kronecker(factors: Factors, shape: tuple[int, ...], scale: Callable[[int], Any]) -> Kronecker:
    """Return the factors of LoKr, scaled by their rank only where a factor is itself a product."""
    ranks = [factors[name].shape[0] for name in ("lokr_w1_b", "lokr_w2_b") if name in factors]
    left, right = (_whole(factors, f"lokr_w{i}") for i in (1, 2))
    (outputs, inputs), *kernel = left.shape, *shape[2:]
    right = right.reshape(shape[0] // outputs, shape[1] // inputs, *kernel)
    return Kronecker(left.T, _channels_last(right), scale(ranks[-1]) if ranks else np.float32(1))


def _whole(factors: Factors, name: str) -> np.ndarray:
    """Return a factor, which may be stored as a product, in float32."""
    if name in factors:
        return factors[name].astype(np.float32)
    a, b = (factors[f"{name}_{part}"].astype(np.float32) for part in "ab")
    if (core := factors.get(name.replace("_w", "_t"))) is not None:
        return np.einsum("nmhw,no,mi->oihw", core.astype(np.float32), a, b, optimize=True)
    return a @ b


def _channels_last(weight: np.ndarray) -> np.ndarray:
    """[out, in, ...] -> [..., in, out]."""
    return np.moveaxis(weight, (1, 0), (-2, -1))


def _other_family(modules: Modules, shapes: Mapping[str, Shapes]) -> str:
    """Return the models that a LoRA's names say it was made for; "" if this is one of them."""
    marks = dict(OTHER_FAMILIES)
    if "text_encoder_2" not in shapes:
        marks |= dict.fromkeys(
            ("te2_", "te2.", "text_encoder_2", "clip_g.", "embedders.1."), "SDXL"
        )
    return next(
        (family for mark, family in marks.items() if any(mark in module for module in modules)), ""
    )


def _family(modules: Modules, shapes: Mapping[str, Shapes]) -> str:
    """Return the models that a LoRA was made for, as far as its names and shapes tell."""
    if other := _other_family(modules, shapes):
        return other
    for module, factors in modules.items():
        down = factors.get("down", factors.get("hada_w1_b"))
        crosses = re.search(r"attn2[._](processor\.)?to[._][kv]$", module)
        if crosses and down is not None and down.shape:
            return FAMILIES_BY_TEXT.get(down.shape[-1], "other models")
    return "other models"


# --- textual inversion --------------------------------------------------------------------------


def read_embedding(path: Path, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Read vectors learned by textual inversion (Gal et al. 2022, arXiv:2208.01618).

    Args:
        path: a safetensors file, as A1111 (`emb_params`, for SDXL `clip_l` and `clip_g`) or
            diffusers (the word itself, or `text_encoders_0` and `text_encoders_1`) write it.
        widths: component -> length of the vectors that its words have.

    Returns:
        Component -> [n, width] float32, of the same n for each.

    Raises:
        CheckpointError: the file is damaged, is not understood, or is for other models.
    """
    with opened(path) as tensors:
        names = {*tensors.keys()}
        named = next((each for each in EMBEDDINGS if {*each} <= names), (*names,))
        if len(names) != 1 and named not in EMBEDDINGS:
            raise CheckpointError(
                f"{path} is not understood: an embedding holds emb_params, or "
                "clip_l and clip_g, or the vectors of a single word."
            )
        parts = dict(zip(("text_encoder", "text_encoder_2"), named, strict=False))
        found = {part: (1, 1, *tensors.get_slice(name).get_shape()) for part, name in parts.items()}
        found_widths = {part: shape[-1] for part, shape in found.items()}
        if found_widths != dict(widths) or any(len(shape) > 4 for shape in found.values()):
            raise CheckpointError(
                f"{path} is an embedding for other models: its vectors are "
                f"{_lengths(found_widths)} numbers long, this model's "
                f"{_lengths(widths)}."
            )
        lengths = {shape[-2] for shape in found.values()}
        if len(lengths) != 1 or not 1 <= max(lengths) <= MOST_VECTORS:
            raise CheckpointError(
                f"{path} holds {_lengths(dict(enumerate(lengths)))} vectors; an "
                f"embedding has 1 to {MOST_VECTORS}, as many for each text "
                "encoder."
            )
        return {
            part: np.atleast_2d(_array(path, tensors, _stored(path, tensors, name))).astype(
                np.float32
            )
            for part, name in parts.items()
        }


def _lengths(widths: Mapping[Any, int]) -> str:
    return " and ".join(map(str, widths.values()))
