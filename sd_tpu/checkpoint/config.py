"""A checkpoint's `*.json` files, read through one schema with bounds.

Each config reads the fields that shape the computation and refuses, by name, the values that belong
to architectures outside the families that are built here. A field that is not here does not change
the result.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import pydantic
from pydantic import Field

from sd_tpu.reading import read_text

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "assets"  # where a wheel has what lies beside the package in the sources
ASSETS = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "assets"
BUNDLED_MODEL = ASSETS / "model"
# How dense layers of transformers may be rounded: their weights, or what these multiply as well.
INT8, W8A8 = WEIGHTS = "int8", "w8a8"

MAX_VALUES = 100_000  # in a JSON file: the index of the largest checkpoint has a few thousand


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what is wrong and what to do."""


@contextlib.contextmanager
def paths_within(*folders: Path | None) -> Iterator[None]:
    """Shorten paths in a CheckpointError to begin at these folders.

    Visitors of a page need not know where its server keeps things.
    """
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        for folder in sorted(filter(None, folders), key=lambda each: -len(str(each))):
            message = message.replace(f"{folder}{os.sep}", "")
            if folder.is_absolute() and folder.name:
                message = message.replace(str(folder), folder.name)
        raise CheckpointError(message) from error


def is_file(path: Path) -> bool:
    """Whether a file is there; raises CheckpointError for a link that leads nowhere, as in a cache
    of the hub that was cleaned or fetched in part."""
    for link in (path, path.parent):
        if link.is_symlink() and not link.exists():
            hub = next((part for part in link.parts if part.startswith("models--")), "")
            name = hub.removeprefix("models--").replace("--", "/")
            fetch = f", as by `hf download {name}`" if name else ""
            raise CheckpointError(
                f"{path} is missing: {link} is a link to {os.readlink(link)}, "
                f"which is not there. Fetch it again{fetch}, or copy the files "
                "that its links lead to."
            )
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object stored at `path`; raises CheckpointError if it holds none."""
    is_file(path)
    try:
        text = read_text(path)
        if text.count(",") >= MAX_VALUES:  # each takes a kilobyte where it is none that it should
            raise ValueError(f"it has more than {MAX_VALUES} values")
        content = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a diffusers checkpoint folder has it.") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise CheckpointError(f"{path} is not readable JSON ({reason}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object.")
    return content


class Config(pydantic.BaseModel):
    """A schema of a JSON object: frozen, without conversions, deaf to names that it does not know.

    It can be compared and be a key, as far as its fields can. What `from_dict` reads of two files
    is equal where they describe the same computation.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False
    )

    # Values outside these belong to architectures that are not built here.
    _supported: ClassVar[dict[str, tuple]] = {}
    _multiples: ClassVar[dict[str, str]] = {}  # of which other field a field is a multiple

    @pydantic.model_validator(mode="after")
    def _fields_divide(self) -> Self:
        for whole, part in self._multiples.items():
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole}={getattr(self, whole)} does not divide into "
                    f"{part}={getattr(self, part)}."
                )
        return self

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read the known fields; null is the default where it is no value itself.

        Raises:
            CheckpointError: a value is of the wrong type, out of bounds, or not supported.
        """
        for name, allowed in cls._supported.items():
            if name in config and config[name] not in allowed:
                raise CheckpointError(
                    f"{cls.__name__}: {name}={_shown(config[name])} is not supported; expected "
                    f"{' or '.join(map(repr, allowed))}."
                )
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        values = {
            name: _frozen(value)
            for name, value in config.items()
            if name in fields
            and (value is not None or NoneType in get_args(fields[name].annotation))
        }
        try:
            return cls(**values).canonical()
        except pydantic.ValidationError as error:
            raise CheckpointError(f"{cls.__name__}: {_first_fault(error, config)}") from None

    def canonical(self) -> Self:
        """Return an equal config in one spelling, where several mean the same."""
        return self


def _first_fault(error: pydantic.ValidationError, config: dict[str, Any]) -> str:
    """Return the first fault that pydantic found, as a sentence."""
    faults = error.errors(include_url=False)
    if not faults[0]["loc"]:  # a check of the whole
        return str(faults[0]["ctx"]["error"])
    name = str(faults[0]["loc"][0])
    if faults[0]["type"] == "missing":
        return f"{name} is missing."
    # One of a union's types is met if none of these is so; what is inside a list is told by itself.
    expected = dict.fromkeys(
        fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        for fault in faults
        if fault["loc"][0] == name
    )
    return f"{name}={_shown(config[name])} is not supported; expected {' or '.join(expected)}."


def _shown(value: Any) -> str:
    """Return a value as Python writes it, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _frozen(value: Any, depth: int = 3) -> Any:
    """Return lists as tuples, down to the depth that a config nests them."""
    if isinstance(value, list) and depth:
        return tuple(_frozen(each, depth - 1) for each in value)
    return value


Count = Annotated[int, Field(ge=1, le=1 << 20)]  # of channels, tokens, pixels, words
Layers = Annotated[int, Field(ge=1, le=16)]
Depth = Annotated[int, Field(ge=0, le=32)]  # transformer blocks in a row; a level may have none
MAX_BLOCKS = 256  # transformer blocks of a UNet; SDXL has 70
Blocks = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
Even = Annotated[int, Field(ge=4, le=1 << 20, multiple_of=2)]  # of sinusoids: half are cosines
Positive = Annotated[float, Field(gt=0, le=1e6)]
Timesteps = Annotated[int, Field(ge=1, le=100_000)]
Levels = Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)]


