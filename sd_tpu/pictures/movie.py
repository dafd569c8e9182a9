"""Pictures one after the other, as a file that moves."""

import shutil
import subprocess
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

KINDS = ("webp", "gif", "mp4")
MILLISECONDS = 120  # for which each picture is seen, unless somebody says otherwise


def write_movie(pictures: Sequence[np.ndarray], file: Path, milliseconds: int) -> None:
    """Write pictures uint8 [H, W, 3] of one size as a movie.

    It plays again and again if its kind can say so.

    Args:
        pictures: in order.
        file: ends in one of KINDS.
        milliseconds: for each picture.

    Raises:
        ValueError: it is an MP4, and ffmpeg is not installed.
        OSError: ffmpeg failed, or the file cannot be written.
    """
    if file.suffix == ".mp4":
        _write_mp4(pictures, file, milliseconds)
        return
    first, *others = map(Image.fromarray, pictures)
    file_bytes, kind = BytesIO(), file.suffix[1:].upper()
    options = dict(quality=90, method=4) if kind == "WEBP" else {}
    first.save(
        file_bytes,
        kind,
        save_all=True,
        append_images=others,
        duration=milliseconds,
        loop=0,
        **options,
    )
    file.write_bytes(file_bytes.getvalue())


def kinds_here() -> list[str]:
    """Return those of KINDS that can be written: without ffmpeg not all."""
    return [kind for kind in KINDS if kind != "mp4" or shutil.which("ffmpeg")]


def find_ffmpeg() -> str:
    """Return ffmpeg's path; raises ValueError if it is not installed."""
    if not (program := shutil.which("ffmpeg")):
        raise ValueError("An MP4 needs ffmpeg, which is not installed here; webp and gif do not.")
    return program


def _write_mp4(pictures: Sequence[np.ndarray], file: Path, milliseconds: int) -> None:
    height, width, _ = pictures[0].shape
    # Most players know nothing but half the colours, and those only of even sides.
    command = [
        find_ffmpeg(),
        "-loglevel",
        "error",
        "-y",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{width}x{height}",
        "-r",
        str(1000 / milliseconds),
        "-i",
        "-",
        "-vf",
        "pad=ceil(iw/2)*2:ceil(ih/2)*2",
        "-pix_fmt",
        "yuv420p",
        str(file),
    ]
    done = subprocess.run(
        command, input=b"".join(map(np.ndarray.tobytes, pictures)), capture_output=True, check=False
    )
    if done.returncode:
        file.unlink(missing_ok=True)
        raise OSError(f"ffmpeg failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
