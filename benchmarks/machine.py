"""The machine a benchmark runs on: its description, a short key, and the versions installed."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import psutil

PACKAGES = ("jax", "flax", "libtpu", "torch", "diffusers", "openvino")
# Intel's processors by model number; AMD's are told apart by family and AVX-512.
INTEL = {
    "85": "cascadelake",
    "106": "icelake",
    "143": "sapphirerapids",
    "207": "emeraldrapids",
    "173": "graniterapids",
}
NAMES = {
    "zen3": "AMD EPYC (Zen 3, no AVX-512)",
    "zen4": "AMD EPYC (Zen 4)",
    "zen5": "AMD EPYC (Zen 5)",
    "epyc": "AMD EPYC (unknown generation)",
    "cascadelake": "Intel Xeon (Cascade Lake)",
    "icelake": "Intel Xeon (Ice Lake)",
    "sapphirerapids": "Intel Xeon (Sapphire Rapids)",
    "emeraldrapids": "Intel Xeon (Emerald Rapids)",
    "graniterapids": "Intel Xeon (Granite Rapids)",
    "xeon": "Intel Xeon (unknown generation)",
    "unknown": "processor not recorded",
    "nvidia-h100-80gb-hbm3": "NVIDIA H100",
}


def describe() -> str:
    """Return the devices and the host, in words."""
    devices = jax.devices()
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    host = f"{cores} cores of {processor()}, {memory:.0f} GiB"
    kind = devices[0].device_kind
    return host if devices[0].platform == "cpu" else f"{len(devices)} x {kind}, {host}"


def key() -> str:
    """Return a short name for machines that are alike: `zen4-2c`, `nvidia-h100-80gb-hbm3-x1`."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{slug(devices[0].device_kind)}-x{len(devices)}"
    return f"{generation(_cpuinfo()) or slug(processor())}-{os.cpu_count()}c"


def generation(cpuinfo: str) -> str | None:
    """Return the processor's generation by Linux's description of it; None if it is not known."""
    facts = dict(re.findall(r"^(\S.*?)\s*: *(.*)", cpuinfo, re.M))
    if facts.get("vendor_id") == "AuthenticAMD":
        avx512 = "avx512f" in facts.get("flags", "").split()
        return {"25": "zen4" if avx512 else "zen3", "26": "zen5"}.get(facts.get("cpu family"))
    return INTEL.get(facts.get("model")) if facts.get("vendor_id") == "GenuineIntel" else None


def name(key: str) -> str:
    """Return a machine's name for people, by its key."""
    kind, _, count = key.rpartition("-")
    if kind not in NAMES:
        return key
    return NAMES[kind] if count.startswith("x") else f"{NAMES[kind]}, {count[:-1]} cores"


def processor() -> str:
    """Return the processor's name as Linux has it, else its architecture."""
    known = re.search(r"^model name\s*: *(.+)", _cpuinfo(), re.M)
    return known[1] if known else platform.machine()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit that is checked out; None without git.

    A `+` follows if files were changed since.
    """
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or None


def slug(text: str) -> str:
    """Return a text as part of a file's name: `CPU, times: sd14` -> `cpu-times-sd14`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
