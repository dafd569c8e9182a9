"""Families whose texts a Qwen3 language model reads, most as a person's turn in a conversation."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.checkpoint.config import CheckpointError, Qwen3Config
from sd_tpu.families.latent_model import Arrays, LatentModel, check_last_layer, stems
from sd_tpu.families.prompt import without_loras
from sd_tpu.families.qwen_tokenizer import QwenTokenizer, Template
from sd_tpu.families.text import DEFAULTS, Count, PromptOptions
from sd_tpu.sentence import SentenceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenModel(LatentModel):
    """The autoencoder of a family, without its parameters, and how its texts are read.

    Inputs are the token ids i32 [2, T] of both texts as "ids", T one of `buckets` and what the
    template drops, and how many of them there are, i32 [2], as "lengths".
    """

    tokens: int = 0  # of each text, padding among them; 0 is the first of `buckets`

    denoiser: ClassVar = "transformer"
    rounded: ClassVar = ("transformer", "text_encoder")
    flow: ClassVar = True
    even_sigmas: ClassVar = True
    components: ClassVar = stems("text_encoder", "transformer")
    buckets: ClassVar[tuple[int, ...]]  # that programs are compiled for; longer texts are cut
    template: ClassVar[Template]  # what the language model is given around a text
    # After how many of its layers states are taken, side by side; none is the family's own way.
    taken: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def unread(cls, part: str, name: str) -> bool:
        """Whether a parameter is left out: in a language model those of layers after the ones that
        are taken, of the norm behind them, and of what sees pictures."""
        if part != "text_encoder":
            return super().unread(part, name)
        layer = re.match(r"layers\.(\d+)\.", name)
        after = bool(cls.taken) and (
            name.startswith("norm.") if layer is None else int(layer[1]) >= cls.taken[-1]
        )
        return after or name.startswith("visual.")

    @classmethod
    def check_states(cls, text: Qwen3Config, takes: int) -> None:
        """Check the states that a transformer takes of a text encoder's layers.

        Args:
            text: the text encoder's config.
            takes: numbers of each token that the transformer takes.

        Raises:
            CheckpointError: the layers are too few, or give other numbers side by side.
        """
        width = len(cls.taken) * text.hidden_size
        if width != takes or text.num_hidden_layers <= cls.taken[-1]:
            raise CheckpointError(
                f"The text encoder's {text.num_hidden_layers} layers give {width} numbers a token, "
                f"the transformer takes {takes} of its first {cls.taken[-1]}."
            )

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of the tokenizer, by component."""
        return {"text_encoder": ("tokenizer", QwenTokenizer)}

    @property
    def length(self) -> int:
        """Tokens of each text, padding among them."""
        return self.tokens or self.buckets[0]

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells these programs from those for short texts."""
        return () if self.length == self.buckets[0] else (f"{self.length} tokens",)

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `encode_text` takes."""
        return {
            "ids": jax.ShapeDtypeStruct((2, self.length + self.template.dropped), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        }

    def for_inputs(self, inputs: Arrays) -> Any:
        """Return these networks for texts as long as in the inputs."""
        return dataclasses.replace(self, tokens=inputs["ids"].shape[1] - self.template.dropped)

    def count(self, tokenizers: Mapping[str, Any], prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens with those of its turn, as `Model.count`."""
        tokenizer, most, dropped = tokenizers["tokenizer"], self.buckets[-1], self.template.dropped
        ids = tokenizer.turn(without_loras(prompt), self.template)
        lost = tokenizer.lost(ids, most + dropped, self.template)
        return Count(len(ids) - dropped, most, lost)

    def prompt_inputs(
        self,
        tokenizers: Mapping[str, Any],
        prompt: str,
        negative_prompt: str = "",
        *,
        options: PromptOptions = DEFAULTS,
        clip_skip: int = 1,
        to_prompt: str = "",
        share: float = 0.0,
        **_: int | float,
    ) -> Arrays:
        """Return the token ids of both texts, which are read as they are written.

        Raises:
            SentenceError: a setting is for models with CLIP, or the picture is between two prompts.
        """
        check_last_layer(clip_skip)
        if to_prompt and share:
            raise SentenceError(
                "This model draws nothing between two prompts, whose lengths differ; between two "
                "seeds it does."
            )
        tokenizer, template = tokenizers["tokenizer"], self.template
        rooms = [size + template.dropped for size in self.buckets]
        texts = [
            tokenizer.cut(tokenizer.turn(without_loras(text), template), rooms[-1], template)
            for text in (negative_prompt, prompt)
        ]
        longest = max(map(len, texts))
        length = next(room for room in rooms if room >= longest)
        ids = np.full((2, length), tokenizer.pad, np.int32)
        for row, tokens in zip(ids, texts, strict=True):
            row[: len(tokens)] = tokens
        return {"ids": ids, "lengths": np.array([len(tokens) for tokens in texts], np.int32)}
