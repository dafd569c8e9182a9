"""The Flax networks of diffusers up to 0.39 and transformers 4, on the networks of `sd_tpu.models`.

As Linen's modules they hold no parameters: `model.apply({"params": params}, ...)`. Images and
latents are NCHW outside, as they were. Parameters are plain trees in Flax's names
(`params["down_blocks_0"]["resnets_0"]["conv1"]["kernel"]`); trees in our names are taken as well.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from flax.serialization import msgpack_restore

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import (
    CheckpointError,
    ControlNetConfig,
    ProjectedTextEncoderConfig,
    SafetyCheckerConfig,
    TextEncoderConfig,
    UNetConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.folder import weight_files
from sd_tpu.checkpoint.weights import Params
from sd_tpu.models import (
    AutoencoderKL,
    ControlNetModel,
    StableDiffusionSafetyChecker,
    UNet2DConditionModel,
)
from sd_tpu.models.text_encoder import CLIPTextModel, CLIPTextModelWithProjection, at_end
from sd_tpu.pipelines.configs import Configured, warn_of_unknown
from sd_tpu.pipelines.files import MSGPACK, find_part, take_options
from sd_tpu.pipelines.names import check, to_flax, to_ours

DEVIATION = 0.01  # of a new text encoder's embeddings and dense layers


class Output(dict):
    """A result whose parts are read by attribute, key or number, where they are not None.

    It is a dictionary, as programs ask whether it is one.
    """

    def __post_init__(self):
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}  # ty: ignore[missing-attribute]
        self.update({name: part for name, part in parts.items() if part is not None})

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        """Return the parts that are not None."""
        return tuple(self.values())


@flax.struct.dataclass
class SampleOutput(Output):
    """Output of the UNet and the decoder: [B, C, H, W] f32."""

    sample: jax.Array


@flax.struct.dataclass
class ControlNetOutput(Output):
    """Output of the ControlNet: maps [B, h, w, F], the outermost first, and the middle's."""

    down_block_res_samples: list[jax.Array]
    mid_block_res_sample: jax.Array


