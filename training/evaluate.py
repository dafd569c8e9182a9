"""Judges what a model draws of prompts that its training never composed:
python -m training.evaluate [FOLDER] [--pictures N] [--steps N] [--sweep] [--grid FILE]

The judge is training.judge. Its answers on real drawings, and on drawings that went through the
autoencoder, stand beside those on generated pictures: they are what could be reached at most. A
model of smaller pictures has them enlarged.
"""

import argparse
import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sd_tpu import BUNDLED_MODEL, FlaxStableDiffusionPipeline
from training import judge, recipe
from training.autoencoder import decibels, gradient_energy, to_unit
from training.captions import Scene
from training.compose import Mix
from training.sprites import STYLES

BATCH = 32
NOTHING = dict.fromkeys(("single", "small", "big"), 0.0)
KINDS = {
    "one thing": Mix(**NOTHING | {"single": 1.0}, default_background=0.0),
    # On the default background: nothing but the paint can then be what training never composed.
    "a painted thing": Mix(**NOTHING | {"single": 1.0}, recoloured=1.0, default_background=1.0),
    "two side by side": Mix(**NOTHING, beside=1.0),
    "one above another": Mix(**NOTHING, stacked=1.0),
    "two or three of a kind": Mix(**NOTHING, copies=1.0),
}
SWEPT_GUIDANCE = (2.0, 3.0, 4.0, 6.0)
SWEPT_STEPS = (4, 6, 8, 20)
GRID = (8, 4)  # columns and rows of the picture of uncurated pictures


@dataclasses.dataclass(frozen=True)
class Trial:
    """Pictures of one kind to be asked about: what each shows, and the words for it."""

    scenes: list[Scene]
    texts: list[str]
    drawings: np.ndarray  # [N, H, W, 3] u8: how the composer draws the scenes

    @classmethod
    def of(cls, mix: Mix, count: int, seed: int) -> "Trial":
        """Draw `count` scenes of the mix, all of combinations kept from training."""
        composer = recipe.composer(mix, unseen=True)
        rng = np.random.default_rng([recipe.Stream.EVALUATION, seed])
        endless = (composer.sample(rng) for _ in itertools.count())
        # Copies are asked for of what cannot be counted, too, and then there is but one.
        wanted = (sample for sample in endless if sample[2].count > 1 or mix.copies < 1)
        drawings, texts, scenes = zip(*itertools.islice(wanted, count), strict=True)
        return cls(list(scenes), list(texts), np.stack(drawings))


def resized(pictures: np.ndarray, size: int) -> np.ndarray:
    """Resize pictures [N, H, H, 3] u8 to [N, size, size, 3] by Lanczos, if they are of another."""
    if pictures.shape[1] == size:
        return pictures
    return np.stack(
        [
            np.asarray(Image.fromarray(one).resize((size, size), Image.Resampling.LANCZOS))
            for one in pictures
        ]
    )


