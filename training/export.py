"""Writes the trained networks as a checkpoint in the diffusers layout:
python -m training.export [FOLDER]"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion import StableDiffusion
from training import diffusion, grow, recipe, sharpen
from training.card import card


def main() -> None:
    """Export the averages of the runs into one folder, in float16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED_MODEL)
    folder = parser.parse_args().folder
    configs = {
        "text_encoder": {
            "architectures": ["CLIPTextModel"],
            "model_type": "clip_text_model",
            **recipe.TEXT_ENCODER,
        },
        "unet": {"_class_name": "UNet2DConditionModel", **recipe.UNET},
        "vae": {"_class_name": "AutoencoderKL", **grow.config()},
        "scheduler": recipe.SCHEDULER,
    }
    model, _ = StableDiffusion.build(configs, jnp.float32)
    params = {**diffusion.trained(), "vae": sharpen.trained()}
    checkpoint = Checkpoint(model, {"tokenizer": recipe.tokenizer()}, configs, card())
    checkpoint.save_pretrained(folder, params, np.float16)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e6
    print(f"{folder}: {size:.1f} MB of weights")


if __name__ == "__main__":
    main()
