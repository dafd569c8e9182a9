"""Original layouts of whole checkpoints, by what no tensor's shape tells of them."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

Config = dict[str, Any]

UNET = "model.diffusion_model."  # or a transformer
VAES = ("first_stage_model.", "vae.")  # as ComfyUI writes some
SD2_WIDTH = 1024  # of OpenCLIP-H, SD 2's text encoder


class TextEncoder(NamedTuple):
    """A text encoder of a layout.

    Whose names its tensors have, those of transformers or of OpenCLIP, says nothing of what it is:
    other programs write either.

    Attributes:
        prefix: of its tensors' names, before `transformer.` or `model.`.
        width: of the published models'.
        hidden_act: its activation.
        pad: the token that fills up a prompt; None is the tokenizer's own.
        pooled: how its pooled output is used: not at all, as its projection makes it, or as it is,
            which an identity in the projection's place says in diffusers' layout.
    """

    prefix: str
    width: int
    hidden_act: str = "gelu"
    pad: str | None = "!"  # the token of number 0
    pooled: Literal["", "projected", "plain"] = ""

    def begin(self, names: Collection[str]) -> str:
        """Return the beginning of its tensors' names in a file; "" if it has none."""
        known = (self.prefix + kind for kind in ("transformer.", "model."))
        return next((begin for begin in known if any(name.startswith(begin) for name in names)), "")


class Language(NamedTuple):
    """How a language model is read.

    Attributes:
        what: it is, for people.
        prefix: of its tensors' names; digits and the like may follow.
        tokens: its tensor of as many rows as there are words, of the width of its states.
        has: a tensor of its own that tells it from others.
        lacks: one that tells another from it.
    """

    what: str
    prefix: str
    tokens: str
    has: str
    lacks: str = ""

    def begin(self, names: Iterable[str]) -> str:
        """Return the beginning of its tensors' names in a file; "" if it has none."""
        pattern = re.compile(rf"{re.escape(self.prefix)}\w*\.transformer\.")
        return next((match[0] for name in names if (match := pattern.match(name))), "")

    def tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is its own, by names after their beginning."""
        begin = self.begin(tensors)
        return part_of(tensors, begin) if begin else {}


PATCHES = "visual.patch_embed.proj.weight"  # of what sees pictures
LANGUAGES = {
    "t5": Language(
        "T5",
        "text_encoders.t5",
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "qwen3": Language(
        "Qwen3",
        "text_encoders.qwen3",
        "embed_tokens.weight",
        "layers.0.self_attn.q_norm.weight",
        PATCHES,
    ),
    "qwen3_vl": Language("Qwen3-VL", "text_encoders.qwen3", "embed_tokens.weight", PATCHES),
}


def part_of(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """Facts of an original layout that no tensor's shape tells.

    Attributes:
        name: of the models.
        class_name: of diffusers' pipeline.
        text_encoders: CLIP's, by folder.
        image_size: pixels of a side of the pictures it was trained on.
        scheduler: diffusers' config of its scheduler.
        vae: values of diffusers' config of its autoencoder.
        denoiser: which of DENOISERS takes noise out of latents.
        mark: begins names that no other has; "" is told by all its text encoders being there.
        languages: which of LANGUAGES is a text encoder, by folder.
        needs_languages: nothing is drawn without them; else a file may lack them.
        takes: what the config of the denoiser, or of a network that lies among its tensors, calls
            the width of what it takes of a language model, and how many of its states that is, side
            by side.
        usual: names of files of its parts, which count where several fit.
    """

    name: str
    class_name: str
    text_encoders: Mapping[str, TextEncoder]
    image_size: int
    scheduler: Config
    vae: Config
    denoiser: Literal["unet", "sd3", "flux", "flux2", "z_image", "anima", "krea2"] = "unet"
    mark: str = ""
    languages: Mapping[str, Literal["t5", "qwen3", "qwen3_vl"]] = dataclasses.field(
        default_factory=dict
    )
    needs_languages: bool = True
    takes: tuple[str, int] = "joint_attention_dim", 1
    usual: tuple[str, ...] = ()

    def is_in(self, names: Collection[str]) -> bool:
        """Whether a file of tensors with these names is of this layout."""
        if self.mark:
            return any(name.startswith(self.mark) for name in names)
        return self.has_texts(names)

    @property
    def of_wan(self) -> bool:
        """Whether its autoencoder is Qwen-Image's, which files have in the names of Wan's."""
        return self.vae.get("_class_name") == "AutoencoderKLQwenImage"

    def has_texts(self, names: Collection[str]) -> bool:
        """Whether all of CLIP's text encoders are there."""
        return all(encoder.begin(names) for encoder in self.text_encoders.values())


SCHEDULE = dict(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    num_train_timesteps=1000,
    steps_offset=1,
    timestep_spacing="leading",
    prediction_type="epsilon",
)
PNDM = SCHEDULE | dict(_class_name="PNDMScheduler", skip_prk_steps=True, set_alpha_to_one=False)
DDIM = SCHEDULE | dict(
    _class_name="DDIMScheduler",
    clip_sample=False,
    set_alpha_to_one=False,
    prediction_type="v_prediction",
)
EULER = SCHEDULE | dict(_class_name="EulerDiscreteScheduler", interpolation_type="linear")
FLOW = dict(_class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, shift=3.0)

