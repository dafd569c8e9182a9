"""Files of a checkpoint's parts, in a folder or on the hub.

They are safetensors, or the msgpack files that Flax models were once published in.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sd_tpu.checkpoint.config import is_file
from sd_tpu.checkpoint.folder import fetch

MSGPACK = ("diffusion_flax_model.msgpack", "flax_model.msgpack")
# Options of the hub's client, and those that asked for what is always so here.
HUB = ("revision", "cache_dir", "local_files_only", "token", "force_download", "proxies")
ACCEPTED = (
    "from_pt",
    "split_head_dim",
    "use_memory_efficient_attention",
    "use_auth_token",
    "resume_download",
    "use_safetensors",
    "variant",
)


def take_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of the old classes from `options`, and return those for the hub."""
    hub = {name: options.pop(name) for name in HUB if name in options}
    login = options.pop("use_auth_token", None)
    if login is not None:
        hub.setdefault("token", login)
    for name in ACCEPTED:
        options.pop(name, None)
    return {name: value for name, value in hub.items() if name != "proxies"}


def find_config(
    name: str | Path, subfolder: str | None, file: str, options: Mapping[str, Any]
) -> Path:
    """Return the path of `file` in a checkpoint's subfolder, or else in its own folder.

    Raises:
        CheckpointError: there is no such folder here and none could be fetched.
    """
    folder = fetch(name, [f"{subfolder}/{file}" if subfolder else file], options)
    inner = folder / (subfolder or "") / file
    return inner if is_file(inner) or not is_file(folder / file) else folder / file


def find_part(name: str | Path, subfolder: str | None, options: Mapping[str, Any]) -> Path:
    """Return the folder with the config and the weights of one network.

    Raises:
        CheckpointError: there is no such folder here and none could be fetched.
    """
    inside = f"{subfolder}/" if subfolder else ""
    folder = fetch(name, [f"{inside}{kind}" for kind in ("*.json", "*.safetensors")], options)
    part = folder / (subfolder or "")
    if not any(part.glob("*.safetensors")) and not Path(name).is_dir():
        fetch(name, [f"{inside}*.msgpack"], options)
    return part


def fetch_packed(repo: str, folder: Path, parts: Iterable[str], options: Mapping[str, Any]) -> None:
    """Fetch Flax's files for the parts of a checkpoint that the hub has no safetensors of."""
    lacking = [part for part in parts if not any((folder / part).glob("*.safetensors"))]
    if lacking:
        fetch(repo, [f"{part}/{file}" for part in lacking for file in MSGPACK], options)
