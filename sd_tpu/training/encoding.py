"""Latents of pictures and conditions of captions, computed once and kept."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.stages import Wrapped

from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.model import Model
from sd_tpu.families.text import DEFAULTS
from sd_tpu.training.pictures import Example

Tree = Any  # of arrays

UNGUIDED = 1.0  # the guidance that networks with a guidance embedding are trained with


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


class ExampleEncoder:
    """Programs that encode pictures and their captions, on one device.

    Attributes:
        model: for texts of these lengths.
        parts: the components whose parameters `encoded` takes.
        temporary: the most bytes that a program takes beside parameters, once all are compiled.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        examples: Sequence[Example],
        device: jax.Device,
        *,
        texts: bool = True,
        stacked: bool = False,
    ):
        """Tokenize the captions.

        Args:
            checkpoint: whose model encodes.
            examples: the pictures.
            device: where.
            texts: whether captions are encoded, which is else left to encoders that are trained.
            stacked: whether parameters lead with an axis of 1.

        Raises:
            PromptError: a caption cannot be read.
        """
        self.examples, self._texts = examples, texts
        self._inputs = _text_inputs(checkpoint, examples)
        self.model = model = checkpoint.model.for_inputs(self._inputs[0][0])
        shapes = checkpoint.parameters.shapes
        self.parts = (
            [part for part in shapes if part != model.denoiser] if texts else [model.autoencoder]
        )
        self.temporary = 0
        lead = (1,) if stacked else ()
        there = jax.sharding.SingleDeviceSharding(device)
        self._params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=there),
            {part: shapes[part] for part in self.parts},
        )
        self._image, self._text = _jitted_encoders(model, stacked)
        self._programs: dict[Any, Any] = {}  # by a picture's size, and of texts by "text"
        self._without: dict[tuple[int, int], Tree] = {}

    def compile(self) -> None:
        """Compile all programs."""
        wanted: dict[Any, Any] = {each.size: (self._image, each.pixels()) for each in self.examples}
        if self._texts:
            wanted["text"] = self._text, self._inputs[0][0]
        for key, (program, inputs) in wanted.items():
            compiled = program.lower(self._params, inputs).compile()
            self._programs[key] = compiled
            size = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
            self.temporary = max(self.temporary, size)

    def blank(self, number: int) -> Encoded:
        """Return zeros in the shapes of an encoded picture."""

        def zeros(of: Tree) -> Tree:
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), of)

        latents = jax.eval_shape(self._image, self._params, self.examples[number].pixels())
        text = self._inputs[number][0]
        if self._texts:
            both = jax.eval_shape(self._text, self._params, text)
            text = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), both)
        return Encoded(np.zeros(latents.shape, np.float32), zeros(text), zeros(text))

    def encoded(self, params: Params, number: int) -> Encoded:
        """Encode a picture and its caption, by programs that are compiled.

        Args:
            params: of `parts`, on the device.
            number: of the picture.
        """
        example, (given, nothing) = self.examples[number], self._inputs[number]
        if example.size not in self._without:
            self._without[example.size] = self._read(params, nothing)
        latents = np.asarray(self._programs[example.size](params, example.pixels()), np.float32)
        return Encoded(latents, self._read(params, given), self._without[example.size])

    def _read(self, params: Params, given: Tree) -> Tree:
        if not self._texts:
            return given
        return jax.tree.map(lambda x: np.asarray(x[-1]), self._programs["text"](params, given))


@lru_cache(maxsize=1)
def _jitted_encoders(model: Model, stacked: bool) -> tuple[Wrapped, Wrapped]:
    """Return jitted encoders of pictures and of texts. The last pair is kept, as in `make_step`."""

    def program(function: Callable) -> Wrapped:
        if not stacked:
            return jax.jit(function)
        return jax.jit(lambda params, x: function(jax.tree.map(lambda y: y[0], params), x))

    return program(model.encode), program(model.encode_prompt)


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
        return checkpoint.prompt_inputs(
            prompt, negative, height=height, width=width, guidance=UNGUIDED
        )

    def nothing(example: Example) -> Tree:
        if getattr(checkpoint.model, "texts", 2) == 1:
            return inputs(example, "", "")
        # A negative prompt that nobody wrote is not the same as an empty prompt.
        return jax.tree.map(_reversed, inputs(example, longest, ""))

    return [(inputs(each, each.caption, longest), nothing(each)) for each in examples]


def _reversed(x: Any) -> Any:
    """Return an input with the texts in the other order; it is as it was if it has none."""
    return x[::-1] if np.ndim(x) and len(x) == 2 else x
