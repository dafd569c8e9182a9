"""The Flax pipeline of Stable Diffusion that is steered by a control picture."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from sd_tpu.checkpoint.config import CheckpointError, ControlNetConfig
from sd_tpu.families.controlnet import check
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxControlNetModel,
    FlaxUNet2DConditionModel,
)
from sd_tpu.pipelines.pipeline import ImageOutput, each_scale, flat, image_keys
from sd_tpu.pipelines.stable_diffusion import FlaxStableDiffusionPipeline

UNIT = 64  # pixels: the sides of control pictures are multiples of it


class FlaxStableDiffusionControlNetPipeline(FlaxStableDiffusionPipeline):
    """Stable Diffusion 1.x and 2.x: prompts and control pictures to pictures."""

    networks: ClassVar = FlaxStableDiffusionPipeline.networks | dict(controlnet=FlaxControlNetModel)
    index: ClassVar = {
        **StableDiffusion.index,
        "_class_name": "StableDiffusionControlNetPipeline",
        "controlnet": ["diffusers", "ControlNetModel"],
    }

    def __init__(
        self,
        vae: FlaxAutoencoderKL,
        text_encoder: FlaxCLIPTextModel,
        tokenizer: Any,
        unet: FlaxUNet2DConditionModel,
        controlnet: FlaxControlNetModel,
        scheduler: Any,
        safety_checker: Any = None,
        feature_extractor: Any = None,
        dtype: Any = None,
        token_downsampling: int = 1,
    ):
        """Join the parts; `tokenizer` is transformers'.

        Raises:
            CheckpointError: the parts do not fit one another, or controlnet is not a single one.
        """
        if not isinstance(controlnet, FlaxControlNetModel):
            raise CheckpointError(
                "The pipeline follows one ControlNet: controlnet should be a "
                f"FlaxControlNetModel, not {type(controlnet).__name__}."
            )
        super().__init__(
            vae,
            text_encoder,
            tokenizer,
            unet,
            scheduler,
            safety_checker,
            feature_extractor,
            dtype,
            token_downsampling,
            controlnet=controlnet,
        )
        check(ControlNetConfig.from_dict(controlnet.config), self._structure()[0], "The ControlNet")

    def prepare_text_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Return token ids [B, 77] int32 of one prompt or several.

        Raises:
            ValueError: they are neither a text nor a list.
        """
        if not isinstance(prompt, str | list):
            raise ValueError(f"prompt should be a text or a list of them, not {type(prompt)}.")
        return self._ids(prompt)

    def prepare_image_inputs(self, image: Image.Image | list[Image.Image]) -> np.ndarray:
        """Return control pictures of one size as float32 [B, 3, H, W] in [0, 1].

        Each side is reduced to a multiple of UNIT.

        Raises:
            ValueError: they are neither a PIL image nor a list.
        """
        if not isinstance(image, Image.Image | list):
            raise ValueError(f"image should be a PIL image or a list of them, not {type(image)}.")
        pictures = [image] if isinstance(image, Image.Image) else image
        levels = [
            np.asarray(
                each.convert("RGB").resize(
                    [side - side % UNIT for side in each.size], Image.Resampling.LANCZOS
                ),
                np.float32,
            )
            for each in pictures
        ]
        return (np.stack(levels) / 255).transpose(0, 3, 1, 2)

    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        controlnet_conditioning_scale: Any = 1.0,
        return_dict: bool = True,
        jit: bool = False,
    ) -> ImageOutput | tuple[np.ndarray, np.ndarray | bool]:
        """Draw one picture for each row of token ids, of the control pictures' size.

        The other arguments and the results are those of `FlaxStableDiffusionPipeline`'s call.

        Args:
            image: float32 [B, 3, H, W] in [0, 1], or [D, b, 3, H, W] as `shard` leaves them.
            params: as `from_pretrained` returns them, with the ControlNet's as "controlnet".
            num_inference_steps: of the pipeline's scheduler; another number compiles anew.
            controlnet_conditioning_scale: what the ControlNet adds is multiplied by; a number, one
                for each device or one for each picture.

        Raises:
            CheckpointError: parameters are missing.
            ValueError: shapes do not fit one another.
        """
        del jit
        pictures = flat(image, 3, "image").astype(np.float32)
        inputs = self._inputs(
            prompt_ids, neg_prompt_ids, prng_seed, num_inference_steps, guidance_scale, latents
        )
        count = len(inputs)
        if len(pictures) != count or pictures.shape[1] != 3:
            raise ValueError(
                f"image should be {count} of 3 channels for these prompts, not {pictures.shape}."
            )
        images = self._everywhere(
            params,
            inputs,
            {
                "image": pictures,
                "controlnet_conditioning_scale": each_scale(controlnet_conditioning_scale, count),
            },
        )
        return self._output(images, prompt_ids, params, return_dict)

    def _generate(
        self,
        prompt_ids: jax.Array,
        image: jax.Array,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        guidance_scale: Any = 7.5,
        latents: jax.Array | None = None,
        neg_prompt_ids: jax.Array | None = None,
        controlnet_conditioning_scale: Any = 1.0,
    ) -> jax.Array:
        """Draw one device's pictures [b, H, W, 3] float32 in [0, 1], as a traceable function.

        It is to be mapped or compiled: `pmap(pipeline._generate)`. Arguments are those of the call;
        the steps are not traced.

        Args:
            prompt_ids: [b, 77].
            image: [b, 3, H, W].
            params: without a device axis.
            prng_seed: one key, or b of them.
        """
        height, width = image.shape[-2:]
        if height % UNIT or width % UNIT:
            raise ValueError(
                f"image should have sides of multiples of {UNIT}, not {height} and {width}."
            )
        keys = image_keys(prng_seed, prompt_ids.shape[0])
        first = self._first_latents(latents, keys, height, width)
        text, _ = self._conditions(prompt_ids, neg_prompt_ids, params, (height, width))
        scale = jnp.broadcast_to(jnp.ravel(jnp.asarray(controlnet_conditioning_scale)), len(keys))

        def control(latents: jax.Array, timestep: jax.Array, text: jax.Array) -> dict[str, Any]:
            times = len(latents) // len(image)
            down, middle = self.controlnet.apply(
                {"params": params["controlnet"]},
                latents,
                timestep,
                text,
                jnp.concatenate([image] * times),
                jnp.concatenate([scale] * times),
                return_dict=False,
            )
            return {
                "down_block_additional_residuals": down,
                "mid_block_additional_residual": middle,
            }

        clean = self._denoise(
            params, text, None, first, keys, num_inference_steps, guidance_scale, control
        )
        return self._decode(params, clean)
