"""The Flax pipelines that begin with a picture: image to image, and filling in what a mask shows.

Where those of diffusers draw latents of a picture from what the autoencoder finds likely, these
take the likeliest, so that the same key and picture give the same picture in any batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from PIL import Image

from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.pipelines.pipeline import ImageOutput, flat
from sd_tpu.pipelines.stable_diffusion import FlaxStableDiffusionPipeline
from sd_tpu.runtime.slots import MASKED_PICTURE, START_PICTURE, StartImage
from sd_tpu.sampling.samplers import steps_taken

UNIT = 32  # pixels: the sides of prepared pictures are multiples of it
Pictures = Image.Image | Sequence[Image.Image]


class FlaxStableDiffusionImg2ImgPipeline(FlaxStableDiffusionPipeline):
    """Stable Diffusion 1.x and 2.x: prompts and pictures to pictures."""

    def prepare_inputs(
        self, prompt: str | list[str], image: Pictures
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids [B, 77] int32 of prompts, and pictures as float32 [B, 3, H, W].

        The pictures are of one size, each side made smaller to a multiple of UNIT, and lie in
        [-1, 1].
        """
        return self._ids(prompt), _stacked(image)

    def get_timestep_start(self, num_inference_steps: int, strength: float) -> int:
        """Return how many of the first steps are left out at a strength."""
        return num_inference_steps - steps_taken(num_inference_steps, strength)

    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        noise: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> ImageOutput | tuple[np.ndarray, np.ndarray | bool]:
        """Draw one picture for each row of token ids, beginning with a picture under noise.

        The other arguments and the results are those of `FlaxStableDiffusionPipeline`'s call.

        Args:
            image: float32 [B, 3, H, W] in [-1, 1], or [D, b, 3, H, W] as `shard` leaves them.
            strength: up to 1, the share of the steps that is taken: the last ones.
            num_inference_steps: of which strength takes its share.
            height: of the image; by default what the model was trained on.
            width: of the image; by default what the model was trained on.
            noise: [B, C, h, w] or [D, b, C, h, w], in place of the noise that prng_seed gives.

        Raises:
            CheckpointError: parameters are missing, or only the scheduler itself knows its steps.
            ValueError: shapes do not fit one another, or the strength leaves no step.
        """
        del jit
        begin = self.get_timestep_start(num_inference_steps, strength)
        if not 0 <= strength <= 1 or begin == num_inference_steps:
            raise ValueError(
                f"strength should be at most 1 and leave at least one of "
                f"{num_inference_steps} steps, which {strength} does not."
            )
        inputs = self._inputs(
            prompt_ids, neg_prompt_ids, prng_seed, num_inference_steps, guidance_scale
        )
        size = self._size(height, width)
        pictures = _channels_last(image, "image", len(inputs), size)
        starts = [StartImage({START_PICTURE: picture}) for picture in pictures]
        images = self._draw(params, inputs, size, begin=begin, start_images=starts, noise=noise)
        return self._output(images, prompt_ids, params, return_dict)


class FlaxStableDiffusionInpaintPipeline(FlaxStableDiffusionPipeline):
    """Stable Diffusion's checkpoints for inpainting: draws what is white in a mask."""

    index: ClassVar = {
        **StableDiffusion.index,
        "_class_name": "StableDiffusionInpaintPipeline",
        "_diffusers_version": "0.35.2",
    }  # which diffusers asks of such checkpoints
    fills_in = True

    def prepare_inputs(
        self, prompt: str | list[str], image: Pictures, mask: Pictures
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the token ids of prompts, what is kept of pictures, and their masks.

        They are [B, 77] int32; float32 [B, 3, H, W] in [-1, 1]; and [B, 1, H, W], 1 where the masks
        are white.
        """
        masks = (_stacked(mask, "L", Image.Resampling.BICUBIC) >= 0).astype(np.float32)
        return self._ids(prompt), _stacked(image) * (masks < 0.5), masks

    def __call__(
        self,
        prompt_ids: Any,
        mask: Any,
        masked_image: Any,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        latents: Any = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> ImageOutput | tuple[np.ndarray, np.ndarray | bool]:
        """Draw one picture for each row of token ids, into what is kept of a picture.

        The other arguments and the results are those of `FlaxStableDiffusionPipeline`'s call.

        Args:
            mask: float32 [B, 1, H, W], 1 where something is drawn, or [D, b, 1, H, W].
            masked_image: float32 [B, 3, H, W] in [-1, 1], 0 where something is drawn, or
                [D, b, 3, H, W]. Both are resized to the height and the width.

        Raises:
            CheckpointError: parameters are missing, or only the scheduler itself knows its steps.
            ValueError: shapes do not fit one another.
        """
        del jit
        inputs = self._inputs(
            prompt_ids, neg_prompt_ids, prng_seed, num_inference_steps, guidance_scale, latents
        )
        count, size = len(inputs), self._size(height, width)
        kept, shown = flat(masked_image, 3, "masked_image"), flat(mask, 3, "mask")
        kept = jax.image.resize(kept, (*kept.shape[:2], *size), "bicubic")
        shown = jax.image.resize(shown, (*shown.shape[:2], *size), "nearest")
        latent = [side // self.vae_scale_factor for side in size]
        mask_channels = jax.image.resize(shown, (*shown.shape[:2], *latent), "nearest")
        starts = [
            StartImage({MASKED_PICTURE: picture}, under_noise=False, mask_channels=where)
            for picture, where in zip(
                _channels_last(kept, "masked_image", count, size),
                _channels_last(mask_channels, "mask", count, latent),
                strict=True,
            )
        ]
        images = self._draw(params, inputs, size, start_images=starts)
        return self._output(images, prompt_ids, params, return_dict)


def _stacked(
    pictures: Pictures, mode: str = "RGB", resampling: Image.Resampling = Image.Resampling.LANCZOS
) -> np.ndarray:
    """Return pictures of one size as float32 [B, C, H, W] in [-1, 1]."""
    pictures = [pictures] if isinstance(pictures, Image.Image) else list(pictures)
    levels = [
        np.asarray(
            picture.resize([side - side % UNIT for side in picture.size], resampling).convert(mode),
            np.float32,
        )
        for picture in pictures
    ]
    stacked = 2 * (np.stack(levels) / 255) - 1
    return stacked[:, None] if mode == "L" else stacked.transpose(0, 3, 1, 2)


def _channels_last(images: Any, name: str, count: int, size: Sequence[int]) -> np.ndarray:
    """Return float32 [B, H, W, C] of [B, C, H, W] or [D, b, C, H, W].

    Raises:
        ValueError: they are of other sizes; it says the name.
    """
    images = flat(images, 3, name).astype(np.float32)
    if len(images) != count or images.shape[2:] != tuple(size):
        raise ValueError(
            f"{name} should be {count} of {size[0]}x{size[1]} for these prompts and "
            f"this height and width, not {images.shape}."
        )
    return images.transpose(0, 2, 3, 1)
