"""What the drawings are called, and how people ask for them."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

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
        "pig": "pig-face",
        "monkey": "monkey-face",
        "ladybug": "lady-beetle",
        "rabbit": "rabbit-face",
        "bear": "bear",
        "whale": "spouting-whale",
        "crab": "crab",
        "mouse": "mouse-face",
        "tiger": "tiger-face",
        "cow": "cow-face",
        "unicorn": "unicorn",
        "duck": "duck",
        "snake": "snake",
        "shark": "shark",
        "parrot": "parrot",
        "dinosaur": "sauropod",
        "rose": "rose",
        "tree": "deciduous-tree",
        "watermelon": "watermelon",
        "donut": "doughnut",
        "tomato": "tomato",
        "lemon": "lemon",
        "grapes": "grapes",
        "cherries": "cherries",
        "piece of cheese": "cheese-wedge",
        "cookie": "cookie",
        "cupcake": "cupcake",
        "cup of coffee": "hot-beverage",
        "french fries": "french-fries",
        "basketball": "basketball",
        "trophy": "trophy",
        "bell": "bell",
        "gift": "wrapped-gift",
        "book": "open-book",
        "camera": "camera",
        "diamond": "gem-stone",
        "lock": "locked",
        "light bulb": "light-bulb",
        "hat": "top-hat",
        "hammer": "hammer",
        "pencil": "pencil",
        "candle": "candle",
        "train": "locomotive",
        "truck": "delivery-truck",
        "bicycle": "bicycle",
        "fire": "fire",
        "rainbow": "rainbow",
        "pumpkin": "jack-o-lantern",
        "skull": "skull",
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
    "ladybug": "ladybird",
    "rabbit": "bunny",
    "donut": "doughnut",
    "piece of cheese": "cheese",
    "cup of coffee": "coffee",
    "french fries": "fries",
    "gift": "present",
    "lock": "padlock",
    "hat": "top hat",
    "train": "steam train",
    "truck": "lorry",
    "bicycle": "bike",
    "fire": "flame",
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
# A painted one would have another thing's name, as the red panda is no panda
UNPAINTED = frozenset({"panda", "bear", "polar bear", "fox", "heart", "rainbow"})

NUMBERS = {2: "two", 3: "three"}
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

# Plurals and masses, by their last word: no article, never counted
NO_ARTICLE = frozenset(
    "bread rice spaghetti sushi broccoli garlic bacon popcorn butter salt oden sake ice fire "
    "fog coral confetti dna soap jeans shorts briefs glasses sunglasses goggles gloves socks "
    "scissors skis grapes cherries blueberries beans peanuts pancakes fries chopsticks fireworks "
    "sparkles eyes lungs footprints prints maracas headphones chains bubbles books notes "
    "banknotes money paper clothes cash people men women arrows shoes dolls tickets "
    "hands houses mugs bags cards swords instruments droplets hearts palms knobs fingers masks "
    "silhouettes meat beads tabs dividers paperclips dice".split()
) | {"santa claus", "mrs claus", "mount fuji"}
# Where a name's noun ends: 'glass| of milk', 'man| walking', but not 'smiling face':
# '-ing' ends a noun only after the last four characters of the nouns listed
AFTER_HEAD = re.compile(
    r" (of|with|without|in|on|over|under|from|at|behind|mountain biking|"
    r"(?<=man |men |ace |ead |and |key |son |ple |ger |ane |eaf |obe )\w+ing)\b"
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
    "elf": "elves",
    "wolf": "wolves",
    "leaf": "leaves",
    "loaf": "loaves",
    "knife": "knives",
    "cactus": "cacti",
    "person": "people",
    "child": "children",
    "tooth": "teeth",
    "foot": "feet",
    "tomato": "tomatoes",
    "potato": "potatoes",
    "mango": "mangoes",
    "volcano": "volcanoes",
}

# Unicode's names that nobody says -> what people say. Names absent here are spoken as they are.
SPOKEN = {
    "grinning face with big eyes": "happy face",
    "face with tears of joy": "laughing face",
    "rolling on the floor laughing": "rolling laughing face",
    "smiling face with smiling eyes": "blushing smiling face",
    "smiling face with heart-eyes": "face with heart eyes",
    "star-struck": "face with star eyes",
    "face savoring food": "face licking its lips",
    "face without mouth": "face without a mouth",
    "loudly crying face": "sobbing face",
    "pile of poo": "poop",
    "alien monster": "space invader",
    "ogre": "red ogre",
    "goblin": "red goblin",
    "see-no-evil monkey": "monkey covering its eyes",
    "hear-no-evil monkey": "monkey covering its ears",
    "speak-no-evil monkey": "monkey covering its mouth",
    "hundred points": "hundred points sign",
    "collision": "explosion",
    "face with open eyes and hand over mouth": "face with a hand over its mouth and open eyes",
    "face with hand over mouth": "face with a hand over its mouth",
    "backhand index pointing left": "hand pointing left",
    "backhand index pointing right": "hand pointing right",
    "backhand index pointing up": "hand pointing up",
    "backhand index pointing down": "hand pointing down",
    "index pointing up": "finger pointing up",
    "index pointing at the viewer": "finger pointing at the viewer",
    "raised back of hand": "back of a hand",
    "palms up together": "two palms",
    "nail polish": "hand with nail polish",
    "chart increasing with yen": "rising chart with a yen sign",
    "chart increasing": "rising chart",
    "chart decreasing": "falling chart",
    "person in suit levitating": "levitating person in a suit",
    "horse racing": "horse race",
    "meat on bone": "meat on the bone",
    "pouring liquid": "spilling glass",
    "hot springs": "hot spring",
    "Statue of Liberty": "the statue of liberty",
    "Tokyo tower": "the tokyo tower",
    "flower playing cards": "hanafuda card",
    "film frames": "film strip",
    "speaker low volume": "quiet speaker",
    "speaker medium volume": "speaker",
    "speaker high volume": "loud speaker",
    "hammer and pick": "crossed hammer and pick",
    "hammer and wrench": "crossed hammer and wrench",
    "dizzy": "dizzy star",
    "dashing away": "puff of wind",
    "ZZZ": "sleeping sign",
    "raised hand": "open hand",
    "OK hand": "ok hand",
    "thumbs up": "thumb up",
    "thumbs down": "thumb down",
    "flexed biceps": "flexed arm",
    "breast-feeding": "woman breastfeeding",
    "Mrs. Claus": "mrs claus",
    "Mx Claus": "santa person",
    "Santa Claus": "santa claus",
    "people with bunny ears": "people with bunny ears",
    "bust in silhouette": "silhouette of a person",
    "busts in silhouette": "silhouettes of two people",
    "cat": "walking cat",
    "dog": "walking dog",
    "moon cake": "mooncake",
    "two-hump camel": "camel with two humps",
    "camel": "camel with one hump",
    "ox": "brown ox",
    "ewe": "sheep",
    "dove": "white dove",
    "front-facing baby chick": "chick from the front",
    "sauropod": "long-necked dinosaur",
    "T-Rex": "t-rex dinosaur",
    "spiral shell": "seashell",
    "blowfish": "pufferfish",
    "lady beetle": "ladybug",
    "microbe": "green microbe",
    "blossom": "yellow flower",
    "lotus": "lotus flower",
    "hibiscus": "hibiscus flower",
    "evergreen tree": "pine tree",
    "deciduous tree": "tree",
    "sheaf of rice": "rice plant",
    "herb": "green herb",
    "shamrock": "three leaf clover",
    "tangerine": "orange",
    "kiwi fruit": "kiwi",
    "ear of corn": "corn cob",
    "hot pepper": "chili pepper",
    "leafy green": "lettuce",
    "pea pod": "pea pod",
    "baguette bread": "baguette",
    "cheese wedge": "piece of cheese",
    "poultry leg": "chicken leg",
    "cut of meat": "steak",
    "french fries": "french fries",
    "stuffed flatbread": "stuffed pita",
    "cooking": "fried egg",
    "shallow pan of food": "paella",
    "pot of food": "stew pot",
    "canned food": "can of food",
    "cooked rice": "bowl of rice",
    "curry rice": "plate of curry",
    "steaming bowl": "bowl of noodles",
    "spaghetti": "plate of spaghetti",
    "fish cake with swirl": "fish cake",
    "ice cream": "bowl of ice cream",
    "doughnut": "donut",
    "shortcake": "slice of cake",
    "custard": "custard pudding",
    "hot beverage": "cup of coffee",
    "teacup without handle": "cup of tea",
    "sake": "sake bottle",
    "bottle with popping cork": "bottle of champagne",
    "wine glass": "glass of wine",
    "cocktail glass": "cocktail",
    "beer mug": "mug of beer",
    "tumbler glass": "glass of whisky",
    "beverage box": "juice box",
    "mate": "mate drink",
    "ice": "ice cube",
    "fork and knife with plate": "plate with fork and knife",
    "globe showing Europe-Africa": "globe showing europe and africa",
    "globe showing Americas": "globe showing the americas",
    "globe showing Asia-Australia": "globe showing asia and australia",
    "globe with meridians": "globe icon",
    "snow-capped mountain": "snowy mountain",
    "camping": "tent in the woods",
    "beach with umbrella": "beach",
    "classical building": "greek temple",
    "building construction": "building site",
    "wood": "log of wood",
    "wedding": "wedding chapel",
    "foggy": "city in fog",
    "night with stars": "city under stars",
    "cityscape": "city skyline",
    "cityscape at dusk": "city at dusk",
    "locomotive": "steam train",
    "high-speed train": "high speed train",
    "light rail": "light rail train",
    "station": "train station",
    "oncoming bus": "bus from the front",
    "oncoming police car": "police car from the front",
    "oncoming taxi": "taxi from the front",
    "oncoming automobile": "car from the front",
    "sport utility vehicle": "jeep",
    "articulated lorry": "lorry",
    "racing car": "race car",
    "motor scooter": "scooter",
    "manual wheelchair": "wheelchair",
    "motorized wheelchair": "electric wheelchair",
    "construction": "construction barrier",
    "ring buoy": "lifebuoy",
    "fire engine": "fire truck",
    "passenger ship": "cruise ship",
    "airplane departure": "airplane taking off",
    "airplane arrival": "airplane landing",
    "mountain cableway": "cable car",
    "flying saucer": "ufo",
    "luggage": "suitcase",
    "hourglass done": "hourglass",
    "hourglass not done": "running hourglass",
    "watch": "wristwatch",
    "mantelpiece clock": "mantel clock",
    "ringed planet": "planet with rings",
    "milky way": "starry sky",
    "sun behind cloud": "sun behind a cloud",
    "sun behind small cloud": "sun behind a small cloud",
    "sun behind large cloud": "sun behind a large cloud",
    "sun behind rain cloud": "sun behind a rain cloud",
    "high voltage": "lightning bolt",
    "snowman": "snowman in the snow",
    "fire": "flame",
    "droplet": "water drop",
    "water wave": "wave",
    "fog": "fog",
    "jack-o-lantern": "halloween pumpkin",
    "Christmas tree": "christmas tree",
    "wrapped gift": "gift",
    "1st place medal": "gold medal",
    "2nd place medal": "silver medal",
    "3rd place medal": "bronze medal",
    "tennis": "tennis racket",
    "bowling": "bowling ball with pins",
    "cricket game": "cricket bat",
    "field hockey": "field hockey stick",
    "ice hockey": "ice hockey stick",
    "lacrosse": "lacrosse stick",
    "ping pong": "ping pong paddle",
    "badminton": "badminton racket",
    "bullseye": "dartboard",
    "flying disc": "frisbee",
    "pool 8 ball": "billiard ball",
    "video game": "game controller",
    "game die": "dice",
    "mirror ball": "disco ball",
    "performing arts": "theater masks",
    "yarn": "ball of yarn",
    "thread": "spool of thread",
    "t-shirt": "t-shirt",
    "one-piece swimsuit": "swimsuit",
    "woman’s clothes": "blouse",
    "thong sandal": "flip flop",
    "man’s shoe": "brown shoe",
    "running shoe": "sneaker",
    "high-heeled shoe": "high heel",
    "woman’s sandal": "sandal",
    "woman’s boot": "boot",
    "woman’s hat": "hat with a ribbon",
    "billed cap": "baseball cap",
    "rescue worker’s helmet": "rescue helmet",
    "gem stone": "diamond",
    "headphone": "headphones",
    "level slider": "slider control",
    "postal horn": "post horn",
    "long drum": "conga drum",
    "musical keyboard": "piano keyboard",
    "mobile phone": "phone",
    "optical disk": "cd",
    "computer disk": "minidisc",
    "trackball": "trackball",
    "magnifying glass tilted left": "magnifying glass",
    "diya lamp": "oil lamp",
    "notebook with decorative cover": "decorated notebook",
    "closed book": "book",
    "envelope": "letter",
    "memo": "memo with a pencil",
    "black nib": "pen nib",
    "locked": "padlock",
    "unlocked": "open padlock",
    "locked with pen": "padlock with a pen",
    "locked with key": "padlock with a key",
    "carpentry saw": "saw",
    "pick": "pickaxe",
    "dna": "dna strand",
    "drop of blood": "drop of blood",
    "adhesive bandage": "bandage",
    "x-ray": "x-ray",
    "roll of paper": "roll of toilet paper",
    "wastebasket": "trash can",
    "headstone": "gravestone",
    "moai": "moai statue",
}

# Not drawn as a thing of its own, the same drawing twice, or nothing to invite
SKIPPED = re.compile(
    r"^(family|kiss (man|woman)|couple with heart|woman and|.* facing right$|middle finger|"
    r".*(o’clock|-thirty)$|magnifying glass tilted right|nazar amulet|person getting massage|"
    r"ballot box|anger symbol|dotted line face|map of japan|kaaba|love hotel)",
    re.IGNORECASE,
)
SKIPPED_GROUPS = frozenset({"Flags", "Symbols"})
FEWEST_STYLES = 2

# Words after 'man' or 'woman' that describe what they do or wear, and need no 'male', 'female'
DOING = re.compile(r"^(man|woman) (in|with|wearing|getting|feeding|mountain biking|\w+ing)\b")
HAIR = re.compile(r"^(man|woman|person) (beard|bald|(?:red|curly|white|blond) hair)$")
# 'man with| veil', where an article is wanting
BARE_TAIL = re.compile(r"^(.* (?:with|wearing|in|feeding|getting|taking|rowing|bouncing)) (\S.*)$")
UNCOUNTED_TAILS = frozenset(
    "a an bed fear fingers fog its lightning medical one rain snow steam sweat symbols tears the "
    "two wind".split()
)
OCCUPATION = re.compile(r"^(man|woman) (.*)$")


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


def all_concepts(
    names: Mapping[str, Mapping], slugs: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Every thing that can be drawn in FEWEST_STYLES styles: spoken name -> its drawing.

    names is sprites.read_names(cache), slugs sprites.read_slugs(cache). FIRST's come first,
    under the names they have there.
    """
    concepts = dict(FIRST)
    used = {slug for drawings in FIRST.values() for slug in drawings}
    for entry in names.values():
        name = entry["name"]
        slug = slug_of(name)
        styles = sum(slug in known for known in slugs.values())
        unwanted = entry["group"] in SKIPPED_GROUPS or SKIPPED.match(name)
        if slug not in used and styles >= FEWEST_STYLES and not unwanted:
            concepts.setdefault(spoken_name(name), (slug,))
    return concepts


