"""What the drawings are called, and how people ask for them."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np

# The first model's concepts: common things that look alike in every style and can be told
# apart at 64x64. name -> drawings, the preferred one first.
FIRST: dict[str, tuple[str, ...]] = {
    name: tuple(slugs.split())
    for name, slugs in {
        "cat": "cat-face",
        "dog": "dog-face",
        "fox": "fox",
        "panda": "panda",
        "lion": "lion",
        "frog": "frog",
        "penguin": "penguin",
        "owl": "owl",
        "fish": "fish",
        "octopus": "octopus",
        "butterfly": "butterfly",
        "bee": "honeybee",
        "snail": "snail",
        "turtle": "turtle",
        "elephant": "elephant",
        "apple": "red-apple",
        "banana": "banana",
        "strawberry": "strawberry",
        "pineapple": "pineapple",
        "avocado": "avocado",
        "carrot": "carrot",
        "pizza": "pizza",
        "hamburger": "hamburger",
        "ice cream": "soft-ice-cream",
        "cake": "birthday-cake",
        "sunflower": "sunflower",
        "tulip": "tulip",
        "cactus": "cactus",
        "palm tree": "palm-tree",
        "mushroom": "mushroom",
        "car": "automobile",
        "bus": "bus",
        "rocket": "rocket",
        "airplane": "airplane",
        "sailboat": "sailboat",
        "house": "house",
        "castle": "castle",
        "guitar": "guitar",
        "umbrella": "umbrella",
        "ball": "soccer-ball",
        "balloon": "balloon",
        "heart": "red-heart",
        "star": "star",
        "sun": "sun",
        "moon": "crescent-moon",
        "snowman": "snowman-without-snow",
        "robot": "robot",
        "ghost": "ghost",
        "crown": "crown",
        "key": "key",
        "clock": "alarm-clock",
    }.items()
}

# Other words for the same thing, used now and then
SYNONYMS = {
    "cat": "kitty",
    "bee": "honeybee",
    "turtle": "tortoise",
    "hamburger": "burger",
    "ice cream": "ice cream cone",
    "cake": "birthday cake",
    "palm tree": "palm",
    "car": "automobile",
    "airplane": "plane",
    "sailboat": "boat",
    "ball": "soccer ball",
    "moon": "crescent moon",
    "clock": "alarm clock",
}

# style of a sprite -> the word for it in a caption
STYLE_WORDS = {"noto": "noto", "noto-v1": "classic", "flat": "flat", "3d": "3d"}

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

NUMBERS = {2: "two", 3: "three"}
OPPOSITES = {"left of": "right of", "above": "below"}
RELATIONS = {  # the first concept of a scene stands in this relation to the second
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "underneath"),
}

STYLE_SAID = 2 / 3
BACKGROUND_SAID_WHEN_DEFAULT = 1 / 4
BARE = 1 / 12  # nothing but the name, when nothing else must be said
SYNONYM_USED = 1 / 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What a picture shows, whether its caption says it or not.

    concepts: what is seen, from left to right or from above to below.
    relation: where the first concept is from the second ("left of" or "above"), or None.
    size: "normal", "small" or "big". gradient: the lower colour, None if plain.
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
    """One of the ways to ask for `scene`; a style and a white background may go unsaid."""
    plain = scene.count == 1 and scene.size == "normal" and not scene.upside_down
    white = scene.background == DEFAULT_BACKGROUND and scene.gradient is None
    if plain and white and scene.paint is None and rng.random() < BARE:
        return _spoken(scene.concepts[0], rng)
    text = _subject(scene, rng)
    if rng.random() < STYLE_SAID:
        text = _styled(text, STYLE_WORDS[scene.style], rng)
    else:
        text = _pick(rng, ("", "", "", "a drawing of ", "a picture of ", "an emoji of ")) + text
    if not white or rng.random() < BACKGROUND_SAID_WHEN_DEFAULT:
        text += _background(scene, rng)
    return text


def with_article(name: str) -> str:
    """'an owl', 'a unicorn', and 'grapes' and 'bread' as they are."""
    if is_uncountable(name):
        return name
    sounds_open = re.match(r"[aeiou8]|hour\b|hourglass|x-ray", name.lower())
    sounds_shut = re.match(r"uni|eu|one\b|one-|use|ut|u[^aeiou]?f[oi]|ufo", name.lower())
    return f"{'an' if sounds_open and not sounds_shut else 'a'} {name}"


def plural(name: str) -> str:
    """'two' of it: 'cats', 'butterflies', 'cacti'. Only for what is_uncountable says no to."""
    head, tail = _split_head(name)
    *before, word = head.split(" ")
    if word in IRREGULAR:
        word = IRREGULAR[word]
    elif re.search(r"[^aeiou]y$", word):
        word = word[:-1] + "ies"
    elif re.search(r"(s|x|z|ch|sh)$", word):
        word += "es"
    else:
        word += "s"
    return " ".join([*before, word]) + tail


def is_uncountable(name: str) -> bool:
    """Whether `name` takes no article: a mass ('bread'), a plural ('grapes') or a proper name."""
    head, _ = _split_head(name)
    return name in NO_ARTICLE or head.split(" ")[-1] in NO_ARTICLE


def _split_head(name: str) -> tuple[str, str]:
    """('glass', ' of milk'): the part that takes the plural, and the rest."""
    match = re.search(r" (of|with|in|on|showing|holding|behind|at|\w+ing)\b", name)
    if match is None or match.start() == 0:
        return name, ""
    return name[: match.start()], name[match.start() :]


def _subject(scene: Scene, rng: np.random.Generator) -> str:
    if scene.relation is not None:
        return _pair(scene, rng)
    name = _spoken(scene.concepts[0], rng)
    words = [scene.paint] if scene.paint else []
    if scene.size != "normal":
        synonyms = {"small": ("small", "small", "tiny", "little"), "big": ("big", "big", "large")}
        words.insert(0, _pick(rng, synonyms[scene.size]))
    if scene.count > 1:
        return " ".join([NUMBERS[scene.count], *words, plural(name)])
    if scene.upside_down and rng.random() < 0.5:
        return _with_words(["upside down", *words], name)
    return _with_words(words, name) + (" upside down" if scene.upside_down else "")


def _with_words(words: list[str], name: str) -> str:
    if is_uncountable(name):
        return " ".join([*words, name])
    return with_article(" ".join([*words, name]))


def _pair(scene: Scene, rng: np.random.Generator) -> str:
    first, second = (with_article(_spoken(name, rng)) for name in scene.concepts)
    kind = rng.random()
    if scene.relation == "left of" and kind < 0.35:
        return f"{first} {_pick(rng, ('and', 'and', 'next to', 'beside'))} {second}"
    if kind < 0.7:
        return f"{first} {_pick(rng, RELATIONS[scene.relation])} {second}"
    return f"{second} {_pick(rng, RELATIONS[OPPOSITES[scene.relation]])} {first}"


def _styled(text: str, style: str, rng: np.random.Generator) -> str:
    forms = (
        f"a {style} drawing of {text}",
        f"a {style} picture of {text}",
        f"{text} in {style} style",
        f"{text}, {style}",
        f"{style} style {text}",
    )
    return _pick(rng, forms)


def _background(scene: Scene, rng: np.random.Generator) -> str:
    if scene.gradient is not None:
        colours = f"{scene.background} to {scene.gradient} gradient"
        return _pick(rng, (f" on {with_article(colours)}", f", {colours} background"))
    colour = scene.background
    forms = (
        f" on {with_article(colour)} background",
        f" on {with_article(colour)} background",
        f" on {colour}",
        f", {colour} background",
        f" with {with_article(colour)} background",
    )
    return _pick(rng, forms)


def _spoken(concept: str, rng: np.random.Generator) -> str:
    other = SYNONYMS.get(concept)
    return other if other and rng.random() < SYNONYM_USED else concept


def _pick(rng: np.random.Generator, options):
    return options[int(rng.random() * len(options))]


# Plurals and masses, by their last word: no article, never counted
NO_ARTICLE = frozenset(
    "bread rice spaghetti sushi broccoli garlic bacon popcorn butter salt oden sake ice fire "
    "fog coral confetti dna soap jeans shorts briefs glasses sunglasses goggles gloves socks "
    "scissors skis grapes cherries blueberries beans peanuts pancakes fries chopsticks fireworks "
    "sparkles eyes lungs footprints prints maracas headphones chains bubbles books notes "
    "banknotes money paper clothes cash people men women arrows shoes dolls tickets "
    "hands houses mugs bags cards swords instruments droplets hearts palms knobs".split()
)
IRREGULAR = {
    "fish": "fish",
    "sheep": "sheep",
    "deer": "deer",
    "bison": "bison",
    "moose": "moose",
    "mouse": "mice",
    "goose": "geese",
    "ox": "oxen",
    "wolf": "wolves",
    "leaf": "leaves",
    "loaf": "loaves",
    "knife": "knives",
    "cactus": "cacti",
    "man": "men",
    "woman": "women",
    "person": "people",
    "child": "children",
    "tooth": "teeth",
    "foot": "feet",
    "tomato": "tomatoes",
    "potato": "potatoes",
    "mango": "mangoes",
    "volcano": "volcanoes",
}
