"""A diagnosis of this machine: what it has for drawing, and what is wrong, with what to do.

Nothing here needs a model. JAX is asked for its devices by `jax_devices`, which takes the chips of
a TPU: a program that holds them already is asked in its own process.
"""

import dataclasses
import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from packaging.requirements import Requirement

from sd_tpu.folders import cache_folder, data_folder
from sd_tpu.memory import machine_memory

PACKAGES = ("sd_tpu", "jax", "jaxlib", "libtpu", "flax", "numpy", "gradio")
REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"  # of a checkout
LEAST_DISK = 5_000_000_000  # bytes: a checkpoint's, and what is compiled for it
HUB_SECONDS = 5.0
HELD_BY = "The TPU is already in use"  # as libtpu begins to say so

DEVICES = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
PROCESSES = Path("/proc")
LOCK = Path("/tmp/libtpu_lockfile")
GOOGLE, NVIDIA = "0x1ae0", "0x10de"  # vendors of PCI devices
# Google's that are TPUs (its network cards have the same vendor), as JAX's hardware_utils has them:
# v2 and v3, v4, v5p, v5e, v6e and 7x.
TPUS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that JAX works on.

    Attributes:
        kind: what JAX calls it.
        platform: tpu, gpu or cpu.
        memory: its own, in bytes; None for a CPU, which has the machine's.
    """

    kind: str
    platform: str
    memory: int | None = None

    @classmethod
    def of(cls, device: Any) -> Self:
        """Describe one of JAX's devices."""
        memory = (device.memory_stats() or {}).get("bytes_limit")
        return cls(device.device_kind, device.platform, memory)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder in which files are kept.

    Attributes:
        path: where it lies, or will.
        writable: whether files can be written there.
        free: bytes that its disk has left, if that can be told.
    """

    path: str
    writable: bool
    free: int | None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Facts about this machine, and what is wrong with it.

    Attributes:
        system: the operating system and Python.
        versions: of packages that are installed, by their names.
        devices: those that JAX found.
        memory: the machine's, in bytes.
        folders: where files are kept, by what they are.
        hub: whether the Hugging Face Hub answers; None if it was not asked.
        ffmpeg: whether movies can be MP4 files.
        problems: sentences about what keeps something from working, with what to do.
    """

    system: str
    versions: Mapping[str, str]
    devices: Sequence[Device]
    memory: int
    folders: Mapping[str, Folder]
    hub: bool | None
    ffmpeg: bool
    problems: Sequence[str]

    @property
    def hardware(self) -> str:
        """The devices by kind, with their memory."""
        counted = Counter((each.kind, each.memory) for each in self.devices)
        return ", ".join(
            f"{count} × {kind.replace('cpu', 'CPU')}"
            + (f" of {memory / 1e9:.1f} GB" if memory else "")
            for (kind, memory), count in counted.items()
        )

    @property
    def packages(self) -> str:
        """The versions of packages and of Python."""
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())


def diagnose(
    devices: Sequence[Device] | None,
    *,
    failure: str = "",
    hub: bool = True,
    public: bool = False,
    more: Sequence[str] = (),
) -> Diagnosis:
    """Look at this machine.

    Args:
        devices: what JAX found, by `jax_devices`; None where others draw.
        failure: why JAX found no TPU, or nothing at all, in its own words.
        hub: whether to ask the Hugging Face Hub for an answer.
        public: whether anybody may read it, who is told of no paths and no processes.
        more: problems that were found elsewhere.
    """
    folders = {
        "compiled programs": folder_at(compiled_folder()),
        "pictures": folder_at(str(data_folder() / "history")),
        "models from the hub": folder_at(hub_folder()),
    }
    answers = hub_answers() if hub and not is_offline() else None
    problems = [
        *([] if devices is None else _problems_of_devices(devices, failure, public)),
        *_problems_of_versions(),
        *_problems_of_folders(folders),
    ]
    system = platform.system() + ("" if public else f" {platform.release()}")
    return Diagnosis(
        system=f"{system}, Python {platform.python_version()}",
        versions=versions(),
        devices=devices or [],
        memory=machine_memory(),
        folders=folders,
        hub=answers,
        ffmpeg=shutil.which("ffmpeg") is not None,
        problems=[*problems, *more],
    )