def slug_of(name: str) -> str:
    """The icon sets' name of a drawing: 'Mrs. Claus' -> 'mrs-claus'."""
    plain = unicodedata.normalize("NFD", name.lower()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"[.']", "", plain)).strip("-")


def spoken_name(name: str) -> str:
    """What people call what Unicode calls `name`."""
    if name in SPOKEN:
        return SPOKEN[name]
    name = name.lower().replace("’", "'")
    if match := HAIR.match(name):
        who, what = match.groups()
        what = what.replace("beard", "a beard")
        return f"bald {who}" if what == "bald" else f"{who} with {what}"
    if (match := OCCUPATION.match(name)) and not DOING.match(name):
        return f"{'male' if match[1] == 'man' else 'female'} {match[2]}"
    match = BARE_TAIL.match(name)
    if match is None or match[2].endswith("s") or match[2].split(" ")[0] in UNCOUNTED_TAILS:
        return name
    return f"{match[1]} {with_article(match[2])}"


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """One of the ways to ask for `scene`; a style and a white background may go unsaid."""
    plain = scene.count == 1 and scene.size == "normal" and not scene.upside_down
    white = scene.background == DEFAULT_BACKGROUND and scene.gradient is None
    if plain and white and scene.paint is None and rng.random() < BARE:
        return _spoken(scene.concepts[0], rng)
    style = STYLE_WORDS[scene.style]
    if rng.random() >= STYLE_SAID:
        prefixes = ("", "", "", "a drawing of ", "a picture of ", "an emoji of ")
        text = pick(rng, prefixes) + _subject(scene, rng)
    elif scene.relation is None and rng.random() < STYLE_AS_ADJECTIVE:
        text = _subject(scene, rng, style)
    else:
        text = _styled(_subject(scene, rng), style, rng)
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
    elif word.endswith("man"):
        word = word[:-3] + "men"
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
    return name.startswith("the ") or not NO_ARTICLE.isdisjoint((name, head.split(" ")[-1]))


