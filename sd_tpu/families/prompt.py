"""A1111's prompt grammar, and prompts longer than the text encoder's context.

    (a)  1.1 times the weight      (a:1.3)  1.3 times       [a]  the weight over 1.1
    \\(  a bracket itself          BREAK  begins a chunk    <lora:name:0.8>  a LoRA's strength

Weights multiply the text encoder's output; see `weighted`.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from unicodedata import combining, normalize

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.reading import composed
from sd_tpu.sentence import SentenceError

CHUNK = 75  # tokens between the two marks of CLIP's context of 77
CLOSING = {")": 1.1, "]": 1 / 1.1}  # factor of a bracket
MOST_WEIGHT = 100.0

LORA = re.compile(r"<lora:([^<>]*)>")
OTHER_TAG = re.compile(r"<(?!lora:)\w+:[^<>]*>")  # of other adapters, which A1111 knows
TOKEN = re.compile(
    r"\\(?P<escaped>[\\()\[\]]?)"
    r"|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*(?P<end>[)\]])"
    r"|(?P<bracket>[()\[\]])"
    r"|\b(?P<BREAK>BREAK)\b"
    r"|(?P<text>[^\\()\[\]:|]+?(?=\bBREAK\b|[\\()\[\]:|]|\Z)|[:|])",
    re.DOTALL,
)


class PromptError(SentenceError):
    """A prompt that cannot be drawn; the message is for the person who wrote it."""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A piece of a prompt whose words all have the same weight."""

    text: str
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Lora:
    """A LoRA that a prompt asks for, by the name that `adapters.listing` gives it."""

    name: str
    strength: float = 1.0


