"""English nouns: their articles and plurals."""

import re

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
