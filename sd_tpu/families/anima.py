"""Anima (CircleStone Labs and Comfy Org 2026): the transformer of Cosmos-Predict2, trained on anime
by flow matching, and a text conditioner that asks a Qwen3 language model by T5's tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint.config import (
    AnimaConditionerConfig,
    CheckpointError,
    CosmosTransformerConfig,
    Qwen3Config,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families.latent_model import Arrays, Parts, check_channels
from sd_tpu.families.prompt import without_loras
from sd_tpu.families.qwen_model import QwenModel
from sd_tpu.families.qwen_tokenizer import ALONE
from sd_tpu.families.t5_tokenizer import T5Tokenizer, lengths
from sd_tpu.families.text import Count, PromptOptions
from sd_tpu.models import AnimaTextConditioner, CosmosTransformer3DModel, Qwen3Model

CONDITIONER = "text_conditioner"
TOKENS = 512  # of each text, for either tokenizer


@dataclass(frozen=True, kw_only=True)
class Anima(QwenModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    Inputs are those of `QwenModel`, T5's token ids of both texts i32 [2, 512] as "t5_ids", and how
    many of them there are, i32 [2], as "t5_lengths". Conditions are the text embeddings [2, 512, D]
    as "text": zeros after the last of T5's tokens, and attended to.
    """

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    text_conditioner: nnx.GraphDef
    transformer_config: CosmosTransformerConfig

    trained: ClassVar = 128
    buckets: ClassVar = (TOKENS,)
    template: ClassVar = ALONE
    whole: ClassVar = False
    pipelines: ClassVar = ("AnimaModularPipeline",)
    components: ClassVar = {**QwenModel.components, CONDITIONER: "diffusion_pytorch_model"}
    index: ClassVar = {
        "_class_name": "AnimaModularPipeline",
        "text_encoder": ["transformers", "Qwen3Model"],
        CONDITIONER: ["diffusers", "AnimaTextConditioner"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "t5_tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "CosmosTransformer3DModel"],
    }
    decoders: ClassVar = ()

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the published numbers, and less noise for what is drawn larger, as sigmas are
        shifted towards noise."""
        return {"steps": 30, "guidance": 4.0, "larger_strength": 0.25}

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of each tokenizer, by the component that it is for."""
        return {**super().tokenizer_classes(), CONDITIONER: ("t5_tokenizer", T5Tokenizer)}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoder, the conditioner and the transformer, as
        `LatentModel.networks`."""
        transformer = CosmosTransformerConfig.from_dict(configs["transformer"])
        conditioner = AnimaConditionerConfig.from_dict(configs[CONDITIONER])
        text = Qwen3Config.from_dict(configs["text_encoder"])
        widths = text.hidden_size, conditioner.target_dim
        if widths != (conditioner.source_dim, transformer.text_embed_dim):
            raise CheckpointError(
                f"The text encoder gives states of {widths[0]} and the conditioner embeddings of "
                f"{widths[1]}; these take {conditioner.source_dim} and the transformer "
                f"{transformer.text_embed_dim}."
            )
        check_channels(transformer.in_channels, transformer.out_channels, vae)
        parts = {
            "text_encoder": architecture(Qwen3Model, text, dtype=dtype),
            CONDITIONER: architecture(AnimaTextConditioner, conditioner, dtype=dtype),
            "transformer": architecture(CosmosTransformer3DModel, transformer, dtype=dtype),
        }
        return parts, dict(transformer_config=transformer)

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def max_size(self) -> tuple[int, int]:
        """Largest height and width of pictures: those that the transformer has positions for."""
        side = self.size_unit * self.transformer_config.positions
        return side, side

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `encode_text` takes."""
        return {
            **super().text_input_shapes,
            "t5_ids": jax.ShapeDtypeStruct((2, TOKENS), jnp.int32),
            "t5_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        }

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        shape = 2, TOKENS, self.transformer_config.text_embed_dim
        return {"text": jax.ShapeDtypeStruct(shape, self.dtype)}

    # --- on the host ----------------------------------------------------------------------------

    def count(self, tokenizers: Mapping[str, Any], prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens, as `Model.count`: those of the tokenizer that makes more."""
        of_t5 = tokenizers["t5_tokenizer"].count(without_loras(prompt), TOKENS)
        of_qwen = super().count(tokenizers, prompt, options)
        return max(of_t5, of_qwen, key=lambda count: count.tokens)

    def prompt_inputs(
        self, tokenizers: Mapping[str, Any], prompt: str, negative_prompt: str = "", **settings: Any
    ) -> Arrays:
        """Return the token ids of both texts, as `QwenModel.prompt_inputs`."""
        inputs = super().prompt_inputs(tokenizers, prompt, negative_prompt, **settings)
        texts = [without_loras(text) for text in (negative_prompt, prompt)]
        ids = tokenizers["t5_tokenizer"].ids(texts, TOKENS)
        return {**inputs, "t5_ids": ids, "t5_lengths": lengths(ids)}

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts by the language model, and make them embeddings of T5's tokens."""
        encoder = nnx.merge(self.text_encoder, params["text_encoder"])
        conditioner = nnx.merge(self.text_conditioner, params[CONDITIONER])
        states = encoder(inputs["ids"])
        text = conditioner(inputs["t5_ids"], inputs["t5_lengths"], states, inputs["lengths"])
        return {"text": text}

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the transformer's output, the velocity."""
        return network(x, t / 1000, cond["text"])
