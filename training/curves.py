"""Draws the loss curves of the runs in the cache: python -m training.curves FILE"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from training import autoencoder, diffusion, grow, sharpen

RUNS = {
    "Autoencoder: pictures, edges, contrasts, KL": autoencoder.FOLDER,
    "Grown autoencoder: pictures, latents": grow.FOLDER,
    "Text encoder and UNet: velocity": diffusion.FOLDER,
    "Decoder and critic": sharpen.FOLDER,
}


def draw(logs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Return a figure with a curve for each run: title -> (pictures seen, loss)."""
    figure = Figure(figsize=(1 + 4.5 * len(logs), 4), layout="constrained")
    for axes, (title, (seen, loss)) in zip(
        figure.subplots(1, len(logs), squeeze=False)[0], logs.items(), strict=True
    ):
        axes.plot(seen / 1000, loss, linewidth=1)
        axes.set(title=title, xlabel="thousand pictures seen", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.title.set_size("medium")
    return figure


def read(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pictures seen and loss, as the run in `folder` logged them.

    A run that was cut off and resumed has logged the steps since its checkpoint twice: the later
    entry counts.
    """
    entries = map(json.loads, (folder / "loss.jsonl").read_text(encoding="utf-8").splitlines())
    losses = {entry["pictures"]: entry["loss"] for entry in entries}
    seen = sorted(losses)
    return np.array(seen), np.array([losses[pictures] for pictures in seen])


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    logs = {
        title: read(folder) for title, folder in RUNS.items() if (folder / "loss.jsonl").is_file()
    }
    draw(logs).savefig(parser.parse_args().file, dpi=100)


if __name__ == "__main__":
    main()
