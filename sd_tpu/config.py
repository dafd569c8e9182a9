"""What a checkpoint's `*.json` files say, as frozen dataclasses.

Each dataclass reads the fields that shape the computation and refuses, by name, the values that
belong to architectures outside Stable Diffusion 1.x and 2.x. A field that is not here does not
change the result.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Self

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "model"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what is wrong and what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object stored at `path`; raises CheckpointError if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a diffusers checkpoint folder has it.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object.")
    return content


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    # Field values outside these belong to architectures that are not built here.
    _supported: ClassVar[dict[str, tuple]] = {}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Reads the fields that are known; raises CheckpointError where one is not supported."""
        for name, allowed in cls._supported.items():
            if name in config and config[name] not in allowed:
                raise CheckpointError(
                    f"{cls.__name__}: {name}={config[name]!r} is not supported; "
                    f"Stable Diffusion 1.x and 2.x have {' or '.join(map(repr, allowed))}."
                )
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {k: _frozen(v) for k, v in config.items() if k in fields and v is not None}
        for field in dataclasses.fields(cls):
            value = values.get(field.name)
            if value is not None and not isinstance(value, _KINDS.get(field.type, object)):
                raise CheckpointError(f"{cls.__name__}: {field.name}={config[field.name]!r} is not "
                                      f"supported; it should be of type {field.type.__name__}.")
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{cls.__name__}: {error}.") from None


_KINDS = {int: int, float: (int, float), str: str, bool: bool, dict[str, dict[str, str]]: dict}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(_Config):
    """`text_encoder/config.json` of a CLIPTextModel."""

    vocab_size: int = 49408
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12  # SD 2.x stores 23 of OpenCLIP-H's 24: its penultimate layer
    num_attention_heads: int = 12
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    _supported: ClassVar = {"hidden_act": ("quick_gelu", "gelu")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig(_Config):
    """`unet/config.json` of a UNet2DConditionModel."""

    sample_size: int = 64
    in_channels: int = 4
    out_channels: int = 4
    down_block_types: tuple[str, ...] = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    up_block_types: tuple[str, ...] = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    cross_attention_dim: int = 768
    attention_head_dim: int | tuple[int, ...] = 8
    num_attention_heads: int | tuple[int, ...] | None = None
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    downsample_padding: int = 1
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    use_linear_projection: bool = False

    _supported: ClassVar = {
        "act_fn": ("silu", "swish"),
        "mid_block_type": ("UNetMidBlock2DCrossAttn",),
        "mid_block_scale_factor": (1, 1.0),
        "center_input_sample": (False,),
        "only_cross_attention": (False,),
        "dual_cross_attention": (False,),
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "addition_embed_type": (None,),
        "encoder_hid_dim": (None,),
        "time_cond_proj_dim": (None,),
        "time_embedding_type": (None, "positional"),
        "resnet_time_scale_shift": ("default",),
        "transformer_layers_per_block": (1,),
        "attention_type": (None, "default"),
        "conv_in_kernel": (None, 3),
        "conv_out_kernel": (None, 3),
    }

    def __post_init__(self):
        known = {"CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"}
        unknown = sorted({*self.down_block_types, *self.up_block_types} - known)
        if unknown:
            raise CheckpointError(f"UNetConfig: block types {unknown} are not supported.")
        levels = len(self.block_out_channels)
        if {len(self.down_block_types), len(self.up_block_types), len(self.heads)} != {levels}:
            raise CheckpointError("UNetConfig: block types, channels and heads differ in length.")

    @property
    def heads(self) -> tuple[int, ...]:
        """Attention heads of each level, outermost first.

        diffusers stores the number of heads under the name `attention_head_dim` (a slip it keeps
        for the sake of published checkpoints); `num_attention_heads` wins where it is present.
        """
        heads = self.num_attention_heads or self.attention_head_dim
        return heads if isinstance(heads, tuple) else (heads,) * len(self.block_out_channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig(_Config):
    """`vae/config.json` of an AutoencoderKL."""

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215

    _supported: ClassVar = {
        "act_fn": ("silu", "swish"),
        "shift_factor": (None, 0, 0.0),
        "mid_block_add_attention": (True,),
        "use_quant_conv": (True,),
        "use_post_quant_conv": (True,),
    }

    @property
    def downscale(self) -> int:
        """Pixels of the image along one side for each latent along that side (8 in SD)."""
        return 2 ** (len(self.block_out_channels) - 1)


GUIDE_PROMPTS = (
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Close-up photograph of young black woman against urban background, high quality, bokeh",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
)


def split_words(text: str) -> list[str]:
    """The words of a text in lower case, without what stands between them."""
    return re.findall(r"\w+", text.lower())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCard(_Config):
    """What a page says of a model and begins with: `sd_tpu.json` in the checkpoint, if there.

    `hint` says in a line what to write, `details` what the model can draw, where that is little;
    `translations` has the two for people who read other languages, by their tags in HTML.
    `more_prompts` are what the page's sample prompts go on with, by the eight. No sampler means the
    one that the checkpoint's `scheduler_config.json` asks for. `words` are those that the captions
    of its training were made of, for a model that was trained on few.
    """

    name: str
    hint: str = ""
    prompts: tuple[str, ...] = GUIDE_PROMPTS
    more_prompts: tuple[str, ...] = ()
    steps: int = 20
    guidance: float = 7.5
    sampler: str | None = None
    spacing: str | None = None
    details: str = ""
    translations: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    words: tuple[str, ...] = ()

    def __post_init__(self):
        texts = [text for told in self.translations.values() if isinstance(told, dict)
                 for text in (told.get("hint", ""), told.get("details", ""))]
        if len(texts) < 2 * len(self.translations) or not all(isinstance(t, str) for t in texts):
            raise CheckpointError("ModelCard: translations should be texts by name, by language.")

    def told(self, name: str, tag: str) -> tuple[str, str]:
        """`hint` or `details` for readers of a language, and the tag of the language it is in."""
        text = self.translations.get(tag, {}).get(name)
        return (text, tag) if text else (getattr(self, name), "en")

    def unknown_words(self, prompt: str) -> list[str]:
        """Words of the prompt that are not among `words`, each once; none if those are not told."""
        known = set(self.words)
        return [word for word in dict.fromkeys(split_words(prompt)) if known and word not in known]

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """The card of the checkpoint in `folder`, called `name` unless the card knows better."""
        file = folder / "sd_tpu.json"
        return cls.from_dict({"name": name, **(read_json(file) if file.is_file() else {})})