class _EncoderConfig(Config):
    """Layers of either half of CLIP."""

    hidden_size: Count = 768
    intermediate_size: Count = 3072
    # SD 2.x stores 23 of OpenCLIP-H's 24: its penultimate layer
    num_hidden_layers: Annotated[int, Field(ge=1, le=128)] = 12
    num_attention_heads: Count = 12
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: Positive = 1e-5

    _multiples: ClassVar = {"hidden_size": "num_attention_heads"}


class TextEncoderConfig(_EncoderConfig):
    """`text_encoder/config.json` of a CLIPTextModel."""

    vocab_size: Count = 49408
    max_position_embeddings: Count = 77


class T5Config(Config):
    """`config.json` of a T5EncoderModel: Stable Diffusion 3's third text encoder, FLUX.1's second.

    The activation of "gated-gelu" is `gelu_new`, whatever else is called GELU.
    """

    d_model: Count = 512
    d_kv: Count = 64
    d_ff: Count = 2048
    num_layers: Annotated[int, Field(ge=1, le=128)] = 6
    num_heads: Count = 8
    vocab_size: Count = 32128
    relative_attention_num_buckets: Annotated[int, Field(ge=4, le=1 << 16)] = 32
    relative_attention_max_distance: Count = 128
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"
    layer_norm_epsilon: Positive = 1e-6

    _supported: ClassVar = {
        "model_type": ("t5",),  # UMT5 has position biases in every layer
        "is_decoder": (None, False),
        "dense_act_fn": (None, "relu", "gelu_new"),
    }

    @pydantic.model_validator(mode="after")
    def _far_distances_share_buckets(self) -> Self:
        near = self.relative_attention_num_buckets // 4
        if self.relative_attention_max_distance <= near:
            raise ValueError(
                f"relative_attention_max_distance={self.relative_attention_max_distance} is not "
                f"supported; expected more than {near}, the distances with a bucket of their own."
            )
        return self


class Qwen3Config(Config):
    """`config.json` of a Qwen3Model, or of the language model that it is of."""

    vocab_size: Count = 151936
    hidden_size: Count = 4096
    intermediate_size: Count = 22016
    num_hidden_layers: Annotated[int, Field(ge=2, le=128)] = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 32
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)] = 128
    rms_norm_eps: Positive = 1e-6
    rope_theta: Annotated[float, Field(gt=1, le=1e9)] = 10_000.0

    _supported: ClassVar = {
        "model_type": (None, "qwen3"),
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "use_sliding_window": (None, False),
        "rope_scaling": (None,),
        "rope_type": (None, "default"),
    }
    _multiples: ClassVar = {"num_attention_heads": "num_key_value_heads"}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a config of transformers 5, which has values of positions apart, or of an older one.

        Raises:
            CheckpointError: as `Config.from_dict`.
        """
        apart = config.get("rope_parameters")
        return super().from_dict({**config, **(apart if isinstance(apart, dict) else {})})


class Qwen3VLTextConfig(Qwen3Config):
    """The language model's part of the `config.json` of a Qwen3VLModel, or the whole of a
    Qwen3Model's. A text is at the same position along all axes, so that these do not matter."""

    _supported: ClassVar = Qwen3Config._supported | {"model_type": (None, "qwen3", "qwen3_vl_text")}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read either; raises CheckpointError as `Config.from_dict`."""
        if isinstance(text := config.get("text_config"), dict):
            axes = text.get("rope_scaling")
            config = {**text, **(axes if isinstance(axes, dict) else {}), "rope_scaling": None}
        return super().from_dict(config)


class VisionEncoderConfig(_EncoderConfig):
    """`vision_config` of a CLIP model's config.json."""

    image_size: Annotated[int, Field(ge=1, le=4096)] = 224
    patch_size: Annotated[int, Field(ge=1, le=4096)] = 32

    _multiples: ClassVar = {**_EncoderConfig._multiples, "image_size": "patch_size"}


class ProjectedVisionEncoderConfig(VisionEncoderConfig):
    """`image_encoder/config.json` of a CLIPVisionModelWithProjection."""

    projection_dim: Count = 512


