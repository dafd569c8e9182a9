"""The Flax pipeline of SDXL, Podell et al. 2023 (https://arxiv.org/abs/2307.01952)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.families.stable_diffusion_xl import StableDiffusionXL
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    FlaxUNet2DConditionModel,
)
from sd_tpu.pipelines.pipeline import FlaxDiffusionPipeline, ImageOutput


class FlaxStableDiffusionXLPipeline(FlaxDiffusionPipeline):
    """SDXL: prompts to pictures, with parameters kept outside."""

    family = StableDiffusionXL
    networks: ClassVar = dict(
        text_encoder=FlaxCLIPTextModel,
        text_encoder_2=FlaxCLIPTextModelWithProjection,
        vae=FlaxAutoencoderKL,
        unet=FlaxUNet2DConditionModel,
    )
    tokenizers = tuple(StableDiffusionXL.encoders.values())
    checkpoints = StableDiffusionXL.pipelines
    index: ClassVar = {**StableDiffusionXL.index, "force_zeros_for_empty_prompt": True}

    def __init__(
        self,
        text_encoder: FlaxCLIPTextModel,
        text_encoder_2: FlaxCLIPTextModelWithProjection,
        vae: FlaxAutoencoderKL,
        tokenizer: Any,
        tokenizer_2: Any,
        unet: FlaxUNet2DConditionModel,
        scheduler: Any,
        dtype: Any = None,
        **rest: Any,
    ):
        """Join the parts; the tokenizers are transformers'."""
        super().__init__(
            dtype,
            text_encoder=text_encoder,
            text_encoder_2=text_encoder_2,
            vae=vae,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer_2,
            unet=unet,
            scheduler=scheduler,
            **rest,
        )

    def get_embeddings(
        self, prompt_ids: jax.Array, params: Mapping[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the embeddings of ids [B, 2, 77] as the UNet takes them.

        They are [B, 77, D] of each word, from both encoders' last layer but one, and [B, P] of the
        whole.
        """
        first = self.text_encoder(
            prompt_ids[:, 0], params=params["text_encoder"], output_hidden_states=True
        )
        second = self.text_encoder_2(
            prompt_ids[:, 1], params=params["text_encoder_2"], output_hidden_states=True
        )
        words = [output["hidden_states"][-2] for output in (first, second)]
        return jnp.concatenate(words, axis=-1), second["text_embeds"]

    def __call__(
        self,
        prompt_ids: Any,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        height: int | None = None,
        width: int | None = None,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        output_type: str | None = None,
        jit: bool = False,
    ) -> ImageOutput | tuple[np.ndarray]:
        """Draw one picture for each row of token ids, as `FlaxStableDiffusionPipeline` does.

        The other arguments and the errors are those of that pipeline's call.

        Args:
            prompt_ids: int32 [B, 2, 77], or [D, b, 2, 77] as `shard` leaves them.
            neg_prompt_ids: like prompt_ids; without them the text is zeros.
            output_type: "latent" for the latents [..., C, h, w] in place of pictures.

        Returns:
            The images alone: there is no safety checker.
        """
        del jit
        inputs = self._inputs(
            prompt_ids, neg_prompt_ids, prng_seed, num_inference_steps, guidance_scale, latents
        )
        size = self._size(height, width)
        images = self._draw(params, inputs, size, decoded=output_type != "latent")
        images = self._as_given(images, prompt_ids)
        return ImageOutput(images) if return_dict else (images,)

    def _conditions(
        self,
        prompt_ids: jax.Array,
        neg_prompt_ids: jax.Array | None,
        params: Mapping[str, Any],
        size: tuple[int, int],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the text [2b, 77, D] as the UNet takes it, and the added conditions."""
        words, pooled = self.get_embeddings(prompt_ids, params)
        if neg_prompt_ids is None:
            negative = jnp.zeros_like(words), jnp.zeros_like(pooled)
        else:
            negative = self.get_embeddings(neg_prompt_ids, params)
        sizes = jnp.array([*size, 0, 0, *size], jnp.float32)
        return jnp.concatenate([negative[0], words]), {
            "text_embeds": jnp.concatenate([negative[1], pooled]),
            "time_ids": jnp.tile(sizes, (2 * len(words), 1)),
        }