class Artist:
    """The model in a folder, with the sampler of its scheduler's config."""

    def __init__(self, folder: Path):
        """Load the model."""
        self.pipeline, self.params = FlaxStableDiffusionPipeline.from_pretrained(folder)
        self.card, (self.size, _) = self.pipeline.card, self.pipeline.default_size

    def draw(
        self, texts: Sequence[str], *, steps: int | None = None, guidance: float | None = None
    ) -> np.ndarray:
        """Pictures [N, H, W, 3] u8 of the texts; picture i has the seed i."""
        ids = self.pipeline.prepare_inputs([*texts, *[""] * (-len(texts) % BATCH)])
        keys = jax.vmap(jax.random.PRNGKey)(np.arange(len(ids)))
        steps = steps or self.card.steps
        guidance = self.card.guidance if guidance is None else guidance
        images = [
            self.pipeline(
                ids[i : i + BATCH], self.params, keys[i : i + BATCH], steps, guidance_scale=guidance
            ).images
            for i in range(0, len(ids), BATCH)
        ]
        pictures = np.rint(np.concatenate(images)[: len(texts)] * 255).astype(np.uint8)
        return resized(pictures, recipe.IMAGE_SIZE)

    def through_autoencoder(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures [N, H, W, 3] u8, encoded at the model's own size and decoded."""
        pictures = resized(pictures, self.size)
        both = jax.jit(
            lambda images: (
                self.pipeline.vae.apply(
                    {"params": self.params["vae"]}, images.transpose(0, 3, 1, 2)
                ).sample
            )
        )
        decoded = np.concatenate(
            [both(to_unit(pictures[i : i + BATCH])) for i in range(0, len(pictures), BATCH)]
        ).transpose(0, 2, 3, 1)
        pictures = np.rint((decoded.clip(-1, 1) + 1) * 127.5).astype(np.uint8)
        return resized(pictures, recipe.IMAGE_SIZE)


Answers = dict[str, np.ndarray]
Measure = Callable[[Answers, Answers, Trial], np.ndarray]


def _right(*questions: str, among: int = 1) -> Measure:
    """Whether all the questions are answered rightly, or among the likeliest answers."""
    return lambda answers, right, _: np.logical_and.reduce(
        [judge.accuracy(answers, right, question, among) for question in questions]
    )


def _style(answers: Answers, right: Answers, trial: Trial) -> np.ndarray:
    said = [any(f"{style} " in text for style in STYLES) for text in trial.texts]
    return judge.accuracy(answers, right, "style")[np.array(said)]


MEASURES: dict[str, dict[str, Measure]] = {
    "one thing": {
        "the thing, top-1": _right("first"),
        "the thing, top-5": _right("first", among=5),
        "the background's colour": _right("background"),
        "the style, where the prompt says one": _style,
    },
    "a painted thing": {"the thing, top-1": _right("first"), "its colour": _right("paint")},
    "two side by side": {"both things, each in its place": _right("first", "second", "layout")},
    "one above another": {"both things, each in its place": _right("first", "second", "layout")},
    "two or three of a kind": {
        "how many": _right("layout"),
        "how many, and of what": _right("first", "layout"),
    },
}


def shares(ask, trial: Trial, kind: str, pictures: np.ndarray) -> dict[str, float]:
    """Return the share of pictures that satisfy each measure of the kind."""
    answers, right = ask(pictures), judge.labels(trial.scenes)
    return {
        name: float(np.mean(measure(answers, right, trial)))
        for name, measure in MEASURES[kind].items()
    }


def print_distances(ask, trial: Trial, kind: str, shown: Sequence[np.ndarray]) -> None:
    """Print how pictures differ from the trial's drawings, the first among those `shown`.

    The kernel distance is that to drawings of other prompts: those of the same look too much alike.
    """
    drawn, *others = (ask(pictures)["features"] for pictures in shown)
    rows = {
        "energy of gradients beside the drawn": [
            gradient_energy(pictures) / gradient_energy(trial.drawings) for pictures in shown
        ],
        "kernel distance to drawings, in the judge's features": [
            0.0,
            *(judge.kernel_distance(drawn[::2], features[1::2]) for features in others),
        ],
    }
    for name, values in rows.items():
        print(f"| {kind} | ({name}) | {' | '.join(f'{value:.3f}' for value in values)} |")


def print_table(artist: Artist, trials: dict[str, Trial], ask, steps: int | None = None) -> None:
    """Print every measure on drawings, on drawings through the autoencoder, and on pictures."""
    print("| Prompts for | the judge finds right | drawn | through the autoencoder | generated |")
    print("|---|---|---|---|---|")
    for kind, trial in trials.items():
        coded = artist.through_autoencoder(trial.drawings)
        shown = trial.drawings, coded, artist.draw(trial.texts, steps=steps)
        columns = [shares(ask, trial, kind, pictures) for pictures in shown]
        for name in MEASURES[kind]:
            cells = " | ".join(f"{100 * column[name]:.1f}%" for column in columns)
            print(f"| {kind} | {name} | {cells} |", flush=True)
        loss = decibels(to_unit(coded), to_unit(trial.drawings))
        print(f"| {kind} | (autoencoder's PSNR) | | {loss:.2f} dB | |")
        print_distances(ask, trial, kind, shown)


def print_sweep(artist: Artist, trials: dict[str, Trial], ask) -> None:
    """Print all measures over guidance and steps."""
    names = [f"{kind}: {name}" for kind, measures in MEASURES.items() for name in measures]
    print(f"| Steps | guidance | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for steps, guidance in itertools.product(SWEPT_STEPS, SWEPT_GUIDANCE):
        values = [
            value
            for kind, trial in trials.items()
            for value in shares(
                ask, trial, kind, artist.draw(trial.texts, steps=steps, guidance=guidance)
            ).values()
        ]
        cells = " | ".join(f"{100 * value:.1f}%" for value in values)
        print(f"| {steps} | {guidance:g} | {cells} |", flush=True)


def label(pictures: Iterable[np.ndarray], texts: Iterable[str], columns: int) -> Image.Image:
    """Lay out the pictures [H, W, 3] u8 in rows, each above its words."""
    font, margin, room = ImageFont.load_default(12), 8, 46
    tiles = []
    for picture, text in zip(pictures, texts, strict=True):
        height, width = picture.shape[:2]
        tile = Image.new("RGB", (width + margin, height + room), "white")
        tile.paste(Image.fromarray(picture))
        lines = textwrap.wrap(text, width // 6)[:3]
        ImageDraw.Draw(tile).multiline_text(
            (0, height + 2), "\n".join(lines), "black", font, spacing=2
        )
        tiles.append(np.asarray(tile))
    rows = [np.concatenate(tiles[i : i + columns], axis=1) for i in range(0, len(tiles), columns)]
    return Image.fromarray(np.concatenate(rows))


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--pictures", type=int, default=400, help="of each kind")
    parser.add_argument("--steps", type=int, help="of each picture, the model's own by default")
    parser.add_argument("--sweep", action="store_true", help="over guidance and steps instead")
    parser.add_argument("--grid", type=Path, help="write uncurated pictures there instead")
    args = parser.parse_args()
    artist = Artist(args.folder)
    if args.grid:
        trial = Trial.of(recipe.MIX, GRID[0] * GRID[1], seed=0)
        pictures = artist.draw(trial.texts, steps=args.steps)
        label(pictures, trial.texts, GRID[0]).save(args.grid, quality=90)
        return
    first = 101 if args.sweep else 1  # what is chosen by the sweep is then judged on other prompts
    trials = {
        kind: Trial.of(mix, args.pictures, seed)
        for seed, (kind, mix) in enumerate(KINDS.items(), start=first)
    }
    if args.sweep:
        print_sweep(artist, trials, judge.trained())
    else:
        print_table(artist, trials, judge.trained(), args.steps)


if __name__ == "__main__":
    main()
