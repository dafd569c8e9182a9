"""A whole checkpoint in one safetensors file, in the original layout of SD 1, 2 or 3, SDXL, FLUX.1,
FLUX.2 klein, Z-Image, Anima or Krea 2; of the last five also in files of its parts, as ComfyUI
keeps them.

Which of them it is, and how wide and deep its networks are, is told by the names and shapes of its
tensors. What these do not tell (the number of attention heads, the noise schedule) is as in the
model that the layout was made for, unless a folder named as the file, without its suffix, lies
beside it with diffusers' config files. A language model is read if its tokenizer lies there.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sd_tpu.checkpoint import original, split_files
from sd_tpu.checkpoint.config import CheckpointError, is_file, read_json
from sd_tpu.checkpoint.layouts import (
    BY_PARTS,
    DYNAMIC_SHIFT,
    KLEIN,
    LANGUAGES,
    LAYOUTS,
    SD1,
    SD2,
    SD2_WIDTH,
    SD3,
    SDXL,
    UNET,
    VAES,
    Config,
    Layout,
    named,
    part_of,
)
from sd_tpu.checkpoint.original import (
    Levels,
    blocks_of,
    open_clip_name,
    renamed,
    vae_name,
    wan_vae_names,
)
from sd_tpu.checkpoint.weights import NOT_PARAMETERS, READ, Identity, Stored, header, modern

Shapes = Mapping[str, tuple[int, ...]]

SUFFIX = ".safetensors"
V_PREDICTION, ZERO_SNR = "v_pred", "ztsnr"  # tensors whose presence is all that they say
OPEN_CLIP_LAYERS = 24  # of OpenCLIP-H, SD 2's text encoder
BUFFERS = ("logit_scale", "attn_mask")  # of text encoders, or of CLIP's text and pictures together
# In transformers' names: of the vocabulary, and of the pooled output
TOKENS = "text_model.embeddings.token_embedding.weight"
PROJECTION = "text_projection.weight"
TEXT_LAYER = re.compile(r"text_model\.encoder\.layers\.(\d+)\.")
T5_LAYER = re.compile(r"encoder\.block\.(\d+)\.")
DUAL_BLOCK = re.compile(r"joint_blocks\.(\d+)\.x_block\.attn2\.")
HEAD = 64  # channels of each head of SD 3's transformer
COSMOS = "net."  # begins names of Cosmos' transformers where these lie alone
ADAPTER = "llm_adapter."  # Anima's text conditioner, among the transformer's tensors
# Buffers that NVIDIA's code stores beside the parameters of Cosmos
COSMOS_BUFFERS = re.compile(r"^(accum_|pos_embedder\.)|_extra_state$")
# Not `loss.`, `model_ema.`
VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "bn.")

# A part of a tensor's name -> what a file is that holds such a one. The first that is there counts.
OTHERS = {
    "edm_mean": "Playground 2.5",
    "edm_vpred.": "CosXL",
    "conditioner.embedders.0.model.": "the refiner of SDXL",
    "lora_": "a LoRA, not a checkpoint",
    "lokr_": "a LoKr, not a checkpoint",
    "hada_": "a LoHa, not a checkpoint",
    "control_model.": "a ControlNet, not a checkpoint",
    "emb_params": "a textual inversion, not a checkpoint",
    "text_encoders.": "text encoders without a UNet or a transformer",
    "clip_g": "a textual inversion, not a checkpoint",
    "down_blocks.": "one network of a checkpoint in the diffusers layout, whose folder is needed",
    "text_model.": "one network of a checkpoint in the diffusers layout, whose folder is needed",
    "joint_blocks.": "the transformer of Stable Diffusion 3 without autoencoder and text encoders",
    "distilled_guidance_layer.": "Chroma",
    UNET: "a UNet without a text encoder",
}
CONFIG_FILES = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}


WIDTHS = {encoder.width for layout in LAYOUTS for encoder in layout.text_encoders.values()}


@dataclasses.dataclass(frozen=True)
class SingleFile:
    """A checkpoint in one file; no tensor has been read yet.

    Attributes:
        path: the file.
        class_name: of the pipeline, as in model_index.json.
        configs: diffusers' configs by folder, and "model_index" and "scheduler".
        stored: folder -> name in diffusers' checkpoints -> where the parameter lies; what
            `weights.load_stored` takes.
        tokenizers: folder of each tokenizer of CLIP -> the token that fills up a prompt; None is
            the tokenizer's own.
        folder: with config files that were taken in place of what the file tells; None is none.
    """

    path: Path
    class_name: str
    configs: dict[str, Config]
    stored: dict[str, dict[str, Stored]]
    tokenizers: dict[str, str | None]
    folder: Path | None

    @property
    def beside(self) -> tuple[Path, ...]:
        """Files of its parts, where these lie in several."""
        files = {each.file for part in self.stored.values() for each in part.values()}
        return tuple(sorted(files - {self.path}))


def read(path: Path, *, t5: bool = True, parts: Sequence[Path] = ()) -> SingleFile:
    """Read what a file holds and where, from its header and the folder beside it.

    Args:
        path: the safetensors file.
        t5: read T5, if the file holds it.
        parts: files of the text encoders and the autoencoder of one that holds a transformer alone.

    Raises:
        CheckpointError: the file is missing or damaged, or holds something else; it says what.
    """
    tensors = _with_parts(path, header(path), parts)
    layout = _recognized(path, tensors)
    folder = path.with_suffix("")
    folder = folder if folder.is_dir() else None
    tensors = _with_languages(path, layout, tensors, t5)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        configs = _inferred(layout, shapes) | named(layout, path.stem)
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} looks like {layout.name}, but tensors are missing or have "
            f"other shapes ({error})."
        ) from None
    if folder:
        configs |= _beside(folder, configs)
    return SingleFile(
        path,
        layout.class_name,
        configs,
        _stored(layout, tensors, configs),
        _tokenizers(layout),
        folder,
    )


def _with_parts(path: Path, tensors: dict[str, Stored], parts: Sequence[Path]) -> dict[str, Stored]:
    """Return a file's tensors by the names that they have in a whole checkpoint and, if it holds a
    transformer alone, those of the parts that are named or lie where ComfyUI keeps them.

    Raises:
        CheckpointError: a part is missing, several files fit, or the file holds more than a
            transformer and parts are named.
    """
    if all(name.startswith(COSMOS) for name in tensors):
        tensors = part_of(tensors, COSMOS)
    marks = tuple(layout.mark.removeprefix(UNET) for layout in BY_PARTS)
    if any(name.startswith(marks) for name in tensors):
        tensors = {f"{UNET}{name}": tensor for name, tensor in tensors.items()}
    layout = next((each for each in BY_PARTS if each.is_in(tensors)), None)
    if layout is KLEIN and any(name.startswith(f"{UNET}guidance_in.") for name in tensors):
        raise CheckpointError(f"{path} holds FLUX.2 [dev], which is not built here; klein is.")
    if not layout or any(not name.startswith(UNET) for name in tensors):
        if parts:
            raise CheckpointError(
                f"{path} is not the transformer of FLUX, Z-Image, Anima or Krea 2 alone, which "
                "text encoders and an autoencoder can be named for."
            )
        return tensors
    shapes = {name: tensor.shape for name, tensor in part_of(tensors, UNET).items()}
    denoiser = DENOISERS[layout.denoiser]
    try:
        network = denoiser.config(layout, shapes)
        for prefix, config in denoiser.among.values():
            network |= config(part_of(shapes, prefix))
    except (LookupError, ValueError, ZeroDivisionError):
        return tensors  # which is refused by what is missing
    clip = network.get(denoiser.texts, 0)
    return tensors | split_files.parts(path, layout, network, clip, parts)


def _recognized(path: Path, tensors: Mapping[str, Stored]) -> Layout:
    def present(mark: str) -> bool:
        return any(name.startswith(mark) for name in tensors)

    other = next(
        (what for mark, what in OTHERS.items() if any(mark in name for name in tensors)),
        "tensors of no kind known here",
    )
    if not (present("edm_mean") or present("edm_vpred.")):  # other noise, of SDXL's layout
        for layout in (*BY_PARTS, SD3, SDXL, SD2 if _is_after_sd_1(tensors) else SD1):
            if layout.is_in(tensors):
                parts = {
                    DENOISERS[layout.denoiser].what: present(UNET),
                    "autoencoder": any(map(present, VAES)),
                    "CLIP text encoders": layout.has_texts(tensors),
                    **{
                        LANGUAGES[kind].what: not layout.needs_languages
                        or bool(LANGUAGES[kind].begin(tensors))
                        for kind in layout.languages.values()
                    },
                }
                lacks = [what for what, there in parts.items() if not there]
                if lacks:
                    raise CheckpointError(
                        f"{path} holds {layout.name} without its "
                        f"{' and its '.join(lacks)}, so it is not a whole checkpoint. Take a file "
                        "that holds them too, or a folder in the diffusers layout"
                        f"{split_files.WAY_OUT if layout in BY_PARTS else ''}."
                    )
                return layout
    raise CheckpointError(
        f"{path} holds {other}; single files of Stable Diffusion 1, 2 and 3, SDXL, FLUX.1, FLUX.2 "
        "klein, Z-Image, Anima and Krea 2 in their original layouts are supported."
    )


def _is_after_sd_1(tensors: Mapping[str, Stored]) -> bool:
    """Whether the UNet takes the texts of SD 2, or projects by dense layers what it attends to, as
    all since SD 1 do. Names say nothing of it."""
    ends = {
        end: tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(UNET)
        for end in (".proj_in.weight", ".attn2.to_k.weight")
        if name.endswith(end)
    }
    return len(ends.get(".proj_in.weight", ())) == 2 or (
        ends.get(".attn2.to_k.weight", ())[1:] == (SD2_WIDTH,)
    )


def _with_languages(
    path: Path, layout: Layout, tensors: Mapping[str, Stored], t5: bool
) -> dict[str, Stored]:
    """Return the tensors but for those of a T5 that nobody wants.

    Raises:
        CheckpointError: a language model that is left has numbers of a kind that is not read.
    """
    tensors = dict(tensors)
    for kind in layout.languages.values():
        what, begin = LANGUAGES[kind].what, LANGUAGES[kind].begin(tensors)
        if not begin:
            continue
        names = [name for name in tensors if name.startswith(begin)]
        if kind == "t5" and not t5:
            for name in names:
                del tensors[name]
        elif others := {tensors[name].dtype for name in names} - {*READ}:
            leave_out = "" if layout.needs_languages else f", or leave {what} out with --no-t5"
            raise CheckpointError(
                f"{path} holds {what} in {' and '.join(sorted(others))}, supported are "
                f"{', '.join(READ)}. Take a file that holds it in one of these{leave_out}."
            )
    return tensors


# --- configs ------------------------------------------------------------------------------------


def _inferred(layout: Layout, shapes: Shapes) -> dict[str, Config]:
    """Infer diffusers' configs; raises LookupError or ValueError where tensors are missing."""
    vae = (_wan_vae_config if layout.of_wan else _vae_config)(layout, _vae_part(shapes))
    denoiser = DENOISERS[layout.denoiser]
    network = denoiser.config(layout, part_of(shapes, UNET))
    downscale = 2 ** (len(vae.get("dim_mult") or vae["block_out_channels"]) - 1)
    configs: dict[str, Config] = {
        "model_index": {"_class_name": layout.class_name},
        "scheduler": {**layout.scheduler},
        "vae": vae,
        denoiser.folder: {**network, "sample_size": layout.image_size // downscale},
        **{
            part: config(part_of(shapes, f"{UNET}{prefix}"))
            for part, (prefix, config) in denoiser.among.items()
        },
        **{
            part: _text_config(layout, part, part_of(shapes, encoder.begin(shapes)))
            for part, encoder in layout.text_encoders.items()
        },
        **{
            part: LANGUAGE_CONFIGS[kind](LANGUAGES[kind].tensors(shapes))
            for part, kind in layout.languages.items()
            if LANGUAGES[kind].begin(shapes)
        },
    }
    widths = [configs[part]["hidden_size"] for part in layout.text_encoders]
    takes = network[denoiser.texts] if denoiser.texts else 0
    # CLIP's texts are filled up to the width of T5's, where a layout may have both.
    filled = layout.languages and not layout.needs_languages
    if not (sum(widths) <= takes if filled else sum(widths) == takes) or any(
        width in WIDTHS and width != encoder.width
        for width, encoder in zip(widths, layout.text_encoders.values(), strict=True)
    ):
        raise ValueError(
            f"texts of {' and '.join(map(str, widths))} numbers a token for a {denoiser.what} "
            f"that takes {takes}"
        )
    if layout is SDXL:
        second = configs["text_encoder_2"]
        numbers = configs["unet"]["projection_class_embeddings_input_dim"]
        configs["model_index"]["force_zeros_for_empty_prompt"] = True
        # Six numbers of size and crop are embedded beside the pooled text.
        configs["unet"]["addition_time_embed_dim"] = (numbers - second["projection_dim"]) // 6
    if layout is SD2 and network["in_channels"] == 9:  # 512-inpainting-ema and its fine-tunes
        configs["scheduler"]["prediction_type"] = "epsilon"
        configs["vae"]["sample_size"] = 512
        configs["unet"]["sample_size"] = 512 // downscale
    if network.get("guidance_embeds"):
        configs["scheduler"] |= DYNAMIC_SHIFT
    if V_PREDICTION in shapes:
        configs["scheduler"]["prediction_type"] = "v_prediction"
    if ZERO_SNR in shapes:
        configs["scheduler"]["rescale_betas_zero_snr"] = True
    return configs


def _vae_part(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return next(filter(None, (part_of(tensors, begin) for begin in VAES)), {})


def _unet_config(layout: Layout, shapes: Shapes) -> Config:
    levels = Levels.of_original(shapes)
    ours = {
        diffusers: original
        for diffusers, original in levels.modules().items()
        if f"{original}.weight" in shapes or f"{original}.norm.weight" in shapes
    }
    depths = _depths(ours, shapes)
    down = [
        [depths.get(f"down_blocks.{level}.attentions.{layer}", 0) for layer in range(layers)]
        for level, layers in enumerate(levels.down)
    ]
    up = [
        [depths.get(f"up_blocks.{level}.attentions.{layer}", 0) for layer in range(layers)]
        for level, layers in enumerate(levels.up)
    ]
    channels = [
        shapes[f"{ours[f'down_blocks.{level}.resnets.0.conv1']}.weight"][0]
        for level in range(len(levels.down))
    ]
    if [layers - 1 for layers in levels.up] != list(levels.down[::-1]):
        raise ValueError(f"{levels.up} layers on the way up do not match {levels.down}")
    middle = depths.get("mid_block.attentions.0", 0)
    config = dict(
        _class_name="UNet2DConditionModel",
        in_channels=shapes["input_blocks.0.0.weight"][1],
        out_channels=shapes["out.2.weight"][0],
        block_out_channels=channels,
        layers_per_block=_one(levels.down),
        down_block_types=[
            "CrossAttnDownBlock2D" if any(depth) else "DownBlock2D" for depth in down
        ],
        up_block_types=["CrossAttnUpBlock2D" if any(depth) else "UpBlock2D" for depth in up],
        mid_block_type=_mid_block(ours, middle),
        cross_attention_dim=_ending(shapes, ".attn2.to_k.weight")[1],
        use_linear_projection=len(_ending(shapes, ".1.proj_in.weight")) == 2,
        # SD 1 has eight heads everywhere, its successors heads of 64 channels.
        attention_head_dim=8 if layout is SD1 else [max(1, width // 64) for width in channels],
        **_depth_config(down, up, middle),
    )
    if "label_emb.0.0.weight" in shapes:
        if layout is not SDXL:
            raise ValueError("it takes image embeddings, as unCLIP does, which is not supported")
        config |= dict(
            addition_embed_type="text_time",
            projection_class_embeddings_input_dim=shapes["label_emb.0.0.weight"][1],
        )
    return config


def _ending(shapes: Shapes, end: str) -> tuple[int, ...]:
    """Return the shape of the tensor whose name ends with `end`."""
    for name, shape in shapes.items():
        if name.endswith(end):
            return shape
    raise LookupError(f"no tensor's name ends with {end}")


def _depths(modules: Mapping[str, str], names: Iterable[str]) -> dict[str, int]:
    """Count the transformer blocks of each attention, by its module in diffusers' names."""
    blocks = defaultdict(set)
    for name in names:
        if match := re.match(r"(.+)\.transformer_blocks\.(\d+)\.", name):
            blocks[match[1]].add(match[2])
    return {ours: len(blocks[original]) for ours, original in modules.items() if original in blocks}


def _mid_block(modules: Mapping[str, str], depth: int) -> str | None:
    if depth:
        return "UNetMidBlock2DCrossAttn"
    return "UNetMidBlock2D" if "mid_block.resnets.0.conv1" in modules else None


def _depth_config(down: list[list[int]], up: list[list[int]], middle: int) -> Config:
    """Return the numbers of transformer blocks as diffusers' configs have them.

    The last level's count is the middle's too.

    A level without attention says 1, which counts for nothing.
    """
    ends = [1] * (len(down) - 1) + [middle or 1]
    per_level = [_one(depth) if any(depth) else end for depth, end in zip(down, ends, strict=True)]
    back = [
        _one(depth) if any(depth) else end
        for depth, end in zip(up, reversed(per_level), strict=True)
    ]
    config: Config = {"transformer_layers_per_block": _one(per_level)}
    if back != per_level[::-1] or any(isinstance(depth, list) for depth in per_level):
        config = {
            "transformer_layers_per_block": per_level,
            "reverse_transformer_layers_per_block": back,
        }
    return config


def _one(values: Iterable[Any]) -> Any:
    """Return the common value, or the list of values if they differ."""
    values = list(values)
    return values[0] if all(value == values[0] for value in values) else values


def _sd3_config(_: Layout, shapes: Shapes) -> Config:
    width, joint = shapes["context_embedder.weight"]
    patch = shapes["x_embedder.proj.weight"][-1]
    dual = {int(match[1]) for name in shapes if (match := DUAL_BLOCK.match(name))}
    return dict(
        _class_name="SD3Transformer2DModel",
        patch_size=patch,
        in_channels=shapes["x_embedder.proj.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=blocks_of(shapes),
        attention_head_dim=HEAD,
        num_attention_heads=width // HEAD,
        joint_attention_dim=joint,
        caption_projection_dim=width,
        pooled_projection_dim=shapes["y_embedder.mlp.0.weight"][1],
        pos_embed_max_size=math.isqrt(shapes["pos_embed"][1]),
        dual_attention_layers=sorted(dual),
        qk_norm="rms_norm" if any(".ln_q." in name for name in shapes) else None,
    )


def _flux_common(shapes: Shapes) -> Config:
    """Return the values that transformers of FLUX.1 and FLUX.2 have by the same names."""
    width, joint = shapes["txt_in.weight"]
    head = shapes["double_blocks.0.img_attn.norm.key_norm.scale"][0]
    return dict(
        patch_size=1,
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0],
        num_layers=_count(shapes, "double_blocks."),
        num_single_layers=_count(shapes, "single_blocks."),
        attention_head_dim=head,
        num_attention_heads=width // head,
        joint_attention_dim=joint,
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
    )


def _flux_config(_: Layout, shapes: Shapes) -> Config:
    common = _flux_common(shapes)
    head = common["attention_head_dim"]
    return common | dict(
        _class_name="FluxTransformer2DModel",
        axes_dims_rope=(head // 8, 7 * head // 16, 7 * head // 16),
        pooled_projection_dim=shapes["vector_in.in_layer.weight"][1],
    )


def _flux2_config(_: Layout, shapes: Shapes) -> Config:
    common = _flux_common(shapes)
    return common | dict(
        _class_name="Flux2Transformer2DModel",
        timestep_guidance_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.2.weight"][1] / shapes["txt_in.weight"][0],
        axes_dims_rope=[common["attention_head_dim"] // 4] * 4,
    )


def _z_image_config(_: Layout, shapes: Shapes) -> Config:
    width, channels = shapes["x_embedder.weight"]
    head = shapes["layers.0.attention.q_norm.weight"][0]
    return dict(
        _class_name="ZImageTransformer2DModel",
        in_channels=channels // 4,
        dim=width,
        n_layers=_count(shapes, "layers."),
        n_refiner_layers=_count(shapes, "noise_refiner."),
        n_heads=width // head,
        n_kv_heads=width // head,
        cap_feat_dim=shapes["cap_embedder.0.weight"][0],
        axes_dims=[head // 4, 3 * head // 8, 3 * head // 8],
        axes_lens=[1536, 512, 512],
    )


def _anima_config(_: Layout, shapes: Shapes) -> Config:
    width, taken = shapes["x_embedder.proj.1.weight"]
    (head,) = shapes["blocks.0.self_attn.q_norm.weight"]
    channels = shapes["final_layer.linear.weight"][0] // 4
    return dict(
        _class_name="CosmosTransformer3DModel",
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=width // head,
        attention_head_dim=head,
        num_layers=_count(shapes, "blocks."),
        mlp_ratio=shapes["blocks.0.mlp.layer1.weight"][0] / width,
        text_embed_dim=shapes["blocks.0.cross_attn.k_proj.weight"][1],
        adaln_lora_dim=shapes["blocks.0.adaln_modulation_self_attn.1.weight"][0],
        max_size=[128, 240, 240],
        patch_size=[1, 2, 2],
        rope_scale=[1.0, 4.0, 4.0],
        concat_padding_mask=taken // 4 > channels,
        extra_pos_embed_type=None,
    )


def _conditioner_config(shapes: Shapes) -> Config:
    vocabulary, width = shapes["embed.weight"]
    (head,) = shapes["blocks.0.self_attn.q_norm.weight"]
    return dict(
        _class_name="AnimaTextConditioner",
        source_dim=shapes["blocks.0.cross_attn.k_proj.weight"][1],
        target_dim=shapes["out_proj.weight"][0],
        model_dim=width,
        num_layers=_count(shapes, "blocks."),
        num_attention_heads=width // head,
        mlp_ratio=shapes["blocks.0.mlp.0.weight"][0] / width,
        target_vocab_size=vocabulary,
    )


def _krea2_config(_: Layout, shapes: Shapes) -> Config:
    text = part_of(shapes, "txtfusion.")

    def attention(shapes: Shapes, block: str) -> tuple[int, int, int, int]:
        """Channels of a head, heads of queries and of keys, and channels inside the MLP."""
        (head,) = shapes[f"{block}.attn.qknorm.qnorm.scale"]
        queries, keys = (shapes[f"{block}.attn.w{letter}.weight"][0] for letter in "qk")
        return head, queries // head, keys // head, shapes[f"{block}.mlp.gate.weight"][0]

    head, heads, keys, inside = attention(shapes, "blocks.0")
    text_heads, text_keys, text_inside = attention(text, "layerwise_blocks.0")[1:]
    side = head * 3 // 16 * 2
    return dict(
        _class_name="Krea2Transformer2DModel",
        in_channels=shapes["first.weight"][1],
        num_layers=_count(shapes, "blocks."),
        attention_head_dim=head,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inside,
        timestep_embed_dim=shapes["tmlp.0.weight"][1],
        text_hidden_dim=shapes["txtmlp.1.weight"][1],
        num_text_layers=text["projector.weight"][1],
        text_num_attention_heads=text_heads,
        text_num_key_value_heads=text_keys,
        text_intermediate_size=text_inside,
        num_layerwise_text_blocks=_count(text, "layerwise_blocks."),
        num_refiner_text_blocks=_count(text, "refiner_blocks."),
        axes_dims_rope=[head - 2 * side, side, side],
    )


def _count(names: Iterable[str], begin: str) -> int:
    return blocks_of(name for name in names if name.startswith(begin))


def _vae_config(layout: Layout, shapes: Shapes) -> Config:
    blocks = sorted(
        (int(match[1]), int(match[2]))
        for name in shapes
        if (match := re.match(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.w", name))
    )
    channels = [
        shapes[f"encoder.down.{level}.block.0.conv1.weight"][0]
        for level, block in blocks
        if block == 0
    ]
    config = dict(
        _class_name="AutoencoderKL",
        in_channels=shapes["encoder.conv_in.weight"][1],
        out_channels=shapes["decoder.conv_out.weight"][0],
        latent_channels=shapes["decoder.conv_in.weight"][1],
        block_out_channels=channels,
        layers_per_block=len(blocks) // len(channels),
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        sample_size=layout.image_size,
    )
    return config | layout.vae


def _wan_vae_config(layout: Layout, shapes: Shapes) -> Config:
    base = shapes["encoder.conv1.weight"][0]
    between = sorted(
        int(match[1])
        for name in shapes
        if (match := re.match(r"encoder\.downsamples\.(\d+)\.resample\.1\.w", name))
    )
    firsts = [0, *(number + 1 for number in between)]  # residual blocks of each level
    return layout.vae | dict(
        base_dim=base,
        z_dim=shapes["decoder.conv1.weight"][1],
        dim_mult=[
            shapes[f"encoder.downsamples.{first}.residual.2.weight"][0] // base for first in firsts
        ],
        num_res_blocks=between[0],
        temperal_downsample=[
            f"encoder.downsamples.{number}.time_conv.weight" in shapes for number in between
        ],
    )


def _text_config(layout: Layout, part: str, shapes: Shapes) -> Config:
    encoder = layout.text_encoders[part]
    names = {_text_name(name): shape for name, shape in shapes.items()}
    layers = len({match[1] for name in names if (match := TEXT_LAYER.match(name))})
    # SD 2 takes the penultimate layer's output, so diffusers leaves out the last one, and so do the
    # files that its script makes of a folder.
    has_last = layers == OPEN_CLIP_LAYERS or (
        layers != OPEN_CLIP_LAYERS - 1 and PROJECTION in names
    )
    vocabulary, width = names[TOKENS]
    config = dict(
        architectures=["CLIPTextModel"],
        model_type="clip_text_model",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=names["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        max_position_embeddings=names["text_model.embeddings.position_embedding.weight"][0],
        num_hidden_layers=layers - 1 if layout is SD2 and has_last else layers,
        num_attention_heads=max(1, width // 64),
        hidden_act=encoder.hidden_act,
        bos_token_id=0,
        eos_token_id=2,
    )
    if encoder.pooled:
        transposed = "text_projection" in shapes
        config |= dict(
            architectures=["CLIPTextModelWithProjection"],
            projection_dim=width if encoder.pooled == "plain" else names[PROJECTION][transposed],
        )
    return config


def _t5_config(shapes: Shapes) -> Config:
    first = "encoder.block.0.layer"
    vocabulary, width = shapes["shared.weight"]
    buckets, heads = shapes[f"{first}.0.SelfAttention.relative_attention_bias.weight"]
    gated = f"{first}.1.DenseReluDense.wi_0.weight" in shapes
    return dict(
        architectures=["T5EncoderModel"],
        model_type="t5",
        vocab_size=vocabulary,
        d_model=width,
        d_kv=shapes[f"{first}.0.SelfAttention.q.weight"][0] // heads,
        d_ff=shapes[f"{first}.1.DenseReluDense.wo.weight"][1],
        num_layers=len({match[1] for name in shapes if (match := T5_LAYER.match(name))}),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )


def _qwen3_config(shapes: Shapes) -> Config:
    shapes = {modern(name): shape for name, shape in shapes.items()}
    vocabulary, width = shapes["embed_tokens.weight"]
    attention = "layers.0.self_attn"
    (head,) = shapes[f"{attention}.q_norm.weight"]
    return dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=shapes["layers.0.mlp.gate_proj.weight"][0],
        num_hidden_layers=blocks_of(shapes),
        num_attention_heads=shapes[f"{attention}.q_proj.weight"][0] // head,
        num_key_value_heads=shapes[f"{attention}.k_proj.weight"][0] // head,
        head_dim=head,
        rope_theta=1e6,
    )


def _qwen3_vl_config(shapes: Shapes) -> Config:
    return _qwen3_config(shapes) | dict(rope_theta=5e6)


def _text_name(name: str) -> str:
    """Return a text encoder's parameter in transformers' names, which it may have already."""
    return modern(open_clip_name(name))


def _beside(folder: Path, configs: Mapping[str, Config]) -> dict[str, Config]:
    """Read the configs that the folder holds."""
    files = {part: folder / CONFIG_FILES.get(part, f"{part}/config.json") for part in configs}
    return {part: read_json(file) for part, file in files.items() if is_file(file)}


def _tokenizers(layout: Layout) -> dict[str, str | None]:
    return {_tokenizer_of(part): encoder.pad for part, encoder in layout.text_encoders.items()}


def _tokenizer_of(text_encoder: str) -> str:
    return text_encoder.replace("text_encoder", "tokenizer")


# --- parameters ---------------------------------------------------------------------------------


def _stored(
    layout: Layout, tensors: Mapping[str, Stored], configs: Mapping[str, Config]
) -> dict[str, dict[str, Stored]]:
    denoiser = DENOISERS[layout.denoiser]
    parts = {
        denoiser.folder: denoiser.stored(part_of(tensors, UNET)),
        "vae": (_wan_vae if layout.of_wan else _vae)(_vae_part(tensors)),
        **{
            part: _parameters(part_of(tensors, f"{UNET}{prefix}"))
            for part, (prefix, _) in denoiser.among.items()
        },
    }
    for folder, encoder in layout.text_encoders.items():
        stored = _open_clip(part_of(tensors, encoder.begin(tensors)), layout, configs[folder])
        if encoder.pooled != "projected":
            stored.pop(PROJECTION, None)
        if encoder.pooled == "plain":
            stored[PROJECTION] = _identity(stored)
        parts[folder] = stored
    for folder, kind in layout.languages.items():
        if language := LANGUAGES[kind].tensors(tensors):
            parts[folder] = {modern(name): tensor for name, tensor in _parameters(language).items()}
    return parts


def _parameters(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {name: tensor for name, tensor in tensors.items() if not NOT_PARAMETERS.search(name)}


def _unet(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    modules = {original: ours for ours, original in Levels.of_original(tensors).modules().items()}
    return {renamed(name, modules): tensor for name, tensor in tensors.items()}


def _z_image(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return Z-Image's tensors, without a norm that its network does not use."""
    stored = original.Z_IMAGE.stored(tensors)
    return {name: tensor for name, tensor in stored.items() if name != "norm_final.weight"}


def _anima(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of Anima's transformer, without those of the conditioner and buffers."""
    return original.ANIMA.stored(
        {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(ADAPTER) and not COSMOS_BUFFERS.search(name)
        }
    )


def _krea2(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of Krea 2's transformer, with tables of a row for each part."""
    stored = {}
    for name, tensor in original.KREA2.stored(tensors).items():
        if name.endswith(".scale_shift_table") and len(tensor.shape) == 1:
            parts = 2 if name.startswith("final_layer.") else 6
            tensor = dataclasses.replace(tensor, shape=(parts, tensor.shape[0] // parts))
        stored[name] = tensor
    return stored


def _identity(text_encoder: Mapping[str, Stored]) -> Identity:
    """Return a projection of a text encoder's pooled output that changes nothing."""
    embedding = text_encoder[TOKENS]
    width = embedding.shape[1]
    return Identity(embedding.file, PROJECTION, (width, width), "F32")


def _vae(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    levels = len(
        {match[1] for name in tensors if (match := re.match(r"decoder\.up\.(\d+)\.", name))}
    )
    stored = {}
    for name, tensor in tensors.items():
        if name.startswith(VAE_PARTS):
            if "attn_1." in name and len(tensor.shape) == 4:  # a product, as a 1x1 convolution
                shape = tensor.shape[:2] if tensor.shape[2:] == (1, 1) else tensor.shape
                tensor = dataclasses.replace(tensor, shape=shape)
            if not NOT_PARAMETERS.search(name):
                stored[vae_name(name, levels)] = tensor
    return stored


def _wan_vae(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    names = wan_vae_names(tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}


def _open_clip(tensors: Mapping[str, Stored], layout: Layout, config: Config) -> dict[str, Stored]:
    """Return a text encoder's tensors, with OpenCLIP's stacked projections of attention split."""
    stored = {}
    for name, tensor in tensors.items():
        ours = _text_name(name)
        layer = TEXT_LAYER.match(ours)
        unused = (
            layout is SD2 and layer and (int(layer[1]) >= _whole(config.get("num_hidden_layers")))
        )
        if unused or name in BUFFERS or NOT_PARAMETERS.search(name):
            continue
        if name == "text_projection":
            tensor = dataclasses.replace(tensor, shape=tensor.shape[::-1], transposed=True)
        stored |= _split(ours, tensor)
    return stored


def _whole(number: Any) -> float:
    return number if isinstance(number, int) else float("inf")


def _split(name: str, tensor: Stored) -> dict[str, Stored]:
    """Return the tensor, or its thirds where `original` calls it `[qkv]`."""
    if "[qkv]" not in name or not tensor.shape or tensor.shape[0] % 3:
        return {name: tensor}
    rows = tensor.shape[0] // 3
    return {
        name.replace("[qkv]", part): tensor.rows_between(i * rows, (i + 1) * rows)
        for i, part in enumerate("qkv")
    }


class Denoiser(NamedTuple):
    """How the network that takes noise out of latents is read.

    Attributes:
        folder: where diffusers keeps it.
        what: it is, for people.
        config: (layout, shapes by names in the file) -> diffusers' config.
        stored: (tensors by names in the file) -> by diffusers' names.
        texts: what its config calls the width of CLIP's texts that it takes; "" takes none.
        among: other networks that lie among its tensors, by folder: what their names begin with,
            and (shapes by the rest of their names) -> diffusers' config.
    """

    folder: str
    what: str
    config: Callable[[Layout, Shapes], Config]
    stored: Callable[[Mapping[str, Stored]], dict[str, Stored]]
    texts: str
    among: Mapping[str, tuple[str, Callable[[Shapes], Config]]] = MappingProxyType({})


DENOISERS = {
    "unet": Denoiser("unet", "UNet", _unet_config, _unet, "cross_attention_dim"),
    "sd3": Denoiser(
        "transformer", "transformer", _sd3_config, original.SD3.stored, "joint_attention_dim"
    ),
    "flux": Denoiser(
        "transformer", "transformer", _flux_config, original.FLUX.stored, "pooled_projection_dim"
    ),
    "flux2": Denoiser("transformer", "transformer", _flux2_config, original.FLUX2.stored, ""),
    "z_image": Denoiser("transformer", "transformer", _z_image_config, _z_image, ""),
    "anima": Denoiser(
        "transformer",
        "transformer",
        _anima_config,
        _anima,
        "",
        {"text_conditioner": (ADAPTER, _conditioner_config)},
    ),
    "krea2": Denoiser("transformer", "transformer", _krea2_config, _krea2, ""),
}
LANGUAGE_CONFIGS = {"t5": _t5_config, "qwen3": _qwen3_config, "qwen3_vl": _qwen3_vl_config}
