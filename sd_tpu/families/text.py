"""Inputs and outputs of CLIP text encoders for a picture's prompts.

Inputs are data only: the tokens' ids, their weights, and vectors learned by textual inversion. A
number of chunks is a shape, so prompts of more than one have programs of their own, and those of
one chunk cost no more for it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.checkpoint.adapters import MOST_VECTORS
from sd_tpu.families.prompt import Chunks, PromptError, arrays, chunks, parse, weighted
from sd_tpu.families.tokenizer import LENGTH, Tokenizer
from sd_tpu.models.slerp import slerp
from sd_tpu.models.text_encoder import Learned

Arrays = dict[str, np.ndarray | jax.Array]
# An embedding's name -> component -> its vectors [n, hidden_size] for that encoder.
Embeddings = Mapping[str, Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Options of prompts.

    Attributes:
        chunks: how many of 75 tokens a prompt may have; what is longer is cut.
        embeddings: the words that stand for learned vectors. Read as they are asked for.
    """

    chunks: int = 3
    embeddings: Embeddings = dataclasses.field(default_factory=dict)


DEFAULTS = PromptOptions()


@dataclasses.dataclass(frozen=True)
class Count:
    """How long a prompt is.

    Attributes:
        tokens: those of the prompt, and the two marks of each chunk that is kept.
        limit: of the chunks that are kept.
        lost: the end of the prompt that is cut.
    """

    tokens: int
    limit: int
    lost: str


def input_shapes(count: int, width: int, texts: int = 2) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of an encoder's inputs, with so many chunks for each text."""
    tokens = texts, count, LENGTH
    return {
        "ids": jax.ShapeDtypeStruct(tokens, jnp.int32),
        "weights": jax.ShapeDtypeStruct(tokens, jnp.float32),
        "rows": jax.ShapeDtypeStruct(tokens, jnp.int32),
        "vectors": jax.ShapeDtypeStruct((MOST_VECTORS, width), jnp.float32),
    }


def plain_inputs(ids: np.ndarray | jax.Array, width: int) -> Arrays:
    """Return an encoder's inputs of two texts of one chunk without emphasis: ids [2, 77] int32."""
    blank = {name: np.zeros(of.shape, of.dtype) for name, of in input_shapes(1, width).items()}
    return blank | {"ids": ids[:, None], "weights": np.ones_like(blank["weights"])}


def read(tokenizer: Tokenizer, prompt: str, options: PromptOptions) -> Chunks:
    """Divide a prompt into chunks.

    Raises:
        PromptError: it cannot be drawn.
        CheckpointError: an embedding that it names cannot be used.
    """
    return chunks(parse(prompt), tokenizer.encode, options.chunks, _Lengths(options.embeddings))


def count(tokenizer: Tokenizer, prompt: str, options: PromptOptions) -> Count:
    """Count a prompt's tokens, and find the part of it that is cut; raises as `read` does."""
    chunked = read(tokenizer, prompt, options)
    chunks_kept = len(chunked.chunks)
    return Count(chunked.tokens + 2 * chunks_kept, LENGTH * chunks_kept, chunked.lost)


def encoder_inputs(
    tokenizers: Mapping[str, Tokenizer],
    widths: Mapping[str, int],
    texts: Sequence[str],
    options: PromptOptions,
) -> dict[str, Arrays]:
    """Return each encoder's inputs, by component; all texts have the longest one's chunks.

    Args:
        tokenizers: by component of the encoder.
        widths: the encoders' hidden sizes, by component.
        texts: the negative prompt and the prompt, and one that this is on the way to, if any.
        options: of prompts.

    Raises:
        PromptError: a prompt cannot be drawn, or has more vectors of embeddings than fit.
        CheckpointError: an embedding cannot be used.
    """
    chunked = {part: [read(tokenizers[part], text, options) for text in texts] for part in widths}
    longest = max(len(prompt.chunks) for prompts in chunked.values() for prompt in prompts)
    inputs = {}
    for part, width in widths.items():
        begin, end, pad = tokenizers[part].marks
        filled = [arrays(prompt, longest, begin, end, pad) for prompt in chunked[part]]
        ids, weights = map(np.stack, zip(*filled, strict=True))
        learned = _learned(chunked[part], part, longest, width, options.embeddings)
        inputs[part] = {"ids": ids, "weights": weights, **learned}
    return inputs


def _learned(
    prompts: Sequence[Chunks], part: str, longest: int, width: int, embeddings: Embeddings
) -> Arrays:
    """Return the learned vectors of all texts, each once, and where they stand."""
    rows = np.zeros((len(prompts), longest, LENGTH), np.int32)
    vectors = np.zeros((MOST_VECTORS, width), np.float32)
    order: dict[tuple[str, int], int] = {}
    for text, prompt in enumerate(prompts):
        for number, chunk in enumerate(prompt.chunks):
            for index, vector in chunk.vectors.items():
                rows[text, number, index + 1] = 1 + order.setdefault(vector, len(order))
    if len(order) > MOST_VECTORS:
        raise PromptError(
            "The embeddings in the prompt and the negative prompt have {count} "
            "vectors; a picture has room for {most}.",
            count=len(order),
            most=MOST_VECTORS,
        )
    for (name, row), into in order.items():
        vectors[into] = embeddings[name][part][row]
    return {"rows": rows, "vectors": vectors}


class _Lengths(Mapping[str, int]):
    """How many vectors embeddings have; only those that are asked for are read."""

    def __init__(self, embeddings: Embeddings):
        self._embeddings = embeddings

    def __getitem__(self, name: str) -> int:
        return len(next(iter(self._embeddings[name].values())))

    def __iter__(self):
        return iter(self._embeddings)

    def __len__(self) -> int:
        return len(self._embeddings)


# --- on the devices -----------------------------------------------------------------------------


def flat(inputs: Mapping[str, Any]) -> tuple[jax.Array, Learned]:
    """Return the ids [T n, 77] of n chunks of T texts, and the vectors among them."""
    rows = jnp.reshape(inputs["rows"], (-1, LENGTH))
    return jnp.reshape(inputs["ids"], (-1, LENGTH)), Learned(inputs["vectors"], rows)


def joined(embeddings: jax.Array, inputs: Arrays) -> jax.Array:
    """Weight the encoder's output [T n, 77, D], and join each text's chunks: [T, n 77, D]."""
    weights = jnp.reshape(inputs["weights"], (-1, LENGTH))
    texts = len(inputs["ids"])
    return weighted(embeddings, weights).reshape(texts, -1, embeddings.shape[-1])


def between(made: jax.Array, inputs: Mapping[str, Any]) -> jax.Array:
    """Interpolate between the last two texts, vector by vector, where there is a way to go.

    Args:
        made: of all texts, [T, ..., D].
        inputs: hold the share of the way, if the last text is where the one before it goes.

    Returns:
        made as it is, or [T - 1, ..., D].
    """
    if "share" not in inputs:
        return made
    way = slerp(made[-2], made[-1], inputs["share"], axis=-1)
    return jnp.stack([*made[:-2], way.astype(made.dtype)])