@flax.struct.dataclass
class LatentDistribution:
    """The normal distribution of latents, each [B, h, w, C] f32, not scaled."""

    mean: jax.Array
    logvar: jax.Array

    @property
    def std(self) -> jax.Array:
        """Standard deviation."""
        return jnp.exp(0.5 * self.logvar)

    @property
    def var(self) -> jax.Array:
        """Variance."""
        return jnp.exp(self.logvar)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draw latents with this key."""
        return self.mean + self.std * jax.random.normal(key, self.mean.shape)

    def mode(self) -> jax.Array:
        """Return the likeliest latents."""
        return self.mean

    def kl(self) -> jax.Array:
        """Return the Kullback-Leibler divergence from the standard normal distribution, [B]."""
        return 0.5 * jnp.sum(self.mean**2 + self.var - 1.0 - self.logvar, axis=(1, 2, 3))


@flax.struct.dataclass
class EncoderOutput(Output):
    """Output of the encoder."""

    latent_dist: LatentDistribution


@flax.struct.dataclass
class TextOutput(Output):
    """Output of the text encoder."""

    last_hidden_state: jax.Array  # [B, L, D], after the final norm
    pooler_output: jax.Array  # [B, D]: that of the end mark
    hidden_states: tuple[jax.Array, ...] | None = None  # of the embeddings and after each layer


@flax.struct.dataclass
class ProjectedTextOutput(Output):
    """Output of the text encoder with a projection."""

    text_embeds: jax.Array  # [B, P]: of the end mark, projected
    last_hidden_state: jax.Array  # as in TextOutput
    hidden_states: tuple[jax.Array, ...] | None = None


class Network(Configured):
    """A network without its parameters."""

    config_name = "config.json"
    stem: ClassVar[str] = "diffusion_pytorch_model"  # of the weights' file
    network: ClassVar[Callable[..., nnx.Module]]
    network_config: ClassVar[Any]

    def __init__(self, *args: Any, dtype: Any = jnp.float32, **values: Any):
        """Take the values of the config; `dtype` is that of the arithmetic."""
        super().__init__(*args, **values)
        self.dtype = dtype
        self._bound: nnx.Module | None = None
        self._rngs: Mapping[str, jax.Array] = {}

    @cached_property
    def _structure(self) -> tuple[nnx.GraphDef, Params]:
        return weights.abstract(self._build)

    def _build(self, *, rngs: Any) -> nnx.Module:
        config = self.network_config.from_dict(self.config)
        return self.network(config, dtype=self.dtype, rngs=rngs)

    @property
    def expected(self) -> Params:
        """Our tree of the parameters' shapes."""
        return self._structure[1]

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        dtype: Any = jnp.float32,
        *,
        subfolder: str | None = None,
        **options: Any,
    ) -> tuple[Self, dict[str, Any]]:
        """Read a network.

        Args:
            name: folder or hub id.
            dtype: of the arithmetic; parameters are float32, as they are trained.
            subfolder: the network's folder within it, such as "unet".
            options: as the pipelines take them, and values to put in place of the config's.

        Returns:
            The model and its parameters.

        Raises:
            CheckpointError: what is wrong with the checkpoint, in one message.
        """
        return cls._read(name, dtype, subfolder, options)

    @classmethod
    def _read(cls, name, dtype, subfolder, options) -> tuple[Self, dict[str, Any]]:
        variant = options.get("variant")
        hub = take_options(options)
        config = options.pop("config", None)
        values = {key: options.pop(key) for key in cls.defaults if key in options}
        warn_of_unknown(options, cls.__name__)
        folder = find_part(name, subfolder, hub)
        config = config or cls.load_config(name, subfolder=subfolder, **hub)
        model = cls.from_config(config, dtype=dtype, **values)
        return model, model.load(folder, variant)

    def load(
        self,
        folder: Path,
        variant: str | None = None,
        dtype: Any = jnp.float32,
        sharding: jax.sharding.Sharding | None = None,
    ) -> dict[str, Any]:
        """Load the parameters in a folder: safetensors or, without any, Flax's msgpack.

        Raises:
            CheckpointError: there are none, they are damaged or of another model.
        """
        packed = [folder / file for file in MSGPACK if (folder / file).is_file()]
        if packed and not any(folder.glob("*.safetensors")):
            return _unpacked(packed[0], self.expected, dtype, sharding)
        files = weight_files(folder, self.stem, variant)
        return to_flax(weights.load(files, self.expected, dtype, sharding))

    def save_pretrained(
        self, folder: str | Path, params: Mapping[str, Any], *, dtype: Any = None, **options: Any
    ) -> None:
        """Write config and parameters, those as safetensors, which PyTorch's class reads too.

        Args:
            folder: made if absent.
            params: without a leading device axis.
            dtype: of the file; by default that of the parameters.
            options: of the old class; ignored with a warning.
        """
        take_options(options)
        warn_of_unknown(options, type(self).__name__)
        self.save_config(folder)
        stored = self._stored(to_ours(params, self.expected))
        weights.save(stored, Path(folder) / f"{self.stem}.safetensors", dtype)

    def _stored(self, params: Params) -> Params:
        """Return our parameters as they are nested in files."""
        return params

    def init_weights(self, rng: jax.Array) -> dict[str, Any]:
        """Draw random parameters in float32, whatever the arithmetic is in."""
        wide = copy.copy(self)
        wide.dtype = jnp.float32
        module = wide._build(rngs=nnx.Rngs(params=rng))
        return to_flax(nnx.to_pure_dict(nnx.state(module, nnx.Param)))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw random variables; shapes follow from the config, not from the arguments."""
        rng = rngs["params"] if isinstance(rngs, Mapping) else rngs
        return {"params": self.init_weights(rng)}

    def bind(
        self, variables: Mapping[str, Any], rngs: Mapping[str, jax.Array] | None = None
    ) -> Self:
        """Return this network with its parameters, `{"params": params}`."""
        bound = copy.copy(self)
        graph, expected = self._structure
        bound._bound = nnx.merge(graph, to_ours(variables["params"], expected))
        bound._rngs = rngs or {}
        return bound

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Mapping[str, jax.Array] | None = None,
        method: Callable | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the network, or another method of it, with these parameters.

        Args:
            variables: `{"params": params}`.
            args: of the method.
            rngs: keys by name.
            method: such as `vae.decode`; the call itself by default.
            kwargs: of the method.
        """
        if isinstance(method, str):
            method = getattr(self, method)
        function = getattr(method, "__func__", method) or type(self).__call__
        return function(self.bind(variables, rngs), *args, **kwargs)

    def _module(self) -> Any:
        if self._bound is None:
            raise ValueError(
                f"{type(self).__name__} holds no parameters: call it by "
                'model.apply({"params": params}, ...).'
            )
        return self._bound

    def to_bf16(self, params: Any, mask: Any = None) -> Any:
        """Return the parameters in bfloat16, where `mask`, a tree of booleans, is true."""
        return _cast(params, jnp.bfloat16, mask)

    def to_fp16(self, params: Any, mask: Any = None) -> Any:
        """Return the parameters in float16, where `mask`, a tree of booleans, is true."""
        return _cast(params, jnp.float16, mask)

    def to_fp32(self, params: Any, mask: Any = None) -> Any:
        """Return the parameters in float32, where `mask`, a tree of booleans, is true."""
        return _cast(params, jnp.float32, mask)


