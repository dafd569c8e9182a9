"""A new thing taught to the bundled model by eight drawings: `python -m benchmarks.teach`.

Draws eight pictures of an invented figure, teaches it by the settings that `sd_tpu teach` has by
default, or by those of the flags, and asks the features of `python -m training.judge` whether
prompts with the new word then give it, also on backgrounds and in numbers that it was not shown in,
and whether other words draw what they drew. `--grid FILE` shows it, untaught and after each state.
"""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.report import add_model, memory, parser, report
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.serving.engine import SLOTS, Engine
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import read_examples
from sd_tpu.training.teach import identity
from sd_tpu.training.trainer import Trainer
from training import judge, recipe
from training.captions import BACKGROUNDS, Scene
from training.compose import Composer, Mix
from training.evaluate import label, resized
from training.grammar import plural, with_article
from training.sprites import Sprites

NAME, STYLE = "zork", "flat"
SHOWN, NOT_SHOWN = [*BACKGROUNDS][:8], [*BACKGROUNDS][8:]
STATES = (0.25, 0.5, 1.0)  # of a run, whose LoRAs are kept
UNTAUGHT = "untaught"
LIKE, BY_CHANCE = "like the figure", "others, untaught"
LIKER, SAME = "liker than any untaught, %", "the same thing, %"
IN_GRID = slice(2, 4)  # of each kind of prompt
OTHER_SEED = 1000  # by which the same prompts give other pictures
SEVERAL = [
    Scene(concepts=(NAME,), style=STYLE, background=each, count=count)
    for each in NOT_SHOWN
    for count in (2, 3)
]
AS_SHOWN = "on the backgrounds shown"
# What is asked for by the new word: as written, the scenes, and the question about them
# whose answer the judge should find. The plural has another last token, which was not taught.
KINDS = {
    AS_SHOWN: (
        NAME,
        [Scene(concepts=(NAME,), style=STYLE, background=each) for each in SHOWN],
        "background",
    ),
    "on other backgrounds": (
        NAME,
        [Scene(concepts=(NAME,), style=STYLE, background=each) for each in 2 * NOT_SHOWN],
        "background",
    ),
    "two or three of it": (NAME, SEVERAL, "layout"),
    "two or three, in the plural": (plural(NAME), SEVERAL, "layout"),
}
Ask = Callable[[np.ndarray], dict[str, np.ndarray]]


def figure(size: int) -> np.ndarray:
    """Draw a teal blob with an eye, orange horns and three legs: [size, size, 4] u8."""
    unit = 4 * size / 100
    picture = Image.new("RGBA", (4 * size, 4 * size))
    draw = ImageDraw.Draw(picture)

    def at(*places: float) -> list[float]:
        return [place * unit for place in places]

    teal, orange, dark = (25, 170, 155), (255, 125, 25), (25, 25, 30)
    for foot in (30, 50, 70):
        draw.line(at(50 + (foot - 50) / 2, 75, foot, 97), teal, round(6 * unit))
    for side in (-1, 1):
        draw.polygon(at(50 + 8 * side, 24, 50 + 38 * side, 34, 50 + 28 * side, 2), orange)
    draw.ellipse(at(18, 18, 82, 88), teal)
    draw.ellipse(at(37, 32, 63, 58), "white")
    draw.ellipse(at(44, 39, 56, 51), dark)
    draw.rounded_rectangle(at(36, 68, 64, 74), 3 * unit, (120, 25, 70))
    return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS))


@functools.cache
def composer() -> Composer:
    """Return a composer of pictures of the figure, as those of the bundled model's things."""
    sprites = Sprites(rgba=figure(recipe.SPRITE_SIZE)[None], concepts=[NAME], styles=[STYLE])
    return Composer(sprites, recipe.IMAGE_SIZE, Mix(), unseen=None)


def prompt(scene: Scene, word: str = NAME) -> str:
    """Return the words that ask for a scene of the figure."""
    asked = {1: with_article(word), 2: f"two {word}", 3: f"three {word}"}[scene.count]
    return f"{asked} on {with_article(scene.background)} background"


def write_pictures(folder: Path) -> None:
    """Write the eight pictures that are shown, whose names are their captions."""
    rng = np.random.default_rng(0)
    for scene in KINDS[AS_SHOWN][1]:
        drawn = Image.fromarray(composer().draw(scene, rng))
        drawn.save(folder / f"{prompt(scene)}.png")


