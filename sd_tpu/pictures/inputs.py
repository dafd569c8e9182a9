"""Pictures that somebody hands in: read with care, fitted to a size, and kept where a mask says so.

What cannot be served is refused by what a file's first bytes say, before anything of it is decoded.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Self

import lazy_loader
import numpy as np
from PIL import Image, ImageOps

from sd_tpu.pictures.detectors import detected
from sd_tpu.pictures.images import MAX_FILE_BYTES, SIGNATURE, open_picture, read_exif
from sd_tpu.sentence import Sentence
from sd_tpu.settings import Picture, RequestError

# For those who hand pictures in: it takes half a second to import.
ndimage = lazy_loader.load("scipy.ndimage", suppress_warning=True)
MAX_PIXELS = 1 << 25  # of a picture that is handed in
MAX_SIDE = 1 << 16  # pixels: what is longer takes minutes to be made smaller, and shows nothing
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ORIENTATION = 0x0112  # EXIF's tag
ON_THEIR_SIDE = range(5, 9)  # its values of pictures that are stored so
PNG_DEPTH = 24  # where a PNG file says how many bits its numbers have
FILL_BLUR = 8  # pixels: deviation of what is blurred into the white of a mask
LONGEST = 16  # times as long as wide: of longer reference pictures the ends are cut off first
EDITED_AREA = 1 << 20  # pixels of a reference picture of models that edit; larger is made smaller
EDITED_SIDE, EDITED_RATIO = 64, 8  # of them: pixels of a side at least, times as long at most
WHITE, BLACK = (255, 255, 255, 255), (0, 0, 0, 255)
HALF = 128  # more opaque than that is painted


class Input:
    """A picture that was handed in; it is decoded whenever its pixels are asked for.

    Attributes:
        name: by which requests call it: a hash of its content.
        size: width and height as it is looked at.
        bytes: that its file has.
    """

    def __init__(self, file: bytes, whose: str = ""):
        """Read the header of a file.

        Args:
            file: a PNG, JPEG, WebP, GIF or BMP.
            whose: its name in error messages.

        Raises:
            RequestError: it is no picture that can be drawn on.
        """
        self._whose = whose or Sentence("The picture")
        self.name = hashlib.sha256(file).hexdigest()
        self._file, self.bytes = file, len(file)
        if len(file) > MAX_FILE_BYTES:
            raise RequestError("The file is larger than {limit} MiB.", limit=MAX_FILE_BYTES >> 20)
        with self._opened() as image:
            self._check(image)
            self.size = image.size[::-1] if _lies_on_its_side(image) else image.size
            if image.format == "PNG":
                image.verify()  # reads it to its end, and decodes nothing

    @classmethod
    def of_pixels(cls, pixels: np.ndarray) -> Self:
        """Make an input of a picture uint8 [H, W, 3], or in grey [H, W]."""
        file = BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        return cls(file.getvalue())

    def on_white(self) -> Image.Image:
        """Return the picture in RGB, white where it is transparent."""
        return _over(self._image, WHITE).convert("RGB")

    def as_mask(self) -> Image.Image:
        """Return the picture in grey, black where it is transparent.

        A mask painted in one colour on clear ground is white, whatever the colour.
        """
        image = self._image
        alpha = image.getchannel("A")
        if alpha.getextrema()[0] <= HALF and _is_of_one_colour(image):  # ty: ignore[unsupported-operator]
            return alpha
        return _over(image, BLACK).convert("L")

    def as_a1111_mask(self) -> Image.Image:
        """Return the picture in grey as A1111 takes masks.

        Where some of it is transparent, opaque parts are white and the rest black.
        """
        image = self._image
        alpha = image.getchannel("A")
        if alpha.getextrema() == (255, 255):
            return image.convert("L")
        return alpha.point(lambda level: 255 * (level > HALF))

    def transparency(self) -> Image.Image:
        """Return a mask in grey, white where the picture is transparent."""
        return ImageOps.invert(self._image.getchannel("A"))

    @property  # kept by nobody: decoded it takes up to 128 MiB
    def _image(self) -> Image.Image:
        with self._opened() as image:
            upright = ImageOps.exif_transpose(image) if _begins_with_exif(image) else image
            return upright.convert("RGBA")

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """Open the file with Pillow; raises RequestError where that fails."""
        head = self._file[:1000].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if head.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
            raise RequestError(
                "{whose} is a drawing of lines (SVG); save it as PNG.", whose=self._whose
            )
        try:
            with open_picture(self._file, FORMATS) as image:
                _keep_orientation(image)
                yield image
        except RequestError:  # what has been found by whoever looks at it
            raise
        except Image.UnidentifiedImageError:
            raise RequestError(
                "{whose} is in no format that is read here; save it as PNG.", whose=self._whose
            ) from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise RequestError("{whose} has far too many pixels.", whose=self._whose) from None
        except Exception:  # Pillow's decoders raise whatever a damaged file leads them into
            raise RequestError(
                "{whose} is damaged: its file is not whole.", whose=self._whose
            ) from None

    def _check(self, image: Image.Image) -> None:
        whose, (width, height) = self._whose, image.size
        if width * height > MAX_PIXELS:
            raise RequestError(
                "{whose} has {width}x{height} pixels; at most {limit} pixels are accepted.",
                whose=whose,
                width=width,
                height=height,
                limit=MAX_PIXELS,
            )
        if max(width, height) > MAX_SIDE:
            raise RequestError(
                "{whose} has {width}x{height} pixels; at most {limit} in a row or a "
                "column are accepted.",
                whose=whose,
                width=width,
                height=height,
                limit=MAX_SIDE,
            )
        # A camera's JPEG may hold smaller copies of the photo behind it (MPO).
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise RequestError("{whose} moves; save one of its frames alone.", whose=whose)
        if image.mode in ("CMYK", "YCCK", "LAB"):
            raise RequestError(
                "{whose} has the colours of print (CMYK); save it with those of a screen (RGB).",
                whose=whose,
            )
        deep = self._file.startswith(SIGNATURE) and self._file[PNG_DEPTH] > 8
        if deep or image.mode.startswith(("I", "F")):
            raise RequestError("{whose} has 16 bits for each colour; save it with 8.", whose=whose)


def _lies_on_its_side(image: Image.Image) -> bool:
    return _begins_with_exif(image) and image.getexif().get(ORIENTATION) in ON_THEIR_SIDE


def _begins_with_exif(image: Image.Image) -> bool:
    """Whether EXIF is looked at. In a PNG that is not decoded yet, only what precedes the pixels:
    Pillow would decode it all to find more, and the size must be known before."""
    return image.format != "PNG" or "exif" in image.info


def _keep_orientation(image: Image.Image) -> None:
    """Have Pillow read nothing else of EXIF, which would take it long."""
    if exif := image.info.get("exif"):
        outer, _ = read_exif(exif)
        kept = Image.Exif()
        kept.update({ORIENTATION: outer[ORIENTATION]} if ORIENTATION in outer else {})
        image.info["exif"] = kept.tobytes()
        image.getexif()  # which Pillow does once


def _is_of_one_colour(image: Image.Image) -> bool:
    """Whether all that is opaque in an RGBA picture is."""
    pixels = np.asarray(image)
    painted = pixels[pixels[..., 3] > HALF]
    return bool((painted == painted[:1])[:, :3].all())


def _over(image: Image.Image, shade: tuple[int, int, int, int]) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, shade), image)


@dataclasses.dataclass(frozen=True, eq=False)
class Canvas:
    """A start picture at the size of what is drawn.

    Attributes:
        pixels: uint8 [H, W, 3].
        mask: float32 [H, W], 1 where it is drawn anew and 0 where it is kept; None is all of it.
        blur: pixels over which what is new fades in, inside the edges of the mask.
    """

    pixels: np.ndarray
    mask: np.ndarray | None = None
    blur: int = 0

    @classmethod
    def of(cls, picture: Picture, inputs: Mapping[str, Input]) -> Self | None:
        """Return a picture's start and mask from inputs by name; None without a start.

        Raises:
            RequestError: something is missing or damaged, does not belong together, or leaves
                nothing to draw.
        """
        if not picture.init_image:
            return None
        start, mask = find_input(inputs, picture.init_image), find_input(inputs, picture.mask)
        assert start is not None  # it has a name
        if mask and mask.size != start.size:
            raise RequestError(
                "The mask has {mask} pixels and the picture {picture}: both should "
                "have the same size.",
                mask="x".join(map(str, mask.size)),
                picture="x".join(map(str, start.size)),
            )
        drawn = mask.as_mask() if mask else None
        if drawn and not drawn.getbbox():
            raise RequestError(
                "The mask is black everywhere: there is nothing to draw; what is "
                "drawn anew is white in it."
            )
        return cls._fitted(start.on_white(), drawn, picture)

    @classmethod
    def _fitted(cls, start: Image.Image, mask: Image.Image | None, picture: Picture) -> Self:
        size = picture.width, picture.height
        if picture.fit == "extend" or (picture.fit == "contain" and mask):
            mask = mask or Image.new("L", start.size, 0)
            drawn = _fit(mask, size, picture.fit, 255)
        else:
            drawn = mask and _fit(mask, size, picture.fit, 255)
        if drawn and not drawn.getbbox():
            if picture.mask:
                raise RequestError(
                    "At this size and fit nothing that is white in the mask is "
                    "left: there is nothing to draw."
                )
            raise RequestError(
                "There is nothing to draw: the picture fills the whole canvas, and "
                "no mask says what should change."
            )
        weights = None if drawn is None else np.asarray(drawn, np.float32) / 255
        pixels = np.asarray(_fit(start, size, picture.fit, None))
        return cls(pixels, weights, picture.mask_blur)

    def composed(self, drawn: np.ndarray) -> np.ndarray:
        """Combine drawn pixels, where the mask says so, with the start picture elsewhere.

        Args:
            drawn: uint8 [H, W, 3], or a preview that is smaller by a whole factor.

        Returns:
            Pixels of the same shape; at full size those that are black in the mask are exactly the
                start's.
        """
        if self.mask is None:
            return drawn
        (h, w, _), times = drawn.shape, len(self.pixels) // len(drawn)
        weight, kept = (
            x.reshape(h, times, w, times, -1).mean(axis=(1, 3)) for x in (self._weight, self.pixels)
        )
        return np.round(weight * drawn + (1 - weight) * kept).astype(np.uint8)

    @functools.cached_property
    def _weight(self) -> np.ndarray:
        """The mask, faded in from its edges: float32 [H, W]. What is black in it stays 0."""
        assert self.mask is not None
        framed = np.pad(self.mask > 0, 1, mode="edge")  # the canvas ends at no edge of the mask
        inside = ndimage.distance_transform_edt(framed)[1:-1, 1:-1] if not framed.all() else np.inf
        return np.minimum(self.mask, inside / (self.blur + 1)).astype(np.float32)


def extension(pixels: np.ndarray, sides: Sequence[int]) -> tuple[Input, Input]:
    """Return a larger canvas with a picture on it, and the mask of what is new there.

    Args:
        pixels: uint8 [H, W, 3].
        sides: pixels to the left, above, to the right and below.
    """
    left, top, right, bottom = sides
    beside = ((top, bottom), (left, right))
    canvas = np.pad(pixels, (*beside, (0, 0)), mode="edge")
    mask = np.pad(np.zeros(pixels.shape[:2], np.uint8), beside, constant_values=255)
    return Input.of_pixels(canvas), Input.of_pixels(mask)


def control_pixels(picture: Picture, inputs: Mapping[str, Input]) -> np.ndarray:
    """Return the control picture for a ControlNet: uint8 [H, W, 3] at the size of the picture.

    Raises RequestError if it is missing or damaged.
    """
    control = inputs.get(picture.control_image)
    if control is None:
        raise RequestError("The control picture is not here any more; please hand it in again.")
    return detected(fitted(control, picture, picture.fit), picture.detector)


def reference_pixels(name: str, inputs: Mapping[str, Input], side: int) -> np.ndarray:
    """Return the reference picture of this name for an IP-Adapter: uint8 [side, side, 3].

    It is the middle of the picture at the size to which transformers' CLIPImageProcessor brings it.
    Raises RequestError if it is missing or damaged.
    """
    image = _reference(name, inputs).on_white()
    most = LONGEST * min(image.size)
    image = _middle(image, *(min(length, most) for length in image.size))
    size = [side * length // min(image.size) for length in image.size]
    return np.asarray(_middle(image.resize(size, Image.Resampling.BICUBIC), side, side))


def edited_pixels(name: str, inputs: Mapping[str, Input], unit: int) -> np.ndarray:
    """Return the reference picture of this name for a model that edits: uint8 [H, W, 3].

    As in diffusers' Flux2KleinPipeline it is the middle of the picture, as large as multiples of
    `unit` allow, made smaller where it has more than EDITED_AREA pixels.

    Raises:
        RequestError: it is missing, damaged, too small or too long.
    """
    reference = _reference(name, inputs)
    width, height = reference.size
    if min(width, height) < EDITED_SIDE:
        raise RequestError(
            "The reference picture has {width}x{height} pixels; this model takes those with "
            "{least} or more on either side.",
            setting="reference",
            width=width,
            height=height,
            least=EDITED_SIDE,
        )
    if max(width, height) > EDITED_RATIO * min(width, height):
        raise RequestError(
            "The reference picture has {width}x{height} pixels; this model takes those that are "
            "at most {most} times as long as wide.",
            setting="reference",
            width=width,
            height=height,
            most=EDITED_RATIO,
        )
    image = reference.on_white()
    if width * height > EDITED_AREA:
        scale = math.sqrt(EDITED_AREA / (width * height))
        size = int(width * scale), int(height * scale)
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(_middle(image, *(length // unit * unit for length in image.size)))


def _reference(name: str, inputs: Mapping[str, Input]) -> Input:
    """Return a reference picture; raises RequestError if it is missing."""
    if name not in inputs:
        raise RequestError("The reference picture is not here any more; please hand it in again.")
    return inputs[name]


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def fitted(given: Input, picture: Picture, fit: str) -> np.ndarray:
    """Return an input at the size of a picture, uint8 [H, W, 3], by a value of `fit`."""
    return np.asarray(_fit(given.on_white(), (picture.width, picture.height), fit, None))


@dataclasses.dataclass(frozen=True, eq=False)
class Closeup:
    """The part of a picture around the white of its mask, to be drawn alone, and larger.

    Attributes:
        pixels: the whole picture, uint8 [H, W, 3].
        mask: uint8 [H, W].
        rows: of the part, which may go beyond the picture's borders: its edges are continued.
        columns: of the part, which may go beyond the borders as well.
    """

    pixels: np.ndarray
    mask: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, pixels: np.ndarray, mask: np.ndarray, ratio: float, padding: int) -> Self:
        """Return the part around the white of a mask, with at least `padding` pixels around it.

        Args:
            pixels: of the picture.
            mask: of the picture; some of it is white.
            ratio: of the part's width to its height.
            padding: in pixels.

        Raises:
            RequestError: the part has more than MAX_PIXELS.
        """
        ys, xs = np.nonzero(mask)
        height, width = (np.ptp(each) + 1 + 2 * padding for each in (ys, xs))
        height, width = max(height, round(width / ratio)), max(width, round(height * ratio))
        if height * width > MAX_PIXELS:
            raise RequestError(
                "What the mask shows is too long and narrow to be drawn alone; draw "
                "the whole picture (inpaint_full_res=0)."
            )
        top, left = (ys.min() + ys.max() + 1 - height) // 2, (xs.min() + xs.max() + 1 - width) // 2
        return cls(pixels, mask, np.arange(top, top + height), np.arange(left, left + width))

    def part(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the part's pixels uint8 [h, w, 3] and mask uint8 [h, w]."""
        height, width = self.mask.shape
        place = np.ix_(self.rows.clip(0, height - 1), self.columns.clip(0, width - 1))
        return self.pixels[place], self.mask[place]

    def with_part(self, drawn: np.ndarray) -> np.ndarray:
        """Return the whole picture with a drawn part, uint8 of any size, in the mask's white."""
        size = len(self.columns), len(self.rows)
        part = np.asarray(Image.fromarray(drawn).resize(size, Image.Resampling.LANCZOS))
        height, width = self.mask.shape
        rows, columns = (
            (each >= 0) & (each < end) for each, end in ((self.rows, height), (self.columns, width))
        )
        place, whole = np.ix_(self.rows[rows], self.columns[columns]), self.pixels.copy()
        whole[place] = np.where(
            self.mask[place][..., None], part[np.ix_(rows, columns)], whole[place]
        )
        return whole


