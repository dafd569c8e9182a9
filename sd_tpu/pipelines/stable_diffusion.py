"""The Flax pipeline of Stable Diffusion 1.x and 2.x: the calls of old, on the compiled programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxUNet2DConditionModel,
    Network,
)
from sd_tpu.pipelines.names import to_ours
from sd_tpu.pipelines.pipeline import (
    FlaxDiffusionPipeline,
    ImageOutput,
    each_scale,
    flat,
    image_keys,
    is_stacked,
)
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import Entry, Given
from sd_tpu.sampling.samplers import Table, default_sampler, make_table
from sd_tpu.sampling.schedule import NoiseSchedule


class FlaxStableDiffusionPipeline(FlaxDiffusionPipeline):
    """Stable Diffusion 1.x and 2.x: prompts to pictures, with parameters kept outside."""

    networks: ClassVar = dict(vae=FlaxAutoencoderKL, text_encoder=FlaxCLIPTextModel,
                              unet=FlaxUNet2DConditionModel)
    checkpoints = StableDiffusion.pipelines
    index = StableDiffusion.index
    fills_in = False  # whether the UNet is told of masks

    def __init__(self, vae: FlaxAutoencoderKL, text_encoder: FlaxCLIPTextModel, tokenizer: Any,
                 unet: FlaxUNet2DConditionModel, scheduler: Any, safety_checker: Any = None,
                 feature_extractor: Any = None, dtype: Any = None, token_downsampling: int = 1,
                 **networks: Network):
        """Joins the parts; `tokenizer` is transformers', and `networks` are a subclass's own.
        Pictures are not checked.

        Raises:
            CheckpointError: the parts do not fit one another, as in an inpainting checkpoint.
        """
        super().__init__(dtype, token_downsampling, vae=vae, text_encoder=text_encoder,
                         tokenizer=tokenizer, unet=unet, scheduler=scheduler,
                         safety_checker=safety_checker, feature_extractor=feature_extractor,
                         **networks)
        self._programs: dict[tuple, Programs] = {}
        self._encoders: dict[tuple, ImageEncoder] = {}
        self._built: tuple[tuple, StableDiffusion, Params] | None = None
        self._structure()

    def prepare_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Token ids [B, 77] int32 of one prompt or several."""
        return self._ids(self.tokenizer, prompt)

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
    ) -> ImageOutput | tuple[np.ndarray, bool]:
        """Draws one picture for each row of token ids, divided over all devices.

        Args:
            prompt_ids: int32 [B, 77], or [D, b, 77] as `shard` leaves them.
            params: as `from_pretrained` returns them, or with the leading device axis of
                `replicate`. A scheduler's state among them says how noise was mixed in.
            prng_seed: one key, or one for each device (`jax.random.split(key, D)`), or one for
                each picture. A key that serves several pictures is split among them.
            num_inference_steps: of the pipeline's scheduler.
            height: of the pictures in pixels; by default what the model was trained on.
            width: likewise.
            guidance_scale: a number, one for each device or one for each picture; up to 1 the
                prompt alone counts.
            latents: [B, C, h, w] or [D, b, C, h, w], of unit variance, in place of the noise that
                prng_seed gives.
            neg_prompt_ids: like prompt_ids; by default those of the empty prompt.
            return_dict: False for a plain tuple.
            jit: accepted for the guide's sake; the programs are always compiled.

        Returns:
            Images float32 in [0, 1] of 256 levels, in NumPy's arrays: [B, H, W, 3] for flat ids
            and [D, b, H, W, 3] for sharded ones; as `.images` and as `[0]`. What comes second is
            False, as no checker finds anything.

        Raises:
            CheckpointError: parameters are missing, or the scheduler asks for what is not
                supported.
            ValueError: shapes do not fit one another, or the model cannot make such pictures.
        """
        del jit
        texts = self._texts(prompt_ids, neg_prompt_ids)
        count = len(texts[0])
        images = self._draw(
            params, num_inference_steps, self._size(height, width), *texts,
            each_scale(guidance_scale, count),
            None if latents is None else flat(latents, 3, "latents"), image_keys(prng_seed, count))
        return self._output(images, prompt_ids, return_dict)

    def _generate(
        self,
        prompt_ids: jax.Array,
        params: Mapping[str, Any],
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: Any = 7.5,
        latents: jax.Array | None = None,
        neg_prompt_ids: jax.Array | None = None,
    ) -> jax.Array:
        """One device's pictures [b, H, W, 3] float32 in [0, 1], to be mapped or compiled:
        `pmap(pipeline._generate)`.

        prompt_ids [b, 77], params without a device axis, prng_seed one key or b of them; the rest
        as in the call, the steps and sizes not traced.
        """
        keys = image_keys(prng_seed, prompt_ids.shape[0])
        first = self._first_latents(latents, keys, *self._size(height, width))
        text = self._embedded(prompt_ids, neg_prompt_ids, params)
        clean = self._denoise(params, text, None, first, keys, num_inference_steps, guidance_scale)
        return self._decode(params, clean)

    def _embedded(self, prompt_ids: jax.Array, neg_prompt_ids: jax.Array | None,
                  params: Mapping[str, Any]) -> jax.Array:
        """The embeddings [2b, 77, D] of negative prompts and prompts."""
        negative = self._ids(self.tokenizer, "") if neg_prompt_ids is None else neg_prompt_ids
        ids = jnp.concatenate([jnp.broadcast_to(jnp.asarray(negative), prompt_ids.shape),
                               prompt_ids])
        return self.text_encoder(ids, params=params["text_encoder"])[0]

    # --- what a call is given and gives ---------------------------------------------------------

    def _texts(self, prompt_ids: Any, neg_prompt_ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the prompts and of as many negative prompts, both [B, 77]."""
        prompt_ids, blank = np.asarray(prompt_ids), self._ids(self.tokenizer, "")
        if prompt_ids.ndim not in (2, 3) or prompt_ids.shape[-1] != blank.size:
            raise ValueError(f"prompt_ids should be [B, 77] or [D, b, 77], not {prompt_ids.shape}.")
        positive = prompt_ids.reshape(-1, prompt_ids.shape[-1])
        negative = blank if neg_prompt_ids is None else neg_prompt_ids
        return positive, np.broadcast_to(flat(negative, 1, "neg_prompt_ids"), positive.shape)

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        default_height, default_width = self.default_size
        return height or default_height, width or default_width

    @staticmethod
    def _output(images: np.ndarray, prompt_ids: Any, return_dict: bool
                ) -> ImageOutput | tuple[np.ndarray, bool]:
        """Images [B, H, W, 3] with the axes that the ids lead with."""
        images = images.reshape(*np.shape(prompt_ids)[:-1], *images.shape[1:])
        return ImageOutput(images, False) if return_dict else (images, False)

    # --- the compiled programs' view ------------------------------------------------------------

    def _structure(self) -> tuple[StableDiffusion, Params]:
        """The family's model of the parts as they are now, and its parameters' shapes."""
        parts = tuple(getattr(self, name) for name in self.networks)
        if self._built is None or self._built[0] != parts:
            configs = {name: dict(part.config)
                       for name, part in zip(self.networks, parts, strict=True)}
            model, expected = StableDiffusion.build(configs, self.dtype,
                                                    token_downsampling=self.token_downsampling)
            if bool(model.mask_channels) != self.fills_in:
                other = "fills in pictures" if model.mask_channels else "takes no mask"
                raise CheckpointError(f"This UNet {other}; {type(self).__name__} cannot use it.")
            self._built = parts, model, expected
        return self._built[1:]

    def _draw(self, params: Mapping[str, Any], steps: int, size: tuple[int, int],
              positive: np.ndarray, negative: np.ndarray, guidance: np.ndarray,
              latents: np.ndarray | None, keys: jax.Array) -> np.ndarray:
        """Pictures [B, H, W, 3] f32 of as many token ids [B, 77]."""
        table = self._table(params, steps)
        if table is None:
            return self._everywhere(positive, params, keys, (steps, *size), guidance, latents,
                                    negative)
        return self._run(params, table, size, positive, negative, guidance, latents, keys)

    def _run(self, params: Mapping[str, Any], table: Table, size: tuple[int, int],
             positive: np.ndarray, negative: np.ndarray, guidance: np.ndarray,
             latents: np.ndarray | None, keys: jax.Array, given: Sequence[Given] = (),
             noise: np.ndarray | None = None) -> np.ndarray:
        """The same by a sampler's table; what each picture begins with may be `given`, under noise
        [B, C, h, w] or that of its key."""
        model, expected = self._structure()
        ours = {name: to_ours(params[name], expected[name]) for name in self.networks}
        programs = self._programs_for(model, len(positive), size, is_stacked(params))
        entries = dict(enumerate(self._entries(programs, table, positive, negative, guidance,
                                               latents, keys, given)))
        if not programs.stacked:
            ours = jax.device_put(ours, replicated(programs.mesh))
        if given:
            encoder = self._encoder_for(model, expected, size, programs.stacked)
            entries = encoder.encode(ours, entries, programs.device)
        if noise is not None:
            fresh = self._as_ours(programs, noise, "noise", len(positive))
            entries = {place: entry.replace(start=entry.start + entry.spread * fresh[place],
                                            spread=np.float32(0))
                       for place, entry in entries.items()}
        slots = programs.encode(ours, programs.empty(), entries)
        slots = programs.advance(ours, slots, len(table.rows))
        images = programs.decode(ours, slots.latents, np.arange(programs.slots) < len(positive))
        return np.asarray(images[: len(positive)]).astype(np.float32) / 255

    def _programs_for(self, model: StableDiffusion, count: int, size: tuple[int, int],
                      stacked: bool) -> Programs:
        mesh, (height, width) = make_mesh(), size
        slots = -(-count // mesh.size) * mesh.size
        key = (model, slots, size, stacked)
        if key not in self._programs:
            self._programs[key] = Programs(model, mesh, slots=slots, height=height, width=width,
                                           stacked=stacked)
        return self._programs[key]

    def _encoder_for(self, model: StableDiffusion, expected: Params, size: tuple[int, int],
                     stacked: bool) -> ImageEncoder:
        key = (model, size, stacked)
        if key not in self._encoders:
            self._encoders[key] = ImageEncoder(model, make_mesh(), expected, height=size[0],
                                               width=size[1], stacked=stacked)
        return self._encoders[key]

    def _table(self, params: Mapping[str, Any], steps: int, begin: int = 0) -> Table | None:
        """The sampler's table from step `begin` on, or None where only the scheduler itself knows
        its steps, such as PNDM's Runge-Kutta steps."""
        config = self._drawing_scheduler().config
        try:
            schedule = NoiseSchedule.from_config(config)
            sampler, spacing = default_sampler(config)
        except CheckpointError:
            return None
        if is_stacked(params) and params.get("scheduler") is not None:
            params = {"scheduler": jax.tree.map(lambda x: x[0], params["scheduler"])}
        signal = np.asarray(self._state(params).common.alphas_cumprod, np.float64)
        return make_table(sampler, dataclasses.replace(schedule, alphas_cumprod=signal), steps,
                          spacing=spacing, begin=begin)

    def _entries(self, programs: Programs, table: Table, positive: np.ndarray,
                 negative: np.ndarray, guidance: np.ndarray, latents: np.ndarray | None,
                 keys: jax.Array, given: Sequence[Given]) -> list[Entry]:
        model, count = programs.model, len(positive)
        nothing = [None] * count
        starts = nothing if latents is None else self._as_ours(programs, latents, "latents", count)
        return [
            Entry.of(table, model.plain_inputs(np.stack(ids), guidance=scale),
                     guidance=model.cfg_scale(scale), key=key, latents=start, given=begun)
            for *ids, scale, key, start, begun in zip(
                negative, positive, guidance.tolist(), np.asarray(keys), starts, given or nothing,
                strict=True)
        ]

    @staticmethod
    def _as_ours(programs: Programs, latents: np.ndarray, name: str, count: int) -> np.ndarray:
        """[B, h, w, C] of [B, C, h, w]; raises ValueError, which says the name, for other sizes."""
        h, w, channels = programs.latent_shape
        if latents.shape != (count, channels, h, w):
            raise ValueError(f"{name} should be {(count, channels, h, w)} for these prompts and "
                             f"sizes, not {latents.shape}.")
        return latents.transpose(0, 2, 3, 1)
