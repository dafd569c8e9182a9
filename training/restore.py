"""Lets the runs begin with a checkpoint's weights: python -m training.restore [FOLDER]

The folder's text encoder and UNet go to the diffusion run. Its autoencoder goes to the run that is
of its size: to the first autoencoder's, or to the grown one's and its decoder also to the run that
sharpens that. What the cache already has stays as it is.

Then text encoder and UNet, or the decoder, can be trained on. Were the autoencoder, its latents
would change, and nothing fit that was trained on them.
"""

import argparse
import json
from pathlib import Path

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.families.checkpoint import Checkpoint
from training import autoencoder, diffusion, grow, recipe, sharpen
from training.trainer import begin


def main() -> None:
    """Write step 0 of the runs into the cache, and the scale of the latents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED_MODEL)
    checkpoint, params = Checkpoint.from_pretrained(parser.parse_args().folder)
    vae = params.pop("vae")
    begin(diffusion.FOLDER, recipe.DIFFUSION_RUN, params)
    config = checkpoint.configs["vae"]
    grown = config["block_out_channels"] == recipe.VAE["block_out_channels"]
    folder, run = (
        (grow.FOLDER, recipe.GROWING_RUN) if grown else (autoencoder.FOLDER, recipe.AUTOENCODER_RUN)
    )
    if begin(folder, run, vae):
        autoencoder.SCALE_FILE.parent.mkdir(parents=True, exist_ok=True)
        autoencoder.SCALE_FILE.write_text(json.dumps(config["scaling_factor"]), encoding="utf-8")
    if grown:
        begin(sharpen.FOLDER, recipe.SHARPENING_RUN, sharpen.beginning(vae))


if __name__ == "__main__":
    main()