def _cast(params: Any, dtype: Any, mask: Any) -> Any:
    def cast(leaf, chosen=True):
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return leaf.astype(dtype) if chosen and floating else leaf

    return jax.tree.map(cast, params) if mask is None else jax.tree.map(cast, params, mask)


def _unpacked(file: Path, expected: Params, dtype: Any, sharding: Any) -> dict[str, Any]:
    try:
        params = msgpack_restore(file.read_bytes())
    except Exception as error:  # msgpack and Flax raise whatever their parsers raise
        raise CheckpointError(
            f"{file} is damaged or incomplete ({error}). Fetch or copy it again."
        ) from error
    check(params, expected, str(file.parent))
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf.astype(dtype or leaf.dtype), sharding), params
    )


# Values of a UNet, and of the half of one that a ControlNet is.
BLOCKS: dict[str, Any] = dict(
    sample_size=32,
    in_channels=4,
    down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    only_cross_attention=False,
    block_out_channels=(320, 640, 1280, 1280),
    layers_per_block=2,
    attention_head_dim=8,
    num_attention_heads=None,
    cross_attention_dim=1280,
    dropout=0.0,
    use_linear_projection=False,
    flip_sin_to_cos=True,
    freq_shift=0,
)


class FlaxUNet2DConditionModel(Network):
    """The denoising UNet."""

    network = UNet2DConditionModel
    network_config = UNetConfig
    defaults: ClassVar = BLOCKS | dict(
        out_channels=4,
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        mid_block_type="UNetMidBlock2DCrossAttn",
        use_memory_efficient_attention=False,
        split_head_dim=False,
        transformer_layers_per_block=1,
        addition_embed_type=None,
        addition_time_embed_dim=None,
        addition_embed_type_num_heads=64,
        projection_class_embeddings_input_dim=None,
    )
    token_downsampling = 1

    def with_token_downsampling(self, step: int) -> Self:
        """Return the network with thinned out self-attention, as in `UNet2DConditionModel`."""
        thinned = self.from_config(self.config, dtype=self.dtype)
        thinned.token_downsampling = step
        return thinned

    def _build(self, *, rngs: Any) -> nnx.Module:
        config = self.network_config.from_dict(self.config)
        return self.network(
            config, token_downsampling=self.token_downsampling, dtype=self.dtype, rngs=rngs
        )

    def __call__(
        self,
        sample: jax.Array,
        timesteps: Any,
        encoder_hidden_states: jax.Array,
        added_cond_kwargs: Mapping[str, jax.Array] | None = None,
        down_block_additional_residuals: Sequence[jax.Array] | None = None,
        mid_block_additional_residual: jax.Array | None = None,
        *,
        return_dict: bool = True,
        train: bool = False,
    ) -> SampleOutput | tuple:
        """Predict the noise (or velocity, or image) in a batch.

        Args:
            sample: [B, C, h, w].
            timesteps: a number, or [B].
            encoder_hidden_states: [B, L, D], of the text.
            added_cond_kwargs: SDXL's `text_embeds` [B, P] and `time_ids` [B, 6].
            down_block_additional_residuals: what a ControlNet returns first.
            mid_block_additional_residual: what it returns second; both or none.
            return_dict: False for a plain tuple.
            train: makes no difference, as there is no dropout.
        """
        control = (
            None
            if mid_block_additional_residual is None
            else [*(down_block_additional_residuals or ()), mid_block_additional_residual]
        )
        out = self._module()(
            sample.transpose(0, 2, 3, 1),
            _times(timesteps, sample),
            encoder_hidden_states,
            added_cond_kwargs,
            control,
        )
        output = SampleOutput(out.transpose(0, 3, 1, 2))
        return output if return_dict else output.to_tuple()


