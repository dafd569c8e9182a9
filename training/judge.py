"""A classifier that says what a picture shows: python -m training.judge [--help]

It has nothing in common with the networks it judges but the drawings: it sees pixels, and is
trained on composed pictures of every combination, also those kept from their training.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from PIL import Image, ImageFilter

from sd_tpu.models.layers import GroupNorm, conv, linear
from sd_tpu.runtime.mesh import make_mesh
from training import captions, recipe
from training.autoencoder import to_unit
from training.captions import Scene
from training.compose import Mix
from training.concepts import CONCEPTS
from training.sprites import STYLES
from training.trainer import ahead, compiled, from_command_line, latest, train

FOLDER = recipe.CACHE / "judge"
# A plain mix: what the evaluation asks about, each kind often enough to be learned well.
MIX = Mix(
    single=0.38,
    small=0.06,
    big=0.06,
    beside=0.18,
    stacked=0.18,
    copies=0.14,
    recoloured=0.7,
    default_background=0.1,
)
CHANNELS = (16, 32, 64, 128, 256, 256)  # at 1/2 to 1/64 of the picture's size
SMOOTHING = 0.05  # of the labels
BLUR = 2.4  # pixels at most: an autoencoder's pictures are softer than drawings
NOISE = 0.03  # at most, of pictures in [-1, 1]

# question -> its possible answers. `first` is the only thing, or the left or upper one of two.
ANSWERS: dict[str, tuple[str, ...]] = {
    "first": tuple(CONCEPTS),
    "second": tuple(CONCEPTS),
    "layout": ("one", "beside", "stacked", "three"),
    "background": tuple(captions.BACKGROUNDS),
    "style": STYLES,
    "paint": ("none", *captions.PAINTS),
}


def truth(scene: Scene) -> dict[str, str]:
    """Return the right answer to every question about a picture of `scene`."""
    layout = {1: "one", 2: "beside", 3: "three"}[scene.count]
    return {
        "first": scene.concepts[0],
        "second": scene.concepts[-1],
        "layout": "stacked" if scene.relation == "above" else layout,
        "background": scene.background,
        "style": scene.style,
        "paint": scene.paint or "none",
    }


def labels(scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """Return the right answers as numbers: question -> int32 [B]."""
    answers = [truth(scene) for scene in scenes]
    return {
        question: np.array([options.index(answer[question]) for answer in answers], np.int32)
        for question, options in ANSWERS.items()
    }


class Judge(nnx.Module):
    """A small residual network with one linear layer of answers for each question."""

    def __init__(self, *, rngs: nnx.Rngs):
        widths = (3, *CHANNELS)
        kwargs = dict(dtype=jnp.float32, rngs=rngs)
        self.halve = nnx.List(
            conv(a, b, strides=2, **kwargs) for a, b in zip(widths, CHANNELS, strict=False)
        )
        self.norms = nnx.List(GroupNorm(b, 8, 1e-5, **kwargs) for b in CHANNELS)
        self.refine = nnx.List(conv(b, b, **kwargs) for b in CHANNELS)
        features = CHANNELS[-1] * (recipe.IMAGE_SIZE // 2 ** len(CHANNELS)) ** 2
        self.answers = nnx.Dict(
            {
                question: linear(features, len(options), **kwargs)
                for question, options in ANSWERS.items()
            }
        )

    def __call__(self, images: jax.Array) -> dict[str, jax.Array]:
        """Images [B, H, W, 3] in [-1, 1] -> logits [B, answers] for each question."""
        x = self.features(images)
        return {question: answer(x) for question, answer in self.answers.items()}

    def features(self, x: jax.Array) -> jax.Array:
        """Return the features of images [B, H, W, 3] in [-1, 1] -> [B, features]."""
        for halve, norm, refine in zip(self.halve, self.norms, self.refine, strict=True):
            x = halve(x)
            x = x + refine(jax.nn.silu(norm(x)))
        return jax.nn.silu(x).reshape(len(x), -1)


def build():
    """Return the judge's graph and initial parameters."""
    graph, state = nnx.split(Judge(rngs=nnx.Rngs(0)))
    return graph, nnx.to_pure_dict(state)


def make_loss(graph: nnx.GraphDef):
    """Mean cross entropy of all questions."""

    def loss(params, batch, key):
        images, right = batch
        total = 0.0
        for question, logits in nnx.merge(graph, params)(images).items():
            wanted = optax.smooth_labels(
                jax.nn.one_hot(right[question], logits.shape[-1]), SMOOTHING
            )
            total += jnp.mean(optax.softmax_cross_entropy(logits, wanted))
        return total / len(ANSWERS)

    return loss


def soften(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a picture [H, W, 3] u8 as float32 in [-1, 1], with up to BLUR and NOISE."""
    blurred = Image.fromarray(picture).filter(ImageFilter.GaussianBlur(BLUR * rng.random()))
    noise = rng.standard_normal(picture.shape, np.float32) * NOISE * rng.random()
    return to_unit(np.asarray(blurred)) + noise


def trained():
    """Return a function: pictures [B, H, W, 3] u8 -> for each question [B, answers].

    The answers are probabilities.

    Beside the questions' there is an array "features" [B, F].

    Raises:
        FileNotFoundError: no judge has been trained yet.
    """
    graph, params = build()
    params = latest(FOLDER, params)

    @compiled
    def ask(images):
        judge = nnx.merge(graph, params)
        return {**jax.tree.map(jax.nn.softmax, judge(images)), "features": judge.features(images)}

    return lambda pictures: jax.tree.map(np.asarray, ask(to_unit(pictures)))


def accuracy(
    probabilities: Mapping[str, np.ndarray],
    right: Mapping[str, np.ndarray],
    question: str,
    among: int = 1,
) -> np.ndarray:
    """Whether the right answer is among the likeliest, for each picture: bool [B]."""
    likeliest = np.argsort(-probabilities[question], axis=-1)[:, :among]
    return (likeliest == right[question][:, None]).any(-1)


def kernel_distance(features: np.ndarray, others: np.ndarray) -> float:
    """Return how far two sets of features [N, F] are from one distribution: 0 if of one.

    The unbiased squared maximum mean discrepancy of a cubic kernel (Binkowski et al. 2018,
    arXiv:1801.01401).
    """

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    def within(a):
        return (kernel(a, a).sum() - np.trace(kernel(a, a))) / (len(a) * (len(a) - 1))

    features, others = features.astype(np.float64), others.astype(np.float64)
    return within(features) + within(others) - 2 * kernel(features, others).mean()


def _batch(count: int, step: int):
    """Return softened pictures [count, H, W, 3] f32, and the right answers as `labels` does."""
    composer = recipe.composer(MIX, unseen=None)
    rng = np.random.default_rng([recipe.Stream.JUDGE, step])
    pictures, _, scenes = zip(*(composer.sample(rng) for _ in range(count)), strict=True)
    return np.stack([soften(picture, rng) for picture in pictures]), labels(scenes)


def main() -> None:
    """Train to the end of the schedule, or resume."""
    run, (graph, params) = from_command_line(recipe.JUDGE_RUN, __doc__), build()
    recipe.composer()  # renders the drawings, which else every process would
    train(
        FOLDER,
        run,
        params,
        make_loss(graph),
        partial(ahead, partial(_batch, run.batch)),
        make_mesh(),
    )


if __name__ == "__main__":
    main()
