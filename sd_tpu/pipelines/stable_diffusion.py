"""The Flax pipeline of Stable Diffusion 1.x and 2.x: the calls of old, on the compiled programs."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.families.stable_diffusion import StableDiffusion, enlarged
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxStableDiffusionSafetyChecker,
    FlaxUNet2DConditionModel,
    Network,
)
from sd_tpu.pipelines.pipeline import CHECKER, FlaxDiffusionPipeline, ImageOutput


class FlaxStableDiffusionPipeline(FlaxDiffusionPipeline):
    """Stable Diffusion 1.x and 2.x: prompts to pictures, with parameters kept outside."""

    family = StableDiffusion
    networks: ClassVar = dict(
        vae=FlaxAutoencoderKL, text_encoder=FlaxCLIPTextModel, unet=FlaxUNet2DConditionModel
    )
    checker = FlaxStableDiffusionSafetyChecker
    checkpoints = StableDiffusion.pipelines
    index = StableDiffusion.index

    def __init__(
        self,
        vae: FlaxAutoencoderKL,
        text_encoder: FlaxCLIPTextModel,
        tokenizer: Any,
        unet: FlaxUNet2DConditionModel,
        scheduler: Any,
        safety_checker: Any = None,
        feature_extractor: Any = None,
        dtype: Any = None,
        token_downsampling: int = 1,
        **networks: Network,
    ):
        """Join the parts; `tokenizer` is transformers', and `networks` are a subclass's own.

        A UNet's old config is mended, as diffusers did it.
        """
        unet.config.update(enlarged(unet.config))
        super().__init__(
            dtype,
            token_downsampling,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=scheduler,
            safety_checker=safety_checker,
            feature_extractor=feature_extractor,
            **networks,
        )

    def __call__(
        self,
        prompt_ids: Any,
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
        """Draw one picture for each row of token ids, divided over all devices.

        Args:
            prompt_ids: int32 [B, 77], or [D, b, 77] as `shard` leaves them.
            params: as `from_pretrained` returns them, or with the leading device axis of
                `replicate`. A scheduler's state among them says how noise was mixed in.
            prng_seed: one key, or one for each device (`jax.random.split(key, D)`), or one for
                each picture. A key that serves several pictures is split among them.
            num_inference_steps: of the pipeline's scheduler.
            height: of the pictures in pixels; by default what the model was trained on.
            width: of the pictures in pixels; by default what the model was trained on.
            guidance_scale: a number, one for each device or one for each picture; up to 1 the
                prompt alone counts.
            latents: [B, C, h, w] or [D, b, C, h, w], of unit variance, in place of the noise that
                prng_seed gives.
            neg_prompt_ids: like prompt_ids; by default those of the empty prompt.
            return_dict: False for a plain tuple.
            jit: accepted for the guide's sake; the programs are always compiled.

        Returns:
            Images float32 in [0, 1] of 256 levels, in NumPy's arrays: [B, H, W, 3] for flat ids
            and [D, b, H, W, 3] for sharded ones; as `.images` and as `[0]`. The second part says
            for each picture, [B], whether the safety checker has blacked it; False without one.

        Raises:
            CheckpointError: parameters are missing, or the scheduler asks for what is not
                supported.
            ValueError: shapes do not fit one another, or the model cannot make such pictures.
        """
        del jit
        inputs = self._inputs(
            prompt_ids, neg_prompt_ids, prng_seed, num_inference_steps, guidance_scale, latents
        )
        images = self._draw(params, inputs, self._size(height, width))
        return self._output(images, prompt_ids, params, return_dict)

    def _negative(self, neg_prompt_ids: Any) -> Any:
        return self._ids("") if neg_prompt_ids is None else neg_prompt_ids

    def _output(
        self, images: np.ndarray, prompt_ids: Any, params: Mapping[str, Any], return_dict: bool
    ) -> ImageOutput | tuple[np.ndarray, np.ndarray | bool]:
        unsafe = False
        if isinstance(self.safety_checker, Network) and params.get(CHECKER):
            levels = (images * 255).round().astype(np.uint8)
            _, unsafe = self._run_safety_checker(levels, params[CHECKER])
            images = np.where(unsafe[:, None, None, None], np.float32(0), images)
        images = self._as_given(images, prompt_ids)
        return ImageOutput(images, unsafe) if return_dict else (images, unsafe)

    def _conditions(
        self,
        prompt_ids: jax.Array,
        neg_prompt_ids: jax.Array | None,
        params: Mapping[str, Any],
        size: tuple[int, int],
    ) -> tuple[jax.Array, None]:
        """Return the text [2b, 77, D] as the UNet takes it, and no other conditions."""
        negative = jnp.broadcast_to(jnp.asarray(self._negative(neg_prompt_ids)), prompt_ids.shape)
        ids = jnp.concatenate([negative, prompt_ids])
        return self.text_encoder(ids, params=params["text_encoder"])[0], None