@dataclasses.dataclass(frozen=True)
class ParsedPrompt:
    """A parsed prompt: its sections, which BREAK divides, and the LoRAs it asks for."""

    sections: tuple[tuple[Fragment, ...], ...]
    loras: tuple[Lora, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """At most 75 tokens of a prompt, without marks and padding.

    Attributes:
        ids: of the tokens; 0 where an embedding's vector takes the place of a token's.
        weights: of the tokens.
        vectors: position -> (name of the embedding, row in it).
    """

    ids: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    vectors: Mapping[int, tuple[str, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A prompt as the text encoder takes it.

    Attributes:
        chunks: at least one.
        tokens: how many the prompt has, those that are cut included.
        lost: the end of the prompt that is cut; empty if all of it fits.
    """

    chunks: tuple[Chunk, ...]
    tokens: int
    lost: str


# A tokenizer: a text -> its token ids without marks, and where each token's text begins and ends.
Encode = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]
# The length of an embedding's name, the longest first -> the name in lower case -> as it is listed.
Spellings = Mapping[int, Mapping[str, str]]


def parse(prompt: str) -> ParsedPrompt:
    """Parse A1111's grammar; a prompt without any of its signs is one fragment of weight 1.

    Brackets that are not closed count to the end; closing ones that were not opened are text.

    Raises:
        PromptError: a LoRA without a name or with a strength that is no number, weights above 100,
            or signs of A1111's that mean what is not done here.
    """
    if other := OTHER_TAG.search(prompt):
        raise PromptError(
            "{tag} is nothing that a prompt can ask for here; a LoRA is, as <lora:name:strength>.",
            tag=other[0],
        )
    loras = tuple(_lora(match[1]) for match in LORA.finditer(prompt))
    pieces: list[list] = []  # [text, weight], None for a BREAK
    opened: list[tuple[str, int]] = []  # brackets that wait, and the piece after each

    def close(bracket: str, factor: float) -> bool:
        """Multiply the weights since the last such bracket; return whether there was one."""
        for place in reversed(range(len(opened))):
            if opened[place][0] == bracket:
                for piece in pieces[opened.pop(place)[1] :]:
                    piece[1] *= factor
                return True
        return False

    for token in TOKEN.finditer(LORA.sub("", prompt)):
        sign, weight = token["bracket"], token["weight"]
        if (token["end"] == "]" or token["text"] == "|") and opened and opened[-1][0] == "[":
            raise PromptError(
                "A prompt says the same in all steps here, so {signs} is not done. A "
                "\\ before a bracket makes it text.",
                signs="[one|other]" if weight is None else "[from:to:when]",
            )
        factor = float(weight) if token["end"] == ")" else CLOSING.get(sign)
        if sign in ("(", "["):
            opened.append((sign, len(pieces)))
        elif token["BREAK"]:
            # Blanks around it are none of the text. TOKEN does not look for them: from each blank
            # of a thousand it would go through all that follow.
            if pieces and pieces[-1][0]:
                pieces[-1][0] = pieces[-1][0].rstrip()
            pieces.append([None, 1.0])
        elif factor is None or not close("[" if sign == "]" else "(", factor):
            escaped, text = token["escaped"], token[0]
            after_break = pieces and pieces[-1][0] is None
            text = text.lstrip() if after_break else text
            pieces.append([text if escaped is None else escaped, 1.0])
    for bracket, _ in list(opened):
        close(bracket, CLOSING[")" if bracket == "(" else "]"])
    return ParsedPrompt(_sections(pieces), loras)


def words_of(prompt: str) -> str:
    """Return a prompt's text without the signs of its grammar; raises as `parse`."""
    return " ".join(fragment.text for section in parse(prompt).sections for fragment in section)


def without_loras(prompt: str) -> str:
    """Return a prompt as it is written, but for the LoRAs that it asks for."""
    text = LORA.sub("", prompt)
    return text if text == prompt else text.strip()


def _sections(pieces: list[list]) -> tuple[tuple[Fragment, ...], ...]:
    """Join neighbours of the same weight."""
    sections: list[list[Fragment]] = [[]]
    for text, weight in pieces:
        if text is None:
            sections.append([])
            continue
        if not abs(weight) <= MOST_WEIGHT:
            raise PromptError(
                "The prompt gives {text} a weight of {weight}; weights go up to {most}.",
                text=repr(text.strip()),
                weight=f"{weight:.3g}",
                most=f"{MOST_WEIGHT:g}",
            )
        section = sections[-1]
        if section and section[-1].weight == weight:
            section[-1] = Fragment(section[-1].text + text, weight)
        elif text:
            section.append(Fragment(text, weight))
    return tuple(map(tuple, sections))


def _lora(tag: str) -> Lora:
    name, _, strength = tag.partition(":")
    try:
        value = float(strength or 1)
    except ValueError:
        value = math.nan
    if not name.strip() or not abs(value) <= MOST_WEIGHT:
        raise PromptError(
            "{tag} asks for no LoRA: it should be <lora:name:strength>, with a "
            "number up to {most} as strength.",
            tag=f"<lora:{tag}>",
            most=f"{MOST_WEIGHT:g}",
        )
    return Lora(composed(name.strip()), value)


# --- chunks -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Unit:
    """An indivisible unit: a token, or all vectors of an embedding."""

    ids: tuple[int, ...]
    weight: float
    text: str  # of the prompt, with what follows up to the next one
    embedding: str | None = None


def chunks(
    parsed: ParsedPrompt, encode: Encode, most: int, embeddings: Mapping[str, int] | None = None
) -> Chunks:
    """Divide a prompt by 75 tokens and by BREAK.

    Args:
        parsed: the prompt.
        encode: the tokenizer.
        most: how many chunks are kept.
        embeddings: name -> number of vectors, at most 75; the name, in upper or lower case, stands
            for them as a word of the prompt.
    """
    vectors = embeddings or {}
    spellings = _spellings(vectors)  # once, as there may be thousands
    divided: list[list[_Unit]] = []
    for section in parsed.sections:
        divided.append([])
        free = CHUNK
        for unit in _units(section, encode, vectors, spellings):
            if len(unit.ids) > free:
                divided.append([])
                free = CHUNK
            divided[-1].append(unit)
            free -= len(unit.ids)
    if len(divided) > 1 and not divided[-1]:  # nothing follows the last BREAK
        divided.pop()
    return Chunks(
        chunks=tuple(map(_chunk, divided[:most])),
        tokens=sum(len(unit.ids) for units in divided for unit in units),
        lost="".join(unit.text for units in divided[most:] for unit in units).strip(),
    )


def _spellings(names: Iterable[str]) -> Spellings:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for name in names:
        for spelling in {normalize("NFC", name), normalize("NFD", name)}:
            found[len(spelling)][spelling.lower()] = name
    return dict(sorted(found.items(), reverse=True))


def _units(
    section: Sequence[Fragment], encode: Encode, embeddings: Mapping[str, int], spellings: Spellings
) -> Iterator[_Unit]:
    for fragment in section:
        for text, name in _divided(fragment.text, spellings):
            if name is not None:
                yield _Unit((0,) * embeddings[name], fragment.weight, text, name)
                continue
            ids, offsets = encode(text)
            begins = [0, *(begin for begin, _ in offsets[1:]), len(text)]
            for number, token in enumerate(ids):
                yield _Unit((token,), fragment.weight, text[begins[number] : begins[number + 1]])


def _divided(text: str, spellings: Spellings) -> Iterator[tuple[str, str | None]]:
    """Split a text into pieces, each with the embedding that it names or None.

    The longest name wins.

    A name stands by itself: no letter, accent, digit or underscore of the text goes on with it.

    Args:
        text: of a prompt.
        spellings: of the embeddings.
    """
    start = place = 0
    while spellings and place < len(text):
        match = next(
            (
                (place + length, names[word])
                for length, names in spellings.items()
                if (word := text[place : place + length].lower()) in names
                and _between_words(text, place)
                and _between_words(text, place + length)
            ),
            None,
        )
        if match is None:
            place += 1
            continue
        if start < place:
            yield text[start:place], None
        end, name = match
        yield text[place:end], name
        start = place = end
    if start < len(text):
        yield text[start:], None


def _between_words(text: str, place: int) -> bool:
    return not (
        re.fullmatch(r"\w\w", text[max(place - 1, 0) : place + 1])
        or combining(text[place : place + 1] or " ")
    )


def _chunk(units: Sequence[_Unit]) -> Chunk:
    ids, weights, vectors = [], [], {}
    for unit in units:
        if unit.embedding is not None:
            vectors |= {len(ids) + row: (unit.embedding, row) for row in range(len(unit.ids))}
        ids += unit.ids
        weights += [unit.weight] * len(unit.ids)
    return Chunk(tuple(ids), tuple(weights), vectors)


def arrays(
    prompt: Chunks, blocks: int, begin: int, end: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks between their marks, filled up with empty chunks.

    Args:
        prompt: of at most `blocks` chunks.
        blocks: how many there should be.
        begin: token before the words.
        end: token after the words.
        pad: token after that one.

    Returns:
        Token ids [blocks, 77] int32, weights [blocks, 77] float32; marks and padding have weight 1.
        A chunk's vectors lie one place further right than in `Chunk.vectors`.
    """
    ids = np.full((blocks, CHUNK + 2), pad, np.int32)
    weights = np.ones((blocks, CHUNK + 2), np.float32)
    empty = [Chunk()] * (blocks - len(prompt.chunks))
    for row, chunk in enumerate([*prompt.chunks, *empty]):
        words = len(chunk.ids)
        ids[row, : words + 2] = [begin, *chunk.ids, end]
        weights[row, 1 : words + 1] = chunk.weights
    return ids, weights


def weighted(embeddings: jax.Array, weights: jax.Array) -> jax.Array:
    """Weight each token's output as A1111 does, and restore the mean.

    Args:
        embeddings: [..., L, C] from the text encoder, a block of L tokens at a time.
        weights: [..., L]; where all of a block's are 1 it is returned as it is, bit for bit.

    Returns:
        Like `embeddings`. Where the weighted block's mean is 0, it is left so.
    """
    before = embeddings.astype(jnp.float32)
    after = before * weights[..., None]
    means = [x.mean((-2, -1), keepdims=True) for x in (before, after)]
    zero = means[1] == 0  # by which nothing is divided, not even where it would not count: a
    # gradient would be no number.
    restored = after * jnp.where(zero, 1, means[0] / jnp.where(zero, 1, means[1]))
    neutral = (weights == 1).all(-1)[..., None, None]
    return jnp.where(neutral, embeddings, restored.astype(embeddings.dtype))