class FlaxControlNetModel(Network):
    """A network that steers the UNet by a control picture."""

    network = ControlNetModel
    network_config = ControlNetConfig
    defaults: ClassVar = BLOCKS | dict(
        controlnet_conditioning_channel_order="rgb",
        conditioning_embedding_out_channels=(16, 32, 96, 256),
    )

    def __call__(
        self,
        sample: jax.Array,
        timesteps: Any,
        encoder_hidden_states: jax.Array,
        controlnet_cond: jax.Array,
        conditioning_scale: Any = 1.0,
        return_dict: bool = True,
        train: bool = False,
    ) -> ControlNetOutput | tuple:
        """Return the maps that are added to those of the UNet.

        Args:
            sample: [B, C, h, w].
            timesteps: a number, or [B].
            encoder_hidden_states: [B, L, D], of the text.
            controlnet_cond: control pictures [B, 3, H, W] in [0, 1].
            conditioning_scale: a number that the maps are multiplied by, or [B].
            return_dict: False for a plain tuple.
            train: makes no difference, as there is no dropout.
        """
        module = self._module()
        embedded = module.embed(controlnet_cond.transpose(0, 2, 3, 1))
        maps = module(
            sample.transpose(0, 2, 3, 1), _times(timesteps, sample), encoder_hidden_states, embedded
        )
        scale = jnp.asarray(conditioning_scale).reshape(-1, 1, 1, 1)
        *down, middle = (scale.astype(each.dtype) * each for each in maps)
        output = ControlNetOutput(down, middle)
        return output if return_dict else output.to_tuple()


def _times(timesteps: Any, sample: jax.Array) -> jax.Array:
    """Return timesteps [B], given one number or B of them."""
    return jnp.broadcast_to(jnp.ravel(jnp.asarray(timesteps)), sample.shape[:1])