def teach(model: str, pictures: Path, options: Options, loras: Path) -> float:
    """Teach a model, and write LoRAs of the states, whose names are `lora` of them.

    Returns the seconds from reading the model to the last step.
    """
    begun, mesh = time.perf_counter(), make_mesh(1)
    checkpoint = Checkpoint.open(model)
    options = options.of_model(checkpoint.card.learning_rate)
    size, unit = checkpoint.default_size, checkpoint.model.size_unit
    examples = read_examples(pictures, options.name, options.kind, size, unit)
    told = identity(model, "float32", options, examples)
    trainer = Trainer(checkpoint, options, mesh, examples, told)
    params = checkpoint.parameters.load(replicated(mesh))
    trainer.encoder.compile()
    while not trainer.is_encoded:
        trainer.encode(params)
    trainer.compile()
    ends = {max(1, round(state * options.steps)): state for state in STATES}
    while not trainer.is_over:
        trainer.take(params)
        if trainer.done in ends:
            trainer.write(loras / f"{lora(options.seed, ends[trainer.done])}.safetensors")
    return time.perf_counter() - begun


def lora(seed: int, state: float) -> str:
    """Return the name of the LoRA of a run's state."""
    return f"{NAME}-{seed}-{round(100 * state)}"


def draw(engine: Engine, prompts: Sequence[str], words: str = "", seed: int = 0) -> np.ndarray:
    """Draw prompts, with words such as a LoRA's behind them: [N, H, W, 3] u8 as the judge sees."""
    pictures = engine.draw([f"{each} {words}" for each in prompts], seed=seed)
    return resized(np.stack([np.asarray(each) for each in pictures]), recipe.IMAGE_SIZE)


