"""A checkpoint in the diffusers layout: found in a folder or fetched from the hub, file by file."""

import warnings
from pathlib import Path

from huggingface_hub import snapshot_download

from sd_tpu.config import CheckpointError, read_json

# Folder of each network -> the name its weight files begin with.
COMPONENTS = {
    "text_encoder": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
OTHER_FILES = (
    "model_index.json", "sd_tpu.json", "*/config.json", "scheduler/*.json", "tokenizer/*",
)


def find(name: str | Path, revision: str | None = None, variant: str | None = None) -> Path:
    """Returns the folder of a checkpoint, fetching only what is needed if `name` is a hub id.

    Raises:
        CheckpointError: it is a pickle or a single file, is no checkpoint, or cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise CheckpointError(_single_file_message(path))
    if not path.is_dir():
        if str(name).startswith(("/", "~", ".")) or str(name).count("/") > 1:
            raise CheckpointError(f"There is no folder {str(path)!r}.")
        path = _fetch(str(name), revision, variant)
    if not (path / "model_index.json").is_file():
        raise CheckpointError(
            f"{path} has no model_index.json, so it is not a checkpoint in the diffusers layout."
        )
    return path


def _fetch(repo: str, revision: str | None, variant: str | None) -> Path:
    try:
        folder = _snapshot(repo, revision, variant)
        if variant and not all(_listed(folder / part, variant) for part in COMPONENTS):
            folder = _snapshot(repo, revision, None)
    except Exception as error:  # the hub client raises its own, requests' and the socket's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"Model {repo!r} is neither a folder here nor could it be fetched from the hub "
            f"({reason}). Check the spelling and the connection, or give a folder."
        ) from error
    return folder


def _snapshot(repo: str, revision: str | None, variant: str | None) -> Path:
    mark = f".{variant}" if variant else ""
    patterns = list(OTHER_FILES)
    for part, stem in COMPONENTS.items():
        patterns += [f"{part}/{stem}{mark}.safetensors", f"{part}/{stem}{mark}-*-of-*.safetensors",
                     f"{part}/{stem}.safetensors.index{mark}.json"]
    return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of one network, e.g. of `checkpoint/unet`.

    A variant (such as "fp16") that the folder lacks falls back to the plain files with a warning:
    the `dtype` of the parameters does not depend on it.

    Raises:
        CheckpointError: there are none, or an index names a file that is missing.
    """
    files = _listed(folder, variant)
    if not files and variant and (files := _listed(folder, None)):
        warnings.warn(f"{folder} has no {variant!r} files; reading the plain ones.", stacklevel=2)
    if not files:
        raise CheckpointError(_no_weights_message(folder))
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is named by the checkpoint's index but is missing.")
    return files


def _listed(folder: Path, variant: str | None) -> list[Path]:
    stem = COMPONENTS.get(folder.name, "diffusion_pytorch_model")
    mark = f".{variant}" if variant else ""
    single = folder / f"{stem}{mark}.safetensors"
    index = folder / f"{stem}.safetensors.index{mark}.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from names to files.")
        return [folder / name for name in sorted(set(shards.values()))]
    return []


def _no_weights_message(folder: Path) -> str:
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        return (
            f"{folder} holds its weights as a pickle ({pickles[0].name}), which can run code when "
            f"it is opened, so it is refused. {_convert(folder.parent)}"
        )
    return (f"{folder} has no safetensors weights. If the model was published as pickles: "
            f"{_convert(folder.parent)}")


def _single_file_message(path: Path) -> str:
    target = path.with_suffix("")
    command = ("from diffusers import StableDiffusionPipeline as P; "
               f"P.from_single_file('{path}').save_pretrained('{target}')")
    if path.suffix == ".safetensors":
        reason, trust = "a single file; sd_tpu reads folders in the diffusers layout", ""
    else:
        reason = "no checkpoint folder; pickles (.ckpt, .bin, .pt) can run code when opened"
        trust = ", if you trust it"
    return (f"{path} is {reason}. Convert it where PyTorch is installed{trust}: "
            f'python -c "{command}", and give {target}')


def _convert(folder: Path) -> str:
    command = ("from diffusers import StableDiffusionPipeline as P; "
               f"P.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')")
    return f'Convert it where PyTorch is installed, if you trust it: python -c "{command}"'
