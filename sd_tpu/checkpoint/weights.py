"""Safetensors <-> the parameters of a module, under an exact check of names and shapes.

Module attributes are spelled as in the checkpoint, so a parameter's path is its name there. Only
the leaves differ: PyTorch keeps convolutions as OIHW and dense layers as [out, in] and calls every
main tensor of a layer `weight`.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sd_tpu.checkpoint.config import CheckpointError, Config, is_file
from sd_tpu.checkpoint.division import undivided
from sd_tpu.reading import check_regular

Params = dict[str, Any]  # nested: module attribute or list index -> ... -> array
SCALE = "kernel_scale"  # beside a kernel of int8: what its columns are multiples of

# (leaf, number of axes) -> (leaf in the checkpoint, axes of ours in the checkpoint's order)
LEAVES = {
    ("kernel", 4): ("weight", (3, 2, 0, 1)),
    ("kernel", 2): ("weight", (1, 0)),
    (SCALE, 1): ("weight_scale", (0,)),  # which no checkpoint here has
    ("scale", 1): ("weight", (0,)),
    ("embedding", 2): ("weight", (0, 1)),
    ("bias", 1): ("bias", (0,)),
    # Those of no layer
    ("latents", 3): ("latents", (0, 1, 2)),
    ("running_mean", 1): ("running_mean", (0,)),
    ("running_var", 1): ("running_var", (0,)),
    ("pos_embed", 3): ("pos_embed", (0, 1, 2)),
    ("x_pad_token", 2): ("x_pad_token", (0, 1)),
    ("cap_pad_token", 2): ("cap_pad_token", (0, 1)),
    ("scale_shift_table", 2): ("scale_shift_table", (0, 1)),
    ("gamma", 3): ("gamma", (0, 1, 2)),
    ("gamma", 4): ("gamma", (0, 1, 2, 3)),
    ("class_embedding", 1): ("class_embedding", (0,)),
    ("concept_embeds", 2): ("concept_embeds", (0, 1)),
    ("concept_embeds_weights", 1): ("concept_embeds_weights", (0,)),
    ("special_care_embeds", 2): ("special_care_embeds", (0, 1)),
    ("special_care_embeds_weights", 1): ("special_care_embeds_weights", (0,)),
}

# Names that older and newer library versions wrote for the same tensors.
SYNONYMS = (
    # Attention of the autoencoder before diffusers 0.17, as in the published SD 1.4.
    (re.compile(r"(mid_block\.attentions\.0)\.query\b"), r"\1.to_q"),
    (re.compile(r"(mid_block\.attentions\.0)\.key\b"), r"\1.to_k"),
    (re.compile(r"(mid_block\.attentions\.0)\.value\b"), r"\1.to_v"),
    (re.compile(r"(mid_block\.attentions\.0)\.proj_attn\b"), r"\1.to_out.0"),
    # transformers 5 leaves out the outermost module of CLIPTextModel.
    (
        re.compile(
            r"^(embeddings|encoder\.layers\.\d+\.(?:self_attn|mlp|layer_norm\d)|final_layer_norm)"
            r"\."
        ),
        r"text_model.\1.",
    ),
    # Nor is there that of a language model's half that gives no words, or that of one that sees.
    (re.compile(r"^(?:model\.)?(?:language_model\.)?(embed_tokens|layers|norm)\."), r"\1."),
    (re.compile(r"^model\.visual\."), "visual."),
    # Nor is there that of the vision model in the safety checker.
    (re.compile(r"^vision_model\.vision_model\."), "vision_model."),
)
# Buffers, what T5 has twice, and what makes words of a language model's states.
NOT_PARAMETERS = re.compile(
    r"\.(position_ids|num_batches_tracked|inv_freq)$"
    r"|^encoder\.embed_tokens\.weight$|^lm_head\.weight$"
)
# Types of numbers in a file, as safetensors spells them; and those that only parameters may have.
DTYPES = ("F64", "F32", "F16", "BF16")
NARROW = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
SCALED_INT8 = "I8 with scales"
READ = (*DTYPES, *NARROW, SCALED_INT8)
# Names that follow a layer's: of what its weight is a multiple, and what says how it was rounded.
SCALES, FORMAT = (".weight_scale", ".scale_weight"), ".comfy_quant"
# Formats whose numbers are those of the weight but for the scale; others are turned as well.
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "int8_tensorwise")
# Tensors for arithmetic in 8 bits, which is not done here.
OF_ACTIVATIONS = re.compile(r"(^|\.)(input_scale|scale_input|scaled_fp8)$")
MAX_LINES = 20  # of differences that a message names
MAX_HEADER = 1 << 25  # bytes; those of real files have a few megabytes, most of it metadata
# Bounds of a file's tensors, of the characters of a name and of axes: SDXL has 2,515 tensors of 4
# axes, and names of a hundred characters.
MAX_TENSORS, MAX_NAME, MAX_AXES = 50_000, 256, 8
READERS = 2  # threads that load a tensor each: twice as fast as one, and more take more memory
BLOCK = 1 << 14  # numbers that are looked at at a time: few enough to stay in the cache


@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter where it lies in a file, and what is done to it when it is read.

    Attributes:
        file: a safetensors file.
        name: of the tensor in it.
        shape: of the parameter, in PyTorch's order of axes.
        dtype: in the file, as safetensors spells it.
        rows: the first and the end of those that are the parameter's, where a tensor holds several.
        transposed: the tensor is the parameter's transpose.
        swapped: the halves of the tensor's first axis are the parameter's in the other order.
        scale: name of the tensor whose number, or number for each row, the tensor is a multiple of.
        frame: the tensor is a kernel [out, in, time, height, width] of a convolution that sees no
            later frames, and the parameter its last slice in time: all that counts for a picture.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    swapped: bool = False
    scale: str = ""
    frame: bool = False

    def rows_between(self, first: int, end: int) -> "Stored":
        """Return what is stored in these rows of the tensor."""
        return dataclasses.replace(self, shape=(end - first, *self.shape[1:]), rows=(first, end))

    def read(self, tensors) -> np.ndarray:
        """Read the parameter in PyTorch's order of axes, given its file as `opened` gives it.

        Only its own rows are read. Axes of length 1 may differ between the tensor and `shape`: what
        is a convolution of single pixels in one layout is a dense layer in another.
        """
        rows = slice(None) if self.rows is None else slice(*self.rows)
        if self.dtype in NARROW:
            value = _narrow(self.file, self.name)[rows].astype(np.float32)
        else:
            value = (
                tensors.get_slice(self.name)[rows] if self.rows else tensors.get_tensor(self.name)
            )
        if self.scale:
            scale = tensors.get_tensor(self.scale).astype(np.float32)
            if scale.size > 1:
                scale = scale.reshape(-1, *[1] * (value.ndim - 1))[rows]
            value = value * scale
        if self.swapped:
            value = np.roll(value, len(value) // 2, axis=0)
        if self.frame:
            value = value[:, :, -1]
        return (value.T if self.transposed else value).reshape(self.shape)


class Identity(Stored):
    """An identity matrix, which a file leaves out: of no tensor, but of a file's parameters."""

    def read(self, tensors) -> np.ndarray:
        """Return the matrix in float32."""
        return np.eye(*self.shape, dtype=np.float32)


