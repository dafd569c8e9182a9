"""Pictures that visitors hand in, each for the browser that did; they are gone with the server."""

import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np
from PIL import Image

from sd_tpu.pictures.images import data_url, enlarged
from sd_tpu.pictures.inputs import Input

SHOWN = 256  # pixels of a side of what is shown of one
MAX_KEPT = 128  # of a browser, what it used last: eight boxes may have ten references each
MAX_BYTES = 1 << 29  # of all browsers
OVERHEAD = 1 << 12  # bytes that one takes beside its file and what is shown of it, or so
SIDE = 4096  # pixels, as large as Stable Diffusion draws by tiles: larger ones are made smaller
PAINTED = 1024, 512  # pixels of a side: at most and about at least, where a mask is painted


class Inputs:
    """Recent uploads."""

    def __init__(self):
        """Begin with nothing."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[Input, str]] = OrderedDict()

    def add(self, browser: str, given: Input) -> str:
        """Keep a picture for a browser; return its name. Raises RequestError if it is damaged."""
        if max(given.size) > SIDE:
            given = Input.of_pixels(np.asarray(_smaller(given.on_white(), SIDE)))
        shown = data_url(np.asarray(_smaller(given.on_white(), SHOWN)))
        with self._lock:
            self._kept[browser, given.name] = given, shown
            self._kept.move_to_end((browser, given.name))
            own = [key for key in self._kept if key[0] == browser]
            for key in own[:-MAX_KEPT]:
                del self._kept[key]
            bytes = sum(map(_bytes, self._kept.values()))
            while bytes > MAX_BYTES:
                bytes -= _bytes(self._kept.popitem(last=False)[1])
        return given.name

    def of(self, browser: str, used: Collection[str] = ()) -> dict[str, Input]:
        """Return this browser's uploads by name; those that are used stay longest."""
        with self._lock:
            self._use(browser, used)
            return {
                name: given for (whose, name), (given, _) in self._kept.items() if whose == browser
            }

    def shown(self, browser: str, used: Collection[str]) -> dict[str, str]:
        """Return small data URLs of those of the used pictures that are there."""
        with self._lock:
            return {name: self._kept[browser, name][1] for name in self._use(browser, used)}

    def _use(self, browser: str, names: Collection[str]) -> list[str]:
        """Mark pictures as used last, and return those that are there. Needs the lock."""
        there = [name for name in names if (browser, name) in self._kept]
        for name in there:
            self._kept.move_to_end((browser, name))
        return there


def _bytes(entry: tuple[Input, str]) -> int:
    input, shown = entry
    return input.bytes + len(shown) + OVERHEAD


def to_paint_on(given: Input) -> str:
    """Return the picture as a data URL in a size to paint a mask on."""
    most, least = PAINTED
    pixels = np.asarray(_smaller(given.on_white(), most))
    return data_url(enlarged(pixels, least))


def painted(mask: Input, start: Input) -> Input:
    """Return a mask in the size of its picture."""
    image = mask.as_mask().resize(start.size, Image.Resampling.BILINEAR)
    return Input.of_pixels(np.asarray(image))


def _smaller(image: Image.Image, side: int) -> Image.Image:
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image