class SafetyCheckerConfig(Config):
    """`safety_checker/config.json` of a StableDiffusionSafetyChecker."""

    vision_config: VisionEncoderConfig
    projection_dim: Count = 512

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read the known fields, and those of the image encoder as its own config."""
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise CheckpointError(f"{cls.__name__}: vision_config is missing.")
        return super().from_dict(config | {"vision_config": VisionEncoderConfig.from_dict(vision)})


class PooledTextEncoderConfig(TextEncoderConfig):
    """`text_encoder/config.json` of a CLIPTextModel whose output at the end of a text is taken."""

    eos_token_id: Annotated[int, Field(ge=0)] = 49407

    def canonical(self) -> Self:
        """Replace an end token that is the last by 2, as in configs before transformers 4.31."""
        is_last = self.eos_token_id == self.vocab_size - 1
        return self.model_copy(update={"eos_token_id": 2}) if is_last else self


class ProjectedTextEncoderConfig(PooledTextEncoderConfig):
    """`text_encoder_2/config.json` of a CLIPTextModelWithProjection."""

    projection_dim: Count = 512


BlockType = Literal["CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]


class UNetConfig(Config):
    """`unet/config.json` of a UNet2DConditionModel."""

    in_channels: Count = 4
    out_channels: Count = 4
    down_block_types: tuple[BlockType, ...] = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] | None = (
        "UNetMidBlock2DCrossAttn"
    )
    up_block_types: tuple[BlockType, ...] = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    block_out_channels: Levels = (320, 640, 1280, 1280)
    layers_per_block: Layers | tuple[Layers, ...] = 2
    transformer_layers_per_block: Depth | tuple[Depth | tuple[Depth, ...], ...] = 1
    reverse_transformer_layers_per_block: tuple[Depth | tuple[Depth, ...], ...] | None = None
    cross_attention_dim: Count = 768
    attention_head_dim: Count | tuple[Count, ...] = 8
    num_attention_heads: Count | tuple[Count, ...] | None = None
    norm_num_groups: Count = 32
    norm_eps: Positive = 1e-5
    downsample_padding: Annotated[int, Field(ge=0, le=1)] = 1
    flip_sin_to_cos: bool = True
    freq_shift: Annotated[int, Field(ge=0, le=1)] = 0
    use_linear_projection: bool = False
    time_cond_proj_dim: Even | None = None
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: Even | None = None
    projection_class_embeddings_input_dim: Count | None = None

    _supported: ClassVar = {
        "act_fn": ("silu", "swish"),
        "mid_block_scale_factor": (1, 1.0),
        "center_input_sample": (None, False),
        "only_cross_attention": (None, False),
        "mid_block_only_cross_attention": (None, False),
        "dual_cross_attention": (None, False),
        "cross_attention_norm": (None,),
        "class_embed_type": (None,),
        "class_embeddings_concat": (None, False),
        "num_class_embeds": (None,),
        "encoder_hid_dim": (None,),
        "encoder_hid_dim_type": (None,),
        "time_embedding_type": (None, "positional"),
        "time_embedding_dim": (None,),
        "time_embedding_act_fn": (None,),
        "timestep_post_act": (None,),
        "resnet_time_scale_shift": ("default",),
        "resnet_skip_time_act": (None, False),
        "resnet_out_scale_factor": (1, 1.0),
        "attention_type": (None, "default"),
        "conv_in_kernel": (None, 3),
        "conv_out_kernel": (None, 3),
    }

    @pydantic.model_validator(mode="after")
    def _levels_agree(self) -> Self:
        levels = len(self.block_out_channels)
        by_level = (
            self.down_block_types,
            self.up_block_types,
            self.heads,
            self.layers,
            *(
                depths
                for depths in (
                    self.transformer_layers_per_block,
                    self.reverse_transformer_layers_per_block,
                )
                if isinstance(depths, tuple)
            ),
        )
        if {*map(len, by_level)} != {levels}:
            raise ValueError("block types, channels, heads and layers differ in length.")
        for width, heads in zip(self.block_out_channels, self.heads, strict=True):
            if width % heads or width % self.norm_num_groups:
                raise ValueError(
                    f"{width} channels do not divide into {heads} heads and "
                    f"norm_num_groups={self.norm_num_groups}."
                )
        return self

    @pydantic.model_validator(mode="after")
    def _transformers_have_depths(self) -> Self:
        depths = self.transformer_layers_per_block
        nested = isinstance(depths, tuple) and any(isinstance(depth, tuple) for depth in depths)
        if nested and self.reverse_transformer_layers_per_block is None:
            raise ValueError(
                "a nested transformer_layers_per_block needs reverse_transformer_layers_per_block."
            )
        for depths, layers in (
            (self.down_depths, self.layers),
            (self.up_depths, [count + 1 for count in self.layers[::-1]]),
        ):
            if [*map(len, depths)] != [*layers]:
                raise ValueError("transformer_layers_per_block and layers_per_block differ.")
        if (blocks := len(self.attending_widths)) > MAX_BLOCKS:
            raise ValueError(
                f"transformer_layers_per_block and layers_per_block make {blocks} "
                f"transformer blocks; at most {MAX_BLOCKS} are supported."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _added_conditions_have_sizes(self) -> Self:
        if self.addition_embed_type == "text_time" and None in (
            self.addition_time_embed_dim,
            self.projection_class_embeddings_input_dim,
        ):
            raise ValueError(
                "addition_embed_type='text_time' needs addition_time_embed_dim and "
                "projection_class_embeddings_input_dim."
            )
        return self

    def canonical(self) -> Self:
        """Return the config with heads, layers and depths for each level; 1 without attention."""
        attends = [
            tuple(kind.startswith("CrossAttn") for kind in kinds)
            for kinds in (self.down_block_types, self.up_block_types)
        ]
        down, up = (
            [depth if there else (1,) * len(depth) for depth, there in zip(depths, of, strict=True)]
            for depths, of in zip((self.down_depths, self.up_depths), attends, strict=True)
        )
        if self.mid_block_type == "UNetMidBlock2DCrossAttn" and not attends[0][-1]:
            down[-1] = (self.mid_depth,) * len(down[-1])
        return self.model_copy(
            update=dict(
                attention_head_dim=self.heads,
                num_attention_heads=None,
                layers_per_block=self.layers,
                transformer_layers_per_block=tuple(down),
                reverse_transformer_layers_per_block=tuple(up),
            )
        )

    @property
    def heads(self) -> tuple[int, ...]:
        """Attention heads of each level, outermost first.

        diffusers stores the number of heads under the name `attention_head_dim` (a slip it keeps
        for the sake of published checkpoints); `num_attention_heads` wins where it is present.
        """
        return self._by_level(self.num_attention_heads or self.attention_head_dim)

    @property
    def layers(self) -> tuple[int, ...]:
        """Resnets of each level on the way down, outermost first; one more on the way up."""
        return self._by_level(self.layers_per_block)

    @property
    def skip_widths(self) -> tuple[int, ...]:
        """Channels of what is skipped across from the way down to the way up, outermost first."""
        channels, last = self.block_out_channels, len(self.block_out_channels) - 1
        return channels[0], *(
            channels[level]
            for level, layers in enumerate(self.layers)
            for _ in range(layers + (level < last))
        )

    @property
    def attending_widths(self) -> tuple[int, ...]:
        """Channels of each transformer block, as diffusers counts those that attend to the text:
        first all on the way down, then all on the way up, and last those in the middle."""
        channels = self.block_out_channels
        levels = [
            *zip(self.down_block_types, self.down_depths, channels, strict=True),
            *zip(self.up_block_types, self.up_depths, channels[::-1], strict=True),
        ]
        if self.mid_block_type:
            levels.append((self.mid_block_type, (self.mid_depth,), channels[-1]))
        return tuple(
            width
            for kind, depths, width in levels
            if "CrossAttn" in kind
            for _ in range(sum(depths))
        )

    @property
    def down_depths(self) -> tuple[tuple[int, ...], ...]:
        """Transformer blocks after each resnet of a level, outermost level first."""
        depths = self._by_level(self.transformer_layers_per_block)
        return _each_layers(depths, self.layers)

    @property
    def mid_depth(self) -> int:
        """Transformer blocks in the middle."""
        depth = self._by_level(self.transformer_layers_per_block)[-1]
        return depth[0] if isinstance(depth, tuple) else depth

    @property
    def up_depths(self) -> tuple[tuple[int, ...], ...]:
        """Transformer blocks after each resnet of a level on the way up, innermost level first."""
        depths = self.reverse_transformer_layers_per_block
        if depths is None:
            depths = self._by_level(self.transformer_layers_per_block)[::-1]
        return _each_layers(depths, [count + 1 for count in self.layers[::-1]])

    def _by_level(self, values) -> tuple:
        return values if isinstance(values, tuple) else (values,) * len(self.block_out_channels)


def _each_layers(depths, layers) -> tuple[tuple[int, ...], ...]:
    return tuple(
        depth if isinstance(depth, tuple) else (depth,) * count
        for depth, count in zip(depths, layers, strict=True)
    )


class ControlNetConfig(UNetConfig):
    """`config.json` of a ControlNetModel: a UNet's way down, told what a control picture shows."""

    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] = "UNetMidBlock2DCrossAttn"
    conditioning_channels: Literal[3] = 3
    conditioning_embedding_out_channels: Levels = (16, 32, 96, 256)
    controlnet_conditioning_channel_order: Literal["rgb", "bgr"] = "rgb"

    _supported: ClassVar = {
        **UNetConfig._supported,
        "global_pool_conditions": (None, False),  # a picture shuffled: no map of what is where
        "time_cond_proj_dim": (None,),
    }

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read the known fields; the missing way up is taken to mirror the way down.

        Raises:
            CheckpointError: as `Config.from_dict`.
        """
        kinds = config.get("down_block_types")
        if not isinstance(kinds, list | tuple):
            kinds = cls.model_fields["down_block_types"].default
        mirrored = [str(kind).replace("Down", "Up") for kind in reversed(kinds)]
        return super().from_dict({**config, "up_block_types": mirrored})

    @property
    def downscale(self) -> int:
        """Pixels of the control picture along one side for each latent along that side."""
        return 2 ** (len(self.conditioning_embedding_out_channels) - 1)


class _HeadsConfig(Config):
    """A transformer whose tokens have the channels of all heads."""

    num_attention_heads: Count
    attention_head_dim: Count

    @property
    def width(self) -> int:
        """Channels of each token."""
        return self.num_attention_heads * self.attention_head_dim


class SD3TransformerConfig(_HeadsConfig):
    """`transformer/config.json` of an SD3Transformer2DModel."""

    sample_size: Count = 128  # latents along a side
    patch_size: Annotated[int, Field(ge=1, le=16)] = 2
    in_channels: Count = 16
    num_layers: Blocks = 18
    attention_head_dim: Count = 64
    num_attention_heads: Count = 18
    joint_attention_dim: Count = 4096
    caption_projection_dim: Count = 1152
    pooled_projection_dim: Count = 2048
    out_channels: Count = 16
    pos_embed_max_size: Annotated[int, Field(ge=1, le=4096)] = 96  # patches along a side
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: Literal["rms_norm"] | None = None

    _multiples: ClassVar = {"sample_size": "patch_size"}

    @pydantic.model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.caption_projection_dim != self.width:
            raise ValueError(
                f"caption_projection_dim={self.caption_projection_dim} should be "
                f"num_attention_heads * attention_head_dim, {self.width}: text and picture are "
                "attended to together."
            )
        if self.sample_size // self.patch_size > self.pos_embed_max_size:
            raise ValueError(
                f"sample_size={self.sample_size} has more patches along a side than "
                f"pos_embed_max_size={self.pos_embed_max_size}."
            )
        return self

    def canonical(self) -> Self:
        """Return the config with those blocks of dual attention that there are, in order."""
        dual = sorted({*self.dual_attention_layers} & {*range(self.num_layers)})
        return self.model_copy(update={"dual_attention_layers": tuple(dual)})


Axes = Annotated[tuple[Count, ...], Field(max_length=8)]  # a value for each axis of positions


class ZImageTransformerConfig(Config):
    """`transformer/config.json` of a ZImageTransformer2DModel."""

    in_channels: Count = 16
    dim: Count = 3840
    n_layers: Blocks = 30
    n_refiner_layers: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 2
    n_heads: Count = 30
    norm_eps: Positive = 1e-5
    qk_norm: bool = True
    cap_feat_dim: Count = 2560
    rope_theta: Positive = 256.0
    t_scale: Positive = 1000.0
    axes_dims: Axes = (32, 48, 48)  # channels of a head that turn by the text's axis, row, column
    axes_lens: Axes = (1024, 512, 512)  # positions along each

    _supported: ClassVar = {
        "all_patch_size": ([2],),
        "all_f_patch_size": ([1],),
        "siglip_feat_dim": (None,),  # Z-Image-Omni's pictures as a prompt
    }

    @pydantic.model_validator(mode="after")
    def _axes_fill_the_heads(self) -> Self:
        if not len(self.axes_dims) == len(self.axes_lens) == 3:
            raise ValueError(
                f"axes_dims={list(self.axes_dims)} and axes_lens={list(self.axes_lens)} should "
                "have three values each: of the text, of rows and of columns."
            )
        odd = any(size % 2 for size in self.axes_dims)
        if odd or sum(self.axes_dims) * self.n_heads != self.dim:
            raise ValueError(
                f"axes_dims={list(self.axes_dims)} should be even and add up to "
                f"dim / n_heads, {self.dim / self.n_heads:g}."
            )
        return self

    @property
    def head_dim(self) -> int:
        """Channels of each head."""
        return self.dim // self.n_heads

    @property
    def feed_forward_dim(self) -> int:
        """Channels inside a feed-forward layer, rounded as diffusers does."""
        return int(self.dim / 3 * 8)

    @property
    def condition_dim(self) -> int:
        """Channels of what a timestep becomes."""
        return min(self.dim, 256)


class _AxesConfig(_HeadsConfig):
    """A transformer whose heads turn by positions along several axes."""

    attention_head_dim: Count = 128
    axes_dims_rope: Axes  # channels of a head by axis

    _axes: ClassVar[tuple[str, ...]]  # of positions

    @pydantic.model_validator(mode="after")
    def _axes_fill_the_heads(self) -> Self:
        sizes, (*most, last) = self.axes_dims_rope, self._axes
        if len(sizes) != len(self._axes) or any(size % 2 for size in sizes):
            raise ValueError(
                f"axes_dims_rope={list(sizes)} should be {len(self._axes)} even numbers: of "
                f"{', of '.join(most)} and of {last}."
            )
        if sum(sizes) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope={list(sizes)} should add up to "
                f"attention_head_dim={self.attention_head_dim}."
            )
        return self


class _FluxConfig(_AxesConfig):
    """Blocks of FLUX.1 and FLUX.2."""

    in_channels: Count
    out_channels: Count | None = None  # null is in_channels
    num_layers: Blocks
    num_single_layers: Blocks
    joint_attention_dim: Count
    guidance_embeds: bool

    def canonical(self) -> Self:
        """Return the config with the channels of the output as a number."""
        return self.model_copy(update={"out_channels": self.out_channels or self.in_channels})


class FluxTransformerConfig(_FluxConfig):
    """`transformer/config.json` of a FluxTransformer2DModel, as FLUX.1 has it."""

    in_channels: Annotated[int, Field(ge=4, le=1 << 20, multiple_of=4)] = 64  # of four latents
    out_channels: Annotated[int, Field(ge=4, le=1 << 20, multiple_of=4)] | None = None
    num_layers: Blocks = 19
    num_single_layers: Blocks = 38
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 4096
    pooled_projection_dim: Count = 768
    guidance_embeds: bool = False
    axes_dims_rope: Axes = (16, 56, 56)

    _supported: ClassVar = {"patch_size": (None, 1)}
    _axes: ClassVar = ("the text", "rows", "columns")


class Flux2TransformerConfig(_FluxConfig):
    """`transformer/config.json` of a Flux2Transformer2DModel, as FLUX.2 klein has it."""

    in_channels: Count = 128
    num_layers: Blocks = 8
    num_single_layers: Blocks = 48
    num_attention_heads: Count = 48
    joint_attention_dim: Count = 15360
    timestep_guidance_channels: Even = 256
    mlp_ratio: Annotated[float, Field(ge=1, le=64)] = 3.0
    guidance_embeds: bool = True
    axes_dims_rope: Axes = (32, 32, 32, 32)
    rope_theta: Positive = 2000.0

    _supported: ClassVar = {"patch_size": (None, 1), "eps": (None, 1e-6)}
    _axes: ClassVar = ("time", "rows", "columns", "the text")

    @pydantic.model_validator(mode="after")
    def _is_klein(self) -> Self:
        if self.guidance_embeds:
            raise ValueError(
                "guidance_embeds=True is not supported; expected False, as in FLUX.2 klein. "
                "FLUX.2 [dev], whose network is given the guidance scale, is not built here."
            )
        return self

    @property
    def feed_forward_dim(self) -> int:
        """Channels inside a feed-forward layer, rounded as diffusers does."""
        return int(self.width * self.mlp_ratio)


class Krea2TransformerConfig(_AxesConfig):
    """`transformer/config.json` of a Krea2Transformer2DModel."""

    in_channels: Annotated[int, Field(ge=4, le=1 << 20, multiple_of=4)] = 64  # of four latents
    num_layers: Blocks = 28
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 12
    intermediate_size: Count = 16384
    timestep_embed_dim: Even = 256
    text_hidden_dim: Count = 2560
    num_text_layers: Annotated[int, Field(ge=1, le=128)] = 12
    text_num_attention_heads: Count = 20
    text_num_key_value_heads: Count = 20
    text_intermediate_size: Count = 6912
    num_layerwise_text_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 2
    num_refiner_text_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 2
    axes_dims_rope: Axes = (32, 48, 48)
    rope_theta: Positive = 1000.0
    norm_eps: Positive = 1e-5

    _multiples: ClassVar = {
        "num_attention_heads": "num_key_value_heads",
        "text_num_attention_heads": "text_num_key_value_heads",
        "text_hidden_dim": "text_num_attention_heads",
    }
    _axes: ClassVar = ("time", "rows", "columns")


THREE = Field(min_length=3, max_length=3)


class CosmosTransformerConfig(_HeadsConfig):
    """`transformer/config.json` of a CosmosTransformer3DModel, as Anima has it."""

    in_channels: Count = 16
    out_channels: Count = 16
    num_attention_heads: Count = 32
    attention_head_dim: Annotated[int, Field(ge=18, le=1 << 20, multiple_of=2)] = 128
    num_layers: Blocks = 28
    text_embed_dim: Count = 1024
    adaln_lora_dim: Count = 256
    # Latents in time, rows and columns, and how much more slowly heads turn by each
    max_size: Annotated[tuple[Count, ...], THREE] = (128, 240, 240)
    rope_scale: Annotated[tuple[Positive, ...], THREE] = (2.0, 1.0, 1.0)
    concat_padding_mask: bool = True
    # Learned positions, which diffusers adds where a config says nothing, are not built.
    extra_pos_embed_type: str | None = "learnable"

    _supported: ClassVar = {
        "mlp_ratio": (None, 4.0),
        "patch_size": (None, [1, 2, 2], (1, 2, 2)),
        "use_crossattn_projection": (None, False),
        "controlnet_block_every_n": (None,),
        "img_context_dim_in": (None, 0),
    }

    @pydantic.model_validator(mode="after")
    def _positions_turn(self) -> Self:
        if self.extra_pos_embed_type is not None:
            raise ValueError(
                f"extra_pos_embed_type={self.extra_pos_embed_type!r} is not supported; expected "
                "None, as in Cosmos-Predict2 and Anima."
            )
        return self

    @property
    def positions(self) -> int:
        """Patches along a side that there are positions for: as many as along any axis."""
        time, *sides = self.max_size
        return max(time, *(side // 2 for side in sides))

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that turn by time, row and column."""
        side = self.attention_head_dim // 6 * 2
        return self.attention_head_dim - 2 * side, side, side

    @property
    def thetas(self) -> tuple[float, ...]:
        """Bases of the frequencies of each, stretched for sizes beyond those of the first training.

        The way is that of the NTK: the slowest channel turns as much slower as the scale says.
        """
        return tuple(
            10000.0 * scale ** (size / (size - 2))
            for scale, size in zip(self.rope_scale, self.axes, strict=True)
        )


