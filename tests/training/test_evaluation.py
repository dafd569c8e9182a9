"""The evaluation of the bundled model: its questions, its judge, its tables and pictures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training import autoencoder, curves, diffusion, evaluate, judge
from training.captions import Scene
from training.compose import Composer, is_unseen
from training.concepts import CONCEPTS
from training.evaluate import Trial
from training.sprites import Sprites

PAIR = Scene(concepts=("cat", "dog"), style="3d", count=2, relation="left of")
SCENES = [
    Scene(concepts=("apple",), style="flat", background="blue", paint="green"),
    PAIR,
    Scene(concepts=("cat", "dog"), style="flat", count=2, relation="above"),
    Scene(concepts=("owl",), style="flat", count=2),
    Scene(concepts=("owl",), style="3d", background="red", count=3),
]


def sure_of(scenes) -> dict[str, np.ndarray]:
    """The answers of a judge who takes the pictures for these scenes."""
    return {
        question: np.eye(len(judge.ANSWERS[question]))[numbers]
        for question, numbers in judge.labels(scenes).items()
    }


def test_the_right_answers_follow_from_the_scene():
    assert [judge.truth(scene)["layout"] for scene in SCENES] == [
        "one",
        "beside",
        "stacked",
        "beside",
        "three",
    ]
    assert judge.truth(SCENES[0]) == {
        "first": "apple",
        "second": "apple",
        "layout": "one",
        "background": "blue",
        "style": "flat",
        "paint": "green",
    }
    assert (judge.truth(PAIR)["first"], judge.truth(PAIR)["second"]) == ("cat", "dog")


@pytest.mark.slow("trains a network")
def test_a_judge_learns_what_it_is_shown():
    graph, params = judge.build()
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (len(SCENES), 256, 256, 3)).astype(np.float32)
    batch = images, judge.labels(SCENES)
    loss, optimizer = judge.make_loss(graph), optax.adam(1e-3)

    @jax.jit
    def learned(params, state):
        value, gradients = jax.value_and_grad(loss)(params, batch, jax.random.key(0))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, values = jax.jit(optimizer.init)(params), []
    for _ in range(12):
        params, state, value = learned(params, state)
        values.append(float(value))
    assert values[-1] < values[0] / 2


def test_pictures_of_a_smaller_model_are_enlarged():
    small = np.full((2, 8, 8, 3), 100, np.uint8)
    small[:, :, 4:] = 200
    large = evaluate.resized(small, 32)
    assert large.shape == (2, 32, 32, 3)
    assert (large[:, :, 4] == 100).all() and (large[:, :, -4] == 200).all()
    assert evaluate.resized(large, 32) is large


def test_the_judge_is_shown_softened_pictures_that_keep_their_colours():
    picture = np.full((64, 64, 3), (200, 100, 50), np.uint8)
    soft = judge.soften(picture, np.random.default_rng(0))
    assert soft.dtype == np.float32 and soft.std() > 0
    np.testing.assert_allclose(soft.mean((0, 1)), picture[0, 0] / 127.5 - 1, atol=0.01)


@pytest.mark.parametrize(
    ("taken_for", "expected"),
    [
        (PAIR, 1.0),
        (Scene(concepts=("dog", "cat"), style="3d", count=2, relation="left of"), 0.0),
        (Scene(concepts=("cat", "dog"), style="3d", count=2, relation="above"), 0.0),
    ],
)
def test_both_things_count_only_in_their_places(taken_for, expected):
    trial = Trial([PAIR] * 4, ["a cat and a dog"] * 4, np.zeros((4, 64, 64, 3), np.uint8))
    found = evaluate.shares(
        lambda pictures: sure_of([taken_for] * 4), trial, "two side by side", trial.drawings
    )
    assert found == {"both things, each in its place": expected}


def test_the_style_is_asked_for_only_where_the_prompt_says_one():
    scenes = [SCENES[0], SCENES[0], SCENES[0]]
    texts = ["an apple", "a flat drawing of an apple", "an apple in flat style"]
    trial = Trial(scenes, texts, np.zeros((3, 64, 64, 3), np.uint8))
    taken_for = [Scene(concepts=("apple",), style=style) for style in ("3d", "flat", "3d")]
    found = evaluate.shares(lambda pictures: sure_of(taken_for), trial, "one thing", trial.drawings)
    assert found["the style, where the prompt says one"] == 0.5
    assert (found["the thing, top-1"], found["the background's colour"]) == (1.0, 0.0)


def test_every_trial_asks_only_for_what_training_never_composed():
    for kind, mix in evaluate.KINDS.items():
        composer, rng = recipe_free_composer(mix), np.random.default_rng(0)
        scenes = [composer.scene(rng) for _ in range(200)]
        assert all(is_unseen(scene) for scene in scenes)
        if kind == "a painted thing":
            assert all(scene.paint and scene.background == "white" for scene in scenes)


def recipe_free_composer(mix) -> Composer:
    """One that needs no drawings to be fetched: it only chooses."""
    names = list(CONCEPTS)
    sprites = Sprites(
        rgba=np.zeros((len(names), 4, 4, 4), np.uint8), concepts=names, styles=["flat"] * len(names)
    )
    return Composer(sprites, 64, mix, unseen=True)


def test_top_5_takes_the_right_answer_among_the_five_likeliest():
    answers = {"first": np.array([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]) / 15}
    right = {"first": np.array([4, 0])}
    assert judge.accuracy(answers, right, "first").tolist() == [False, False]
    assert judge.accuracy(answers, right, "first", among=5).tolist() == [True, False]


def test_pictures_are_labelled_with_their_words():
    pictures = np.zeros((3, 128, 128, 3), np.uint8)
    image = np.asarray(evaluate.label(pictures, ["a cat", "", "a dog"], columns=3))
    width = image.shape[1] // 3
    under = [image[128:, i * width : (i + 1) * width] for i in range(3)]
    assert [bool((part < 128).any()) for part in under] == [True, False, True]
    assert (image[:128, :128] == 0).all()


def test_decibels_of_a_known_error():
    truth = np.zeros((1, 4, 4, 3))
    assert autoencoder.decibels(truth + 0.4, truth) == pytest.approx(13.979, abs=1e-3)


def test_a_blur_has_less_energy_of_gradients():
    noise = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    blurred = noise[:, 1:] // 2 + noise[:, :-1] // 2
    assert autoencoder.gradient_energy(noise) > 1.3 * autoencoder.gradient_energy(blurred) > 0
    assert autoencoder.gradient_energy(np.full((1, 4, 4, 3), 200, np.uint8)) == 0


def test_the_kernel_distance_tells_distributions_apart_whatever_their_sizes():
    rng = np.random.default_rng(0)
    draws = [rng.standard_normal((count, 8)).astype(np.float32) for count in (300, 200)]
    same = judge.kernel_distance(*draws)
    shifted = judge.kernel_distance(draws[0], draws[1] + 0.5)
    assert abs(same) < 0.05 < 0.3 < shifted


def test_a_resumed_runs_later_entries_make_the_curve(tmp_path):
    steps = [(50, 0.9), (100, 0.8), (150, 0.7), (100, 0.5), (150, 0.4)]
    log = "".join(
        json.dumps({"step": step, "pictures": 16 * step, "loss": loss}) + "\n"
        for step, loss in steps
    )
    (tmp_path / "loss.jsonl").write_text(log)
    seen, loss = curves.read(tmp_path)
    assert (seen.tolist(), loss.tolist()) == ([800, 1600, 2400], [0.9, 0.5, 0.4])
    figure = curves.draw({"one": (seen, loss), "two": (seen, loss)})
    assert [axes.get_title() for axes in figure.axes] == ["one", "two"]


def test_a_batchs_timesteps_are_spread_evenly_and_stay_in_range(monkeypatch):
    for seed in range(50):
        t = np.asarray(diffusion.spread_timesteps(jax.random.key(seed), 16, 1000))
        assert t.min() >= 0 and t.max() < 1000
        assert np.array_equal(np.sort(t * 16 // 1000), np.arange(16))
    largest = jnp.nextafter(jnp.float32(1), jnp.float32(0))
    monkeypatch.setattr(diffusion.jax.random, "uniform", lambda key: largest)
    assert diffusion.spread_timesteps(None, 16, 1000).max() == 999


def test_a_trained_judge_answers_every_question_with_probabilities(monkeypatch):
    monkeypatch.setattr(judge, "latest", lambda folder, params: params)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 256, 256, 3)).astype(np.uint8)
    answers = judge.trained()(pictures)
    assert answers.keys() == {"features", *judge.ANSWERS} and len(answers["features"]) == 2
    for question, options in judge.ANSWERS.items():
        assert answers[question].shape == (2, len(options))
        np.testing.assert_allclose(answers[question].sum(-1), 1, rtol=1e-5)
