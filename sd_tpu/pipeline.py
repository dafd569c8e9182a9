"""The old Flax pipeline's API: the guide's calls, on top of the compiled programs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from sd_tpu import checkpoint, weights
from sd_tpu.config import ModelCard, read_json
from sd_tpu.denoise import (
    advance_slots,
    decode_slots,
    empty_slots,
    encode_slots,
    no_arrivals,
    padded_rows,
    row_kinds,
)
from sd_tpu.folders import cache_folder
from sd_tpu.networks import Models
from sd_tpu.programs import Arrival, Programs
from sd_tpu.samplers import Table, default_sampler, make_table
from sd_tpu.schedule import NoiseSchedule
from sd_tpu.sharding import make_mesh, replicated
from sd_tpu.tokenizer import Tokenizer
from sd_tpu.weights import Params


class StableDiffusionOutput(NamedTuple):
    """`output.images` and `output[0]` are the pictures; there is no safety checker to report."""

    images: jax.Array
    nsfw_content_detected: None = None


class FlaxStableDiffusionPipeline:
    """Stable Diffusion 1.x and 2.x: prompts to pictures, with parameters kept outside."""

    def __init__(self, models: Models, tokenizer: Tokenizer, configs: dict[str, dict[str, Any]],
                 card: ModelCard):
        """Joins the parts; `configs` are the checkpoint's own, by folder name.

        Raises:
            CheckpointError: the scheduler's config asks for what is not supported.
        """
        self.models, self.tokenizer, self.configs, self.card = models, tokenizer, configs, card
        self.schedule = NoiseSchedule.from_config(configs["scheduler"])
        self.sampler, self.spacing = default_sampler(configs["scheduler"])
        self._programs: dict[tuple, Programs] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        variant: str | None = None,
        dtype=jnp.float32,
        sharding: jax.sharding.Sharding | None = None,
        token_downsampling: int = 1,
    ) -> tuple["FlaxStableDiffusionPipeline", Params]:
        """Reads a checkpoint in the diffusers layout from a folder or the hub.

        What JAX compiles from then on is kept in the user's cache folder for the next start, unless
        the program or the environment has said where, or not to.

        Args:
            name: the folder or the hub id.
            revision: branch, tag or commit on the hub.
            variant: of the weight files, such as "fp16".
            dtype: of the parameters and the arithmetic.
            sharding: where the parameters go; by default on every device of this process.
            token_downsampling: the UNet's finest self-attention takes its keys and values from
                every so many rows and columns only; 1 is exact.

        Returns:
            The pipeline, and its parameters as nested dictionaries of arrays.

        Raises:
            CheckpointError: what is wrong with the checkpoint, in one message.
            ValueError: the downsampling is no whole number from 1.
        """
        folder = checkpoint.find(name, revision, variant)
        _keep_compiled()
        sharding = sharding or replicated(make_mesh())
        configs = {part: read_json(folder / part / "config.json")
                   for part in checkpoint.COMPONENTS}
        configs["scheduler"] = read_json(folder / "scheduler" / "scheduler_config.json")
        models, expected = Models.build(configs, dtype, token_downsampling=token_downsampling)
        # A folder's whole path would travel in every picture.
        local = Path(name).expanduser().is_dir()
        card = ModelCard.read(folder, folder.resolve().name if local else str(name))
        pipeline = cls(models, Tokenizer.from_folder(folder / "tokenizer"), configs, card)
        params = {
            part: weights.load(checkpoint.weight_files(folder / part, variant), expected[part],
                               dtype, sharding)
            for part in checkpoint.COMPONENTS
        }
        return pipeline, params

    def save_pretrained(self, folder: str | Path, params: Params, dtype=None) -> None:
        """Writes the diffusers layout, which PyTorch's pipeline reads as well.

        Args:
            folder: made if absent.
            params: without a leading device axis.
            dtype: of the files; by default that of the parameters.
        """
        folder = Path(folder)
        for part, stem in checkpoint.COMPONENTS.items():
            weights.save(params[part], folder / part / f"{stem}.safetensors", dtype)
            _write_json(folder / part / "config.json", self.configs[part])
        scheduler = self.schedule.scheduler  # not by its name of Flax, which diffusers had before
        _write_json(folder / "scheduler" / "scheduler_config.json",
                    {**self.configs["scheduler"], "_class_name": scheduler})
        self.tokenizer.save(folder / "tokenizer")
        _write_json(folder / "sd_tpu.json", dataclasses.asdict(self.card))
        _write_json(folder / "model_index.json", {
            "_class_name": "StableDiffusionPipeline",
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", scheduler],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        })

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width of the pictures that the model was trained on."""
        side = self.models.unet_config.sample_size * self.models.vae_config.downscale
        return side, side

    def prepare_inputs(self, prompt: str | Sequence[str]) -> np.ndarray:
        """Token ids [B, 77] int32 of one prompt or several."""
        return self.tokenizer([prompt] if isinstance(prompt, str) else prompt)

    def __call__(
        self,
        prompt_ids,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale=7.5,
        latents=None,
        neg_prompt_ids=None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> StableDiffusionOutput | tuple[jax.Array, None]:
        """Draws one picture for each row of token ids, divided over all devices.

        Args:
            prompt_ids: int32 [B, 77], or [D, b, 77] as `shard` leaves them.
            params: as `from_pretrained` returns them, or with the leading device axis of
                `replicate`.
            prng_seed: one key, or one for each device (`jax.random.split(key, D)`), or one for
                each picture. A key that serves several pictures is split among them.
            num_inference_steps: of the checkpoint's scheduler.
            height: of the pictures in pixels; by default what the model was trained on.
            width: likewise.
            guidance_scale: a number, or one for each picture; up to 1 the prompt alone counts.
            latents: [B, C, h, w] or [D, b, C, h, w], of unit variance, in place of the noise that
                prng_seed gives.
            neg_prompt_ids: like prompt_ids; by default those of the empty prompt.
            return_dict: False for a plain tuple.
            jit: accepted for the guide's sake; the programs are always compiled.

        Returns:
            Images float32 in [0, 1] of 256 levels: [B, H, W, 3] for flat ids and
            [D, b, H, W, 3] for sharded ones; as `.images` and as `[0]`.

        Raises:
            ValueError: shapes do not fit one another, or the model cannot make such pictures.
        """
        del jit
        prompt_ids = np.asarray(prompt_ids)
        lead = prompt_ids.shape[:-1]
        if prompt_ids.ndim not in (2, 3) or prompt_ids.shape[-1] != self.prepare_inputs("").size:
            raise ValueError(f"prompt_ids should be [B, 77] or [D, b, 77], not {prompt_ids.shape}.")
        positive = prompt_ids.reshape(-1, prompt_ids.shape[-1])
        count = len(positive)
        default_height, default_width = self.default_size
        programs = self._programs_for(count, height or default_height, width or default_width,
                                      _is_stacked(params))
        table = make_table(self.sampler, self.schedule, num_inference_steps, spacing=self.spacing)
        arrivals = self._arrivals(
            programs, table, positive, neg_prompt_ids, guidance_scale, latents,
            _image_keys(prng_seed, count),
        )
        if not programs.stacked:
            params = jax.device_put(params, replicated(programs.mesh))
        slots = programs.encode(params, programs.empty(), dict(enumerate(arrivals)))
        slots = programs.advance(params, slots, len(table.rows))
        images = programs.decode(params, slots.latents, np.arange(programs.slots) < count)
        images = _to_float(images[:count]).reshape(*lead, *images.shape[1:])
        return StableDiffusionOutput(images) if return_dict else (images, None)

    def _generate(
        self,
        prompt_ids: jax.Array,
        params: Params,
        prng_seed: jax.Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float = 7.5,
    ) -> jax.Array:
        """One device's pictures [b, H, W, 3] float32, to be mapped: `pmap(pipeline._generate)`.

        prompt_ids [b, 77], params without a device axis, prng_seed one key.
        """
        models, count = self.models, prompt_ids.shape[0]
        default_height, default_width = self.default_size
        shape = models.latent_shape(height or default_height, width or default_width)
        table = make_table(self.sampler, self.schedule, num_inference_steps, spacing=self.spacing)
        kinds = row_kinds(table, guidance_scale)
        negative = jnp.broadcast_to(self.prepare_inputs("")[0], prompt_ids.shape)
        empty = no_arrivals(count, shape)
        arrivals = empty.replace(
            fresh=jnp.ones(count, bool),
            ids=jnp.stack([negative, prompt_ids], axis=1),
            guidance=jnp.full(count, guidance_scale, jnp.float32),
            rows=jnp.broadcast_to(padded_rows(table), empty.rows.shape),
            kinds=jnp.asarray(empty.kinds).at[:, : len(kinds)].set(kinds),
            end=jnp.full(count, len(table.rows), jnp.int32),
            key=_image_keys(prng_seed, count),
            spread=jnp.full(count, table.init_noise_sigma, jnp.float32),
        )
        slots = encode_slots(models, params, empty_slots(models, count, shape), arrivals)
        slots = advance_slots(models, params, slots, len(table.rows), group=1)
        return _to_float(decode_slots(models, params, slots.latents, jnp.ones(count, bool)))

    @staticmethod
    def numpy_to_pil(images) -> list[Image.Image]:
        """Float images [..., H, W, 3] in [0, 1], or one [H, W, 3], as a list of PIL images."""
        images = np.asarray(images)
        pixels = (images.reshape(-1, *images.shape[-3:]) * 255).round().astype(np.uint8)
        return [Image.fromarray(image) for image in pixels]

    def _programs_for(self, count: int, height: int, width: int, stacked: bool) -> Programs:
        mesh = make_mesh()
        slots = -(-count // mesh.size) * mesh.size
        key = (slots, height, width, stacked)
        if key not in self._programs:
            self._programs[key] = Programs(self.models, mesh, slots=slots, height=height,
                                           width=width, stacked=stacked)
        return self._programs[key]

    def _arrivals(self, programs: Programs, table: Table, positive: np.ndarray, negative,
                  guidance, latents, keys) -> list[Arrival]:
        count = len(positive)
        if negative is None:
            negative = self.prepare_inputs("")
        negative = np.broadcast_to(_flat(negative, 1, "neg_prompt_ids"), positive.shape)
        guidance = np.broadcast_to(np.asarray(guidance, np.float32).reshape(-1), count)
        if latents is None:
            latents = [None] * count
        else:
            h, w, channels = programs.latent_shape
            latents = _flat(latents, 3, "latents")
            if latents.shape != (count, channels, h, w):
                raise ValueError(f"latents should be {(count, channels, h, w)} for these prompts "
                                 f"and sizes, not {latents.shape}.")
            latents = latents.transpose(0, 2, 3, 1)
        return [
            Arrival(ids=np.stack(ids), table=table, guidance=g, key=key, latents=start)
            for *ids, g, key, start in zip(negative, positive, guidance, np.asarray(keys), latents,
                                           strict=True)
        ]


def _keep_compiled() -> None:
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def _flat(values, trailing: int, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim not in (trailing + 1, trailing + 2):
        raise ValueError(f"{name} has the shape {values.shape}; it should lead with one axis, or "
                         "with two if it is sharded.")
    return values.reshape(-1, *values.shape[-trailing:])


def _image_keys(prng_seed: jax.Array, count: int) -> jax.Array:
    """One raw key for each picture, [count, 2] u32, from one key, some, or one each."""
    if jnp.issubdtype(prng_seed.dtype, jax.dtypes.prng_key):
        prng_seed = jax.random.key_data(prng_seed)
    keys = prng_seed.reshape(-1, 2)
    if count % len(keys):
        raise ValueError(f"{len(keys)} keys cannot be divided over {count} pictures.")
    share = count // len(keys)
    if share == 1:
        return keys
    return jax.vmap(lambda key: jax.random.split(key, share))(keys).reshape(-1, 2)


def _to_float(images: jax.Array) -> jax.Array:
    return images.astype(jnp.float32) / 255


def _is_stacked(params: Params) -> bool:
    kernel = params["unet"]["conv_in"]["kernel"]
    return kernel.ndim == 5


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