class FlaxAutoencoderKL(Network):
    """The autoencoder.

    Latents here are not scaled: `config.scaling_factor` is left to the caller.
    """

    network = AutoencoderKL
    network_config = VAEConfig
    defaults: ClassVar = dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(64,),
        layers_per_block=1,
        act_fn="silu",
        latent_channels=4,
        norm_num_groups=32,
        sample_size=32,
        scaling_factor=0.18215,
    )

    def encode(
        self, sample: jax.Array, deterministic: bool = True, return_dict: bool = True
    ) -> EncoderOutput | tuple:
        """Return the distribution of the latents, NHWC, of pictures [B, 3, H, W] in [-1, 1].

        `deterministic` makes no difference, as there is no dropout.
        """
        mean, logvar = self._module().encode(sample.transpose(0, 2, 3, 1))
        middle, scale = self.scaling()
        output = EncoderOutput(
            LatentDistribution(mean / scale + middle, logvar - 2 * jnp.log(scale))
        )
        return output if return_dict else output.to_tuple()

    def decode(
        self, latents: jax.Array, deterministic: bool = True, return_dict: bool = True
    ) -> SampleOutput | tuple:
        """Decode latents [B, C, h, w] or [B, h, w, C] to pictures [B, 3, H, W], about [-1, 1]."""
        if latents.shape[-1] != self.config.latent_channels:
            latents = latents.transpose(0, 2, 3, 1)
        middle, scale = self.scaling()
        image = self._module().decode((latents - middle) * scale)
        output = SampleOutput(image.transpose(0, 3, 1, 2))
        return output if return_dict else output.to_tuple()

    def scaling(self) -> tuple[jax.Array, jax.Array]:
        """Return the number, or [C], that is subtracted from latents, and their factor then."""
        middle = self.config.get("latents_mean")
        if middle is None:
            return jnp.float32(0), jnp.float32(self.config.scaling_factor)
        return (
            jnp.float32(middle),
            self.config.scaling_factor / jnp.float32(self.config["latents_std"]),
        )

    def __call__(
        self,
        sample: jax.Array,
        sample_posterior: bool = False,
        deterministic: bool = True,
        return_dict: bool = True,
    ) -> SampleOutput | tuple:
        """Encode and decode pictures.

        With `sample_posterior` their latents are drawn with the key "gaussian".
        """
        latents = self.encode(sample).latent_dist  # ty: ignore[missing-union-attribute]
        latents = latents.sample(self._rngs["gaussian"]) if sample_posterior else latents.mode()
        return self.decode(latents, return_dict=return_dict)


class TransformersNetwork(Network):
    """A network that may hold its parameters and is called, as transformers' networks are."""

    stem = "model"

    def __init__(
        self,
        config: Any = None,
        *,
        dtype: Any = jnp.float32,
        params: Mapping[str, Any] | None = None,
        **values: Any,
    ):
        """Take a config, a mapping or transformers' own, or its values; and parameters."""
        super().__init__(dtype=dtype, **values)
        if config is not None:
            self.config.update(config if isinstance(config, Mapping) else config.to_dict())
        self.params = params

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        dtype: Any = jnp.float32,
        *,
        subfolder: str | None = None,
        _do_init: bool = True,
        **options: Any,
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Read a network as `Network.from_pretrained`.

        The model holds its parameters unless `_do_init` is False, and is unpacked into itself and
        them where a pair is expected.
        """
        model, params = cls._read(name, dtype, subfolder, options)
        if not _do_init:
            return model, params
        model.params = params
        return model

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self.params))

    def save_pretrained(
        self, folder: str | Path, params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Write config and parameters as `Network.save_pretrained`, by default its own."""
        super().save_pretrained(folder, params or self.params, **options)  # ty: ignore[invalid-argument-type]

    def _called(self, params: Mapping[str, Any] | None) -> Any:
        """Return the module with these parameters, or its own; raises ValueError without any."""
        if params is None and self.params is None and self._bound is None:
            raise ValueError(f"{type(self).__name__} holds no parameters: give it params=.")
        return (
            self._bound or self.bind({"params": self.params if params is None else params})._bound
        )


