"""Openly licensed emoji drawings in two styles: fetched with npm, rendered, kept in a cache.

Licences and sources are listed in assets/LICENSES.md.
"""

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sd_tpu.folders import cache_folder

# style -> (npm package, version) of the drawings in that style: the same, without and with shading
SETS = {
    "flat": ("@iconify-json/fluent-emoji-flat", "1.2.6"),
    "3d": ("@iconify-json/fluent-emoji", "1.2.7"),
}
STYLES = tuple(SETS)

RENDERING = 2  # part of the cache's key: raise it when the same drawings come out differently
OVERSAMPLING = 2
VISIBLE = 8  # fainter alpha than this, of 255, does not count as content


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sprites:
    """Drawings cropped to their content and centred in a transparent square.

    rgba [N, size, size, 4] u8, straight (not premultiplied) alpha; for each of the N its
    concept, as people say it, and its style, one of STYLES.
    """

    rgba: np.ndarray
    concepts: list[str]
    styles: list[str]


def training_folder() -> Path:
    """Return $SD_TPU_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("SD_TPU_CACHE", cache_folder() / "training"))


def download(cache: Path) -> None:
    """Fetch the packages that are not in `cache` yet (16 MB in all) with npm."""
    for package, version in SETS.values():
        archive = _archive(cache, package, version)
        if not archive.exists():
            command = ["npm", "pack", "--silent", f"{package}@{version}"]
            fetch([*command, "--pack-destination"], archive)


def fetch(command: Sequence[str], target: Path) -> None:
    """Run `command FOLDER`, which downloads a file of target's name, and move it to `target`.

    The move comes last, so that a download cut short leaves nothing that looks complete.
    Raises RuntimeError with the command's own words if it fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        done = subprocess.run([*command, folder], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        os.replace(Path(folder) / target.name, target)


def render(cache: Path, concepts: Mapping[str, str], size: int = 96) -> Sprites:
    """Draw every concept in every style, or read what an earlier call drew.

    concepts maps a name to that of the drawing. Raises KeyError if a style has no such drawing.
    """
    key = _digest([RENDERING, SETS, size, concepts])
    path = cache / f"sprites-{size}-{key}.npz"
    if not path.exists():
        download(cache)
        sprites = _render(cache, concepts, size)
        _replace(path, lambda file: np.savez_compressed(file, **vars(sprites)))
    with np.load(path) as file:
        return Sprites(
            rgba=file["rgba"], concepts=file["concepts"].tolist(), styles=file["styles"].tolist()
        )


def fit(image: Image.Image, size: int) -> np.ndarray:
    """Crop an RGBA image to its content and centre that, as large as it fits, in a square.

    Returns [size, size, 4] u8. Raises ValueError if the image is empty.
    """
    box = image.getchannel("A").point(lambda alpha: 255 * (alpha >= VISIBLE)).getbbox()
    if box is None:
        raise ValueError("the drawing is empty")
    scale = size / max(box[2] - box[0], box[3] - box[1])
    width, height = (max(1, round(scale * (box[i + 2] - box[i]))) for i in (0, 1))
    # Pillow premultiplies RGBA before it resamples: no dark fringes
    content = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
    square = Image.new("RGBA", (size, size))
    square.paste(content, ((size - width) // 2, (size - height) // 2))
    return np.asarray(square)


def _render(cache: Path, concepts: Mapping[str, str], size: int) -> Sprites:
    sets = {style: _read_set(cache, style) for style in STYLES}
    found = [
        (name, style, fit(_draw(sets[style], slug, size), size))
        for name, slug in concepts.items()
        for style in STYLES
    ]
    names, styles, drawings = zip(*found, strict=True)
    return Sprites(rgba=np.stack(drawings), concepts=list(names), styles=list(styles))


def _draw(icons: dict, slug: str, size: int) -> Image.Image:
    import resvg_py  # only the first run draws: later ones, and the tests, go without it

    icon = icons["icons"][slug]
    left, top, width, height = (
        icon.get(key, icons.get(key, default))
        for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )
    pixels = OVERSAMPLING * size
    png = resvg_py.svg_to_bytes(svg_string=svg, width=pixels, height=pixels, skip_system_fonts=True)
    return Image.open(io.BytesIO(png)).convert("RGBA")


def _read_set(cache: Path, style: str) -> dict:
    with tarfile.open(_archive(cache, *SETS[style])) as archive:
        return json.load(archive.extractfile("package/icons.json"))


def _archive(cache: Path, package: str, version: str) -> Path:
    return cache / f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _replace(path: Path, write) -> None:
    """Write a file beside `path` and rename it: readers never see half a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        write(file)
    os.replace(file.name, path)
