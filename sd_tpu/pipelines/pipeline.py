"""Base of the Flax pipelines of diffusers up to 0.39.

A pipeline has named parts, while its parameters are kept outside. It is read from checkpoints and
written, and draws on the compiled programs or in a loop that can be traced.
"""

import copy
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from PIL import Image
from tqdm.auto import tqdm

from sd_tpu.checkpoint import folder as checkpoint
from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import CheckpointError, TrainingConfig, read_json
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families import find_family
from sd_tpu.families.checkpoint import SAFETY_CHECKERS, keep_compiled
from sd_tpu.families.latent_diffusion import LatentDiffusion
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.families.stable_diffusion_xl import StableDiffusionXL
from sd_tpu.families.tokenizer import Tokenizer, clip_tokenizer
from sd_tpu.models.unet import guidance_encoding
from sd_tpu.pipelines.configs import FrozenConfig, warn_of_unknown, write_json
from sd_tpu.pipelines.files import fetch_packed, take_options
from sd_tpu.pipelines.models import Network, Output
from sd_tpu.pipelines.names import to_ours
from sd_tpu.pipelines.schedulers import FlaxScheduler, SchedulerState, scheduler_for
from sd_tpu.reading import expanded
from sd_tpu.runtime.mesh import REPLICATED, SPLIT, make_mesh, replicated, split
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import SlotInputs, StartImage
from sd_tpu.sampling.samplers import Table, default_sampler, make_table
from sd_tpu.sampling.schedule import NoiseSchedule

MAX_PROGRAMS = 8  # that are kept when the pipelines that had them compiled are gone
CHECKER, EXTRACTOR = OPTIONAL = "safety_checker", "feature_extractor"  # parts that may be None
_SD = "sd_tpu.pipelines.stable_diffusion:FlaxStableDiffusionPipeline"
_XL = "sd_tpu.pipelines.stable_diffusion_xl:FlaxStableDiffusionXLPipeline"
_OTHERS = {
    "StableDiffusionImg2ImgPipeline": "beginning:FlaxStableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline": "beginning:FlaxStableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline": "controlnet:FlaxStableDiffusionControlNetPipeline",
}
CLASSES = {  # module and class by the `_class_name` of the checkpoints that they are for
    **dict.fromkeys(StableDiffusion.pipelines, _SD),
    **dict.fromkeys(StableDiffusionXL.pipelines, _XL),
    **{
        f"{prefix}{name}": f"sd_tpu.pipelines.{where}"
        for prefix in ("", "Flax")
        for name, where in _OTHERS.items()
    },
}


@flax.struct.dataclass
class ImageOutput(Output):
    """Output of pipelines: images, also by key or as the first of two."""

    images: Any
    nsfw_content_detected: Any = None


