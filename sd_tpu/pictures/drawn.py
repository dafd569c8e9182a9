"""Finished pictures as PIL images that know how they were drawn."""

from os import PathLike
from typing import IO, Any

import numpy as np
from PIL import Image

from sd_tpu.pictures.images import KEY, png_info
from sd_tpu.settings import Picture


class DrawnImage(Image.Image):
    """A PIL image with the settings it was drawn with.

    A PNG file that it is saved to carries them, as the page's own files do; so does
    `info["parameters"]`, which Pillow copies to what is made of the image. What `resize`, `crop`
    and the like return is an ordinary PIL image.

    Attributes:
        settings: all that the picture depends on. Drawn again, it is the same, pixel by pixel.
        index: of the picture's prompt among those that were asked for.
        unsafe: whether the model's safety checker flagged the picture, which is blurred then.
    """

    settings: Picture
    index: int
    unsafe: bool

    def __init__(
        self,
        pixels: np.ndarray,
        settings: Picture,
        *,
        parameters: str,
        index: int = 0,
        unsafe: bool = False,
    ):
        """Copy pixels.

        Args:
            pixels: uint8 [H, W, 3].
            settings: of the picture.
            parameters: the same as the text of PNG files, as `format_parameters` returns it.
            index: of its prompt.
            unsafe: whether it was flagged.
        """
        super().__init__()
        drawn = Image.fromarray(pixels)
        drawn.info[KEY] = parameters
        self.__setstate__([*drawn.__getstate__(), settings, index, unsafe])

    def save(
        self,
        fp: str | bytes | PathLike[str] | PathLike[bytes] | IO[bytes],
        format: str | None = None,
        **params: Any,
    ) -> None:
        """Save the image as `PIL.Image.Image.save` does; a PNG file carries the settings."""
        super().save(fp, format, **{"pnginfo": png_info(self.info[KEY]), **params})

    def __getstate__(self) -> list[Any]:
        return [*super().__getstate__(), self.settings, self.index, self.unsafe]

    def __setstate__(self, state: list[Any]) -> None:
        *image, self.settings, self.index, self.unsafe = state
        super().__setstate__(image)
