"""Stable Diffusion XL (Podell et al. 2023, arXiv:2307.01952).

It has two CLIP text encoders, and a UNet that takes the picture's size as well.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sd_tpu.checkpoint.config import (
    CheckpointError,
    PipelineConfig,
    ProjectedTextEncoderConfig,
    TextEncoderConfig,
    UNetConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families import text
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.families.latent_model import Arrays, Parts, stems
from sd_tpu.families.text import DEFAULTS, PromptOptions
from sd_tpu.families.tokenizer import LENGTH, Tokenizer
from sd_tpu.models import CLIPTextModel, CLIPTextModelWithProjection

SIZES = 6  # numbers told to the UNet: original height and width, top and left of the crop, target


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableDiffusionXL(LatentDiffusion):
    """The four networks without their parameters: a `sd_tpu.families.model.Model`.

    Inputs are those of `text.encoder_inputs` for both texts and both encoders, "clip_skip" as in
    `StableDiffusion`, whether each text was written [2] as "written", and the sizes [2, 6] f32 as
    "time_ids". Conditions are the embeddings [2, n 77, D] as "text", n the number of chunks and D
    the width of both encoders, the pooled first chunk [2, P] of the second as "text_embeds", and
    the sizes.
    """

    text_encoder: nnx.GraphDef
    text_encoder_2: nnx.GraphDef
    text_config: TextEncoderConfig
    text_config_2: ProjectedTextEncoderConfig
    force_zeros: bool  # in place of the conditions of a negative prompt that nobody wrote

    upcasts: ClassVar = True
    pipelines: ClassVar = (
        "StableDiffusionXLPipeline",
        "FlaxStableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLPAGPipeline",
    )
    components: ClassVar = stems("text_encoder", "text_encoder_2", "unet")
    index: ClassVar = {
        "_class_name": "StableDiffusionXLPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    encoders: ClassVar = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
    decoders: ClassVar = ("taesdxl",)

    @classmethod
    def text_encoders(
        cls, configs: Mapping[str, Any], unet: UNetConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoders, as `LatentDiffusion.text_encoders`."""
        first = TextEncoderConfig.from_dict(configs["text_encoder"])
        second = ProjectedTextEncoderConfig.from_dict(configs["text_encoder_2"])
        index = PipelineConfig.from_dict(configs["model_index"])
        _check(first, second, unet)
        parts = {
            "text_encoder": architecture(CLIPTextModel, first, dtype=dtype),
            "text_encoder_2": architecture(CLIPTextModelWithProjection, second, dtype=dtype),
        }
        zeros = bool(index.force_zeros_for_empty_prompt)
        return parts, dict(text_config=first, text_config_2=second, force_zeros=zeros)

    @property
    def model_index(self) -> dict[str, Any]:
        """model_index.json, but for the scheduler."""
        return {**super().model_index, "force_zeros_for_empty_prompt": self.force_zeros}

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `encode_text` takes."""
        written = jax.ShapeDtypeStruct((self.texts,), jnp.bool)
        return {**super().text_input_shapes, "written": written}

    @property
    def added_input_shapes(self) -> Arrays:
        """Shapes of the inputs beside the texts, among them the sizes."""
        time_ids = jax.ShapeDtypeStruct((2, SIZES), jnp.float32)
        return {**super().added_input_shapes, "time_ids": time_ids}

    @property
    def added_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_added_cond` returns."""
        time_ids = self.added_input_shapes["time_ids"]
        return {**super().added_cond_shapes, "time_ids": time_ids}

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        shape = (2, self.chunks * LENGTH, sum(self.text_widths.values()))
        return {
            "text": jax.ShapeDtypeStruct(shape, self.dtype),
            "text_embeds": jax.ShapeDtypeStruct((2, self.text_config_2.projection_dim), self.dtype),
        }

    # --- on the host ----------------------------------------------------------------------------

    def prompt_inputs(
        self,
        tokenizers: Mapping[str, Tokenizer],
        prompt: str,
        negative_prompt: str = "",
        *,
        options: PromptOptions = DEFAULTS,
        height: int,
        width: int,
        guidance: float = 1.0,
        clip_skip: int = 1,
        to_prompt: str = "",
        share: float = 0.0,
        **_: int | float,
    ) -> Arrays:
        """Return the inputs of the texts, the size, and the guidance where the UNet takes it."""
        written = bool(negative_prompt) or not self.force_zeros
        texts = self.text_inputs(
            tokenizers, [negative_prompt, prompt], options, clip_skip, to_prompt, share
        )
        prompts = len(texts["text_encoder"]["ids"]) - 1
        return {
            **texts,
            **_size_inputs([written, *[True] * prompts], height, width),
            **self.guidance_inputs(guidance),
        }

    def plain_inputs(
        self,
        prompt: np.ndarray,
        negative_prompt: np.ndarray | None,
        *,
        height: int,
        width: int,
        guidance: float = 1.0,
    ) -> Arrays:
        """Return `prompt_inputs` of ids [2, 77] i32, of one chunk without emphasis.

        Without a negative prompt there are zeros, whatever the checkpoint says.
        """
        written = negative_prompt is not None
        return {
            **self.plain_text_inputs(negative_prompt if written else prompt, prompt),
            **_size_inputs([written, True], height, width),
            **self.guidance_inputs(guidance),
        }

    # --- on the devices -------------------------------------------------------------------------

    def encode_added_cond(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode the inputs beside the texts; the sizes stay as they are."""
        return {**super().encode_added_cond(params, inputs), "time_ids": inputs["time_ids"]}

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts by both encoders."""
        first = nnx.merge(self.text_encoder, params["text_encoder"])
        second = nnx.merge(self.text_encoder_2, params["text_encoder_2"])
        text_inputs, text_inputs_2 = inputs["text_encoder"], inputs["text_encoder_2"]
        # These networks were trained on the last layer but one, and so 1 and 2 are the same.
        skip = jnp.maximum(inputs["clip_skip"], 2) - 1
        ids, learned = text.flat(text_inputs)
        hidden = first.hidden_state(ids, skip, learned)
        ids, learned = text.flat(text_inputs_2)
        hidden_2, pooled = second(ids, skip, learned)
        embeddings = jnp.concatenate(
            [text.joined(hidden, text_inputs), text.joined(hidden_2, text_inputs_2)], axis=-1
        )
        written = inputs["written"]
        whole = jnp.where(written[:, None, None], embeddings, 0)
        pooled = jnp.where(written[:, None], pooled[:: self.chunks], 0)
        return {"text": text.between(whole, inputs), "text_embeds": text.between(pooled, inputs)}


def _size_inputs(written: Sequence[bool], height: int, width: int) -> Arrays:
    """Return which of the texts were written, and the sizes.

    As in diffusers, original and target size are the picture's own, and nothing was cropped.
    """
    sizes = np.asarray([height, width, 0, 0, height, width], np.float32)
    return {"written": np.array(written), "time_ids": np.stack([sizes, sizes])}


def _check(first: TextEncoderConfig, second: ProjectedTextEncoderConfig, unet: UNetConfig) -> None:
    if not unet.addition_embed_type:
        raise CheckpointError(
            "The UNet takes no sizes and no pooled text, but the checkpoint is "
            "for StableDiffusionXLPipeline."
        )
    width = first.hidden_size + second.hidden_size
    length = min(first.max_position_embeddings, second.max_position_embeddings)
    if width != unet.cross_attention_dim or length < LENGTH:
        raise CheckpointError(
            f"The text encoders give {length} embeddings of {width}, the UNet takes {LENGTH} of "
            f"{unet.cross_attention_dim}."
        )
    added = second.projection_dim + SIZES * (unet.addition_time_embed_dim or 0)
    if added != unet.projection_class_embeddings_input_dim:
        raise CheckpointError(
            f"The UNet takes {unet.projection_class_embeddings_input_dim} numbers beside the text, "
            f"SDXL tells it {added}: a pooled text of {second.projection_dim} and {SIZES} sizes of "
            f"{unet.addition_time_embed_dim}. The refiner of SDXL is not supported."
        )
