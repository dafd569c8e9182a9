"""Makes full-size checkpoints with random weights: `python -m benchmarks.make_checkpoint`.

Time and memory do not depend on the values of weights, so whoever cannot download the published
ones can still measure. The files are in the diffusers layout, float16, and PyTorch's pipeline reads
them as well. They are made once, in the user's cache folder.
"""

import argparse
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.checkpoint.original import Levels, renamed
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families import find_family
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.folders import cache_folder


def _text_encoder(
    hidden: int, layers: int, heads: int, activation: str, **differing
) -> dict[str, Any]:
    common = dict(
        architectures=["CLIPTextModel"],
        model_type="clip_text_model",
        vocab_size=49408,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_act=activation,
        max_position_embeddings=77,
        layer_norm_eps=1e-5,
        projection_dim=512,
    )
    return {**common, **differing}


def _projected(hidden: int, layers: int, heads: int, activation: str) -> dict[str, Any]:
    kind = dict(architectures=["CLIPTextModelWithProjection"], eos_token_id=2)
    return _text_encoder(hidden, layers, heads, activation, projection_dim=hidden, **kind)


def _unet(**differing) -> dict[str, Any]:
    common = dict(
        _class_name="UNet2DConditionModel",
        sample_size=64,
        in_channels=4,
        out_channels=4,
        block_out_channels=[320, 640, 1280, 1280],
        layers_per_block=2,
        down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    )
    return {**common, **differing}


def _unet_xl(**differing) -> dict[str, Any]:
    return _unet(
        **{
            **dict(
                down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                use_linear_projection=True,
                addition_embed_type="text_time",
            ),
            **differing,
        }
    )


def _vae(*channels: int, **differing) -> dict[str, Any]:
    common = dict(
        _class_name="AutoencoderKL",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=channels,
        layers_per_block=2,
        sample_size=512,
        scaling_factor=0.18215,
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
    )
    return {**common, **differing}


