"""What is added to a checkpoint: LoRA and its kin, and words learned by textual inversion.

LoRA (Hu et al. 2021, arXiv:2106.09685), LoHa (Hyeon-Woo et al. 2021, arXiv:2108.06098) and LoKr
(Yeh et al. 2023, arXiv:2309.14859) all add a product of small factors to a weight. The factors are
read as they are; `difference` makes their product inside a compiled program.
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it, as safetensors asks
import numpy as np

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.original import Levels, renamed
from sd_tpu.checkpoint.weights import DTYPES, is_finite, modern, opened

Shapes = Mapping[str, tuple[int, ...]]
Factors = Mapping[str, np.ndarray]

INTEGERS = ("I64", "I32", "I16", "I8", "U8")  # which an alpha may be
# What embeddings are called in files, of one text encoder or of two.
EMBEDDINGS = (("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1"), ("emb_params",))
MOST_VECTORS = 75  # of an embedding: what fits between the marks of a prompt


class LowRank(NamedTuple):
    """scale * left @ right, in our order of axes: [in, out] or [height, width, in, out]."""

    left: np.ndarray  # [..., in, rank]
    right: np.ndarray  # [rank, out]
    scale: np.ndarray  # [] float32


class Hadamard(NamedTuple):
    """The product of two, element by element."""

    first: LowRank
    second: LowRank


class Kronecker(NamedTuple):
    """scale times the Kronecker product of left and right over their last two axes."""

    left: np.ndarray  # [in1, out1]
    right: np.ndarray  # [..., in2, out2]
    scale: np.ndarray  # [] float32


Delta = LowRank | Hadamard | Kronecker

COMPONENTS = {"unet": ("lora_unet_",), "text_encoder": ("lora_te_", "lora_te1_"),
              "text_encoder_2": ("lora_te2_",)}
# A module, and the factor of its weight: LoRA as kohya, diffusers and PEFT spell it, LoHa, LoKr.
KEY = re.compile(
    r"(?P<module>.+?)(?:_lora|\.lora|\.lora_linear_layer)?\."
    r"(?:(?:lora_)?(?P<kohya>down|up|mid)\.weight|lora_(?P<peft>[AB])(?:\.default)?\.weight"
    r"|(?P<other>alpha|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)))"
)
DORA = ("dora_scale", "lora_magnitude_vector")
METADATA = "lora_adapter_metadata"  # where diffusers keeps PEFT's configs, if it was asked to
# A part of a module's name -> the family of models that has it.
OTHER_FAMILIES = {"double_blocks": "FLUX", "single_blocks": "FLUX",
                  "single_transformer_blocks": "FLUX", "joint_blocks": "Stable Diffusion 3",
                  "transformer.transformer_blocks": "a diffusion transformer"}
FAMILIES_BY_TEXT = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "SDXL"}


# --- files in a folder --------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, Path]:
    """The safetensors files in a folder and the folders in it, by what they are called.

    A file is called by its stem. Where several have the same, that is the one highest up, or first
    in the order of the alphabet; the others are called by their paths within the folder, without
    suffix. Names that are not text in any encoding are left out, as nobody can write them.

    Raises:
        CheckpointError: there is no such folder, or it cannot be read.
    """
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CheckpointError(f"The folder {str(folder)!r} cannot be read "
                              f"({error.strerror}).") from None
    found: dict[str, Path] = {}
    for path in sorted(_walked(folder), key=lambda path: (len(path.parts), str(path))):
        if path.stem in found:
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
        else:
            found[path.stem] = path
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


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of another encoding, which Python keeps as surrogates
        return False
    return True


# --- LoRA ---------------------------------------------------------------------------------------


def read_lora(path: Path, shapes: Mapping[str, Shapes]) -> dict[str, dict[str, Delta]]:
    """Reads a LoRA, LoHa or LoKr for a model.

    Args:
        path: a safetensors file as kohya, LyCORIS, PEFT or diffusers write it.
        shapes: component -> what `weights.shapes` says of its parameters.

    Returns:
        Component -> a parameter's name in a checkpoint, as in `shapes` -> what is added to it.

    Raises:
        CheckpointError: the file is damaged, is not understood, or is for other models.
    """
    modules, metadata = _modules(path)
    places = _places(shapes)
    deltas: dict[str, dict[str, Delta]] = defaultdict(dict)
    strange = []
    for module, factors in modules.items():
        component, name = _place(module, places)
        try:
            scale = _declared_scale(metadata, component, name)
            delta = _delta(factors, shapes[component][name], scale)
        except (LookupError, ValueError, ArithmeticError, re.error):
            strange.append(module)
        else:
            deltas[component][name] = delta
    if strange:
        raise CheckpointError(
            f"{path} is a LoRA for {_family(modules)} and does not fit this model: {len(strange)} "
            f"of its {len(modules)} layers differ, such as {strange[0]}."
        )
    return dict(deltas)


def difference(delta: Delta) -> jax.Array:
    """What is added to a weight, float32, in the weight's shape and our order of axes."""
    if isinstance(delta, Hadamard):
        return difference(delta.first) * difference(delta.second)
    left, right = (jnp.asarray(factor, jnp.float32) for factor in delta[:2])
    if isinstance(delta, LowRank):
        return delta.scale * jnp.matmul(left, right, precision="highest")
    product = delta.scale * left[:, None, :, None] * right[..., None, :, None, :]
    rows, columns = np.multiply(left.shape, right.shape[-2:])
    return product.reshape(*right.shape[:-2], rows, columns)