class AnimaConditionerConfig(Config):
    """`text_conditioner/config.json` of an AnimaTextConditioner."""

    source_dim: Count = 1024
    target_dim: Count = 1024
    model_dim: Count = 1024
    num_layers: Blocks = 6
    num_attention_heads: Count = 16
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    target_vocab_size: Count = 32128

    _supported: ClassVar = {
        "use_self_attention": (None, True),
        "use_layer_norm": (None, False),
        "min_sequence_length": (None, 512),
    }

    @pydantic.model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.model_dim != self.target_dim:
            raise ValueError(
                f"model_dim={self.model_dim} should be target_dim, {self.target_dim}: tokens are "
                "as wide as the text embeddings that are made of them."
            )
        if self.model_dim % (2 * self.num_attention_heads):
            raise ValueError(
                f"model_dim={self.model_dim} does not divide into heads of even size for "
                f"num_attention_heads={self.num_attention_heads}."
            )
        return self

    @property
    def feed_forward_dim(self) -> int:
        """Channels inside a feed-forward layer, rounded as diffusers does."""
        return int(self.model_dim * self.mlp_ratio)


class PipelineConfig(Config):
    """Values of `model_index.json` beside the names of its parts."""

    force_zeros_for_empty_prompt: bool | None = True  # of SDXL; null is false, as for diffusers
    is_distilled: bool | None = False  # of FLUX.2 klein and Krea 2, which then need no guidance
    text_encoder_select_layers: tuple[int, ...] | None = None  # of Krea 2

    _supported: ClassVar = {"patch_size": (None, 2)}


