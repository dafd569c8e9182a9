"""Overlapping tiles that draw a picture too large to be drawn at once.

Each is an ordinary picture in an ordinary slot; they are blended when all are there. A tile begins
with its part of the enlarged start picture, under its part of the whole's noise, so that neighbours
draw nearly the same where they overlap. This needs no program of its own, and as much memory on the
devices as a picture of a tile's size.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

import numpy as np

from sd_tpu.models.tiles import weights

OVERLAP = 4  # neighbours share this part of a tile's side, or more: a quarter


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Where the tiles of a picture lie, row by row.

    Attributes:
        size: height and width of a tile, in pixels.
        rows: where tiles begin from above, in pixels.
        columns: where they begin from the left.
    """

    size: tuple[int, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, height: int, width: int, size: tuple[int, int], unit: int) -> Self:
        """Return as few tiles as cover a picture.

        Args:
            height: of the picture, in pixels.
            width: of the picture, in pixels.
            size: of the tiles, which are no larger than the picture.
            unit: pixels along a side for each latent, of which all sides are multiples.
        """
        return cls(size, _starts(height, size[0], unit), _starts(width, size[1], unit))

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    def part(self, number: int, whole: np.ndarray, unit: int = 1) -> np.ndarray:
        """Return the part of the whole [H, W, ...] that a tile covers.

        Args:
            number: of the tile.
            whole: an array over the picture.
            unit: pixels along a side for each element of it.
        """
        row, column = divmod(number, len(self.columns))
        return whole[
            tuple(
                slice(start // unit, (start + side) // unit)
                for start, side in zip(
                    (self.rows[row], self.columns[column]), self.size, strict=True
                )
            )
        ]

    def blended(self, tiles: Mapping[int, np.ndarray]) -> np.ndarray:
        """Blend all tiles, by their numbers, into the whole picture uint8 [H, W, 3].

        Where tiles overlap, each fades out linearly.
        """
        vertical, horizontal = (
            weights(starts, side, 1)
            for starts, side in zip((self.rows, self.columns), self.size, strict=True)
        )
        shape = self.rows[-1] + self.size[0], self.columns[-1] + self.size[1], 1
        drawn, total = np.zeros((*shape[:2], 3), np.float32), np.zeros(shape, np.float32)
        for number in range(len(self)):
            row, column = divmod(number, len(self.columns))
            weight = np.outer(vertical[row], horizontal[column])[..., None]
            for whole, tile in ((drawn, weight * tiles[number]), (total, weight)):
                part = self.part(number, whole)
                part += tile
        drawn /= total  # 1 but for tiles that reach beyond their neighbours
        return np.round(drawn).astype(np.uint8)


def _starts(side: int, length: int, unit: int) -> tuple[int, ...]:
    overlap = length // OVERLAP
    count = math.ceil((side - overlap) / (length - overlap))
    return tuple(round(start / unit) * unit for start in np.linspace(0, side - length, count))
