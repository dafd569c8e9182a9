"""Latents of pictures and conditions of captions, computed once and kept."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.text import DEFAULTS
from sd_tpu.training.pictures import Example

Tree = Any  # of arrays

TOLD = 1.0  # the guidance of networks that are told it: none


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A picture as the networks take it, in NumPy's arrays.

    Attributes:
        latents: [h, w, C] float32.
        text: the conditions of its caption, or inputs of text encoders whose last text it is.
        no_text: the same where the caption is left out.
    """

    latents: np.ndarray
    text: Tree
    no_text: Tree


def encode(
    checkpoint: Checkpoint,
    params: Params,
    examples: Sequence[Example],
    *,
    texts: bool = True,
    done: Callable[[int], None] = lambda count: None,
) -> tuple[Any, list[Encoded]]:
    """Encode pictures, and their captions unless that is left to encoders that are trained.

    Args:
        checkpoint: whose model encodes.
        params: of its text encoders and its autoencoder.
        examples: the pictures.
        texts: whether captions are encoded.
        done: called with the number of pictures that are.

    Returns:
        The model for texts of these lengths, and the pictures in their order.

    Raises:
        PromptError: a caption cannot be read.
    """
    inputs = _text_inputs(checkpoint, examples)
    model = checkpoint.model.for_inputs(inputs[0][0])
    encode_image, encode_text = jax.jit(model.encode), jax.jit(model.encode_prompt)

    def text(given: Tree) -> Tree:
        if not texts:
            return given
        return jax.tree.map(lambda x: np.asarray(x[-1]), encode_text(params, given))

    without: dict[tuple[int, int], Tree] = {}
    encoded = []
    for number, (example, (given, nothing)) in enumerate(zip(examples, inputs, strict=True), 1):
        if example.size not in without:
            without[example.size] = text(nothing)
        latents = np.asarray(encode_image(params, example.pixels()), np.float32)
        encoded.append(Encoded(latents, text(given), without[example.size]))
        done(number)
    return model, encoded


def _text_inputs(checkpoint: Checkpoint, examples: Sequence[Example]) -> list[tuple[Tree, Tree]]:
    """Return the text encoders' inputs of each picture, with its caption and without.

    The last text is the one that counts. All are filled up to the longest caption's length, which
    stands in place of a negative prompt.
    """
    count = checkpoint.model.count
    longest = max(
        (each.caption for each in examples),
        key=lambda caption: count(checkpoint.tokenizers, caption, DEFAULTS).tokens,
    )

    def inputs(example: Example, prompt: str, negative: str) -> Tree:
        height, width = example.size
        return checkpoint.prompt_inputs(prompt, negative, height=height, width=width, guidance=TOLD)

    def nothing(example: Example) -> Tree:
        if getattr(checkpoint.model, "texts", 2) == 1:
            return inputs(example, "", "")
        # A negative prompt that nobody wrote is not the same as an empty prompt.
        return jax.tree.map(_reversed, inputs(example, longest, ""))

    return [(inputs(each, each.caption, longest), nothing(each)) for each in examples]


def _reversed(x: Any) -> Any:
    """Return an input with the texts in the other order; it is as it was if it has none."""
    return x[::-1] if np.ndim(x) and len(x) == 2 else x
