"""Draws the pictures that a page shows of a model before anybody has drawn any:
python -m training.examples [FOLDER]"""

import argparse
from pathlib import Path

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.pictures.images import to_webp
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady

SEED, QUALITY = 45, 50  # the seed: of twelve that were looked at, one without a smear


def main() -> None:
    """Draw the card's first prompts with one seed, nothing chosen, as WebP files by index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED_MODEL)
    folder = parser.parse_args().folder
    engine = Engine.open(folder)
    examples = folder / "examples"
    examples.mkdir(exist_ok=True)
    values = {"prompts": list(engine.checkpoint.card.prompts), "seed": SEED}
    for event in engine.submit(Request.check(values, engine.catalog), previews=False).events():
        if isinstance(event, ImageReady):
            file = to_webp(event.pixels, QUALITY, effort=6)
            (examples / f"{event.index}.webp").write_bytes(file)
    engine.close()


if __name__ == "__main__":
    main()
