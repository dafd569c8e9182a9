"""Families whose texts CLIP reads, in chunks of 77 tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.families import text
from sd_tpu.families.latent_model import Arrays, LatentModel
from sd_tpu.families.text import Count, PromptOptions
from sd_tpu.families.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipModel(LatentModel):
    """The autoencoder and the CLIP text encoders of a family, without their parameters."""

    chunks: int = 1  # of 77 tokens that each text has
    texts: int = 2  # the negative prompt and the prompt, and a third that this is on the way to

    encoders: ClassVar[dict[str, str]]  # the folder of the tokenizer of each CLIP text encoder

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of each text encoder's tokenizer, by component."""
        return {part: (folder, Tokenizer) for part, folder in cls.encoders.items()}

    def count(self, tokenizers: Mapping[str, Any], prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens, as `Model.count`: those of the first encoder."""
        return text.count(tokenizers[next(iter(self.encoders.values()))], prompt, options)

    def for_inputs(self, inputs: Arrays) -> Any:
        """Return these networks for as many texts of as many chunks as in the inputs."""
        texts, chunks, _ = inputs[next(iter(self.encoders))]["ids"].shape
        return dataclasses.replace(self, texts=texts, chunks=chunks)

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells these programs from those for one prompt of one chunk."""
        long, way = [f"{self.chunks} chunks"], ["between prompts"]
        return (*long * (self.chunks > 1), *way * (self.texts > 2))

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `text_inputs` returns, and of the share of a journey's way."""
        encoders = {
            part: text.input_shapes(self.chunks, width, self.texts)
            for part, width in self.text_widths.items()
        }
        way = {"share": jax.ShapeDtypeStruct((), jnp.float32)} if self.texts > 2 else {}
        return {**encoders, "clip_skip": jax.ShapeDtypeStruct((), jnp.int32), **way}

    def text_inputs(
        self,
        tokenizers: Mapping[str, Tokenizer],
        texts: Sequence[str],
        options: PromptOptions,
        clip_skip: int,
        to_prompt: str,
        share: float,
    ) -> Arrays:
        """Return the encoders' inputs of a negative prompt, a prompt and a journey's second prompt.

        Args:
            tokenizers: the checkpoint's, by folder.
            texts: the negative prompt and the prompt.
            options: of prompts.
            clip_skip: the layer that embeddings are taken from, the last being 1.
            to_prompt: the prompt that this one is on the way to, or "".
            share: of the way to it.
        """
        if to_prompt and share:
            return {
                **self.text_inputs(tokenizers, [*texts, to_prompt], options, clip_skip, "", 0.0),
                "share": np.float32(share),
            }
        of = {part: tokenizers[folder] for part, folder in self.encoders.items()}
        return {
            **text.encoder_inputs(of, self.text_widths, texts, options),
            "clip_skip": np.int32(clip_skip),
        }

    def plain_text_inputs(self, *texts: np.ndarray) -> Arrays:
        """Return the encoders' inputs of ids of one chunk without emphasis.

        Args:
            texts: ids [77] i32, or [E, 77] for E encoders, of each text.
        """
        ids = np.stack(texts).reshape(len(texts), len(self.encoders), -1)
        encoders = {
            part: text.plain_inputs(ids[:, number], width)
            for number, (part, width) in enumerate(self.text_widths.items())
        }
        return {**encoders, "clip_skip": np.int32(1)}

    @property
    def text_widths(self) -> Mapping[str, int]:
        """The hidden size of each CLIP text encoder, by component."""
        configs = {part: part.replace("encoder", "config") for part in self.encoders}
        return {part: getattr(self, config).hidden_size for part, config in configs.items()}
