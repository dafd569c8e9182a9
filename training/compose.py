"""Captioned pictures without end: sprites placed on backgrounds, described in words."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from training import captions
from training.captions import Scene, pick
from training.grammar import is_countable
from training.sprites import Sprites

# Side of an object relative to the picture's, drawn evenly from these
SCALES = {"normal": (0.75, 0.875), "small": (0.375,), "big": (1.0,)}
SEVERAL_SCALE = 0.47
# The part of the picture by which objects are shifted: one latent. The UNet, which sees latents
# only, then need not learn every thing at every offset within one.
SHIFT = 1 / 8
UNSEEN_ONE_IN = 8
SPRITES_KEPT = 16_384  # resized sprites in memory: some 1 MB a thing at 128x128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of the kinds of picture (their sum is 1), and chances of what any may have."""

    single: float = 0.8
    small: float = 0.1
    big: float = 0.1
    beside: float = 0.0  # two things, one to the left of the other
    stacked: float = 0.0  # two things, one above the other
    copies: float = 0.0  # two or three of one thing
    upside_down: float = 0.0
    gradient: float = 0.0  # chance of a background that changes from one colour to another
    recoloured: float = 0.0  # chance that a single thing is painted
    default_background: float = 0.25  # chance of captions.DEFAULT_BACKGROUND

    def kinds(self) -> dict[str, float]:
        """Return the shares by kind. Raises ValueError if their sum is not 1."""
        names = ("single", "small", "big", "beside", "stacked", "copies", "upside_down")
        shares = {name: getattr(self, name) for name in names}
        if abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of a Mix add up to {sum(shares.values())}, not to 1")
        return shares


def is_unseen(scene: Scene) -> bool:
    """Whether `scene` is kept from training, so that an evaluation can ask for what is new.

    By a checksum of names: one in UNSEEN_ONE_IN of all pairs of things, of all counted things, and
    of all single things on a background (other than the default) or painted in a colour.
    """
    first = scene.concepts[0]
    if len(scene.concepts) > 1:
        combinations = [sorted(scene.concepts)]
    elif scene.count > 1:
        combinations = [(first, str(scene.count))]
    else:
        combinations = [(first, f"{scene.paint} paint")] if scene.paint else []
        if scene.background != captions.DEFAULT_BACKGROUND:
            combinations.append((first, scene.background))
    return any(zlib.crc32("|".join(names).encode()) % UNSEEN_ONE_IN == 0 for names in combinations)


class Composer:
    """Composer of pictures of [size, size, 3] u8 with a caption and the facts behind it.

    Everything random comes from the generator that is passed in: the same generator state
    gives the same picture and words.
    """

    def __init__(self, sprites: Sprites, size: int, mix: Mix, unseen: bool | None = False):
        """Choose among scenes by `unseen`: none that is_unseen, nothing else, or (None) any."""
        self.sprites = sprites
        self.size = size
        self.mix = mix
        self._unseen = unseen
        shares = mix.kinds()
        self._kinds = list(shares)
        self._limits = np.cumsum(list(shares.values()))
        things = zip(sprites.concepts, sprites.styles, strict=True)
        self._index = {thing: index for index, thing in enumerate(things)}
        self._concepts = list(dict.fromkeys(sprites.concepts))
        self._styles = list(dict.fromkeys(sprites.styles))
        self._resized = functools.lru_cache(maxsize=SPRITES_KEPT)(self._resize)

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, str, Scene]:
        """Draw one picture [size, size, 3] u8, its caption, and its scene."""
        scene = self.scene(rng)
        picture = self.draw(scene, rng)
        return picture, captions.caption(scene, rng), scene

    def batch(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, list[str]]:
        """Draw n pictures [n, size, size, 3] u8 and their captions."""
        pictures = np.empty((n, self.size, self.size, 3), np.uint8)
        texts = []
        for index in range(n):
            pictures[index], text, _ = self.sample(rng)
            texts.append(text)
        return pictures, texts

    def scene(self, rng: np.random.Generator) -> Scene:
        """Choose what to draw."""
        while True:
            scene = self._scene(rng)
            if self._unseen in (None, is_unseen(scene)):
                return scene

    def _scene(self, rng: np.random.Generator) -> Scene:
        kind = self._kinds[min(np.searchsorted(self._limits, rng.random()), len(self._kinds) - 1)]
        concept = pick(rng, self._concepts)
        style = pick(rng, self._styles)
        chosen = {"concepts": (concept,), "style": style, "background": self._background(rng)}
        if rng.random() < self.mix.gradient:
            chosen["gradient"] = _pick_other(rng, list(captions.BACKGROUNDS), chosen["background"])
        if kind in ("beside", "stacked"):
            second = _pick_other(rng, self._concepts, concept)
            relation = "left of" if kind == "beside" else "above"
            return Scene(**chosen | {"concepts": (concept, second)}, count=2, relation=relation)
        if kind == "copies" and is_countable(concept):
            return Scene(**chosen, count=pick(rng, (2, 3)))
        if rng.random() < self.mix.recoloured and concept not in captions.UNPAINTED:
            chosen["paint"] = pick(rng, list(captions.PAINTS))
        size = kind if kind in ("small", "big") else "normal"
        return Scene(**chosen, size=size, upside_down=kind == "upside_down")

    def draw(self, scene: Scene, rng: np.random.Generator) -> np.ndarray:
        """Draw `scene` [size, size, 3] u8, with small shifts of place and scale from rng."""
        picture = self._canvas(scene)
        centres, scales = _layout(scene)
        pixels = round(self.size * pick(rng, scales))
        # Two are told apart on one axis, three on both, and keep their places there
        kept = {1: (), 2: (1,) if scene.relation == "above" else (0,), 3: (0, 1)}[scene.count]
        for index, centre in enumerate(centres):
            concept = scene.concepts[index % len(scene.concepts)]
            sprite = self._resized(self._index[concept, scene.style], pixels)
            if scene.upside_down:
                sprite = sprite[::-1]
            if scene.paint is not None:
                sprite = paint(sprite, captions.PAINTS[scene.paint])
            corner = [round(self.size * place - pixels / 2) for place in centre]
            for axis in (0, 1):
                if axis not in kept:
                    corner[axis] = self._shifted(corner[axis], pixels, rng)
            over(picture, sprite, *corner)
        return picture

    def _shifted(self, begin: int, pixels: int, rng: np.random.Generator) -> int:
        """Return where an object begins, at `begin` or a little before or behind."""
        step = round(SHIFT * self.size)
        inside = [
            begin + shift for shift in (-step, 0, step) if 0 <= begin + shift <= self.size - pixels
        ]
        return pick(rng, inside or [begin])

    def _background(self, rng: np.random.Generator) -> str:
        if rng.random() < self.mix.default_background:
            return captions.DEFAULT_BACKGROUND
        return _pick_other(rng, list(captions.BACKGROUNDS), captions.DEFAULT_BACKGROUND)

    def _canvas(self, scene: Scene) -> np.ndarray:
        upper = np.array(captions.BACKGROUNDS[scene.background])
        canvas = np.empty((self.size, self.size, 3), np.uint8)
        if scene.gradient is None:
            canvas[:] = upper
        else:
            lower = np.array(captions.BACKGROUNDS[scene.gradient])
            weight = np.linspace(0, 1, self.size)[:, None, None]
            canvas[:] = np.rint(upper * (1 - weight) + lower * weight)
        return canvas

    def _resize(self, index: int, pixels: int) -> np.ndarray:
        return premultiplied(self.sprites.rgba[index], pixels)


