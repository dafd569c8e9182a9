"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206): a transformer that was trained
by flow matching, two CLIP text encoders and, unless it is left out, a T5."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint.config import (
    CheckpointError,
    ProjectedTextEncoderConfig,
    SD3TransformerConfig,
    T5Config,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families import text
from sd_tpu.families.clip_model import ClipModel
from sd_tpu.families.latent_model import Arrays, Parts, check_channels, check_t5, stems
from sd_tpu.families.prompt import words_of
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from sd_tpu.families.text import DEFAULTS, PromptOptions
from sd_tpu.families.tokenizer import LENGTH
from sd_tpu.models import CLIPTextModelWithProjection, SD3Transformer2DModel, T5EncoderModel

T5 = "text_encoder_3"
T5_TOKENS = 256  # of each text, padding among them; zeros without the encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableDiffusion3(ClipModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    Inputs are those of `text.encoder_inputs` for both CLIP encoders, "clip_skip" as in
    `StableDiffusion`, and T5's token ids i32 [2, 256] by its component's name. Conditions are the
    embeddings [2, n 77 + 256, D] as "text", n the number of chunks, and the pooled first chunk
    [2, P] of both CLIP encoders as "pooled".
    """

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    text_encoder_2: nnx.GraphDef
    text_encoder_3: nnx.GraphDef | None = None
    transformer_config: SD3TransformerConfig
    text_config: ProjectedTextEncoderConfig
    text_config_2: ProjectedTextEncoderConfig

    denoiser: ClassVar = "transformer"
    trained: ClassVar = 128
    rounded: ClassVar = ("transformer", T5)
    flow: ClassVar = True
    pipelines: ClassVar = (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    )
    components: ClassVar = stems("text_encoder", "text_encoder_2", T5, "transformer")
    optional: ClassVar = (T5,)
    index: ClassVar = {
        "_class_name": "StableDiffusion3Pipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        T5: [None, None],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "tokenizer_3": [None, None],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    encoders: ClassVar = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
    decoders: ClassVar = ("taesd3",)

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return diffusers' own numbers, as `LatentModel.defaults`; and less noise for what is
        drawn larger, as its sigmas are shifted towards noise."""
        return {"steps": 28, "guidance": 7.0, "larger_strength": 0.25}

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of each text encoder's tokenizer, by component."""
        return {**super().tokenizer_classes(), T5: ("tokenizer_3", T5Tokenizer)}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoders and the transformer, as `LatentModel.networks`."""
        transformer = SD3TransformerConfig.from_dict(configs["transformer"])
        first = ProjectedTextEncoderConfig.from_dict(configs["text_encoder"])
        second = ProjectedTextEncoderConfig.from_dict(configs["text_encoder_2"])
        parts = {
            "text_encoder": architecture(CLIPTextModelWithProjection, first, dtype=dtype),
            "text_encoder_2": architecture(CLIPTextModelWithProjection, second, dtype=dtype),
            "transformer": architecture(SD3Transformer2DModel, transformer, dtype=dtype),
        }
        width = first.hidden_size + second.hidden_size
        if T5 in configs:
            t5 = T5Config.from_dict(configs[T5])
            parts[T5] = architecture(T5EncoderModel, t5, dtype=dtype)
            check_t5(t5, transformer.joint_attention_dim)
        _check(transformer, width, first.projection_dim + second.projection_dim)
        check_channels(transformer.in_channels, transformer.out_channels, vae)
        return parts, dict(transformer_config=transformer, text_config=first, text_config_2=second)

    @property
    def model_index(self) -> dict[str, Any]:
        """model_index.json, but for the scheduler."""
        index = super().model_index
        if self.text_encoder_3 is None:
            return index
        return {
            **index,
            T5: ["transformers", "T5EncoderModel"],
            "tokenizer_3": ["transformers", "T5TokenizerFast"],
        }

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples."""
        return self.downscale * self.transformer_config.patch_size

    @property
    def max_size(self) -> tuple[int, int]:
        """Largest height and width of pictures: those that the transformer has positions for."""
        side = self.size_unit * self.transformer_config.pos_embed_max_size
        return side, side

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `encode_text` takes."""
        shapes = super().text_input_shapes
        if self.text_encoder_3 is not None:
            shapes[T5] = jax.ShapeDtypeStruct((self.texts, T5_TOKENS), jnp.int32)
        return shapes

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        config = self.transformer_config
        tokens = self.chunks * LENGTH + T5_TOKENS
        return {
            "text": jax.ShapeDtypeStruct((2, tokens, config.joint_attention_dim), self.dtype),
            "pooled": jax.ShapeDtypeStruct((2, config.pooled_projection_dim), self.dtype),
        }

    # --- on the host ----------------------------------------------------------------------------

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
        """Return the encoders' inputs of the texts; T5 is told no weights of words."""
        texts = [negative_prompt, prompt]
        inputs = self.text_inputs(tokenizers, texts, options, clip_skip, to_prompt, share)
        if self.text_encoder_3 is not None:
            texts += [to_prompt] * ("share" in inputs)
            inputs[T5] = tokenizers["tokenizer_3"].ids(
                [words_of(each) for each in texts], T5_TOKENS
            )
        return inputs

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts by all encoders."""
        # As SDXL's: the last layer but one is the last that is taken.
        skip = jnp.maximum(inputs["clip_skip"], 2) - 1
        hidden, pooled = [], []
        for part in self.encoders:
            encoder = nnx.merge(getattr(self, part), params[part])
            ids, learned = text.flat(inputs[part])
            states, whole = encoder(ids, skip, learned)
            hidden.append(text.joined(states, inputs[part]))
            pooled.append(whole[:: self.chunks])
        width = self.transformer_config.joint_attention_dim
        clip = text.between(jnp.concatenate(hidden, axis=-1), inputs)
        clip = jnp.pad(clip, ((0, 0), (0, 0), (0, width - clip.shape[-1])))
        if self.text_encoder_3 is None:
            t5 = jnp.zeros((2, T5_TOKENS, width), clip.dtype)
        else:
            encoder = nnx.merge(self.text_encoder_3, params[T5])
            t5 = text.between(encoder(inputs[T5]), inputs).astype(clip.dtype)
        return {
            "text": jnp.concatenate([clip, t5], axis=1),
            "pooled": text.between(jnp.concatenate(pooled, axis=-1), inputs),
        }

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the transformer's output, the velocity."""
        return network(x, t, cond["text"], cond["pooled"])


def _check(transformer: SD3TransformerConfig, width: int, pooled: int) -> None:
    if width > transformer.joint_attention_dim or pooled != transformer.pooled_projection_dim:
        raise CheckpointError(
            f"The CLIP text encoders give embeddings of {width} and pooled texts of {pooled}, the "
            f"transformer takes {transformer.joint_attention_dim} and "
            f"{transformer.pooled_projection_dim}."
        )