CLIP: dict[str, Any] = dict(
    width=768, hidden_act="quick_gelu", pad=None
)  # OpenAI's; the others are OpenCLIP's
SD1 = Layout(
    "Stable Diffusion 1",
    "StableDiffusionPipeline",
    {"text_encoder": TextEncoder("cond_stage_model.", **CLIP)},
    512,
    PNDM,
    dict(scaling_factor=0.18215),
)
SD2 = Layout(
    "Stable Diffusion 2",
    "StableDiffusionPipeline",
    {"text_encoder": TextEncoder("cond_stage_model.", SD2_WIDTH)},
    768,
    DDIM,
    dict(scaling_factor=0.18215),
)
SDXL = Layout(
    "SDXL",
    "StableDiffusionXLPipeline",
    {
        "text_encoder": TextEncoder("conditioner.embedders.0.", **CLIP),
        "text_encoder_2": TextEncoder("conditioner.embedders.1.", 1280, pooled="projected"),
    },
    1024,
    EULER,
    dict(scaling_factor=0.13025, force_upcast=True),
)
SD3 = Layout(
    "Stable Diffusion 3",
    "StableDiffusion3Pipeline",
    {
        "text_encoder": TextEncoder("text_encoders.clip_l.", **CLIP, pooled="plain"),
        "text_encoder_2": TextEncoder("text_encoders.clip_g.", 1280, pooled="projected"),
    },
    1024,
    FLOW,
    dict(
        scaling_factor=1.5305,
        shift_factor=0.0609,
        force_upcast=True,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ),
    denoiser="sd3",
    mark=f"{UNET}joint_blocks.",
    languages={"text_encoder_3": "t5"},
    needs_languages=False,
)
FLUX_VAE = dict(
    scaling_factor=0.3611,
    shift_factor=0.1159,
    force_upcast=True,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
DYNAMIC_SHIFT = dict(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)  # of FLUX
FLUX = Layout(
    "FLUX.1",
    "FluxPipeline",
    {"text_encoder": TextEncoder("text_encoders.clip_l.", **CLIP)},
    1024,
    FLOW | dict(shift=1.0),
    FLUX_VAE,
    denoiser="flux",
    mark=f"{UNET}double_blocks.0.img_mod.",
    languages={"text_encoder_2": "t5"},
    usual=("clip_l", "t5xxl_fp16", "ae"),
)
KLEIN = Layout(
    "FLUX.2 klein",
    "Flux2KleinPipeline",
    {},
    1024,
    FLOW | DYNAMIC_SHIFT,
    dict(
        _class_name="AutoencoderKLFlux2", scaling_factor=1.0, batch_norm_eps=1e-4, patch_size=[2, 2]
    ),
    denoiser="flux2",
    mark=f"{UNET}single_stream_modulation.",
    languages={"text_encoder": "qwen3"},
    takes=("joint_attention_dim", 3),
    usual=("qwen_3_4b", "qwen_3_8b", "flux2-vae"),
)
Z_IMAGE = Layout(
    "Z-Image",
    "ZImagePipeline",
    {},
    1024,
    FLOW,
    FLUX_VAE,
    denoiser="z_image",
    mark=f"{UNET}cap_pad_token",
    languages={"text_encoder": "qwen3"},
    takes=("cap_feat_dim", 1),
    usual=("qwen_3_4b", "ae"),
)
ANIMA = Layout(
    "Anima",
    "AnimaModularPipeline",
    {},
    1024,
    FLOW,
    dict(_class_name="AutoencoderKLQwenImage"),
    denoiser="anima",
    mark=f"{UNET}llm_adapter.",
    languages={"text_encoder": "qwen3"},
    takes=("source_dim", 1),
    usual=("qwen_3_06b_base", "qwen_image_vae"),
)
KREA2 = Layout(
    "Krea 2",
    "Krea2Pipeline",
    {},
    1024,
    FLOW | DYNAMIC_SHIFT | dict(base_image_seq_len=256, max_image_seq_len=6400),
    dict(_class_name="AutoencoderKLQwenImage"),
    denoiser="krea2",
    mark=f"{UNET}txtfusion.",
    languages={"text_encoder": "qwen3_vl"},
    takes=("text_hidden_dim", 1),
    usual=("qwen3vl_4b_bf16", "qwen3vl_4b_fp8_scaled", "qwen_image_vae"),
)
LAYOUTS = (SD1, SD2, SDXL, SD3, FLUX, KLEIN, Z_IMAGE, ANIMA, KREA2)
BY_PARTS = (FLUX, KLEIN, Z_IMAGE, ANIMA, KREA2)  # whose transformers may lie in files of their own
# Names of files of models that are not distilled, which no tensor tells, and what they differ in.
BASE = re.compile(r"(^|[-_ ])base([-_ ]|$)", re.I)
RAW = re.compile(r"(^|[-_ ])(base|raw)([-_ ]|$)", re.I)  # of Krea 2
BASE_Z_IMAGE = re.compile(r"z[-_ ]?image([-_ ](bf16|fp16|fp8\w*))*", re.I)  # as it was published
BASE_SHIFT = 6.0  # of Z-Image's sigmas


def named(layout: Layout, stem: str) -> dict[str, Config]:
    """Return the configs of what the name of a file alone tells."""
    if layout is Z_IMAGE and (BASE.search(stem) or BASE_Z_IMAGE.fullmatch(stem)):
        return {"scheduler": layout.scheduler | {"shift": BASE_SHIFT}}
    if layout in (KLEIN, KREA2):
        distilled = not (BASE if layout is KLEIN else RAW).search(stem)
        return {"model_index": {"_class_name": layout.class_name, "is_distilled": distilled}}
    return {}