def premultiplied(rgba: np.ndarray, pixels: int) -> np.ndarray:
    """Resize straight-alpha [S, S, 4] u8 to premultiplied [pixels, pixels, 4] u8, antialiased.

    Colours are weighted by alpha before neighbours are averaged, so what hides under
    transparent pixels (mostly black) never darkens an edge.
    """
    image = Image.fromarray(rgba).convert("RGBa")
    return np.asarray(image.resize((pixels, pixels), Image.Resampling.HAMMING))


def over(picture: np.ndarray, sprite: np.ndarray, left: int, top: int) -> None:
    """Lay a premultiplied sprite [P, P, 4] u8 over picture [S, S, 3] u8, in place, clipped."""
    height, width = picture.shape[:2]
    x0, x1 = max(left, 0), min(left + sprite.shape[1], width)
    y0, y1 = max(top, 0), min(top + sprite.shape[0], height)
    if x0 >= x1 or y0 >= y1:
        return
    part = sprite[y0 - top : y1 - top, x0 - left : x1 - left]
    seen = 255 - part[..., 3:].astype(np.uint16)
    under = (picture[y0:y1, x0:x1] * seen + 127) // 255
    picture[y0:y1, x0:x1] = np.minimum(part[..., :3] + under, 255)


def paint(sprite: np.ndarray, colour: Sequence[int]) -> np.ndarray:
    """Give a premultiplied sprite [P, P, 4] u8 another colour, keeping shades and grey parts.

    The object's mean lightness becomes `colour`, darker parts go to black, lighter to white.
    Parts without colour (wheels, windows) stay, unless half of the object is grey.
    """
    alpha = sprite[..., 3:].astype(np.float32) / 255
    straight = sprite[..., :3] / np.maximum(alpha, 1 / 255) / 255
    low, high = straight.min(-1, keepdims=True), straight.max(-1, keepdims=True)
    coloured = np.clip((high - low) * 4 - 0.4, 0, 1)
    if (coloured * alpha).sum() < 0.5 * alpha.sum():
        coloured = np.ones_like(coloured)
    light = (low + high) / 2
    middle = (light * coloured * alpha).sum() / (coloured * alpha).sum()
    target = np.array(colour, np.float32) / 255
    dark = target * np.clip(light / middle, 0, 1)
    shade = dark + (1 - target) * 0.7 * np.clip((light - middle) / (1 - middle + 1e-6), 0, 1)
    rgb = (straight + coloured * (shade - straight)) * alpha
    rgb = np.rint(np.clip(rgb, 0, 1) * 255).astype(np.uint8)
    return np.concatenate([rgb, sprite[..., 3:]], -1)


def _layout(scene: Scene) -> tuple[tuple[tuple[float, float], ...], tuple[float, ...]]:
    """Return the objects' centres, relative to the picture, and the scales to choose from.

    Several of them are as large as each other and whole latents apart, so that the UNet knows the
    things of three from those of two.
    """
    if scene.relation == "above":
        return ((0.5, 0.25), (0.5, 0.75)), (SEVERAL_SCALE,)
    if scene.count == 2:
        return ((0.25, 0.5), (0.75, 0.5)), (SEVERAL_SCALE,)
    if scene.count == 3:
        return ((0.5, 0.25), (0.25, 0.75), (0.75, 0.75)), (SEVERAL_SCALE,)
    return ((0.5, 0.5),), SCALES[scene.size]


def _pick_other(rng: np.random.Generator, options: Sequence, excluded):
    """Return one of `options`, each with equal chance, but never `excluded`."""
    while True:
        option = pick(rng, options)
        if option != excluded:
            return option