# --- what is here -------------------------------------------------------------------------------


def jax_devices() -> tuple[list[Device], str]:
    """Ask JAX for its devices, which takes a TPU's chips for this process.

    Returns:
        The devices, and why there is no TPU among them if JAX tried one and says so.
    """
    import jax  # takes a second

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return [], _first_line(error)
    failure = ""
    if all(device.platform != "tpu" for device in found) and tpu_is_here():
        try:
            jax.local_devices(backend="tpu")
        except RuntimeError as error:
            failure = _first_line(error)
    return [Device.of(each) for each in found], failure


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, where they are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def tpu_is_here() -> bool:
    """Whether the machine has a TPU, whether or not JAX can use it."""
    accelerators = list(DEVICES.glob("accel[0-9]*"))
    return bool(accelerators) or any(
        vendor == GOOGLE and device in TPUS for vendor, device in _pci()
    )


def gpu_is_here() -> bool:
    """Whether the machine has an NVIDIA GPU with its driver."""
    return (DEVICES / "nvidia0").exists()


def find_libtpu() -> ModuleType | None:
    """Return the package with TPU support, if it is installed."""
    return importlib.import_module("libtpu") if importlib.util.find_spec("libtpu") else None


def compiled_folder() -> str:
    """Return where compiled programs are kept."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_folder() / "compiled")


def hub_folder() -> str:
    """Return where the hub's library keeps models."""
    from huggingface_hub.constants import HF_HUB_CACHE  # takes half a second

    return HF_HUB_CACHE


