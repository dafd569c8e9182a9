"""English nouns: their articles and plurals."""

import re

# Plurals and masses, by their last word: no article, never counted
NO_ARTICLE = frozenset("popcorn fire glasses scissors grapes cherries pancakes fries".split())
IRREGULAR = {
    "fish": "fish",
    "sheep": "sheep",
    "mouse": "mice",
    "wolf": "wolves",
    "leaf": "leaves",
    "cactus": "cacti",
    "tomato": "tomatoes",
    "potato": "potatoes",
    "mango": "mangoes",
    "volcano": "volcanoes",
}


def with_article(name: str) -> str:
    """Return 'an owl', 'a unicorn', and 'grapes' and 'popcorn' as they are."""
    if not is_countable(name):
        return name
    return f"{'an' if re.match(r'(?!uni|ufo)[aeiou]', name) else 'a'} {name}"


def plural(name: str) -> str:
    """Return 'two' of it: 'cats', 'butterflies', 'cups of coffee'; only for what is_countable."""
    head, of, rest = name.partition(" of ")
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
    return " ".join([*before, word]) + of + rest


def is_countable(name: str) -> bool:
    """Whether `name` takes an article and a number: not a mass ('popcorn'), nor a plural."""
    return name.partition(" of ")[0].split(" ")[-1] not in NO_ARTICLE