class ShapesOnly(nnx.Rngs):
    """Stands in for nnx.Rngs where only shapes are wanted: layers need no random numbers then.

    Every draw from an nnx.Rngs advances a counter, which under tracing takes time quadratic in the
    number of draws: five seconds for the UNet of SD, against half a second.
    """

    def __init__(self):
        self._key = nnx.data(jax.random.key(0))

    def params(self) -> jax.Array:
        return self._key


def abstract(build: Callable[..., nnx.Module]) -> tuple[nnx.GraphDef, Params]:
    """Return the result of `build(rngs=...)` without its numbers; nothing is allocated.

    Returns the module's structure, and its parameters as a tree of ShapeDtypeStruct.
    """
    module = nnx.eval_shape(lambda: build(rngs=ShapesOnly()))
    return nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))


@lru_cache(maxsize=64)
def architecture(
    module: type[nnx.Module], config: Config, **options: Any
) -> tuple[nnx.GraphDef, Params]:
    """Return `abstract` of `module(config, **options)`, the very same for all fine-tunes.

    Finding it out takes a second.
    """
    return abstract(partial(module, config, **options))


def shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that parameters have in a checkpoint, which has no int8."""
    return {
        _checkpoint_name(path, leaf): _checkpoint_shape(path, leaf)
        for path, leaf in _leaves(params)
    }


def map_named(function: Callable[..., Any], params: Params, *rest: Params) -> Params:
    """Apply `function(name, leaf, *others)` to each parameter, by its name in a checkpoint.

    The others are what trees like `params` hold in its place.
    """

    def one(path: tuple, leaf: Any, *others: Any) -> Any:
        return function(_checkpoint_name(path, leaf), leaf, *others)

    return jax.tree_util.tree_map_with_path(one, params, *rest)


def load(files: list[Path], expected: Params, dtype=None, sharding=None) -> Params:
    """Read parameters tensor by tensor, each straight onto its devices.

    Args:
        files: safetensors files that together hold every parameter once.
        expected: tree of arrays or ShapeDtypeStructs that names the parameters and their shapes.
        dtype: of the parameters returned; by default that of each in `expected`.
        sharding: where they go; None is JAX's default device.

    Raises:
        CheckpointError: names or shapes differ (all of them listed), or a file is damaged or holds
            what is no finite number.
    """
    return load_stored(contents(files), expected, dtype, sharding, source=files[0].parent)


def load_stored(
    stored: Mapping[str, Stored],
    expected: Params,
    dtype=None,
    sharding=None,
    *,
    source: Path,
    leading: bool = False,
    divisions: Params | None = None,
) -> Params:
    """Load parameters, as `load`, that lie anywhere under any names.

    Args:
        stored: where they lie, by their names in a checkpoint.
        expected: as in `load`.
        dtype: as in `load`.
        sharding: as in `load`.
        source: the folder or file that error messages speak of.
        leading: every array gets an axis of 1 in front.
        divisions: of each over the chips of a replica, which `sharding`, then a NamedSharding over
            a mesh that has them, puts the others on whole; by default none is divided.

    Raises:
        CheckpointError: as in `load`.
    """
    check(stored, shapes(expected), source)
    wanted = {_checkpoint_name(path, leaf): (path, leaf) for path, leaf in _leaves(expected)}
    divided = dict(jax.tree_util.tree_leaves_with_path(divisions or undivided(expected)))
    # Which a caller may have set for its thread.
    default_device = jax.config.jax_default_device  # ty: ignore[missing-attribute]

    def placed(tensors: safe_open, name: str) -> dict[tuple, jax.Array]:
        (path, leaf), entry = wanted[name], stored[name]
        _, axes = LEAVES[path[-1].key, leaf.ndim]
        value = entry.read(tensors)
        if not is_finite(value):
            raise CheckpointError(
                f"{entry.file} is damaged: {entry.name} holds what is no finite number."
            )
        value = value.transpose(np.argsort(axes))
        if leaf.dtype == np.int8:
            kernel, scale = to_int8(value)
            arrays = {path: kernel, (*path[:-1], jax.tree_util.DictKey(SCALE)): scale}
        else:
            arrays = {path: value.astype(leaf.dtype if dtype is None else dtype, copy=False)}
        with jax.default_device(default_device):
            # Until they are there: what is under way takes memory twice.
            return {
                where: jax.block_until_ready(
                    jax.device_put(
                        divided[where].in_order(array)[(None,) * leading],
                        divided[where].sharding(sharding, leading),
                    )
                )
                for where, array in arrays.items()
            }

    loaded = {}
    for file in dict.fromkeys(entry.file for entry in stored.values()):
        with opened(file) as tensors, ThreadPoolExecutor(READERS) as pool:
            names = [name for name, entry in stored.items() if entry.file == file]
            for arrays in pool.map(partial(placed, tensors), names):
                loaded |= arrays
    return jax.tree_util.tree_map_with_path(lambda path, _: loaded[path], expected)


def to_int8(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a kernel [N, M] to multiples of a 127th of each column's largest number.

    Returns:
        The multiples, int8 [N, M], and what they are of, float32 [M].
    """
    wide = kernel.astype(np.float32)
    scale = np.abs(wide).max(axis=0) / 127
    wide /= np.where(scale, scale, 1)
    return np.rint(wide, out=wide).astype(np.int8), scale


