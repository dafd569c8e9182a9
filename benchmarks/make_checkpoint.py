"""Makes full-size checkpoints with random weights: `python -m benchmarks.make_checkpoint`.

Time and memory do not depend on what the weights are, so whoever cannot fetch the published ones
can still measure. The files are in the diffusers layout, float16, and PyTorch's pipeline reads them
as well. They lie in the user's cache folder and are made once.
"""

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sd_tpu.config import BUNDLED_MODEL, ModelCard
from sd_tpu.folders import cache_folder
from sd_tpu.networks import Models
from sd_tpu.pipeline import FlaxStableDiffusionPipeline
from sd_tpu.tokenizer import Tokenizer
from sd_tpu.weights import Params


def _text_encoder(hidden: int, layers: int, heads: int, activation: str) -> dict[str, Any]:
    return dict(
        architectures=["CLIPTextModel"], model_type="clip_text_model", vocab_size=49408,
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, hidden_act=activation, max_position_embeddings=77,
        layer_norm_eps=1e-5, projection_dim=512,
    )


def _unet(**differing) -> dict[str, Any]:
    common = dict(
        _class_name="UNet2DConditionModel", sample_size=64, in_channels=4, out_channels=4,
        block_out_channels=[320, 640, 1280, 1280], layers_per_block=2,
        down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    )
    return {**common, **differing}


def _vae(*channels: int, **differing) -> dict[str, Any]:
    common = dict(
        _class_name="AutoencoderKL", in_channels=3, out_channels=3, latent_channels=4,
        block_out_channels=channels, layers_per_block=2, sample_size=512, scaling_factor=0.18215,
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
    )
    return {**common, **differing}


_NOISE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
              num_train_timesteps=1000, set_alpha_to_one=False, steps_offset=1)

# The configs of the published checkpoints, as far as they shape the computation, by folder; "tiny"
# has both of their kinds of blocks and runs in moments.
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "sd14": dict(
        text_encoder=_text_encoder(768, 12, 12, "quick_gelu"),
        unet=_unet(attention_head_dim=8, cross_attention_dim=768),
        vae=_vae(128, 256, 512, 512),
        scheduler=dict(_NOISE, _class_name="PNDMScheduler", skip_prk_steps=True),
    ),
    "sd21": dict(
        text_encoder=_text_encoder(1024, 23, 16, "gelu"),
        unet=_unet(attention_head_dim=[5, 10, 20, 20], cross_attention_dim=1024, sample_size=96,
                   use_linear_projection=True, upcast_attention=True),
        vae=_vae(128, 256, 512, 512, sample_size=768),
        scheduler=dict(_NOISE, _class_name="DDIMScheduler", clip_sample=False,
                       prediction_type="v_prediction"),
    ),
    "tiny": dict(
        text_encoder=_text_encoder(32, 2, 4, "quick_gelu"),
        unet=_unet(attention_head_dim=4, cross_attention_dim=32, sample_size=16,
                   block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=8,
                   down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
                   up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"]),
        vae=_vae(16, 32, layers_per_block=1, norm_num_groups=8, sample_size=32),
        scheduler=dict(_NOISE, _class_name="PNDMScheduler", skip_prk_steps=True),
    ),
}


def checkpoint_folder(name: str, parent: Path | None = None) -> Path:
    """The folder of one of MODELS, by default in the user's cache; made if it is not there."""
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
    configs = MODELS[name]
    models, shapes = Models.build(configs, np.float16)
    tokenizer = Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")
    card = ModelCard(name=f"{name}, random weights")
    pipeline = FlaxStableDiffusionPipeline(models, tokenizer, configs, card)
    pipeline.save_pretrained(folder, random_parameters(shapes))


def random_parameters(shapes: Params) -> Params:
    """Parameters float16 under which activations keep their size from layer to layer.

    Kernels are normal with a variance of 1 / inputs (LeCun et al. 1998, Efficient BackProp), norms
    begin as the identity, and biases as 0. Residual sums grow slowly enough for float16.
    """
    draw = np.random.default_rng(0)

    def leaf(path, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        match path[-1].key:
            case "scale":
                return np.ones(shape.shape, np.float16)
            case "bias":
                return np.zeros(shape.shape, np.float16)
            case "embedding":
                deviation = 1.0
            case _:
                deviation = 1 / math.sqrt(math.prod(shape.shape[:-1]))
        values = draw.standard_normal(shape.shape, np.float32)
        return np.multiply(values, deviation, out=values).astype(np.float16)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the checkpoints that are asked for and says where they are."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("models", nargs="*", default=["sd14", "sd21"], metavar="MODEL",
                       help=f"some of {', '.join(MODELS)} (default: sd14 sd21)")
    flags.add_argument("--folder", type=Path, default=_parent(), metavar="DIR",
                       help="where they are made (%(default)s)")
    args = flags.parse_args(arguments)
    if unknown := set(args.models) - MODELS.keys():
        flags.error(f"there is no model {', '.join(sorted(unknown))}")
    for name in args.models:
        folder = checkpoint_folder(name, args.folder)
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        print(f"{folder}: {size / 1e9:.3g} GB of weights")


if __name__ == "__main__":
    main()