def is_offline() -> bool:
    """Whether the hub's library was told to ask nobody."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return HF_HUB_OFFLINE


def hub_answers() -> bool:
    """Whether the Hugging Face Hub, or the mirror of $HF_ENDPOINT, answers."""
    import httpx
    from huggingface_hub.constants import ENDPOINT

    try:
        return httpx.head(ENDPOINT, timeout=HUB_SECONDS, follow_redirects=True).is_success
    except (httpx.HTTPError, ValueError, OSError):
        return False


def folder_at(place: str) -> Folder:
    """Look at a folder that may not be there yet, without making it."""
    if "://" in place:  # in a bucket, which JAX reaches itself
        return Folder(place, True, None)
    path = Path(place)
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    return Folder(place, there.is_dir() and os.access(there, os.W_OK | os.X_OK), free)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _pci() -> Iterator[tuple[str, str]]:
    """Yield the vendor and the id of each PCI device, as Linux writes them."""
    for folder in PCI.glob("*"):
        with suppress(OSError):
            yield (
                (folder / "vendor").read_text("ascii").strip(),
                (folder / "device").read_text("ascii").strip(),
            )


# --- what is wrong ------------------------------------------------------------------------------


def _problems_of_devices(devices: Sequence[Device], failure: str, public: bool) -> Iterator[str]:
    platforms = {device.platform for device in devices}
    if not devices:
        yield f"JAX finds nothing to work on: {failure}."
    if tpu_is_here() and "tpu" not in platforms:
        yield _why_no_tpu("" if public else failure, public)
    if gpu_is_here() and not platforms & {"gpu", "tpu"}:
        yield (
            "There is an NVIDIA GPU, and JAX works on the CPU: install JAX for it, `pip install "
            '"jax[cuda13]"` (cuda12 for drivers before 580).'
        )


def _why_no_tpu(failure: str, public: bool) -> str:
    """Return the likeliest reason for which JAX does not work on the TPU that is here."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return f"There is a TPU, and JAX_PLATFORMS={platforms} keeps JAX from it: unset it."
    libtpu = find_libtpu()
    if libtpu is None:
        return (
            'There is a TPU, and JAX has no support for it here: `pip install "jax[tpu]"` in this '
            + ("environment." if public else f"environment ({sys.prefix}).")
        )
    if not hasattr(libtpu, "get_library_path"):
        return (
            "There is a TPU, and another package, such as tensorflow-tpu, has replaced libtpu: "
            "`pip uninstall tensorflow-tpu`, then `pip install --force-reinstall libtpu`."
        )
    workers = [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(workers) > 1:
        return (
            f"This is one host of {len(workers)} of a TPU slice, and JAX waits until the same "
            "program runs on all of them: take a slice of one host, such as v5litepod-8."
        )
    if not [*DEVICES.glob("accel[0-9]*"), *(DEVICES / "vfio").glob("[0-9]*")]:
        return (
            "The TPU's chips are not in /dev: a container needs `--privileged`, and a TPU VM the "
            "software version that is made for its kind of TPU."
        )
    if holders := [] if public else [*_holders()]:
        programs = ", ".join(f"{number} ({name})" for number, name in holders)
        return (
            f"Another process holds the TPU's chips: {programs}. End it; a notebook's kernel "
            "gives them back when it is restarted."
        )
    if HELD_BY in failure:
        return (
            "Another user's process holds the TPU's chips: `sudo lsof -w /dev/accel* /dev/vfio/*` "
            "names it."
        )
    if LOCK.exists() and not os.access(LOCK, os.W_OK):
        return (
            f"{LOCK} belongs to another user, whose process held the TPU last: if nothing runs, "
            f"`sudo rm {LOCK}`."
        )
    return f"There is a TPU, and JAX cannot use it: {failure or 'it does not say why'}."


def _holders() -> Iterator[tuple[int, str]]:
    """Yield the id and the name of each process, of those we may look into, with chips open."""
    for process in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):
            opened = {os.readlink(file) for file in (process / "fd").iterdir()}
            if process.name != str(os.getpid()) and any(
                name.startswith(("/dev/accel", "/dev/vfio/")) for name in opened
            ):
                yield int(process.name), (process / "comm").read_text("utf-8").strip()


def _problems_of_versions() -> Iterator[str]:
    for requirement in _requirements():
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        with suppress(PackageNotFoundError):
            found = version(requirement.name)
            if not requirement.specifier.contains(found, prereleases=True):
                yield (
                    f"{requirement.name} {found} is installed, and this was made for "
                    f'{requirement.specifier}: `pip install "{requirement.name}'
                    f'{requirement.specifier}"`.'
                )


def _requirements() -> list[Requirement]:
    """Return the packages that this one needs, of a checkout or of an installed package."""
    if REQUIREMENTS.is_file():
        lines = REQUIREMENTS.read_text("utf-8").splitlines()
    else:
        lines = requires("sd_tpu") or []
    plain = (line.partition(" #")[0].strip() for line in lines)
    return [Requirement(line) for line in plain if line and not line.startswith("#")]


def _problems_of_folders(folders: Mapping[str, Folder]) -> Iterator[str]:
    helps = {
        "compiled programs": "each start compiles anew. JAX_COMPILATION_CACHE_DIR names another",
        "pictures": "the page does not start. --history names another, --no-history keeps none",
        "models from the hub": "none can be fetched. HF_HOME names another",
    }
    for what, folder in folders.items():
        if not folder.writable:
            yield f"The folder of {what} cannot be written: {helps[what]}."
    free = {what: each.free for what, each in folders.items() if each.free is not None}
    short = [what for what, left in free.items() if left < LEAST_DISK]
    if short:
        least = min(free[what] for what in short)
        yield (
            f"The disk has {least / 1e9:.1f} GB left for {' and '.join(short)}; a checkpoint and "
            "its programs take several."
        )
