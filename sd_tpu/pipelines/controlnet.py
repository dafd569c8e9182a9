"""The Flax pipeline of Stable Diffusion that is steered by a control picture."""

from collections.abc import Mapping, Sequence
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
        """Token ids [B, 77] int32 of one prompt or several; raises ValueError for anything else."""
        if not isinstance(prompt, str | list):
            raise ValueError(f"prompt should be a text or a list of them, not {type(prompt)}.")
        return self._ids(prompt)

    def prepare_image_inputs(self, image: Image.Image | list[Image.Image]) -> np.ndarray:
        """Return control pictures of one size as float32 [B, 3, H, W] in [0, 1].

        Each side is reduced to a multiple of UNIT. Raises ValueError for pictures of other kinds.
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

        Args:
            prompt_ids: as `FlaxStableDiffusionPipeline` takes them.
            image: float32 [B, 3, H, W] in [0, 1], or [D, b, 3, H, W] as `shard` leaves them.
            params: as `from_pretrained` returns them, with the ControlNet's as "controlnet".
            prng_seed: one key, or one for each device or each picture.
            num_inference_steps: of the pipeline's scheduler; others compile anew.
            guidance_scale: a number, or one for each device or each picture.
            latents: [B, C, h, w] or [D, b, C, h, w], of unit variance, in place of noise.
            neg_prompt_ids: like prompt_ids; by default those of the empty prompt.
            controlnet_conditioning_scale: what the ControlNet adds is multiplied by; a number, one
                for each device or one for each picture.
            return_dict: False for a plain tuple.
            jit: accepted for the guide's sake; the programs are always compiled.

        Returns:
            Images float32 in [0, 1] with the axes that the ids lead with, as in
                `FlaxStableDiffusionPipeline`.

        Raises:
            CheckpointError: parameters are missing.
            ValueError: shapes do not fit one another.
        """
        del jit
        positive, negative = self._texts(prompt_ids, neg_prompt_ids)
        count, pictures = len(positive), flat(image, 3, "image").astype(np.float32)
        if len(pictures) != count or pictures.shape[1] != 3:
            raise ValueError(
                f"image should be {count} of 3 channels for these prompts, not {pictures.shape}."
            )
        images = self._everywhere(
            positive,
            params,
            image_keys(prng_seed, count),
            (num_inference_steps, *pictures.shape[2:]),
            each_scale(guidance_scale, count),
            None if latents is None else flat(latents, 3, "latents"),
            negative,
            pictures,
            each_scale(controlnet_conditioning_scale, count),
        )
        return self._output(images, prompt_ids, params, return_dict)

    def _drawn(
        self,
        ids: jax.Array,
        params: Mapping[str, Any],
        keys: jax.Array,
        sizes: Sequence[int],
        guidance: jax.Array,
        latents: jax.Array | None,
        negative: jax.Array | None,
        image: jax.Array,
        scale: jax.Array,
    ) -> jax.Array:
        return self._generate(
            ids, image, params, keys, sizes[0], guidance, latents, negative, scale
        )

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

        It is to be mapped or compiled: `pmap(pipeline._generate)`.

        prompt_ids [b, 77], image [b, 3, H, W], params without a device axis, prng_seed one key or b
        of them; other arguments are those of the call, the steps not traced.
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
