"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet, an autoencoder."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from sd_tpu.checkpoint.config import CheckpointError, TextEncoderConfig, UNetConfig
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families import text
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.families.latent_model import Arrays, Parts, stems
from sd_tpu.families.text import DEFAULTS, PromptOptions
from sd_tpu.families.tokenizer import LENGTH, Tokenizer
from sd_tpu.models import CLIPTextModel

# Pipelines whose constructors in diffusers make steps_offset of a scheduler 1, and those that take
# UNets for larger ones.
OFFSETTING = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionPAGPipeline",
)
ENLARGING = (*OFFSETTING, "FlaxStableDiffusionPipeline", "FlaxStableDiffusionInpaintPipeline")


def enlarged(unet: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a UNet's config with at least 64 latents a side, if diffusers before 0.9 wrote it.

    Such configs say 32 for SD 1, which was trained on 64.
    """
    size, version = unet.get("sample_size"), str(unet.get("_diffusers_version"))
    small = type(size) is int and size < 64
    return {**unet, "sample_size": 64} if small and re.match(r"0\.[0-8]\b", version) else unet


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableDiffusion(LatentDiffusion):
    """The three networks without their parameters: a `sd_tpu.families.model.Model`.

    Inputs are those of `text.encoder_inputs` for both texts, and the encoder's layer that is taken,
    i32 [] as "clip_skip", 1 the last. Conditions are the embeddings [2, n 77, D] as "text", n the
    number of chunks.
    """

    text_encoder: nnx.GraphDef
    text_config: TextEncoderConfig

    pipelines: ClassVar = (
        "StableDiffusionPipeline",
        "FlaxStableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "FlaxStableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "FlaxStableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
        "FlaxStableDiffusionControlNetPipeline",
        "StableDiffusionPAGPipeline",
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
    )
    components: ClassVar = stems("text_encoder", "unet")
    index: ClassVar = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    encoders: ClassVar = {"text_encoder": "tokenizer"}
    decoders: ClassVar = ("taesd",)

    @staticmethod
    def mended(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's configs as diffusers changes them, as `LatentDiffusion.mended`."""
        unet, scheduler = configs["unet"], configs["scheduler"]
        name = configs["model_index"].get("_class_name")
        if name in OFFSETTING:
            scheduler = {**scheduler, "steps_offset": 1}
        if name == "StableDiffusionInpaintPipeline" and (
            scheduler.get("_class_name") == "PNDMScheduler"
        ):
            scheduler = {**scheduler, "skip_prk_steps": True}
        if name in ENLARGING:
            unet = enlarged(unet)
        return {**configs, "unet": unet, "scheduler": scheduler}

    @classmethod
    def text_encoders(
        cls, configs: Mapping[str, Any], unet: UNetConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoder, as `LatentDiffusion.text_encoders`."""
        config = TextEncoderConfig.from_dict(configs["text_encoder"])
        _check(config, unet)
        encoder = architecture(CLIPTextModel, config, dtype=dtype)
        return {"text_encoder": encoder}, dict(text_config=config)

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        shape = (2, self.chunks * LENGTH, self.text_config.hidden_size)
        return {"text": jax.ShapeDtypeStruct(shape, self.dtype)}

    # --- on the host ----------------------------------------------------------------------------

    def prompt_inputs(
        self,
        tokenizers: Mapping[str, Tokenizer],
        prompt: str,
        negative_prompt: str = "",
        *,
        options: PromptOptions = DEFAULTS,
        guidance: float = 1.0,
        clip_skip: int = 1,
        to_prompt: str = "",
        share: float = 0.0,
        **_: int | float,
    ) -> Arrays:
        """Return the encoder's inputs of the texts, and the guidance where the UNet takes it."""
        return {
            **self.text_inputs(
                tokenizers, [negative_prompt, prompt], options, clip_skip, to_prompt, share
            ),
            **self.guidance_inputs(guidance),
        }

    def plain_inputs(
        self,
        prompt: np.ndarray,
        negative_prompt: np.ndarray,
        *,
        guidance: float = 1.0,
        **_: int | float,
    ) -> Arrays:
        """Return `prompt_inputs` of ids [77] i32, of one chunk without emphasis."""
        return {**self.plain_text_inputs(negative_prompt, prompt), **self.guidance_inputs(guidance)}

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts."""
        encoder = nnx.merge(self.text_encoder, params["text_encoder"])
        text_inputs = inputs["text_encoder"]
        # Of both texts, as in A1111; diffusers takes the negative prompt's last layer always.
        hidden = encoder(*text.flat(text_inputs), skip=inputs["clip_skip"] - 1)
        embeddings = text.joined(hidden, text_inputs)
        return {"text": text.between(embeddings, inputs)}


def _check(encoder: TextEncoderConfig, unet: UNetConfig) -> None:
    if unet.addition_embed_type:
        raise CheckpointError(
            "The UNet takes sizes and a pooled text, as that of SDXL does, but "
            "the checkpoint is for StableDiffusionPipeline."
        )
    if encoder.hidden_size != unet.cross_attention_dim or encoder.max_position_embeddings < LENGTH:
        raise CheckpointError(
            f"The text encoder gives {encoder.max_position_embeddings} embeddings of "
            f"{encoder.hidden_size}, the UNet takes {LENGTH} of {unet.cross_attention_dim}."
        )
