"""A checkpoint in the diffusers layout: found in a folder or fetched from the hub, file by file."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import snapshot_download

from sd_tpu.checkpoint.config import CheckpointError, is_file, read_json
from sd_tpu.reading import expanded

Components = Mapping[str, str]  # folder of each network -> what its weight files' names begin with

INDEX = "model_index.json"
MODULAR_INDEX = f"modular_{INDEX}"  # of pipelines that diffusers puts together of blocks
# Where the hub's client puts what it fetches: the id, the commit, and a folder in it.
HUB_FOLDER = re.compile(r"/models--([^/]+)/snapshots/([^/]+)(?:/(.+))?$")
OTHER_FILES = (
    INDEX,
    MODULAR_INDEX,
    "sd_tpu.json",
    "*/config.json",
    "scheduler/*.json",
    "*tokenizer*/*",
)


def find(
    name: str | Path,
    components_of: Callable[[dict[str, Any]], Components],
    revision: str | None = None,
    variant: str | None = None,
    **options: Any,
) -> Path:
    """Return the folder of a checkpoint, fetching only what is needed if `name` is a hub id.

    Args:
        name: the folder or the hub id.
        components_of: gives the networks of a checkpoint with this model_index.json, or raises
            CheckpointError, in which case nothing else is fetched.
        revision: branch, tag or commit on the hub.
        variant: of the weight files, such as "fp16".
        options: the hub's client's, such as `cache_dir` and `local_files_only`.

    Raises:
        CheckpointError: it is a file, is no checkpoint, cannot be fetched, or has weights that are
            links to what is gone.
    """
    path = expanded(name)
    if is_file(path):
        raise CheckpointError(_file_message(path))
    if not path.is_dir():
        options["revision"] = revision
        path = fetch(name, [INDEX, MODULAR_INDEX], options)
        components = components_of(_index(path))
        path = fetch(name, _patterns(components, variant), options)
        lacking = {
            part: stem
            for part, stem in components.items()
            if variant and not _listed(path / part, stem, variant)
        }
        if lacking:
            path = fetch(name, _patterns(lacking, None), options)
    for pattern in _weight_patterns(components_of(_index(path)), variant):
        for file in path.glob(f"{pattern}*"):  # without a `*` it passes over what this is to find
            is_file(file)
    return path


def index_file(folder: Path) -> Path:
    """Return the file that says of which parts the checkpoint in a folder is; it need not exist."""
    modular = folder / MODULAR_INDEX
    return modular if not is_file(folder / INDEX) and is_file(modular) else folder / INDEX


def _index(folder: Path) -> dict[str, Any]:
    if not is_file(file := index_file(folder)):
        raise CheckpointError(
            f"{folder} has no {INDEX}, so it is not a checkpoint in the diffusers layout."
        )
    return read_json(file)


def fetch(
    name: str | Path, patterns: Sequence[str], options: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Return a folder, or fetch the files of a hub id that match the patterns.

    Args:
        name: the folder or the hub id.
        patterns: of paths within it.
        options: the hub's client's.

    Raises:
        CheckpointError: it is not there, and cannot be fetched.
    """
    path = expanded(name)
    if not is_file(path) and path.is_dir():
        return path
    if str(name).startswith(("/", "~", ".")) or str(name).count("/") > 1:
        raise CheckpointError(f"There is no folder {str(path)!r}.")
    try:
        return Path(snapshot_download(str(name), allow_patterns=[*patterns], **options))
    except Exception as error:  # the hub client raises its own, requests' and the socket's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"Model {str(name)!r} is neither a folder here nor could it be fetched from the hub "
            f"({reason}). Check the spelling and the connection, or give a folder."
        ) from error


def _patterns(components: Components, variant: str | None) -> list[str]:
    return [*OTHER_FILES, *_weight_patterns(components, variant)]


def _weight_patterns(components: Components, variant: str | None) -> list[str]:
    mark = f".{variant}" if variant else ""
    return [
        pattern
        for part, stem in components.items()
        for pattern in (
            f"{part}/{stem}{mark}.safetensors",
            f"{part}/{stem}{mark}-*-of-*.safetensors",
            f"{part}/{stem}.safetensors.index{mark}.json",
        )
    ]