def is_countable(name: str) -> bool:
    """Whether plural() has a word for several: not for 'bread', nor for 'bow and arrow'."""
    return not is_uncountable(name) and " and " not in name


def _split_head(name: str) -> tuple[str, str]:
    """('glass', ' of milk'): the part that takes the plural, and the rest."""
    match = AFTER_HEAD.search(name)
    return (name[: match.start()], name[match.start() :]) if match else (name, "")


def _subject(scene: Scene, rng: np.random.Generator, style: str | None = None) -> str:
    if scene.relation is not None:
        return _pair(scene, rng)
    name = _spoken(scene.concepts[0], rng)
    words = [word for word in (style, scene.paint) if word]
    if scene.size != "normal":
        synonyms = {"small": ("small", "small", "tiny", "little"), "big": ("big", "big", "large")}
        words.insert(0, pick(rng, synonyms[scene.size]))
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
        colours = f"{scene.background} to {scene.gradient} gradient"
        return pick(rng, (f" on {with_article(colours)}", f", {colours} background"))
    colour = scene.background
    forms = (
        f" on {with_article(colour)} background",
        f" on {with_article(colour)} background",
        f" on {colour}",
        f", {colour} background",
        f" with {with_article(colour)} background",
    )
    return pick(rng, forms)


def _spoken(concept: str, rng: np.random.Generator) -> str:
    other = SYNONYMS.get(concept)
    return other if other and rng.random() < SYNONYM_USED else concept


def pick(rng: np.random.Generator, options: Sequence):
    """One of `options`, each with equal chance; several times faster than rng.choice."""
    return options[int(rng.random() * len(options))]