class TrainingConfig(Config):
    """Values of the denoiser's `config.json` that say how it was trained."""

    sample_size: Count | tuple[Count, Count] = 64  # latents along a side, or along both

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in latents."""
        size = self.sample_size
        return size if isinstance(size, tuple) else (size, size)


class VAEConfig(Config):
    """`vae/config.json` of an AutoencoderKL."""

    in_channels: Count = 3
    out_channels: Count = 3
    latent_channels: Count = 4
    block_out_channels: Levels = (128, 256, 512, 512)
    layers_per_block: Layers = 2
    norm_num_groups: Count = 32
    scaling_factor: Positive = 0.18215
    latents_mean: tuple[float, ...] | None = None  # by channel, where the latents were whitened
    latents_std: tuple[Positive, ...] | None = None
    force_upcast: bool = True  # 16 bits are too few; diffusers' SD 1.x and 2.x do not ask

    shift_factor: float | None = None  # mean of the latents, as SD 3 has it
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True

    _supported: ClassVar = {"act_fn": ("silu", "swish"), "mid_block_add_attention": (True,)}

    @pydantic.model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        for width in self.block_out_channels:
            if width % self.norm_num_groups:
                raise ValueError(
                    f"{width} channels do not divide into norm_num_groups={self.norm_num_groups}."
                )
        if (self.latents_mean is None) != (self.latents_std is None):
            raise ValueError("latents_mean and latents_std come together.")
        if self.latents_mean is not None and self.shift_factor:
            raise ValueError("latents_mean and shift_factor say different things.")
        if {self.latent_channels} != {
            len(values or range(self.latent_channels))
            for values in (self.latents_mean, self.latents_std)
        }:
            raise ValueError("latents_mean and latents_std have a number for each channel.")
        return self

    @property
    def halvings(self) -> int:
        """How often the encoder halves an image."""
        return len(self.block_out_channels) - 1

    @property
    def downscale(self) -> int:
        """Pixels of the image along one side for each latent along that side (8 in SD)."""
        return 2**self.halvings

    @property
    def channels(self) -> int:
        """Channels of each latent."""
        return self.latent_channels


class Flux2VAEConfig(VAEConfig):
    """`vae/config.json` of an AutoencoderKLFlux2, whose latents are patches of two by two."""

    latent_channels: Count = 32
    scaling_factor: Positive = 1.0
    batch_norm_eps: Positive = 1e-4

    _supported: ClassVar = {
        **VAEConfig._supported,
        "decoder_block_out_channels": (None,),
        "patch_size": ([2, 2], (2, 2)),
    }

    @property
    def downscale(self) -> int:
        """Pixels of the image along one side for each latent along that side."""
        return 2 ** (self.halvings + 1)

    @property
    def channels(self) -> int:
        """Channels of each latent."""
        return 4 * self.latent_channels


class QwenImageVAEConfig(VAEConfig):
    """`vae/config.json` of an AutoencoderKLQwenImage, which calls most by other names."""

    base_dim: Count = 96
    dim_mult: Levels = (1, 2, 4, 4)
    in_channels: Count = Field(3, alias="input_channels")
    latent_channels: Count = Field(16, alias="z_dim")
    layers_per_block: Layers = Field(2, alias="num_res_blocks")
    norm_num_groups: Count = 1  # pixels are normed alone
    scaling_factor: Positive = 1.0
    latents_mean: tuple[float, ...] | None = (
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    )
    latents_std: tuple[Positive, ...] | None = (
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    )

    _supported: ClassVar = {"attn_scales": (None, []), "input_channels": (None, 3)}

    def canonical(self) -> Self:
        """Return the config with the channels of each level, and as many colours out as in."""
        widths = tuple(self.base_dim * factor for factor in self.dim_mult)
        return self.model_copy(update={"block_out_channels": widths})


class TinyVAEConfig(Config):
    """`config.json` of an AutoencoderTiny, such as TAESD and TAESDXL."""

    in_channels: Count = 3
    out_channels: Count = 3
    latent_channels: Count = 4
    encoder_block_out_channels: Levels = (64, 64, 64, 64)
    decoder_block_out_channels: Levels = (64, 64, 64, 64)
    num_encoder_blocks: tuple[Layers, ...] = (1, 3, 3, 3)
    num_decoder_blocks: tuple[Layers, ...] = (3, 3, 3, 1)
    scaling_factor: Positive = 1.0

    _supported: ClassVar = {
        "act_fn": ("relu",),
        "upsample_fn": ("nearest",),
        "upsampling_scaling_factor": (2,),
        "shift_factor": (None, 0, 0.0),
    }

    @pydantic.model_validator(mode="after")
    def _levels_agree(self) -> Self:
        for widths, counts in (
            (self.encoder_block_out_channels, self.num_encoder_blocks),
            (self.decoder_block_out_channels, self.num_decoder_blocks),
        ):
            if len(widths) != len(counts):
                raise ValueError("channels and numbers of blocks differ in length.")
            if len({*widths}) > 1:  # their convolutions keep the number of channels
                raise ValueError(f"channels {[*widths]} of different levels differ.")
        return self

    @property
    def downscale(self) -> int:
        """Pixels of the image along one side for each latent along that side (8 in TAESD)."""
        return 2 ** (len(self.num_decoder_blocks) - 1)

    @property
    def channels(self) -> int:
        """Channels of each latent."""
        return self.latent_channels


class SchedulerConfig(Config):
    """`scheduler/scheduler_config.json`, whichever scheduler's.

    None leaves a choice to the sampler. `clip_sample` has no field: diffusers' Stable Diffusion
    pipelines force it off.
    """

    scheduler: str | None = Field(None, alias="_class_name")
    num_train_timesteps: Timesteps = 1000
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] | None = None
    beta_start: Annotated[float, Field(gt=0, lt=1)] | None = None
    beta_end: Annotated[float, Field(gt=0, lt=1)] | None = None
    trained_betas: (
        Annotated[
            tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, max_length=100_000)
        ]
        | None
    ) = None
    rescale_betas_zero_snr: bool = False
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = None
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    steps_offset: Annotated[int, Field(ge=0, le=100_000)] = 0
    set_alpha_to_one: bool | None = None
    final_sigmas_type: Literal["zero", "sigma_min"] = "zero"
    skip_prk_steps: bool = False
    algorithm_type: Literal["dpmsolver++", "sde-dpmsolver++", "deis"] | None = None
    solver_order: Annotated[int, Field(ge=1, le=10)] = 2
    lower_order_final: bool | None = None
    euler_at_final: bool = False
    variance_type: Literal["fixed_small", "fixed_small_log", "fixed_large"] = "fixed_small"
    original_inference_steps: Timesteps = 50
    timestep_scaling: Positive = 10.0

    _supported: ClassVar = {
        "solver_type": (None, "midpoint", "bh2", "logrho"),
        "timestep_type": (None, "discrete"),
        "sigma_min": (None,),
        "sigma_max": (None,),
        "interpolation_type": (None, "linear"),
        "lambda_min_clipped": (None, -math.inf, "-Infinity"),
        "thresholding": (None, False),  # divides by a quantile of the image, which is not affine
        "predict_x0": (None, True),
        "disable_corrector": (None, []),
        "use_beta_sigmas": (None, False),
        "use_lu_lambdas": (None, False),
        "use_flow_sigmas": (None, False),
    }

    @pydantic.model_validator(mode="after")
    def _betas_are_said(self) -> Self:
        if self.trained_betas is None:
            lacking = [
                name
                for name in ("beta_schedule", "beta_start", "beta_end")
                if getattr(self, name) is None
            ]
            if lacking:
                raise ValueError(f"the scheduler's config lacks {', '.join(lacking)}.")
        if self.use_karras_sigmas and self.use_exponential_sigmas:
            raise ValueError("the scheduler asks for Karras and exponential sigmas at once.")
        return self


class FlowSchedulerConfig(Config):
    """`scheduler/scheduler_config.json` of a scheduler for flow matching."""

    scheduler: str | None = Field(None, alias="_class_name")
    num_train_timesteps: Timesteps = 1000
    shift: Positive = 1.0
    flow_shift: Positive = 1.0  # as solvers call it
    use_flow_sigmas: bool = False
    use_dynamic_shifting: bool = False  # by the size of the picture, as its family says
    base_image_seq_len: Count = 256  # tokens of a picture whose shift has the logarithm base_shift
    base_shift: Annotated[float, Field(ge=-16, le=16)] = 0.5
    max_image_seq_len: Count = 4096  # the same of another size; others lie on a line with them
    max_shift: Annotated[float, Field(ge=-16, le=16)] = 1.15
    lower_order_final: bool | None = None
    euler_at_final: bool = False

    _supported: ClassVar = {
        "shift_terminal": (None,),
        "invert_sigmas": (None, False),
        "stochastic_sampling": (None, False),
        "use_karras_sigmas": (None, False),
        "use_exponential_sigmas": (None, False),
        "use_beta_sigmas": (None, False),
        "prediction_type": (None, "flow_prediction"),
        "rescale_betas_zero_snr": (None, False),
        "time_shift_type": (None, "exponential"),
        "algorithm_type": (None, "dpmsolver++"),
        "solver_order": (None, 2),
        "solver_type": (None, "midpoint", "bh2"),
        "final_sigmas_type": (None, "zero"),
        "predict_x0": (None, True),
        "thresholding": (None, False),
    }

    @pydantic.model_validator(mode="after")
    def _sizes_differ(self) -> Self:
        if self.use_dynamic_shifting and self.base_image_seq_len == self.max_image_seq_len:
            raise ValueError(
                f"base_image_seq_len={self.base_image_seq_len} should not be max_image_seq_len."
            )
        return self

    @property
    def constant_shift(self) -> float:
        """How far sigmas are shifted towards noise; 1 not at all."""
        return self.flow_shift if self.use_flow_sigmas else self.shift