def weight_files(folder: Path, stem: str, variant: str | None = None) -> list[Path]:
    """Return the safetensors files of one network, such as `checkpoint/unet`, by their stem.

    A variant (such as "fp16") that the folder lacks falls back to the plain files with a warning:
    the `dtype` of the parameters does not depend on it.

    Raises:
        CheckpointError: there are none, or an index names a file that is missing.
    """
    files = _listed(folder, stem, variant)
    if not files and variant and (files := _listed(folder, stem, None)):
        warnings.warn(f"{folder} has no {variant!r} files; reading the plain ones.", stacklevel=2)
    if not files:
        raise CheckpointError(_no_weights_message(folder, stem))
    for file in files:
        if not is_file(file):
            raise CheckpointError(f"{file} is named by the checkpoint's index but is missing.")
    return files


def _listed(folder: Path, stem: str, variant: str | None) -> list[Path]:
    mark = f".{variant}" if variant else ""
    single = folder / f"{stem}{mark}.safetensors"
    index = folder / f"{stem}.safetensors.index{mark}.json"
    if is_file(single):
        return [single]
    if is_file(index):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from names to files.")
        return [folder / name for name in sorted(set(shards.values()))]
    return []


def _no_weights_message(folder: Path, stem: str) -> str:
    variants = sorted(
        {
            match[1] or match[2]
            for file in folder.glob(f"{stem}.*")
            if (
                match := re.match(
                    r"\.(?:(\w+)\.safetensors|safetensors\.index\.(\w+)\.json)$",
                    file.name.removeprefix(stem),
                )
            )
        }
    )
    if variants:
        return (
            f"{folder} has weights of a variant only ({', '.join(variants)}): ask for it, as "
            f"by --variant {variants[0]}."
        )
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        return (
            f"{folder} holds its weights as a pickle ({pickles[0].name}), which can run code when "
            f"it is opened, so it is refused. {_convert(folder)}"
        )
    return (
        f"{folder} has no safetensors weights. If the model was published in a variant only, "
        f"ask for it, as by --variant fp16. If as pickles: {_convert(folder)}"
    )


def _file_message(path: Path) -> str:
    """Return why a single file is refused where a folder is wanted, and how to make one of it."""
    if path.suffix == ".safetensors":
        # A folder of the file's own name would be taken for its configs.
        target = f"{path.with_suffix('')}-diffusers"
        command = (
            "from sd_tpu.families.checkpoint import Checkpoint as C; "
            f"model, params = C.from_pretrained('{path}'); "
            f"model.save_pretrained('{target}', params)"
        )
        return (
            f"{path} is a single file, but a folder in the diffusers layout or a hub id is "
            f'wanted. Convert it: python -c "{command}", and give {target}'
        )
    target = path.with_suffix("")
    command = (
        "from diffusers import StableDiffusionPipeline as P; "
        f"P.from_single_file('{path}').save_pretrained('{target}')"
    )
    return (
        f"{path} is neither a .safetensors file nor a folder; pickles (.ckpt, .bin, .pt) can "
        "run code when opened. Convert it where PyTorch is installed, if you trust it: "
        f'python -c "{command}", and give {target}'
    )


def _convert(folder: Path) -> str:
    """Return the command that converts the checkpoint of this folder, or the network alone."""
    trusted = "where PyTorch is installed, if you trust it"
    library, kind = "diffusers", "DiffusionPipeline"
    if index_file(folder.parent).is_file():
        folder = folder.parent
    else:
        library, kind = _class_of(folder)
        if not kind.isidentifier():  # else a config could have anything run
            return f"Convert it {trusted}, by from_pretrained and save_pretrained of its class."
    source, target = f"'{folder}'", f"{folder}-safetensors"
    if hub := HUB_FOLDER.search(folder.as_posix()):
        name, revision, subfolder = hub.groups()
        name = name.replace("--", "/")
        source = f"'{name}', revision='{revision}'"
        source += f", subfolder='{subfolder}'" if subfolder else ""
        target = f"{name.rpartition('/')[2]}-safetensors"
    command = (
        f"from {library} import {kind} as P; "
        f"P.from_pretrained({source}).save_pretrained('{target}')"
    )
    return f'Convert it {trusted}: python -c "{command}", and give {target}'


def _class_of(folder: Path) -> tuple[str, str]:
    """Return the library and the class of a network in PyTorch; "" if its config does not tell."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("_class_name"):
        return "diffusers", str(config["_class_name"]).removeprefix("Flax")
    names = config.get("architectures")
    return "transformers", str(names[0]) if isinstance(names, list) and names else ""