def is_finite(value: np.ndarray) -> bool:
    """Whether all are; told by their bits, many times faster than by `np.isfinite`, and in blocks,
    so that no copy of a large tensor is made."""
    infinite = np.array(np.inf, value.dtype).view(f"u{value.dtype.itemsize}")
    return all(most < infinite for most in _magnitudes(value))


def largest(value: np.ndarray) -> np.ndarray:
    """Return the largest magnitude [] of finite numbers, in their dtype; 0 where there are none."""
    most = max(_magnitudes(value), default=0)
    return np.array(most, f"u{value.dtype.itemsize}").view(value.dtype)


def _magnitudes(value: np.ndarray) -> Iterator[np.unsignedinteger]:
    """Yield the largest magnitude of each block of numbers, as its bits."""
    bits = np.ravel(value, order="K").view(f"u{value.dtype.itemsize}")
    magnitude = np.iinfo(bits.dtype).max >> 1
    for first in range(0, bits.size, BLOCK):
        yield (bits[first : first + BLOCK] & magnitude).max()


def header(file: Path) -> dict[str, Stored]:
    """Return where all tensors of a file lie, by their names in it.

    Raises:
        CheckpointError: the file is damaged or missing.
    """
    found = {}
    with opened(file) as tensors:
        for name in tensors.keys():
            part = tensors.get_slice(name)
            shape = tuple(part.get_shape())
            # Five axes are those of a convolution over frames as well.
            frame = len(shape) == 5
            shape = (*shape[:2], *shape[3:]) if frame else shape
            found[name] = Stored(file, name, shape, part.get_dtype(), frame=frame)
        if any(each.dtype in (*NARROW, "I8") for each in found.values()):
            return _with_scales(found, tensors)
    return found


