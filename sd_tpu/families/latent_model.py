"""The base of all families, whose networks work on an autoencoder's latents."""

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from sd_tpu.checkpoint.config import (
    W8A8,
    CheckpointError,
    Config,
    Flux2VAEConfig,
    QwenImageVAEConfig,
    T5Config,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.division import TensorParallelPlan, undivided
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.models import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderTiny
from sd_tpu.models.factors import Factors, Layer, adapt, applied, factor_divisions, factor_shapes
from sd_tpu.models.layers import in_int8
from sd_tpu.sampling.schedule import FlowSchedule, Schedule
from sd_tpu.sentence import SentenceError

Arrays = dict[str, Any]  # of NumPy on the host, of JAX on the devices; or their shapes
Parts = dict[str, tuple[nnx.GraphDef, Params]]  # by component

AUTOENCODERS: dict[type[Config], type[nnx.Module]] = {
    VAEConfig: AutoencoderKL,
    Flux2VAEConfig: AutoencoderKLFlux2,
    QwenImageVAEConfig: AutoencoderKLQwenImage,
    TinyVAEConfig: AutoencoderTiny,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentModel:
    """The autoencoder of a family, without its parameters, and what a family has by default."""

    vae: nnx.GraphDef
    vae_config: VAEConfig | TinyVAEConfig
    dtype: jnp.dtype
    token_downsampling: int = 1  # of a UNet's keys and values; 1 is exact, and all that others have
    preview_vae: nnx.GraphDef | None = None  # a tiny autoencoder beside that of the pictures
    previewer: str = ""  # the component whose decoder draws previews, if any does
    weights: str = ""  # one of WEIGHTS where dense layers in `rounded` are so
    # Layers of the denoiser beside which each slot brings factors of its own, and their rank.
    adapter_layers: Mapping[str, Layer] = dataclasses.field(default_factory=dict, hash=False)
    adapter_rank: int = 0

    autoencoder: ClassVar = "vae"
    denoiser: ClassVar[str]  # the component that takes noise out of latents
    trained: ClassVar[int] = 0  # latents along a side of a transformer's pictures of training
    upcasts: ClassVar = False  # whether the autoencoder is float32 where its config says so
    optional: ClassVar[tuple[str, ...]] = ()  # components that a checkpoint may leave out
    rounded: ClassVar[tuple[str, ...]] = ()  # components whose dense layers int8 is for
    decoders: ClassVar[tuple[str, ...]]  # names of tiny decoders of its latents
    index: ClassVar[dict[str, Any]]  # model_index.json, but for what a checkpoint may choose
    whole: ClassVar = True  # whether all parameters of a checkpoint are read
    flow: ClassVar = False  # whether it was trained by flow matching
    even_sigmas: ClassVar = False  # of flow matching, instead of those of training
    max_references: ClassVar = 0  # pictures that it sees by itself beside the prompt

    @classmethod
    def mended(cls, configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's configs as the constructor of its diffusers pipeline mends them.

        A transformer's get the size of training, which few files say.
        """
        part = configs[cls.denoiser]
        defaults = {"sample_size": cls.trained} if cls.trained else {}
        given = {name: value for name, value in part.items() if value is not None}
        return {**configs, cls.denoiser: {**part, **defaults, **given}}

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the card of a model with these configs says where it says nothing."""
        return {}

    @classmethod
    def unread(cls, part: str, name: str) -> bool:
        """Whether a parameter of a component is left out, as nothing depends on it: in an
        autoencoder those for a video's later frames."""
        return part == "vae" and ".time_conv." in name

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of each text encoder's tokenizer, by component."""
        raise NotImplementedError

    @classmethod
    def text_parts(cls) -> frozenset[str]:
        """Return the components that `encode_text` takes, which are read by tokenizers' ids."""
        return frozenset(cls.tokenizer_classes())

    @classmethod
    def tokenizers(cls, parts: Container[str], read: Callable[[str, type], Any]) -> dict[str, Any]:
        """Read the tokenizers of the encoders that are among the parts, by folder.

        Args:
            parts: names of components.
            read: (folder, class of tokenizers) -> tokenizer.
        """
        kinds = cls.tokenizer_classes()
        return {
            folder: read(folder, kind) for part, (folder, kind) in kinds.items() if part in parts
        }

    @classmethod
    def autoencoders(
        cls, configs: Mapping[str, Any], dtype
    ) -> tuple[Parts, VAEConfig | TinyVAEConfig]:
        """Build the autoencoder, and a tiny one for previews if there is one.

        Args:
            configs: the contents of a checkpoint's config.json files, by folder.
            dtype: of the parameters.

        Returns:
            Them by component, and the config of the first.

        Raises:
            CheckpointError: one is not supported.
        """
        vae = vae_config(configs["vae"])
        wide = cls.upcasts and isinstance(vae, VAEConfig) and vae.force_upcast
        if isinstance(vae, VAEConfig):
            vae = vae.model_copy(update={"force_upcast": wide})
        kind = AUTOENCODERS[type(vae)]
        parts = {"vae": architecture(kind, vae, dtype=jnp.float32 if wide else dtype)}
        if "preview_vae" in configs:
            tiny = TinyVAEConfig.from_dict(configs["preview_vae"])
            parts["preview_vae"] = architecture(AutoencoderTiny, tiny, dtype=dtype)
        return parts, vae

    @classmethod
    def build(
        cls, configs: Mapping[str, Any], dtype, *, token_downsampling: int = 1, previewer: str = ""
    ) -> tuple[Self, Params]:
        """Build a transformer's family and the shapes of its parameters; nothing is allocated.

        Args:
            configs: the contents of a checkpoint's config.json files, by folder, and of its
                model_index.json as "model_index".
            dtype: of the parameters.
            token_downsampling: 1; a UNet alone has levels to take tokens from.
            previewer: as the class has it.

        Raises:
            CheckpointError: a part is not supported, or the parts do not fit one another.
        """
        if token_downsampling != 1:
            raise CheckpointError("Token downsampling is for models with a UNet.")
        autoencoders, vae = cls.autoencoders(configs, dtype)
        parts, fields = cls.networks(configs, vae, dtype)
        return cls.joined(
            {**parts, **autoencoders},
            vae_config=vae,
            dtype=jnp.dtype(dtype),
            previewer=previewer,
            **fields,
        )

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoders and the transformer for `build`; each family's own.

        Args:
            configs: as `build` takes them.
            vae: the autoencoder's config.
            dtype: of the parameters.

        Returns:
            Them by component, and the family's own fields.

        Raises:
            CheckpointError: a part is not supported, or the parts do not fit one another.
        """
        raise NotImplementedError

    @classmethod
    def joined(cls, parts: Parts, **fields: Any) -> tuple[Self, Params]:
        """Return a model of these parts and fields, and the shapes of its parameters."""
        graphs: dict[str, Any] = {module: graph for module, (graph, _) in parts.items()}
        return cls(**graphs, **fields), {module: shapes for module, (_, shapes) in parts.items()}

    def in_int8(self, params: Params, weights: str) -> tuple[Self, Params]:
        """Return the model with kernels of int8 in the dense layers of `rounded`.

        Args:
            params: the shapes of its parameters.
            weights: one of WEIGHTS; with W8A8 the denoiser multiplies its tokens as int8, too.

        Returns:
            The model, and the shapes of its parameters.
        """
        parts = {
            part: in_int8(
                getattr(self, part), params[part], tokens=weights == W8A8 and part == self.denoiser
            )
            for part in self.rounded
            if part in params
        }
        graphs: dict[str, Any] = {part: graph for part, (graph, _) in parts.items()}
        model = dataclasses.replace(self, weights=weights if parts else "", **graphs)
        return model, params | {part: shapes for part, (_, shapes) in parts.items()}

    @property
    def adapter_part(self) -> str:
        """The component whose dense layers LoRAs may bring factors to; "" of a UNet, which is small
        enough to merge them into copies."""
        return self.denoiser if self.denoiser in self.rounded else ""

    def with_adapters(self, params: Params, rank: int) -> Self:
        """Return the model with factors of this rank beside all dense layers of `adapter_part`.

        Args:
            params: the shapes of its parameters.
            rank: of the factors that each slot brings; 0 is the model as it is.
        """
        if not rank:
            return self
        part = self.adapter_part
        network = nnx.merge(getattr(self, part), params[part])
        layers = adapt(network, lambda name: True)
        graph: dict[str, Any] = {part: nnx.graphdef(network)}
        return dataclasses.replace(self, adapter_layers=layers, adapter_rank=rank, **graph)

    @property
    def adapter_shapes(self) -> Factors:
        """Shapes of a slot's factors, by the names of `adapter_layers`."""
        return factor_shapes(self.adapter_layers, self.adapter_rank, self.dtype)

    def adapter_divisions(self, divisions: Params) -> Factors:
        """Return how a slot's factors are divided over the chips of a replica, by the divisions of
        the parameters."""
        return factor_divisions(self.adapter_layers, divisions.get(self.adapter_part, {}))

    def adapted(self, params: Params, factors: Factors) -> Params:
        """Return parameters with factors of B pictures among them, each with an axis in front."""
        if not self.adapter_layers:
            return params
        part = self.adapter_part
        return {**params, part: applied(params[part], self.adapter_layers, factors)}

    def divisions(self, params: Params, chips: int) -> Params:
        """Return how its parameters are divided over the chips of a replica.

        A network without a plan, or whose heads or channels the chips cannot have equal shares of,
        is on each of them whole.

        Args:
            params: their shapes, by component.
            chips: of a replica.
        """
        plans = {part: self._plan(part, shapes) for part, shapes in params.items() if chips > 1}
        return {
            part: plan.divisions(shapes, chips) if (plan := plans.get(part)) else undivided(shapes)
            for part, shapes in params.items()
        }

    def _plan(self, part: str, shapes: Params) -> TensorParallelPlan | None:
        graph = getattr(self, part, None)
        network = graph and nnx.merge(graph, shapes)
        return getattr(network, "tensor_parallel_plan", None)

    @property
    def model_index(self) -> dict[str, Any]:
        """model_index.json, but for the scheduler."""
        return {**self.index, "vae": ["diffusers", AUTOENCODERS[type(self.vae_config)].__name__]}

    # --- sizes and shapes -----------------------------------------------------------------------

    @property
    def downscale(self) -> int:
        """Pixels of a picture along one side for each latent along that side."""
        return self.vae_config.downscale

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples: patches of two latents."""
        return 2 * self.downscale

    @property
    def max_size(self) -> tuple[int, int] | None:
        """Largest height and width of pictures, if there is any."""
        return None

    @property
    def text_widths(self) -> Mapping[str, int]:
        """Hidden sizes of the encoders that embeddings can be learned for: none."""
        return {}

    @property
    def mask_channels(self) -> int:
        """Channels that the denoiser takes after the latents'."""
        return 0

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of those inputs that `encode_text` takes; each family's own."""
        raise NotImplementedError

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns; each family's own."""
        raise NotImplementedError

    @property
    def added_input_shapes(self) -> Arrays:
        """Shapes of the inputs beside the texts."""
        return {}

    @property
    def added_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_added_cond` returns."""
        return {}

    @property
    def input_shapes(self) -> Arrays:
        """Shapes of the inputs that `prompt_inputs` returns, with those beside the texts."""
        return {**self.text_input_shapes, **self.added_input_shapes}

    @property
    def entry_shapes(self) -> Arrays:
        """Shapes of the inputs of a slot, whose texts are encoded."""
        return {**self.text_cond_shapes, **self.added_input_shapes}

    @property
    def cond_shapes(self) -> Arrays:
        """Shapes of all conditions."""
        return {**self.text_cond_shapes, **self.added_cond_shapes}

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (h, w, C) of a picture's latents; raises ValueError for an impossible size."""
        if (most := self.max_size) and (height > most[0] or width > most[1]):
            raise ValueError(
                f"A picture of {width}x{height} is not possible: this model makes pictures of at "
                f"most {most[1]}x{most[0]}."
            )
        unit = self.size_unit
        if min(height, width) < unit or height % unit or width % unit:
            raise ValueError(
                f"A picture of {width}x{height} is not possible: this model makes pictures whose "
                f"sides are multiples of {unit}."
            )
        return height // self.downscale, width // self.downscale, self.vae_config.channels

    def schedule_of(self, schedule: Schedule, height: int, width: int, steps: int) -> Schedule:
        """Return the schedule of a picture of this size in so many steps.

        Raises:
            CheckpointError: the checkpoint's depends on them, and the family does not say how.
        """
        if isinstance(schedule, FlowSchedule) and schedule.config.use_dynamic_shifting:
            raise CheckpointError(
                "The scheduler's use_dynamic_shifting=true is not supported for such a model."
            )
        return schedule

    # --- what a family may have beside ----------------------------------------------------------

    @property
    def uses_controlnet(self) -> bool:
        """Whether it has a ControlNet."""
        return False

    @property
    def checks_safety(self) -> bool:
        """Whether `is_unsafe` can tell."""
        return False

    def is_unsafe(self, params: Params, picture: UInt8[Array, "H W 3"]) -> Bool[Array, ""]:
        """Whether a picture is flagged as not safe for work; of models that check."""
        raise NotImplementedError

    def cfg_scale(self, guidance: Any) -> Any:
        """Return the scale of classifier-free guidance for what people ask for."""
        return guidance

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode the texts of a slot; each family's own."""
        raise NotImplementedError

    def encode_added_cond(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode the inputs beside the texts into conditions."""
        return {}

    def encode_prompt(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode all inputs of a slot into its conditions."""
        return {**self.encode_text(params, inputs), **self.encode_added_cond(params, inputs)}

    def denoise(
        self,
        params: Params,
        x: Float[Array, "b h w C"],
        t: Float[Array, " b"],
        cond: Arrays,
        strength: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b h w C"]:
        """Return the denoiser's output, as `Model.denoise`."""
        network = nnx.merge(getattr(self, self.denoiser), params[self.denoiser])
        return self.evaluate(network, x, t, cond)

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the output of the denoiser with its parameters; each transformer's own."""
        raise NotImplementedError

    def encode(self, params: Params, image: Float[Array, "H W 3"]) -> Float[Array, "h w C"]:
        """Return the autoencoder's likeliest latents of a picture in [-1, 1]."""
        encoded = nnx.merge(self.vae, params["vae"]).encode(image[None])
        mean = encoded if isinstance(self.vae_config, TinyVAEConfig) else encoded[0]
        return mean[0]

    def decode(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the autoencoder's picture, about [-1, 1]."""
        return nnx.merge(self.vae, params["vae"]).decode(latent[None])[0]

    def preview(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the previewer's picture, about [-1, 1], of latents that need not be finished."""
        decoder = nnx.merge(getattr(self, self.previewer), params[self.previewer])
        return decoder.decode(latent[None])[0]


def stems(*encoders_and_denoiser: str) -> dict[str, str]:
    """Return how names of files of weights begin, by component, the autoencoder last."""
    *encoders, denoiser = encoders_and_denoiser
    networks = dict.fromkeys((denoiser, "vae"), "diffusion_pytorch_model")
    return {**dict.fromkeys(encoders, "model"), **networks}


def vae_config(config: Mapping[str, Any]) -> VAEConfig | TinyVAEConfig:
    """Parse an autoencoder's config.json; raises CheckpointError if it is not supported."""
    name = str(config.get("_class_name") or "AutoencoderKL").removeprefix("Flax")
    for schema, network in AUTOENCODERS.items():
        if network.__name__ == name:
            found: Any = schema.from_dict(dict(config))
            return found
    supported = ", ".join(network.__name__ for network in AUTOENCODERS.values())
    raise CheckpointError(f"The autoencoder {name} is not supported; there are {supported}.")


def check_last_layer(clip_skip: int) -> None:
    """Raise SentenceError for a layer of CLIP's other than the last, 1, where none can be taken."""
    if clip_skip != 1:
        raise SentenceError("Clip skip is for models whose prompts CLIP reads.")


def check_channels(takes: int, gives: int | None, vae: VAEConfig | TinyVAEConfig) -> None:
    """Check that a transformer takes and gives latents of an autoencoder.

    Args:
        takes: the channels of the transformer's input.
        gives: those of its output.
        vae: the autoencoder's config.

    Raises:
        CheckpointError: they differ.
    """
    if {takes, gives} != {vae.channels}:
        raise CheckpointError(
            f"The transformer takes {takes} channels and gives {gives}, the autoencoder's latents "
            f"have {vae.channels}."
        )


def check_t5(t5: T5Config, takes: int) -> None:
    """Raise CheckpointError unless T5's embeddings are as wide as those that a network takes."""
    if t5.d_model != takes:
        raise CheckpointError(
            f"T5 gives embeddings of {t5.d_model}, the transformer takes {takes}."
        )