def filled_in(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Fill the white of a mask uint8 [H, W] with its blurred surroundings in uint8 [H, W, 3]."""
    if mask.all():
        return pixels
    nearest = ndimage.distance_transform_edt(mask, return_distances=False, return_indices=True)
    around = ndimage.gaussian_filter(pixels[tuple(nearest)], (FILL_BLUR, FILL_BLUR, 0))
    return np.where(mask[..., None], around, pixels)


def find_input(inputs: Mapping[str, Input], name: str) -> Input | None:
    """Return the input of this name, None for no name; raises RequestError if it is missing."""
    if name and name not in inputs:
        raise RequestError(
            "The start picture or its mask is not here any more; please hand it in again."
        )
    return inputs[name] if name else None


def _fit(image: Image.Image, size: tuple[int, int], fit: str, border: int | None) -> Image.Image:
    """Bring an image to this width and height.

    Args:
        image: a picture or a mask.
        size: width and height.
        fit: a value of the setting.
        border: the shade of a mask's border; None continues a picture's edges.
    """
    # Lanczos is sharper, but rings: what is black in a mask would not stay so.
    resampling = Image.Resampling.LANCZOS if border is None else Image.Resampling.BILINEAR
    match fit:
        case "stretch":
            return image.resize(size, resampling)
        case "cover":
            return ImageOps.fit(image, size, resampling)
    if fit == "contain" or image.width > size[0] or image.height > size[1]:
        scale = min(size[0] / image.width, size[1] / image.height)
        image = image.resize([max(1, round(side * scale)) for side in image.size], resampling)
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    around = [(top, size[1] - image.height - top), (left, size[0] - image.width - left)]
    around += [(0, 0)] * (len(image.getbands()) > 1)
    how: dict[str, Any] = (
        dict(mode="edge") if border is None else dict(mode="constant", constant_values=border)
    )
    return Image.fromarray(np.pad(np.asarray(image), around, **how))