class FlaxStableDiffusionSafetyChecker(TransformersNetwork):
    """A network that flags pictures that are not safe for work."""

    network = StableDiffusionSafetyChecker
    network_config = SafetyCheckerConfig
    defaults: ClassVar = dict(vision_config=None, text_config=None, projection_dim=512)

    def load(
        self,
        folder: Path,
        variant: str | None = None,
        dtype: Any = None,
        sharding: jax.sharding.Sharding | None = None,
    ) -> dict[str, Any]:
        """Load parameters as `Network.load`, in the arithmetic's dtype except for thresholds."""
        return super().load(folder, variant, None, sharding)

    def __call__(self, clip_input: jax.Array, params: Mapping[str, Any] | None = None) -> jax.Array:
        """Return whether pictures are not safe for work, [B].

        Args:
            clip_input: [B, 3, side, side], as CLIPImageProcessor makes them.
            params: its own by default.
        """
        scores = self._called(params).scores_of(jnp.asarray(clip_input).transpose(0, 2, 3, 1))
        return jnp.any(scores > 0, axis=-1)

    def _stored(self, params: Params) -> Params:
        return {**params, "vision_model": {"vision_model": params["vision_model"]}}

    def flags(self, pictures: jax.Array, params: Mapping[str, Any]) -> jax.Array:
        """Flag pictures [B, H, W, 3] u8."""
        return self._called(params)(pictures)


class FlaxCLIPTextModel(TransformersNetwork):
    """CLIP's text encoder."""

    network = CLIPTextModel
    network_config = TextEncoderConfig
    defaults: ClassVar = dict(
        vocab_size=49408,
        hidden_size=512,
        intermediate_size=2048,
        projection_dim=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
        eos_token_id=49407,
    )

    def init_weights(self, rng: jax.Array) -> dict[str, Any]:
        """Draw weights as `Network.init_weights`, with transformers' deviation for most of them.

        The projection is the exception.
        """
        params = super().init_weights(rng)
        leaves, structure = jax.tree.flatten(params["text_model"])
        drawn = [
            DEVIATION * jax.random.normal(key, leaf.shape) if leaf.ndim == 2 else leaf
            for leaf, key in zip(leaves, jax.random.split(rng, len(leaves)), strict=True)
        ]
        return {**params, "text_model": jax.tree.unflatten(structure, drawn)}

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: None = None,
        position_ids: None = None,
        params: Mapping[str, Any] | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> TextOutput | ProjectedTextOutput | tuple:
        """Encode token ids.

        Args:
            input_ids: [B, L].
            attention_mask: none is supported: Stable Diffusion sees all of its 77 tokens.
            position_ids: none is supported.
            params: its own by default.
            dropout_rng: makes no difference, as there is no dropout.
            train: makes no difference, as there is no dropout.
            output_attentions: False.
            output_hidden_states: whether to return those of all layers.
            return_dict: False for a plain tuple.

        Raises:
            ValueError: something is asked for that is not supported, or there are no parameters.
        """
        if attention_mask is not None or position_ids is not None or output_attentions:
            raise ValueError(
                "FlaxCLIPTextModel takes no attention_mask and no position_ids and "
                "returns no attentions."
            )
        output = self._encode(self._called(params), jnp.asarray(input_ids), output_hidden_states)
        return output if return_dict else output.to_tuple()

    def _encode(self, module: Any, ids: jax.Array, all_states: bool) -> Any:
        states = module.text_model.hidden_states(ids)
        last = module.text_model.final_layer_norm(states[-1])
        pooled = at_end(last, ids, self.config.eos_token_id)
        return self._output(module, last, pooled, tuple(states) if all_states else None)

    def _output(
        self, module: Any, last: jax.Array, pooled: jax.Array, states: tuple[jax.Array, ...] | None
    ) -> Any:
        return TextOutput(last, pooled, states)


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextModel):
    """The second text encoder of SDXL."""

    network = CLIPTextModelWithProjection
    network_config = ProjectedTextEncoderConfig

    def _output(
        self, module: Any, last: jax.Array, pooled: jax.Array, states: tuple[jax.Array, ...] | None
    ) -> ProjectedTextOutput:
        return ProjectedTextOutput(module.text_projection(pooled), last, states)
