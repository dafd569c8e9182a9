"""Lets the runs begin with a checkpoint's weights: python -m training.restore [FOLDER]

The folder's text encoder and UNet go to the diffusion run, its autoencoder to the autoencoder's,
its decoder also to the run that sharpens it. What the cache already has stays as it is.

Then text encoder and UNet, or the decoder, can be trained on. Were the autoencoder, its latents
would change, and nothing fit that was trained on them.
"""

import argparse
import json
from pathlib import Path

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.families.checkpoint import Checkpoint
from training import autoencoder, diffusion, recipe, sharpen
from training.trainer import begin


def main() -> None:
    """Write step 0 of the runs into the cache, and the scale of the latents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED_MODEL)
    checkpoint, params = Checkpoint.from_pretrained(parser.parse_args().folder)
    vae = params.pop("vae")
    begin(diffusion.FOLDER, recipe.DIFFUSION_RUN, params)
    if begin(autoencoder.FOLDER, recipe.AUTOENCODER_RUN, vae):
        scale = checkpoint.configs["vae"]["scaling_factor"]
        autoencoder.SCALE_FILE.write_text(json.dumps(scale), encoding="utf-8")
    begin(sharpen.FOLDER, recipe.SHARPENING_RUN, sharpen.beginning(vae))


if __name__ == "__main__":
    main()