def _modules(path: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Module as the file calls it -> factor -> array, and PEFT's configs if there are any."""
    modules: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    with opened(path) as tensors:
        metadata = _metadata(path, tensors.metadata() or {})
        for name in tensors.keys():
            if any(mark in name for mark in DORA):
                raise CheckpointError(_dora(path))
            key = KEY.fullmatch(name)
            if not key:
                raise CheckpointError(f"{path} is not understood: it holds {name!r}, which belongs "
                                      "to no LoRA, LoHa or LoKr.")
            modules[key["module"]][_factor(key)] = _array(path, tensors, name)
    if not modules:
        raise CheckpointError(f"{path} holds no tensors.")
    return modules, metadata


def _metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        declared = json.loads(metadata.get(METADATA, "{}"))
    except ValueError:
        raise CheckpointError(f"{path} is damaged: its {METADATA} is no JSON.") from None
    declared = declared if isinstance(declared, dict) else {}
    if any(name.endswith("use_dora") and value for name, value in declared.items()):
        raise CheckpointError(_dora(path))
    return declared


def _dora(path: Path) -> str:
    return f"{path} is a DoRA, which is not supported; LoRA, LoHa and LoKr are."


def _factor(key: re.Match) -> str:
    return key["other"] or key["kohya"] or {"A": "down", "B": "up"}[key["peft"]]


def _array(path: Path, tensors, name: str) -> np.ndarray:
    dtype = tensors.get_slice(name).get_dtype()
    if name.endswith(".alpha") and dtype in INTEGERS:
        return tensors.get_tensor(name).astype(np.float32)
    if dtype not in DTYPES:
        raise CheckpointError(f"{path} holds {name} as {dtype}; supported are "
                              f"{', '.join(DTYPES)}.")
    value = tensors.get_tensor(name)
    if not is_finite(value):
        raise CheckpointError(f"{path} is damaged: {name} holds what is no finite number.")
    return value.astype(np.float32) if dtype == "F64" else value


def _places(shapes: Mapping[str, Shapes]) -> dict[str, tuple[str, str]]:
    """All that files call a module -> its component and the name of its weight."""
    places = {}
    for component, prefixes in COMPONENTS.items():
        names = shapes.get(component, {})
        original = Levels.of(names).modules() if component == "unet" else {}
        for name in names:
            if name.endswith(".weight"):
                module = name.removesuffix(".weight")
                place = component, name
                places[module] = places.get(module, place)  # both text encoders have the same
                for spelling in {module, renamed(module, original),
                                 module.removeprefix("text_model.")}:
                    places[f"{component}.{spelling}"] = place
                    for prefix in prefixes:
                        places[prefix + spelling.replace(".", "_")] = place
    return places


def _place(module: str, places: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """The component and parameter that a file's module means; names nobody has if there is none."""
    module = module.replace("base_model.model.", "").replace(".processor", "")
    component, dot, rest = module.partition(".")
    for spelling in (module, component + dot + modern(rest), modern(module)):
        # diffusers called the projections of CLIP as the UNet's for a while.
        for name in (spelling, f"{spelling}.0", re.sub(r"\.to_(\w+)$", r".\1_proj", spelling)):
            if name in places:
                return places[name]
    return "", module


def _declared_scale(metadata: Mapping[str, Any], component: str,
                    name: str) -> Callable[[int], float]:
    """The scale of a rank by PEFT's config in the file; 1 where there is none."""
    def declared(setting: str) -> Any:
        return metadata.get(f"{component}.{setting}")

    alpha, module = declared("lora_alpha"), name.removesuffix(".weight")
    patterns = declared("alpha_pattern")
    for pattern, value in (patterns if isinstance(patterns, dict) else {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
    if not isinstance(alpha, int | float):
        return lambda rank: 1.0
    return lambda rank: alpha / (math.sqrt(rank) if declared("use_rslora") else rank)


def _delta(factors: Factors, shape: tuple[int, ...],
           default_scale: Callable[[int], float]) -> Delta:
    """The factors in our order of axes.

    Args:
        factors: of one weight, as they were trained for PyTorch.
        shape: of the weight, [out, in] or [out, in, height, width].
        default_scale: of a rank, where no alpha is told.

    Raises:
        KeyError: a factor is missing.
        ValueError: the factors' shapes do not give the weight's.
    """
    def scale(rank: int) -> np.ndarray:
        alpha = factors.get("alpha")
        value = default_scale(rank) if alpha is None else float(alpha.item()) / rank
        if not math.isfinite(value):
            raise ValueError(f"a scale of {value}")
        return np.float32(value)

    if "down" in factors:
        down = factors["down"]
        return _low_rank(factors["up"], down, factors.get("mid"), shape, scale(down.shape[0]))
    if "hada_w1_a" in factors:
        first, second = ([factors[f"hada_w{i}_a"], factors[f"hada_w{i}_b"], factors.get(
            f"hada_t{i}")] for i in (1, 2))
        rank = first[1].shape[0]
        return Hadamard(_product(*first, shape, scale(rank)),
                        _product(*second, shape, np.float32(1)))
    return _kronecker(factors, shape, scale)


def _product(up, down, core, shape, scale) -> LowRank:
    """LoHa's: with a core, the outputs' factor is [rank, out]."""
    return _low_rank(up if core is None else up.T, down, core, shape, scale)


def _low_rank(up: np.ndarray, down: np.ndarray, core: np.ndarray | None, shape: tuple[int, ...],
              scale: np.ndarray) -> LowRank:
    """up [out, rank], down [rank, in...], core [rank of up, rank of down, height, width]."""
    outputs, *inputs = shape
    if up.shape[:1] != (outputs,):
        raise ValueError(f"{up.shape[:1]} outputs in place of {outputs}")
    up = up.reshape(outputs, -1)
    if core is not None:
        down = down.reshape(down.shape[0], inputs[0])
        down = np.einsum("nmhw,mi->nihw", core.astype(np.float32), down.astype(np.float32))
    if down.shape[:1] != up.shape[1:]:
        raise ValueError(f"ranks {down.shape[0]} and {up.shape[1]}")
    down = down.reshape(-1, *inputs)
    if down.shape[0] != up.shape[1]:
        raise ValueError(f"{down.size} numbers for {inputs} inputs")
    return LowRank(_channels_last(down), up.T, scale)


def _kronecker(factors: Factors, shape: tuple[int, ...],
               scale: Callable[[int], np.ndarray]) -> Kronecker:
    """LoKr's: scaled by its rank only where a factor is itself a product."""
    ranks = [factors[name].shape[0] for name in ("lokr_w1_b", "lokr_w2_b") if name in factors]
    left, right = (_whole(factors, f"lokr_w{i}") for i in (1, 2))
    (outputs, inputs), *kernel = left.shape, *shape[2:]
    if shape[0] % outputs or shape[1] % inputs:
        raise ValueError(f"{left.shape} does not divide {shape}")
    right = right.reshape(shape[0] // outputs, shape[1] // inputs, *kernel)
    return Kronecker(left.T, _channels_last(right), scale(ranks[-1]) if ranks else np.float32(1))


def _whole(factors: Factors, name: str) -> np.ndarray:
    """A factor that may be stored as a product, in float32."""
    if name in factors:
        return factors[name].astype(np.float32)
    a, b = (factors[f"{name}_{part}"].astype(np.float32) for part in "ab")
    if (core := factors.get(name.replace("_w", "_t"))) is not None:
        return np.einsum("nmhw,no,mi->oihw", core.astype(np.float32), a, b)
    return a @ b


def _channels_last(weight: np.ndarray) -> np.ndarray:
    """[out, in, ...] -> [..., in, out]."""
    return np.moveaxis(weight, (1, 0), (-2, -1))


def _family(modules: Mapping[str, Factors]) -> str:
    """The models that a LoRA was made for, as far as its names and shapes tell."""
    for mark, family in OTHER_FAMILIES.items():
        if any(mark in module for module in modules):
            return family
    if any("te2_" in module or "text_encoder_2" in module for module in modules):
        return "SDXL"
    for module, factors in modules.items():
        down = factors.get("down", factors.get("hada_w1_b"))
        crosses = re.search(r"attn2[._](processor\.)?to[._][kv]$", module)
        if crosses and down is not None and down.ndim:
            return FAMILIES_BY_TEXT.get(down.shape[-1], "other models")
    return "other models"


# --- textual inversion --------------------------------------------------------------------------


def read_embedding(path: Path, widths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Reads what textual inversion (Gal et al. 2022, arXiv:2208.01618) learned.

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
            raise CheckpointError(f"{path} is not understood: an embedding holds emb_params, or "
                                  "clip_l and clip_g, or the vectors of a single word.")
        vectors = {part: np.atleast_2d(_array(path, tensors, name)).astype(np.float32)
                   for part, name in zip(("text_encoder", "text_encoder_2"), named, strict=False)}
    found_widths = {part: value.shape[-1] for part, value in vectors.items()}
    if found_widths != dict(widths) or any(value.ndim != 2 for value in vectors.values()):
        raise CheckpointError(f"{path} is an embedding for other models: its vectors are "
                              f"{_lengths(found_widths)} numbers long, this model's "
                              f"{_lengths(widths)}.")
    lengths = {len(value) for value in vectors.values()}
    if len(lengths) != 1 or not 1 <= max(lengths) <= MOST_VECTORS:
        raise CheckpointError(f"{path} holds {_lengths(dict(enumerate(lengths)))} vectors; an "
                              f"embedding has 1 to {MOST_VECTORS}, as many for each text encoder.")
    return vectors


def _lengths(widths: Mapping[Any, int]) -> str:
    return " and ".join(map(str, widths.values()))