def _with_scales(found: dict[str, Stored], tensors: safe_open) -> dict[str, Stored]:
    """Return the tensors with their scales, which are no parameters themselves."""
    result = {}
    for name, stored in found.items():
        stem, _, leaf = name.rpartition(".")
        if name.endswith((*SCALES, FORMAT)) or OF_ACTIVATIONS.search(name):
            continue
        scale = next((stem + end for end in SCALES if leaf == "weight" and stem + end in found), "")
        rounded = _format(tensors, found.get(stem + FORMAT)) if leaf == "weight" else ""
        dtype = stored.dtype
        if rounded and rounded not in FORMATS:
            dtype = rounded
        elif scale and not _is_scale(found[scale], stored):
            dtype = f"{dtype} with scales of another kind"
        elif dtype == "I8" and scale:
            dtype = SCALED_INT8
        result[name] = dataclasses.replace(stored, scale=scale, dtype=dtype)
    return result


def _is_scale(scale: Stored, weight: Stored) -> bool:
    """Whether a tensor is one number for a weight, or one for each of its rows."""
    count = math.prod(scale.shape)
    return scale.dtype in DTYPES and (count == 1 or (count,) == weight.shape[:1])


def _format(tensors: safe_open, stored: Stored | None) -> str:
    """Return how a layer was rounded, by the JSON that a tensor of bytes holds; "" without one."""
    if stored is None:
        return ""
    if stored.dtype != "U8":
        raise SafetensorError(f"{stored.name} should be bytes")
    try:
        return str(json.loads(tensors.get_tensor(stored.name).tobytes())["format"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SafetensorError(f"{stored.name} says nothing of a format") from error


def _narrow(file: Path, name: str) -> np.ndarray:
    """Read a tensor of floats of 8 bits, of which NumPy knows nothing."""
    begin, layout = _layout(file, written(file))
    about = layout[name]
    first, end = about["data_offsets"]
    data = np.fromfile(file, np.uint8, end - first, offset=begin + first)
    return data.view(NARROW[about["dtype"]]).reshape(about["shape"])


@lru_cache(maxsize=4)
def _layout(file: Path, _: Any) -> tuple[int, dict[str, Any]]:
    """Return where a file's tensors begin, and what its header says of each."""
    with file.open("rb") as opening:
        size = int.from_bytes(opening.read(8), "little")
        return 8 + size, json.loads(opening.read(size))


def contents(files: list[Path]) -> dict[str, Stored]:
    """Return where the parameters of one network lie in its files, by their present names.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    return {
        modern(name): stored
        for file in files
        for name, stored in header(file).items()
        if not NOT_PARAMETERS.search(name)
    }


def save(params: Params, file: Path, dtype=None) -> None:
    """Write parameters under the checkpoint's names, in `dtype` if given.

    Raises:
        CheckpointError: some are int8, which is less than the checkpoint had.
    """
    if any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(params)):
        raise CheckpointError("Weights that were read as int8 are not written.")
    tensors = {}
    for path, leaf in _leaves(params):
        _, axes = LEAVES[path[-1].key, leaf.ndim]
        value = np.asarray(leaf).transpose(axes)
        tensors[_checkpoint_name(path, leaf)] = np.ascontiguousarray(value, dtype=dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors writes for its owner alone


def _leaves(params: Params) -> list[tuple[tuple, Any]]:
    """Return the parameters that a checkpoint has, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(path, leaf) for path, leaf in leaves if path[-1].key != SCALE]


def _checkpoint_name(path: tuple, leaf) -> str:
    *modules, last = (str(key.key) for key in path)
    return ".".join([*modules, LEAVES[last, leaf.ndim][0]])


def _checkpoint_shape(path: tuple, leaf) -> tuple[int, ...]:
    _, axes = LEAVES[path[-1].key, leaf.ndim]
    return tuple(leaf.shape[axis] for axis in axes)


def modern(name: str) -> str:
    """Return the present name of a parameter that an older or newer library version wrote."""
    for pattern, replacement in SYNONYMS:
        name = pattern.sub(replacement, name)
    return name


def written(file: Path) -> tuple[int, int] | None:
    """Return a value that changes when somebody writes the file; None if it is gone."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """Open a safetensors file; errors while it is read become sentences.

    Raises:
        CheckpointError: the file is missing, damaged or cannot be read.
    """
    is_file(file)
    try:
        check_regular(file)
        with file.open("rb") as begin:
            if int.from_bytes(begin.read(8), "little") > MAX_HEADER:
                raise SafetensorError(f"its header should have at most {MAX_HEADER >> 20} MiB")
        # The default maps the file, and all that was read of it then stays in memory beside the
        # parameters until it is closed.
        with safe_open(file, framework="np", backend="pread") as tensors:
            names = tensors.keys()
            if len(names) > MAX_TENSORS or any(
                len(name) > MAX_NAME or len(tensors.get_slice(name).get_shape()) > MAX_AXES
                for name in names
            ):
                raise SafetensorError("it holds tensors as no network has them")
            yield tensors
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {str(file)!r}.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or incomplete ({getattr(error, 'strerror', None) or error}). "
            "Fetch or copy it again."
        ) from error
    except MemoryError:
        raise CheckpointError(f"There is too little memory to read {file}.") from None


def check(found: Mapping[str, Stored], wanted: dict[str, tuple[int, ...]], source: Path) -> None:
    """Raise CheckpointError, with all differences, unless names and shapes are as wanted.

    `source` is the folder or file that the parameters were found in.
    """
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    difference = [f"- missing    {name} {list(wanted[name])}" for name in missing]
    difference += [f"+ unexpected {name} {list(found[name].shape)}" for name in unexpected]
    for name in wanted.keys() & found.keys():
        shape, dtype = found[name].shape, found[name].dtype
        if shape != wanted[name]:
            difference.append(
                f"~ shape      {name}: the file has {list(shape)}, "
                f"the model needs {list(wanted[name])}"
            )
        if dtype not in READ:
            difference.append(
                f"~ type       {name}: the file has {dtype}, supported are {', '.join(READ)}"
            )
    if difference:
        raise CheckpointError(
            f"The weights in {source} do not fit the model that its config.json describes "
            f"({len(difference)} differences):\n  {first_lines(sorted(difference))}"
        )


def first_lines(lines: list[str]) -> str:
    """Return indented lines of a message: the first MAX_LINES, and how many more there are."""
    more = [f"and {len(lines) - MAX_LINES} more"] * (len(lines) > MAX_LINES)
    return "\n  ".join([*lines[:MAX_LINES], *more])