def _sd3(clip: int, big_clip: int, layers: tuple[int, int], **transformer) -> dict[str, Any]:
    """Return the configs of a Stable Diffusion 3 without T5, but for the autoencoder's."""
    return dict(
        model_index=dict(_class_name="StableDiffusion3Pipeline"),
        text_encoder=_projected(clip, layers[0], clip // 64, "quick_gelu"),
        text_encoder_2=_projected(big_clip, layers[1], big_clip // 64, "gelu"),
        transformer=dict(
            _class_name="SD3Transformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=16,
            pooled_projection_dim=clip + big_clip,
            **transformer,
        ),
        scheduler=dict(
            _class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, shift=3.0
        ),
    )


def _vae_3(*channels: int, **differing) -> dict[str, Any]:
    return _vae(
        *channels,
        latent_channels=16,
        **dict(
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        | differing,
    )


_TINY_UNET = dict(
    attention_head_dim=4,
    cross_attention_dim=32,
    sample_size=8,
    block_out_channels=[16, 32],
    layers_per_block=1,
    norm_num_groups=8,
    down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
    up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
)
_TINY_VAE = dict(_class_name="AutoencoderTiny")  # those of TAESD are its defaults
_SMALL = dict(layers_per_block=1, norm_num_groups=8, sample_size=32)  # of a VAE

_NOISE = dict(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    num_train_timesteps=1000,
    set_alpha_to_one=False,
    steps_offset=1,
)
_SD = dict(_class_name="StableDiffusionPipeline")
_SDXL = dict(_class_name="StableDiffusionXLPipeline", force_zeros_for_empty_prompt=True)

_SD35_MEDIUM = dict(
    **_sd3(
        768,
        1280,
        (12, 32),
        sample_size=128,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=[*range(13)],
        qk_norm="rms_norm",
    ),
    vae=_vae_3(128, 256, 512, 512, sample_size=1024),
)
_T5_XXL = dict(
    architectures=["T5EncoderModel"],
    model_type="t5",
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_heads=64,
    vocab_size=32128,
    feed_forward_proj="gated-gelu",
)

_QWEN3_4B = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1e6,
)

_TINY_QWEN3 = dict(
    _QWEN3_4B,
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=29,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)

_FLUX_VAE = _vae_3(128, 256, 512, 512, sample_size=1024, scaling_factor=0.3611, shift_factor=0.1159)
_Z_IMAGE: dict[str, dict[str, Any]] = dict(
    model_index=dict(_class_name="ZImagePipeline"),
    text_encoder=_QWEN3_4B,
    transformer=dict(
        _class_name="ZImageTransformer2DModel",
        in_channels=16,
        dim=3840,
        n_layers=30,
        n_refiner_layers=2,
        n_heads=30,
        n_kv_heads=30,
        cap_feat_dim=2560,
        axes_dims=[32, 48, 48],
        axes_lens=[1536, 512, 512],
        sample_size=128,
    ),
    vae=_FLUX_VAE,
    scheduler=dict(_class_name="FlowMatchEulerDiscreteScheduler", shift=3.0),
)
_FLUX2_VAE = "AutoencoderKLFlux2"
_KLEIN: dict[str, dict[str, Any]] = dict(
    model_index=dict(_class_name="Flux2KleinPipeline", is_distilled=True),
    text_encoder=_QWEN3_4B,
    transformer=dict(
        _class_name="Flux2Transformer2DModel",
        in_channels=128,
        num_layers=5,
        num_single_layers=20,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=7680,
        axes_dims_rope=[32, 32, 32, 32],
        rope_theta=2000,
        guidance_embeds=False,
        sample_size=64,
    ),
    vae=_vae(
        *(128, 256, 512, 512),
        sample_size=1024,
        latent_channels=32,
        scaling_factor=1.0,
        _class_name=_FLUX2_VAE,
    ),
    scheduler=dict(
        _class_name="FlowMatchEulerDiscreteScheduler", shift=3.0, use_dynamic_shifting=True
    ),
)

# The configs of the published checkpoints, as far as they shape the computation, by folder, and
# model_index.json. The tiny ones have the same kinds of blocks and run in moments.
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "sd14": dict(
        model_index=_SD,
        text_encoder=_text_encoder(768, 12, 12, "quick_gelu"),
        unet=_unet(attention_head_dim=8, cross_attention_dim=768),
        vae=_vae(128, 256, 512, 512),
        scheduler=dict(_NOISE, _class_name="PNDMScheduler", skip_prk_steps=True),
    ),
    "sd21": dict(
        model_index=_SD,
        text_encoder=_text_encoder(1024, 23, 16, "gelu"),
        unet=_unet(
            attention_head_dim=[5, 10, 20, 20],
            cross_attention_dim=1024,
            sample_size=96,
            use_linear_projection=True,
            upcast_attention=True,
        ),
        vae=_vae(128, 256, 512, 512, sample_size=768),
        scheduler=dict(
            _NOISE, _class_name="DDIMScheduler", clip_sample=False, prediction_type="v_prediction"
        ),
    ),
    # Of few steps, with TAESD: SD-Turbo's shapes, and an LCM's of SD 1.
    "turbo": dict(
        model_index=_SD,
        text_encoder=_text_encoder(1024, 23, 16, "gelu"),
        unet=_unet(
            attention_head_dim=[5, 10, 20, 20], cross_attention_dim=1024, use_linear_projection=True
        ),
        vae=_TINY_VAE,
        scheduler=dict(_NOISE, _class_name="EulerDiscreteScheduler", timestep_spacing="trailing"),
    ),
    "lcm": dict(
        model_index=_SD,
        text_encoder=_text_encoder(768, 12, 12, "quick_gelu"),
        unet=_unet(attention_head_dim=8, cross_attention_dim=768, time_cond_proj_dim=256),
        vae=_TINY_VAE,
        scheduler=dict(_NOISE, _class_name="LCMScheduler"),
    ),
    "sdxl": dict(
        model_index=_SDXL,
        text_encoder=_text_encoder(768, 12, 12, "quick_gelu"),
        text_encoder_2=_projected(1280, 32, 20, "gelu"),
        unet=_unet_xl(
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            sample_size=128,
            block_out_channels=[320, 640, 1280],
            addition_time_embed_dim=256,
            transformer_layers_per_block=[1, 2, 10],
            projection_class_embeddings_input_dim=1280 + 6 * 256,
        ),
        vae=_vae(128, 256, 512, 512, sample_size=1024, scaling_factor=0.13025, force_upcast=True),
        scheduler=dict(_NOISE, _class_name="EulerDiscreteScheduler"),
    ),
    "zimage": _Z_IMAGE,
    "anima": dict(
        model_index=dict(_class_name="AnimaModularPipeline"),
        text_encoder=_QWEN3_4B
        | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
        | dict(num_attention_heads=16),
        text_conditioner=dict(_class_name="AnimaTextConditioner"),
        transformer=dict(
            _class_name="CosmosTransformer3DModel",
            in_channels=16,
            out_channels=16,
            num_attention_heads=16,
            attention_head_dim=128,
            num_layers=28,
            text_embed_dim=1024,
            adaln_lora_dim=256,
            max_size=[128, 240, 240],
            rope_scale=[1.0, 4.0, 4.0],
            extra_pos_embed_type=None,
            sample_size=128,
        ),
        vae=dict(_class_name="AutoencoderKLQwenImage"),
        scheduler=dict(_class_name="FlowMatchEulerDiscreteScheduler", shift=3.0),
    ),
    "krea2": dict(
        model_index=dict(_class_name="Krea2Pipeline", is_distilled=True),
        text_encoder=_QWEN3_4B | dict(rope_theta=5e6),
        transformer=dict(_class_name="Krea2Transformer2DModel", sample_size=128),
        vae=dict(_class_name="AutoencoderKLQwenImage"),
        scheduler=dict(_class_name="FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True)
        | dict(max_image_seq_len=6400),
    ),
    "klein": _KLEIN,
    "schnell": dict(
        model_index=dict(_class_name="FluxPipeline"),
        text_encoder=_text_encoder(768, 12, 12, "quick_gelu"),
        text_encoder_2=_T5_XXL,
        transformer=dict(
            _class_name="FluxTransformer2DModel",
            in_channels=64,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            axes_dims_rope=[16, 56, 56],
            guidance_embeds=False,
            sample_size=128,
        ),
        vae=_FLUX_VAE,
        scheduler=dict(_class_name="FlowMatchEulerDiscreteScheduler", shift=1.0),
    ),
    # SD 3.5 medium without T5, and with it.
    "sd35m": dict(_SD35_MEDIUM),
    "sd35m-t5": dict(_SD35_MEDIUM, text_encoder_3=_T5_XXL),
    "tiny": dict(
        model_index=_SD,
        text_encoder=_text_encoder(32, 2, 4, "quick_gelu"),
        unet=_unet(**_TINY_UNET),
        vae=_vae(8, 16, 16, **_SMALL),
        scheduler=dict(_NOISE, _class_name="PNDMScheduler", skip_prk_steps=True),
    ),
    "tinylcm": dict(
        model_index=_SD,
        text_encoder=_text_encoder(32, 2, 4, "quick_gelu"),
        unet=_unet(**_TINY_UNET, time_cond_proj_dim=16),
        vae=dict(
            _TINY_VAE,
            encoder_block_out_channels=[8] * 3,
            num_encoder_blocks=[1] * 3,
            decoder_block_out_channels=[8] * 3,
            num_decoder_blocks=[1] * 3,
        ),
        scheduler=dict(_NOISE, _class_name="LCMScheduler"),
    ),
    "tinyxl": dict(
        model_index=_SDXL,
        text_encoder=_text_encoder(32, 2, 4, "quick_gelu"),
        text_encoder_2=_projected(32, 2, 4, "gelu"),
        unet=_unet_xl(
            attention_head_dim=[2, 4, 4],
            cross_attention_dim=64,
            sample_size=8,
            block_out_channels=[16, 32, 32],
            addition_time_embed_dim=8,
            transformer_layers_per_block=[1, 1, 2],
            norm_num_groups=8,
            projection_class_embeddings_input_dim=32 + 6 * 8,
        ),
        vae=_vae(8, 16, 16, **_SMALL, force_upcast=True),
        scheduler=dict(_NOISE, _class_name="EulerDiscreteScheduler"),
    ),
    "tiny3": dict(
        **_sd3(
            64,
            64,
            (2, 2),
            sample_size=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=128,
            caption_projection_dim=32,
            pos_embed_max_size=8,
            dual_attention_layers=[0],
            qk_norm="rms_norm",
        ),
        vae=_vae_3(8, 16, 16, **_SMALL),
    ),
    "tinyzimage": dict(
        _Z_IMAGE,
        text_encoder=_TINY_QWEN3,
        transformer=_Z_IMAGE["transformer"]
        | dict(dim=48, n_layers=2, n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=16)
        | dict(axes_dims=[4, 6, 6], axes_lens=[1536, 64, 64], sample_size=8),
        vae=_vae_3(8, 16, 16, **_SMALL),
    ),
    "tinyklein": dict(
        _KLEIN,
        text_encoder=_TINY_QWEN3,
        transformer=_KLEIN["transformer"]
        | dict(in_channels=32, num_layers=1, num_single_layers=2, attention_head_dim=16)
        | dict(num_attention_heads=3, joint_attention_dim=48, timestep_guidance_channels=32)
        | dict(axes_dims_rope=[4, 4, 4, 4], sample_size=4),
        vae=_vae(
            8, 16, 16, **_SMALL, latent_channels=8, scaling_factor=1.0, _class_name=_FLUX2_VAE
        ),
    ),
}


def checkpoint_folder(name: str, parent: Path | None = None) -> Path:
    """Return the folder of one of MODELS, by default in the user's cache, made if missing."""
    folder = (parent or _parent()) / name
    if not folder.is_dir():
        unfinished = folder.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _write(name, unfinished)
        unfinished.rename(folder)
    return folder


def _parent() -> Path:
    return cache_folder() / "checkpoints"


def _write(name: str, folder: Path) -> None:
    checkpoint, shapes = without_parameters(name, np.float16)
    checkpoint.save_pretrained(folder, random_parameters(shapes))


def without_parameters(name: str, dtype: Any) -> tuple[Checkpoint, Params]:
    """Return one of MODELS that CLIP reads the prompts of, and the shapes of its parameters."""
    configs = MODELS[name]
    model, shapes = find_family(configs["model_index"]).build(configs, dtype)
    tokenizer = Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")
    card = ModelCard(name=f"{name}, random weights")
    tokenizers = dict.fromkeys(model.encoders.values(), tokenizer)
    return Checkpoint(model, tokenizers, configs, card), shapes


def random_parameters(shapes: Params) -> Params:
    """Parameters float16 under which activations keep their size from layer to layer."""
    draw = np.random.default_rng(0)

    def leaf(path, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, deviation = moments(path[-1].key, shape.shape)
        if not deviation:
            return np.full(shape.shape, mean, np.float16)
        values = draw.standard_normal(shape.shape, np.float32)
        return np.multiply(values, deviation, out=values).astype(np.float16)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def moments(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a random parameter.

    Kernels are normal with a variance of 1 / inputs (LeCun et al. 1998, Efficient BackProp), norms
    begin as the identity, and biases as 0. Residual sums grow slowly enough for float16.
    """
    match name:
        case "scale" | "running_var":
            return 1, 0
        case "bias":
            return 0, 0
        case "embedding":
            return 0, 1
    return 0, 1 / math.sqrt(math.prod(shape[:-1]))


def single_file(folder: Path, file: Path) -> None:
    """Write a checkpoint of SD 1 as a single file, in the original layout.

    Its configs are in a folder beside it, as no file tells all of a tiny one.
    """
    shutil.copytree(folder, file.with_suffix(""), ignore=shutil.ignore_patterns("*.safetensors"))
    parts = {part: _tensors(folder / part) for part in ("text_encoder", "unet", "vae")}
    modules = Levels.of(parts["unet"]).modules()
    levels = 1 + max(
        int(found[1])
        for name in parts["vae"]
        if (found := re.match(r"decoder\.up_blocks\.(\d+)", name))
    )
    names = {
        "unet": lambda name: "model.diffusion_model." + renamed(name, modules),
        "vae": lambda name: "first_stage_model." + original_vae(name, levels),
        "text_encoder": lambda name: "cond_stage_model.transformer." + name,
    }
    save_file(
        {
            names[part](name): tensor
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        },
        file,
    )


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def original_vae(name: str, levels: int) -> str:
    """Return the original layout's name of a parameter of an autoencoder with `levels` levels."""
    for ours, theirs in (
        ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"),
        ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
        ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"),
        ("mid_block.attentions.0.to_", "mid.attn_1."),
        ("conv_norm_out", "norm_out"),
        ("conv_shortcut", "nin_shortcut"),
        ("resnets", "block"),
        ("downsamplers.0", "downsample"),
        ("upsamplers.0", "upsample"),
        ("down_blocks", "down"),
    ):
        name = name.replace(ours, theirs)
    return re.sub(r"up_blocks\.(\d)", lambda found: f"up.{levels - 1 - int(found[1])}", name)


def lora(folder: Path, file: Path, rank: int, seed: int) -> None:
    """Write a LoRA of random numbers, in kohya's names.

    It is for a checkpoint's attention and feed-forward layers.
    """
    draw, tensors = np.random.default_rng(seed), {}
    for part, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_")):
        for name, weight in _tensors(folder / part).items():
            if re.search(r"(attn\d?|mlp|ff\.net)\..*weight$", name) and weight.ndim == 2:
                module = prefix + name.removesuffix(".weight").replace(".", "_")
                for leaf, shape in (
                    ("down", (rank, weight.shape[1])),
                    ("up", (weight.shape[0], rank)),
                ):
                    factor = draw.standard_normal(shape, np.float32) / 100
                    tensors[f"{module}.lora_{leaf}.weight"] = factor.astype(np.float16)
    save_file(tensors, file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoints that are asked for and say where they are."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "models",
        nargs="*",
        default=["sd14", "sd21"],
        metavar="MODEL",
        help=f"some of {', '.join(MODELS)} (default: sd14 sd21)",
    )
    flags.add_argument(
        "--folder",
        type=Path,
        default=_parent(),
        metavar="DIR",
        help="where they are made (%(default)s)",
    )
    args = flags.parse_args(arguments)
    if unknown := set(args.models) - MODELS.keys():
        flags.error(f"there is no model {', '.join(sorted(unknown))}")
    for name in args.models:
        folder = checkpoint_folder(name, args.folder)
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        print(f"{folder}: {size / 1e9:.3g} GB of weights")


if __name__ == "__main__":
    main()