@lru_cache(MAX_PROGRAMS)
def _shared_programs(
    model: Any, mesh: Mesh, slots: int, height: int, width: int, stacked: bool
) -> Programs:
    """Return the programs of all pipelines that draw with such a model."""
    return Programs(
        model,
        mesh,
        slots=slots,
        height=height,
        width=width,
        guided=not model.guidance_size,
        stacked=stacked,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CallInputs:
    """Inputs of a call, with one row for each picture."""

    steps: int
    prompt_ids: np.ndarray  # [B, 77] i32, or [B, 2, 77] for two encoders
    neg_prompt_ids: np.ndarray | None  # likewise
    keys: np.ndarray  # [B, 2] u32
    guidance_scale: np.ndarray  # [B] f32
    latents: np.ndarray | None  # [B, C, h, w], of unit variance

    def __len__(self) -> int:
        return len(self.prompt_ids)


class FlaxDiffusionPipeline:
    """A pipeline of whichever class a checkpoint was made for."""

    family: ClassVar[Any]
    networks: ClassVar[dict[str, type[Network]]] = {}
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer",)
    checkpoints: ClassVar[tuple[str, ...]] = ()  # the pipelines whose checkpoints are read
    index: ClassVar[dict[str, Any]] = {}  # model_index.json, but for the scheduler
    fills_in: ClassVar[bool] = False  # whether the UNet is told of masks
    checker: ClassVar[type[Network] | None] = None  # the class of its checkpoints' safety checkers
    _conditions: Callable[..., Any]  # what the UNet is told, each class's own
    # The parts, of which a class has those that `_parts` names.
    unet: Any
    vae: Any
    text_encoder: Any
    text_encoder_2: Any
    controlnet: Any
    scheduler: Any
    safety_checker: Any
    feature_extractor: Any

    def __init__(self, dtype: Any = None, token_downsampling: int = 1, **parts: Any):
        """Join parts; `dtype` is that of the arithmetic.

        Raises:
            TypeError: a part is missing or unknown.
            CheckpointError: the parts do not fit one another, as in an inpainting checkpoint.
        """
        lacking = {*self._parts()} - parts.keys()
        unknown = parts.keys() - {*self._parts(), *OPTIONAL}
        if lacking or unknown:
            raise TypeError(
                f"{type(self).__name__} takes {', '.join(self._parts())}; "
                f"missing {sorted(lacking)}, unknown {sorted(unknown)}."
            )
        for name in (*self._parts(), *OPTIONAL):
            setattr(self, name, parts.get(name))
        if self.safety_checker is not None and not isinstance(self.safety_checker, Network):
            warnings.warn(
                "Pictures are not checked: safety_checker is no "
                "FlaxStableDiffusionSafetyChecker, and is ignored.",
                stacklevel=3,
            )
        self.dtype = jnp.float32 if dtype is None else dtype
        self.token_downsampling = token_downsampling
        if token_downsampling != 1:
            self.unet = self.unet.with_token_downsampling(token_downsampling)
        self.card: ModelCard | None = None
        self._progress_bar: dict[str, Any] = {}
        self._compilations: dict[tuple, Any] = {}
        self._programs: dict[tuple, Programs] = {}
        self._encoders: dict[tuple, ImageEncoder] = {}
        self._built: tuple[tuple, LatentDiffusion, Params] | None = None
        self._structure()

    @classmethod
    def _parts(cls) -> tuple[str, ...]:
        return *cls.networks, *cls.tokenizers, "scheduler"

    # --- files ----------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: Any = None,
        sharding: jax.sharding.Sharding | None = None,
        token_downsampling: int = 1,
        **options: Any,
    ) -> tuple["FlaxDiffusionPipeline", dict[str, Any]]:
        """Read a checkpoint in the diffusers layout from a folder or the hub.

        JAX keeps the programs that it compiles from then on in the user's cache folder, unless the
        program or the environment has said where, or not to.

        Args:
            name: the folder or the hub id.
            dtype: of the parameters and the arithmetic, by default float32.
            sharding: where the parameters go; by default on every device of this process.
            token_downsampling: the UNet's finest self-attention takes its keys and values from
                every so many rows and columns only; 1 is exact.
            options: `revision`, `variant`, `cache_dir`, `local_files_only`, `token`; parts to take
                in place of the checkpoint's, whose parameters are then the caller's; what asked for
                things that are always so here, such as `from_pt` and `split_head_dim`, is accepted,
                and what is unknown is ignored with a warning.

        Returns:
            The pipeline, and its parameters in Flax's names by part, with the scheduler's state as
            "scheduler".

        Raises:
            CheckpointError: what is wrong with the checkpoint, in one message.
            ValueError: the downsampling is no whole number from 1.
        """
        variant = options.get("variant")
        hub, sharding = take_options(options), sharding or replicated(make_mesh())
        folder = checkpoint.find(
            name, partial(cls._components, checked=CHECKER not in options), variant=variant, **hub
        )
        keep_compiled()
        index = read_json(folder / "model_index.json")
        pipeline_class = cls._class_for(index)
        stored = cls._components(index, checked=CHECKER not in options)
        given_parts = {
            part: options.pop(part)
            for part in (*pipeline_class._parts(), *OPTIONAL)
            if part in options
        }
        warn_of_unknown(options, pipeline_class.__name__)
        if not expanded(name).is_dir():
            fetch_packed(str(name), folder, stored, hub)
        checks, params = (
            ({}, {})
            if CHECKER not in stored
            else pipeline_class._read_checker(
                folder / CHECKER, variant, dtype or jnp.float32, sharding
            )
        )
        parts = {
            **pipeline_class._read(folder, dtype or jnp.float32, given_parts),
            **checks,
            **given_parts,
        }
        pipeline = pipeline_class(**parts, dtype=dtype, token_downsampling=token_downsampling)
        # A folder's whole path would travel in every picture.
        local = expanded(name).is_dir()
        pipeline.card = ModelCard.read(folder, folder.resolve().name if local else str(name))
        params |= {
            part: parts[part].load(folder / part, variant, pipeline.dtype, sharding)
            for part in pipeline_class.networks
            if part not in given_parts
        }
        if "scheduler" not in given_parts:
            params["scheduler"] = pipeline.scheduler.create_state()
        return pipeline, params

    @classmethod
    def _components(cls, index: Mapping[str, Any], *, checked: bool) -> dict[str, str]:
        """Return the networks of a checkpoint, with the beginnings of their weights' names.

        A safety checker is one of them if pictures are to be checked.
        """
        pipeline_class = cls._class_for(index)
        found = {part: network.stem for part, network in pipeline_class.networks.items()}
        if (
            checked
            and pipeline_class.checker
            and (index.get(CHECKER) or [None])[-1] in SAFETY_CHECKERS
        ):
            found[CHECKER] = pipeline_class.checker.stem
        return found

    @classmethod
    def _class_for(cls, index: Mapping[str, Any]) -> type[Self]:
        name = index.get("_class_name")
        if name in cls.checkpoints:
            return cls
        if name in CLASSES:
            module, _, found = CLASSES[name].partition(":")
            made = getattr(importlib.import_module(module), found)
            if issubclass(made, cls):
                return made
        find_family(dict(index))  # says it where nothing here draws with such a checkpoint
        raise CheckpointError(f"{cls.__name__} cannot draw with a checkpoint for {name}.")

    @classmethod
    def _read(cls, folder: Path, dtype: Any, given_parts: Iterable[str]) -> dict[str, Any]:
        """Read the parts of a checkpoint except for those given."""
        parts = {}
        for part in (name for name in cls._parts() if name not in given_parts):
            if part in cls.networks:
                network = cls.networks[part]
                config = read_json(folder / part / network.config_name)
                parts[part] = network.from_config(config, dtype=dtype)
            elif part in cls.tokenizers:
                parts[part] = clip_tokenizer(folder / part)
            else:
                parts[part] = scheduler_for(read_json(folder / part / FlaxScheduler.config_name))
        return parts

    @classmethod
    def _read_checker(
        cls, folder: Path, variant: str | None, dtype: Any, sharding: jax.sharding.Sharding
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the parts that check pictures, and their parameters, by name.

        Warns and returns none where the checker cannot be read.
        """
        # The other one says at each load that torchvision is missing.
        from transformers import CLIPImageProcessorPil

        assert cls.checker is not None
        try:
            config = read_json(folder / cls.checker.config_name)
            checker = cls.checker.from_config(config, dtype=dtype)
            params = checker.load(folder, variant, None, sharding)
        except CheckpointError as error:
            warnings.warn(f"Pictures are not checked: {error}", stacklevel=3)
            return {}, {}
        side = config["vision_config"].get("image_size", 224)
        extractor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side)
        return {CHECKER: checker, EXTRACTOR: extractor}, {CHECKER: params}

    def save_pretrained(
        self, folder: str | Path, params: Mapping[str, Any], dtype: Any = None, **options: Any
    ) -> None:
        """Write the diffusers layout, which PyTorch's pipeline reads as well.

        Args:
            folder: made if absent.
            params: by part, without a leading device axis; what is no part's is left out.
            dtype: of the files; by default that of the parameters.
            options: of the old class; ignored with a warning.

        Raises:
            CheckpointError: parameters are missing.
        """
        take_options(options)
        warn_of_unknown(options, type(self).__name__)
        folder = Path(folder)
        index = dict(self.index)
        for part in self.networks:
            getattr(self, part).save_pretrained(folder / part, params[part], dtype=dtype)
        if isinstance(self.safety_checker, Network) and params.get(CHECKER):
            self.safety_checker.save_pretrained(folder / CHECKER, params[CHECKER])
            index[CHECKER] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
            if hasattr(self.feature_extractor, "save_pretrained"):
                self.feature_extractor.save_pretrained(folder / EXTRACTOR)
                index[EXTRACTOR] = ["transformers", "CLIPImageProcessor"]
        for part in self.tokenizers:
            getattr(self, part).save_pretrained(folder / part)
        self.scheduler.save_config(folder / "scheduler")
        scheduler = self.scheduler.config["_class_name"].removeprefix("Flax")
        write_json(folder / "model_index.json", {**index, "scheduler": ["diffusers", scheduler]})
        if self.card is not None:
            write_json(folder / "sd_tpu.json", self.card.model_dump())

    # --- methods of all pipelines ---------------------------------------------------------------

    @property
    def components(self) -> dict[str, Any]:
        """Return all parts by name, to make another pipeline of."""
        return {name: getattr(self, name) for name in (*self._parts(), *OPTIONAL)}

    @property
    def config(self) -> FrozenConfig:
        """Return the parts' modules and classes by name."""
        kinds = {name: type(part) for name, part in self.components.items() if part is not None}
        named = {
            name: (kind.__module__.split(".")[0], kind.__name__) for name, kind in kinds.items()
        }
        return FrozenConfig(
            {
                "_class_name": type(self).__name__,
                **{name: named.get(name, (None, None)) for name in self.components},
            }
        )

    @property
    def vae_scale_factor(self) -> int:
        """Pixels of a picture along one side for each latent along that side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width of the pictures that the model was trained on."""
        height, width = TrainingConfig.from_dict(self.unet.config).size
        return height * self.vae_scale_factor, width * self.vae_scale_factor

    def set_progress_bar_config(self, **options: Any) -> None:
        """Set the options of `progress_bar`. Drawing shows no bar: its loop is compiled."""
        self._progress_bar = options

    def progress_bar(self, iterable: Iterable) -> Iterable:
        """Wrap an iterable in a bar of its progress."""
        return tqdm(iterable, **self._progress_bar)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Convert float images [..., H, W, 3] in [0, 1], or one [H, W, 3], to PIL images."""
        images = np.asarray(images)
        pixels = (images.reshape(-1, *images.shape[-3:]) * 255).round().astype(np.uint8)
        return [Image.fromarray(image) for image in pixels]

    # --- inputs and outputs of a call -----------------------------------------------------------

    def prepare_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Return token ids [B, 77] int32 of one prompt or more; [B, 2, 77] for two encoders."""
        return self._ids(prompt)

    def _ids(self, prompts: str | list[str]) -> np.ndarray:
        """Return the ids of prompts, cut and padded."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [Tokenizer.of(getattr(self, name))(prompts) for name in self.tokenizers]
        return ids[0] if len(ids) == 1 else np.stack(ids, axis=1)

    def _inputs(
        self,
        prompt_ids: Any,
        neg_prompt_ids: Any,
        prng_seed: jax.Array,
        steps: int,
        guidance_scale: Any,
        latents: Any = None,
    ) -> CallInputs:
        """Return a call's arguments, plain or sharded, as rows.

        Raises:
            ValueError: their shapes do not fit one another.
        """
        prompt_ids, one = np.asarray(prompt_ids), self._ids("")[0].shape
        if prompt_ids.ndim - len(one) not in (1, 2) or prompt_ids.shape[-len(one) :] != one:
            each = ", ".join(map(str, one))
            raise ValueError(
                f"prompt_ids should be [B, {each}] or [D, b, {each}], not {prompt_ids.shape}."
            )
        positive = flat(prompt_ids, len(one), "prompt_ids")
        negative = self._negative(neg_prompt_ids)
        if negative is not None:
            negative = np.broadcast_to(flat(negative, len(one), "neg_prompt_ids"), positive.shape)
        return CallInputs(
            steps=steps,
            prompt_ids=positive,
            neg_prompt_ids=negative,
            keys=np.asarray(image_keys(prng_seed, len(positive))),
            guidance_scale=each_scale(guidance_scale, len(positive)),
            latents=None if latents is None else flat(latents, 3, "latents"),
        )

    def _negative(self, neg_prompt_ids: Any) -> Any:
        """Return the negative prompts' ids, or what stands for them where none are given."""
        return neg_prompt_ids

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        default_height, default_width = self.default_size
        return height or default_height, width or default_width

    def _as_given(self, images: np.ndarray, prompt_ids: Any) -> np.ndarray:
        """Return images [B, ...] with the axes that the ids lead with."""
        leading = np.shape(prompt_ids)[: np.ndim(prompt_ids) - self._ids("")[0].ndim]
        return images.reshape(*leading, *images.shape[1:])

    # --- drawing on the compiled programs -------------------------------------------------------

    def _structure(self) -> tuple[LatentDiffusion, Params]:
        """Return the family's model of the parts as they are now, and its parameters' shapes."""
        parts = tuple(getattr(self, name) for name in self.networks)
        if self._built is None or self._built[0] != parts:
            configs = {
                name: dict(part.config) for name, part in zip(self.networks, parts, strict=True)
            }
            model, expected = self.family.build(
                {**configs, "model_index": self.index},
                self.dtype,
                token_downsampling=self.token_downsampling,
            )
            if bool(model.mask_channels) != self.fills_in:
                other = "fills in pictures" if model.mask_channels else "takes no mask"
                raise CheckpointError(f"This UNet {other}; {type(self).__name__} cannot use it.")
            self._built = parts, model, expected
        return self._built[1:]

    def _draw(
        self,
        params: Mapping[str, Any],
        inputs: CallInputs,
        size: tuple[int, int],
        *,
        begin: int = 0,
        start_images: Sequence[StartImage] = (),
        noise: Any = None,
        decoded: bool = True,
    ) -> np.ndarray:
        """Draw pictures [B, H, W, 3] f32, or their latents [B, C, h, w].

        Args:
            params: as calls take them.
            inputs: of the call.
            size: height and width in pixels.
            begin: the first step that is taken.
            start_images: one for each picture, or none.
            noise: [B, C, h, w] or [D, b, C, h, w], which is put on the start images in place of
                that of the keys.
            decoded: False for latents.

        Raises:
            CheckpointError: parameters are missing, or start images need a table and only the
                scheduler itself knows its steps.
            ValueError: shapes do not fit one another.
        """
        table = self._table(params, inputs.steps, begin)
        if table is None and start_images:
            raise CheckpointError(
                "This scheduler's steps cannot be written as a table; give the "
                "pipeline another to begin with a picture, such as "
                "FlaxDDIMScheduler."
            )
        if table is None:
            height, width = size
            return self._everywhere(
                params, inputs, height=height, width=width, return_latents=not decoded
            )
        model, expected = self._structure()
        ours = {name: to_ours(params.get(name, {}), expected[name]) for name in self.networks}
        count = len(inputs)
        programs = self._programs_for(model, count, size, is_stacked(params))
        entering = dict(enumerate(self._slot_inputs(programs, table, inputs, size, start_images)))
        where = split if programs.stacked else replicated
        ours = jax.device_put(ours, where(programs.mesh))
        if start_images:
            encoder = self._encoder_for(model, ours, size, programs.stacked)
            entering = encoder.encode(ours, entering, programs.replica)
        if noise is not None:
            fresh = self._as_ours(programs, flat(noise, 3, "noise"), "noise", count)
            entering = {
                index: dataclasses.replace(
                    slot_inputs,
                    start=slot_inputs.start + slot_inputs.spread * fresh[index],
                    spread=np.float32(0),
                )
                for index, slot_inputs in entering.items()
            }
        slots = programs.encode(ours, programs.empty(), entering)
        slots = programs.advance(ours, slots, len(table.rows))
        if not decoded:
            return np.asarray(slots.latents)[:count].transpose(0, 3, 1, 2)
        images = programs.decode(ours, slots.latents, np.arange(programs.slots) < count)
        return np.asarray(images)[:count].astype(np.float32) / 255

    def _programs_for(
        self, model: Any, count: int, size: tuple[int, int], stacked: bool
    ) -> Programs:
        mesh, (height, width) = make_mesh(), size
        slots = -(-count // mesh.size) * mesh.size
        key = (model, slots, size, stacked)
        if key not in self._programs:
            self._programs[key] = _shared_programs(model, mesh, slots, height, width, stacked)
        return self._programs[key]

    def _encoder_for(
        self, model: LatentDiffusion, params: Params, size: tuple[int, int], stacked: bool
    ) -> ImageEncoder:
        """Return the encoder of pictures for parameters of these dtypes."""
        shapes = {
            part: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype), params[part]
            )
            for part in [model.autoencoder]
        }
        key = (model, size, stacked, *(leaf.dtype for leaf in jax.tree.leaves(shapes)))
        if key not in self._encoders:
            self._encoders[key] = ImageEncoder(
                model.encode,
                make_mesh(),
                shapes,
                height=size[0],
                width=size[1],
                network_dtype=model.dtype,
                stacked=stacked,
            )
        return self._encoders[key]

    def _table(self, params: Mapping[str, Any], steps: int, begin: int = 0) -> Table | None:
        """Return the sampler's table from step `begin` on.

        Returns None where only the scheduler itself knows its steps, such as PNDM's Runge-Kutta
        steps.
        """
        config = self._drawing_scheduler().config
        try:
            schedule = NoiseSchedule.from_config(config)
            sampler, spacing = default_sampler(config)
        except CheckpointError:
            return None
        if is_stacked(params) and params.get("scheduler") is not None:
            params = {"scheduler": jax.tree.map(lambda x: x[0], params["scheduler"])}
        signal = np.asarray(self._state(params).common.alphas_cumprod, np.float64)
        return make_table(
            sampler,
            dataclasses.replace(schedule, alphas_cumprod=signal),
            steps,
            spacing=spacing,
            begin=begin,
        )

    def _slot_inputs(
        self,
        programs: Programs,
        table: Table,
        inputs: CallInputs,
        size: tuple[int, int],
        start_images: Sequence[StartImage],
    ) -> list[SlotInputs]:
        model: Any = programs.model
        (height, width), nothing = size, [None] * len(inputs)
        latents, negative = inputs.latents, inputs.neg_prompt_ids
        starts = nothing
        if latents is not None:
            starts = self._as_ours(programs, latents, "latents", len(inputs))
        return [
            SlotInputs.of(
                table,
                model.plain_inputs(prompt, unwanted, height=height, width=width, guidance=scale),
                guidance=model.cfg_scale(scale),
                key=key,
                latents=start,
                start_image=begun,
            )
            for prompt, unwanted, scale, key, start, begun in zip(
                inputs.prompt_ids,
                nothing if negative is None else negative,
                inputs.guidance_scale.tolist(),
                inputs.keys,
                starts,
                start_images or nothing,
                strict=True,
            )
        ]

    @staticmethod
    def _as_ours(programs: Programs, latents: np.ndarray, name: str, count: int) -> np.ndarray:
        """Return [B, h, w, C] of [B, C, h, w].

        Raises:
            ValueError: they are of other sizes; it says the name.
        """
        h, w, channels = programs.latent_shape
        if latents.shape != (count, channels, h, w):
            raise ValueError(
                f"{name} should be {(count, channels, h, w)} for these prompts and "
                f"sizes, not {latents.shape}."
            )
        return latents.transpose(0, 2, 3, 1)

    # --- drawing in a loop that can be traced ---------------------------------------------------

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
        return_latents: bool = False,
    ) -> jax.Array:
        """Draw one device's pictures [b, H, W, 3] float32 in [0, 1], or latents [b, C, h, w].

        It is to be mapped or compiled: `pmap(pipeline._generate)`. Arguments are those of the call;
        the steps and the sizes are not traced.

        Args:
            prompt_ids: [b, 77], or [b, 2, 77] for two encoders.
            params: without a device axis.
            prng_seed: one key, or b of them.
            return_latents: whether to return the latents in place of pictures.
        """
        keys, size = image_keys(prng_seed, prompt_ids.shape[0]), self._size(height, width)
        first = self._first_latents(latents, keys, *size)
        text, added = self._conditions(prompt_ids, neg_prompt_ids, params, size)
        clean = self._denoise(params, text, added, first, keys, num_inference_steps, guidance_scale)
        return clean if return_latents else self._decode(params, clean)

    def _drawing_scheduler(self) -> FlaxScheduler:
        """Return the scheduler, which clips nothing: latents are no pixels."""
        if not isinstance(self.scheduler, FlaxScheduler):
            raise ValueError(f"{type(self.scheduler).__name__} does not draw in latents.")
        scheduler = copy.copy(self.scheduler)
        scheduler.config = FrozenConfig(self.scheduler.config, clip_sample=False)
        return scheduler

    def _state(self, params: Mapping[str, Any]) -> SchedulerState:
        """Return the scheduler's state among the parameters, or its first one if there is none."""
        scheduler = self._drawing_scheduler()
        state = params.get("scheduler")
        return scheduler.create_state() if state is None else scheduler.consistent(state)

    def _denoise(
        self,
        params: Mapping[str, Any],
        text: jax.Array,
        added: Mapping | None,
        latents: jax.Array,
        keys: jax.Array,
        steps: int,
        guidance: Any,
        control: Callable[..., Mapping[str, Any]] | None = None,
    ) -> jax.Array:
        """Denoise the latents of one device's pictures, in a loop that can be traced.

        Args:
            params: in Flax's names.
            text: [2b, L, D], the negative prompts' before the prompts'.
            added: to the text, as the UNet takes it.
            latents: [b, C, h, w], of unit variance.
            keys: [b, 2] u32, of fresh noise.
            steps: a number, not traced.
            guidance: one number or b of them; up to 1 the prompt alone counts. A latent consistency
                model is told it, and draws the prompt alone.
            control: what the UNet takes besides, given what it takes: latents [.., C, h, w], the
                timestep and the text.
        """
        scheduler = self._drawing_scheduler()
        state = scheduler.set_timesteps(self._state(params), steps, latents.shape)
        scale = jnp.asarray(guidance, jnp.float32).reshape(-1, 1, 1, 1)
        guidance_size = self.unet.config.get("time_cond_proj_dim")
        if guidance_size:
            text = jnp.split(text, 2)[1]
            each = jnp.broadcast_to(jnp.ravel(scale), len(latents))
            added = jax.tree.map(lambda x: jnp.split(x, 2)[1], added or {})
            added["timestep_cond"] = guidance_encoding(each - 1, guidance_size)

        def one(i, carry):
            x, state = carry
            t = state.timesteps[i]
            taken = scheduler.scale_model_input(
                state, x if guidance_size else jnp.concatenate([x] * 2), t
            )
            besides = control(taken, t, text) if control else {}
            out = self.unet.apply(
                {"params": params["unet"]}, taken, t, text, added, **besides
            ).sample
            if not guidance_size:
                negative, positive = jnp.split(out, 2)
                out = jnp.where(scale > 1, negative + scale * (positive - negative), positive)
            fresh = {"noise": noise_of(keys, x.shape[1:], i)} if scheduler.stochastic else {}
            return scheduler.step(state, out, t, x, **fresh).to_tuple()  # ty: ignore[missing-union-attribute, invalid-argument-type]

        first = latents.astype(jnp.float32) * state.init_noise_sigma
        return jax.lax.fori_loop(0, len(state.timesteps), one, (first, state))[0]

    def _decode(self, params: Mapping[str, Any], latents: jax.Array) -> jax.Array:
        """Decode latents [b, C, h, w] to pictures [b, H, W, 3] f32 in [0, 1]."""
        middle, scale = self.vae.scaling()
        image = self.vae.apply(
            {"params": params["vae"]},
            latents.transpose(0, 2, 3, 1) / scale + middle,
            method=self.vae.decode,
        ).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    def _everywhere(
        self,
        params: Mapping[str, Any],
        inputs: CallInputs,
        rows: Mapping[str, np.ndarray] | None = None,
        **fixed: Any,
    ) -> np.ndarray:
        """Call `_generate` for pictures divided over all devices.

        Args:
            params: plain, or with the leading device axis of `replicate`.
            inputs: of the call.
            rows: other arguments of `_generate`, [B, ...] each.
            fixed: its arguments that are not traced, besides the steps.
        """
        mesh = make_mesh()
        params = {name: params[name] for name in (*self.networks, "scheduler") if name in params}
        stacked = is_stacked(params)
        params = jax.device_put(params, (split if stacked else replicated)(mesh))
        given = {
            "prompt_ids": inputs.prompt_ids,
            "prng_seed": inputs.keys,
            "guidance_scale": inputs.guidance_scale,
            "latents": inputs.latents,
            "neg_prompt_ids": inputs.neg_prompt_ids,
            **(rows or {}),
        }
        given = {name: filled(x, mesh.size) for name, x in given.items() if x is not None}
        generate = self._compiled(mesh, {"num_inference_steps": inputs.steps, **fixed}, stacked)
        return np.asarray(generate(params, given)[: len(inputs)])

    def _compiled(
        self, mesh: jax.sharding.Mesh, fixed: Mapping[str, Any], stacked: bool
    ) -> Callable:
        """Return `_generate` of parameters and of its arguments that are traced, by name."""
        # By the scheduler's config as well, which may be changed.
        parts = [*self.components.values()]
        key = (mesh, *fixed.items(), stacked, *map(id, parts), repr(self.scheduler.config))
        if key not in self._compilations:

            def generate(params, rows):
                return self._generate(params=params, **rows, **fixed)

            # The parts are kept, or another might come to have the number of one that is gone.
            self._compilations[key] = parts, divided(generate, mesh, stacked)
        return self._compilations[key][1]

    def _first_latents(
        self, latents: jax.Array | None, keys: jax.Array, height: int, width: int
    ) -> jax.Array:
        """Return [b, C, h, w], given or drawn.

        Raises:
            ValueError: the sizes do not fit.
        """
        unit = self.vae_scale_factor
        if height % unit or width % unit:
            raise ValueError(
                f"height and width should be multiples of {unit}, not {height} and {width}."
            )
        shape = (self.unet.config.in_channels, height // unit, width // unit)
        if latents is None:
            return noise_of(keys, shape)
        if latents.shape != (len(keys), *shape):
            raise ValueError(
                f"latents should be {(len(keys), *shape)} for these prompts and "
                f"sizes, not {latents.shape}."
            )
        return latents

    # --- checking pictures ----------------------------------------------------------------------

    def _run_safety_checker(
        self, images: np.ndarray, safety_model_params: Mapping[str, Any], jit: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check pictures [B, H, W, 3] u8.

        Args:
            images: of the levels 0 to 255.
            safety_model_params: plain, or with a leading device axis.
            jit: accepted for old programs' sake; the checker is always compiled.

        Returns:
            The pictures, black where they may not be safe for work, and where that is, [B].
        """
        del jit
        mesh, checker = make_mesh(), self.safety_checker
        stacked = np.ndim(safety_model_params["concept_embeds"]) == 3
        if (checker, mesh, stacked) not in self._compilations:
            self._compilations[checker, mesh, stacked] = divided(
                lambda params, pictures: checker.flags(pictures, params), mesh, stacked
            )
        params = jax.device_put(safety_model_params, (split if stacked else replicated)(mesh))
        found = self._compilations[checker, mesh, stacked](params, filled(images, mesh.size))
        unsafe = np.asarray(found)[: len(images)]
        if unsafe.any():
            warnings.warn(
                "Pictures that may not be safe for work are black. Try another prompt or seed.",
                stacklevel=4,
            )
        return np.where(unsafe[:, None, None, None], np.uint8(0), images), unsafe


def divided(function: Callable, mesh: jax.sharding.Mesh, stacked: bool) -> Callable:
    """Compile a function of parameters and of rows, which are divided over the devices.

    The parameters are the same everywhere or, if they are stacked, lead with a device axis, which
    the function does not see.
    """

    def one(params, rows):
        return function(jax.tree.map(lambda x: x[0], params) if stacked else params, rows)

    return jax.jit(
        jax.shard_map(
            one,
            mesh=mesh,
            in_specs=(SPLIT if stacked else REPLICATED, SPLIT),
            out_specs=SPLIT,
            check_vma=False,
        )
    )


def filled(x: np.ndarray, share: int) -> np.ndarray:
    """Repeat the last of [B, ...] up to whole shares."""
    return np.pad(x, ((0, -len(x) % share), *[(0, 0)] * (np.ndim(x) - 1)), mode="edge")


def is_stacked(params: Mapping[str, Any]) -> bool:
    """Return whether parameters lead with a device axis, as flax's `replicate` leaves them."""
    return params["unet"]["conv_in"]["kernel"].ndim == 5


def flat(values: Any, trailing: int, name: str) -> np.ndarray:
    """Return values as [B, ...] that lead with one axis, or with two if they are sharded.

    Raises:
        ValueError: they lead with others; it says the name.
    """
    values = np.asarray(values)
    if values.ndim not in (trailing + 1, trailing + 2):
        raise ValueError(
            f"{name} has the shape {values.shape}; it should lead with one axis, or "
            "with two if it is sharded."
        )
    return values.reshape(-1, *values.shape[-trailing:])


def each_scale(guidance: Any, count: int) -> np.ndarray:
    """Return guidance scales [count] f32, of one number, one a device or one a picture.

    Raises:
        ValueError: they cannot be divided over the pictures.
    """
    scales = np.asarray(guidance, np.float32).reshape(-1)
    if count % len(scales):
        raise ValueError(f"{len(scales)} guidance scales cannot be divided over {count} pictures.")
    return scales.repeat(count // len(scales))


def noise_of(keys: jax.Array, shape: tuple[int, ...], row: Any = None) -> jax.Array:
    """Draw the first noise of pictures with these keys [b, 2]: [b, *shape].

    With `row` it is the fresh noise after that row of their tables.
    """
    if row is not None:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, row))(keys)
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def image_keys(prng_seed: jax.Array, count: int) -> jax.Array:
    """Return one raw key for each picture, [count, 2] u32, from one key, some, or one each.

    Raises:
        ValueError: the keys cannot be divided over the pictures.
    """
    if jnp.issubdtype(prng_seed.dtype, jax.dtypes.prng_key):
        prng_seed = jax.random.key_data(prng_seed)
    keys = jnp.reshape(prng_seed, (-1, 2))
    if count % len(keys):
        raise ValueError(f"{len(keys)} keys cannot be divided over {count} pictures.")
    share = count // len(keys)
    if share == 1:
        return keys
    return jax.vmap(lambda key: jax.random.split(key, share))(keys).reshape(-1, 2)
