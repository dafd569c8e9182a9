"""Scenes, and how people ask for them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from training.concepts import SYNONYMS
from training.grammar import plural, with_article

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (16, 16, 20),
    "gray": (140, 144, 150),
    "red": (205, 40, 45),
    "orange": (245, 140, 40),
    "yellow": (252, 220, 80),
    "green": (60, 160, 80),
    "light blue": (150, 210, 245),
    "blue": (40, 90, 205),
    "purple": (125, 70, 180),
    "pink": (250, 165, 200),
    "brown": (120, 75, 45),
}
DEFAULT_BACKGROUND = "white"

# Colours an object can be given; the shading stays
PAINTS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 45),
    "orange": (245, 140, 40),
    "yellow": (245, 205, 50),
    "green": (70, 165, 75),
    "blue": (50, 105, 215),
    "purple": (130, 75, 190),
    "pink": (240, 125, 175),
    "brown": (135, 85, 50),
    "black": (45, 45, 50),
    "white": (235, 235, 235),
}
# A painted one would have another thing's name, as the red panda is no panda
UNPAINTED = frozenset({"panda", "bear", "polar bear", "fox", "heart", "rainbow"})

SPELLINGS = {"gray": ("gray", "grey")}
NUMBERS = {2: ("two", "two", "two", "2"), 3: ("three", "three", "three", "3")}
OPPOSITES = {"left of": "right of", "above": "below"}
RELATIONS = {  # the first concept of a scene stands in this relation to the second
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "underneath"),
}

STYLE_SAID = 2 / 3
STYLE_AS_ADJECTIVE = 1 / 3  # 'a 3d cat' among the ways to say it
BACKGROUND_SAID_WHEN_DEFAULT = 1 / 4
BARE = 1 / 12  # nothing but the name, when nothing else must be said
SYNONYM_USED = 1 / 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Contents of a picture, whether its caption says them or not.

    Attributes:
        concepts: from left to right or from above to below.
        relation: where the first concept is from the second ("left of" or "above"), or None.
        size: "normal", "small" or "big".
        gradient: the lower colour, None if plain.
    """

    concepts: tuple[str, ...]
    style: str
    background: str = DEFAULT_BACKGROUND
    gradient: str | None = None
    count: int = 1
    relation: str | None = None
    size: str = "normal"
    upside_down: bool = False
    paint: str | None = None


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """Return one of the ways to ask for `scene`; a style and a white background may go unsaid."""
    plain = scene.count == 1 and scene.size == "normal" and not scene.upside_down
    white = scene.background == DEFAULT_BACKGROUND and scene.gradient is None
    if plain and white and scene.paint is None and rng.random() < BARE:
        return _spoken(scene.concepts[0], rng)
    if rng.random() >= STYLE_SAID:
        prefixes = ("", "", "", "a drawing of ", "a picture of ", "an emoji of ")
        text = pick(rng, prefixes) + _subject(scene, rng)
    elif scene.relation is None and rng.random() < STYLE_AS_ADJECTIVE:
        text = _subject(scene, rng, scene.style)
    else:
        text = _styled(_subject(scene, rng), scene.style, rng)
    if not white or rng.random() < BACKGROUND_SAID_WHEN_DEFAULT:
        text += _background(scene, rng)
    return text


def _subject(scene: Scene, rng: np.random.Generator, style: str | None = None) -> str:
    if scene.relation is not None:
        return _pair(scene, rng)
    name = _spoken(scene.concepts[0], rng)
    words = [word for word in (style, scene.paint) if word]
    if scene.size != "normal":
        synonyms = {"small": ("small", "small", "tiny", "little"), "big": ("big", "big", "large")}
        words.insert(0, pick(rng, synonyms[scene.size]))
    if scene.count > 1:
        return " ".join([pick(rng, NUMBERS[scene.count]), *words, plural(name)])
    if scene.upside_down and rng.random() < 0.5:
        return with_article(" ".join(["upside down", *words, name]))
    return with_article(" ".join([*words, name])) + " upside down" * scene.upside_down


def _pair(scene: Scene, rng: np.random.Generator) -> str:
    first, second = (with_article(_spoken(name, rng)) for name in scene.concepts)
    kind = rng.random()
    if scene.relation == "left of" and kind < 0.35:
        return f"{first} {pick(rng, ('and', 'and', 'next to', 'beside'))} {second}"
    if kind < 0.7:
        return f"{first} {pick(rng, RELATIONS[scene.relation])} {second}"
    return f"{second} {pick(rng, RELATIONS[OPPOSITES[scene.relation]])} {first}"


def _styled(text: str, style: str, rng: np.random.Generator) -> str:
    forms = (
        f"{with_article(style)} drawing of {text}",
        f"{with_article(style)} picture of {text}",
        f"{text} in {style} style",
    )
    return pick(rng, forms)


def _background(scene: Scene, rng: np.random.Generator) -> str:
    if scene.gradient is not None:
        colours = f"{_colour(scene.background, rng)} to {_colour(scene.gradient, rng)} gradient"
        return pick(rng, (f" on {with_article(colours)}", f", {colours} background"))
    colour = _colour(scene.background, rng)
    forms = (
        f" on {with_article(colour)} background",
        f" on {with_article(colour)} background",
        f" on {colour}",
        f", {colour} background",
        f" with {with_article(colour)} background",
    )
    return pick(rng, forms)


def _colour(name: str, rng: np.random.Generator) -> str:
    return pick(rng, SPELLINGS.get(name, (name,)))


def _spoken(concept: str, rng: np.random.Generator) -> str:
    other = SYNONYMS.get(concept)
    return other if other and rng.random() < SYNONYM_USED else concept


def pick(rng: np.random.Generator, options: Sequence):
    """Return one of `options`, each with equal chance; several times faster than rng.choice."""
    return options[int(rng.random() * len(options))]