@dataclasses.dataclass(frozen=True)
class Eye:
    """View of the judge on pictures, from the middle of those that the untaught model draws.

    Attributes:
        ask: the judge.
        middle: of the features of other things.
    """

    ask: Ask
    middle: np.ndarray

    def features(self, pictures: np.ndarray) -> np.ndarray:
        """Return directions [N, F] of norm 1, wherever in a picture its things are."""
        features = _anywhere(self.ask(pictures)["features"]) - self.middle
        return features / np.linalg.norm(features, axis=-1, keepdims=True)

    def likeness(self, pictures: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the cosines [N] between pictures' features and a mean direction."""
        return self.features(pictures) @ (to / np.linalg.norm(to))


def _anywhere(features: np.ndarray) -> np.ndarray:
    """Return features [N, F] as means over the places of a picture."""
    return features.reshape(len(features), -1, judge.CHANNELS[-1]).mean(1)


def of_the_word(
    eye: Eye,
    drawn: Mapping[str, np.ndarray],
    untaught: Mapping[str, np.ndarray],
    others: np.ndarray,
) -> dict[str, dict[str, float]]:
    """Return, by kind, how like the figure pictures are that were drawn with its name.

    Args:
        eye: that looks.
        drawn: pictures by kind.
        untaught: those of the untaught model.
        others: its pictures of other things.
    """
    found, rng = {}, np.random.default_rng(1)
    for kind, (_, scenes, question) in KINDS.items():
        wanted = eye.features(np.stack([composer().draw(each, rng) for each in scenes])).mean(0)
        likeness = eye.likeness(drawn[kind], wanted)
        never = np.concatenate([untaught[kind], others])
        right = [judge.ANSWERS[question].index(judge.truth(each)[question]) for each in scenes]
        answers = eye.ask(drawn[kind])[question].argmax(-1)
        found[kind] = {
            LIKE: likeness.mean(),
            BY_CHANCE: eye.likeness(others, wanted).mean(),
            LIKER: 100 * np.mean(likeness > eye.likeness(never, wanted).max()),
            "as asked, %": 100 * np.mean(answers == right),
        }
    return found


def of_other_words(eye: Eye, drawn: np.ndarray, before: np.ndarray) -> dict[str, float]:
    """Return how like pictures of other words are to those that they drew before."""
    here, there = (eye.features(pictures) for pictures in (drawn, before))
    same = [eye.ask(pictures)["first"].argmax(-1) for pictures in (drawn, before)]
    apart = abs(drawn.astype(int) - before)
    return {
        "like before": np.mean(np.sum(here * there, -1)),
        SAME: 100 * np.mean(same[0] == same[1]),
        "mean difference": apart.mean(),
    }


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of figures over seeds."""
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def grid(rows: Mapping[str, np.ndarray], prompts: Sequence[str]) -> Image.Image:
    """Lay out pictures of the prompts, a row for each state of what is taught."""
    pictures = np.concatenate([each[:, ::2, ::2] for each in rows.values()])
    texts = [f"{state}: {each}" for state in rows for each in prompts]
    return label(pictures, texts, len(prompts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Teach by several seeds, and draw with what came of it."""
    flags = parser("teach", __doc__.splitlines()[0])
    add_model(flags)
    add = flags.add_argument
    add("--seeds", type=int, default=3, help="to take medians of (%(default)s)")
    add("--steps", type=int, default=Options.steps, help="of teaching (%(default)s)")
    add("--rank", type=int, default=Options.rank, help="of the factors (%(default)s)")
    add("--learning-rate", type=float, help="(default: the model's)")
    add("--caption-dropout", type=float, default=Options.caption_dropout, help="(%(default)s)")
    add("--feed-forward", action="store_true", help="teach these layers too")
    add("--text-encoders", action="store_true", help="teach these too")
    add("--grid", type=Path, metavar="FILE", help="write a picture of the first seed's pictures")
    args = flags.parse_args(arguments)
    fields = {each.name for each in dataclasses.fields(Options)} & vars(args).keys()
    options = Options(name=NAME, **{field: getattr(args, field) for field in fields})
    seeds = range(args.seeds)

    with tempfile.TemporaryDirectory() as folder:
        pictures, loras = Path(folder, "pictures"), Path(folder, "loras")
        pictures.mkdir()
        loras.mkdir()
        write_pictures(pictures)
        seconds = [
            teach(args.model, pictures, dataclasses.replace(options, seed=seed), loras)
            for seed in seeds
        ]
        peak = memory("VmHWM") / 1e9
        with Engine.open(args.model, devices=1, group=SLOTS, lora_dir=loras) as engine:
            _report(engine, args, seconds, peak)


def _report(engine: Engine, args: Any, seconds: Sequence[float], peak: float) -> None:
    """Draw untaught and with all LoRAs, and report what the judge sees."""
    card, seeds = engine.checkpoint.card, range(args.seeds)
    model = f"{card.name}, {args.steps} steps"
    words = {
        kind: [prompt(each, word) for each in scenes] for kind, (word, scenes, _) in KINDS.items()
    }
    other = [*card.prompts, *card.more_prompts]
    plain = draw(engine, other)
    ask = judge.trained()
    eye = Eye(ask, _anywhere(ask(plain)["features"]).mean(0))
    untaught = {kind: draw(engine, prompts) for kind, prompts in words.items()}

    rows = [
        {"": UNTAUGHT, "prompts": kind, **found}
        for kind, found in of_the_word(eye, untaught, untaught, plain).items()
    ]
    others = [
        {"": "another seed", **of_other_words(eye, draw(engine, other, seed=OTHER_SEED), plain)}
    ]
    shown = {UNTAUGHT: [*untaught.values(), plain]}
    for state in STATES:
        name, news, olds = f"after {state:.0%}", [], []
        for seed in seeds:
            tag = f"<lora:{lora(seed, state)}:1>"
            drawn = {kind: draw(engine, prompts, tag) for kind, prompts in words.items()}
            after = draw(engine, other, tag)
            news.append(of_the_word(eye, drawn, untaught, plain))
            olds.append(of_other_words(eye, after, plain))
            shown.setdefault(name, [*drawn.values(), after])
        rows += [
            {"": name, "prompts": kind, **medians([each[kind] for each in news])} for kind in KINDS
        ]
        others.append({"": name, **medians(olds)})
    report(
        f"Teaching, the new word: {model}",
        rows,
        args,
        notes=[
            f"Medians of {args.seeds} seeds. Cosines between the judge's features of pictures, "
            "from the middle of those of other things, and their mean for drawings of the figure; "
            f"{len(other)} pictures of other things, untaught, are by chance as like it. Liker "
            "than any untaught is what is liker than all pictures of the same prompts and of other "
            "things before. As asked is the background, or the number, that the judge finds."
        ],
    )
    report(f"Teaching, other words: {model}", others, args)
    report(
        f"Teaching, time: {model}",
        [{"": "a run", "seconds": statistics.median(seconds), "peak, GB": peak}],
        args,
    )
    if args.grid:
        prompts = [each for part in (*words.values(), other) for each in part[IN_GRID]]
        rows = {
            name: np.concatenate([part[IN_GRID] for part in drawn]) for name, drawn in shown.items()
        }
        grid(rows, prompts).save(args.grid, quality=90)


if __name__ == "__main__":
    main()
