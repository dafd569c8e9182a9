"""Journeys: pictures on the way from one prompt or seed to another, and files that move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.report import count_compilations
from sd_tpu.models.slerp import slerp
from sd_tpu.pictures.images import parse_parameters, read_parameters, read_png
from sd_tpu.pictures.movie import write_movie
from sd_tpu.request import Request
from sd_tpu.settings import RequestError
from tests.support.command import run
from tests.support.pictures import ASKED, assert_alike, drawn, opened, pipelines

PAIR = dict(to_prompt="a dog", to_seed=9, share=0.3)


@pytest.fixture(scope="module", params=["sd1", "sdxl"])
def loaded(request, tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model) of two layouts in turn."""
    yield from opened(pipelines(request.param), tmp_path_factory.mktemp(request.param))


def test_half_way_between_two_directions_is_as_far_from_either_and_as_long():
    one, other = jnp.array([2.0, 0, 0]), jnp.array([0, 2.0, 0])
    np.testing.assert_allclose(slerp(one, other, jnp.float32(0.5)), [2**0.5, 2**0.5, 0], atol=1e-6)
    np.testing.assert_allclose(slerp(one, other, jnp.float32(1 / 3)), [3**0.5, 1, 0], atol=1e-6)
    for share, end in ((0, one), (1, other)):
        np.testing.assert_allclose(slerp(one, other, jnp.float32(share)), end, atol=1e-6)


@pytest.mark.parametrize("other", [[1.0, 0], [3.0, 1e-6], [-1.0, 0], [0.0, 0]])
def test_between_parallel_vectors_the_way_is_straight(other):
    way = slerp(jnp.array([[1.0, 0]]), jnp.array([other]), jnp.float32(0.25), axis=-1)
    np.testing.assert_allclose(way[0], [0.75 + 0.25 * other[0], 0], atol=1e-5)


def between(one: np.ndarray, other: np.ndarray, share: float, axis=None) -> np.ndarray:
    """By the formula."""
    one, other = np.float64(one), np.float64(other)
    length = [np.sqrt((each**2).sum(axis=axis, keepdims=True)) for each in (one, other)]
    angle = np.arccos(
        ((one / length[0]) * (other / length[1])).sum(axis=axis, keepdims=True).clip(-1, 1)
    )
    sine = np.where(angle > 1e-3, np.sin(angle), 1)
    first = np.where(angle > 1e-3, np.sin((1 - share) * angle) / sine, 1 - share)
    return first * one + np.where(angle > 1e-3, np.sin(share * angle) / sine, share) * other


@pytest.mark.slow("compiles each model")
def test_a_picture_on_the_way_is_pytorchs_of_the_embeddings_and_noise_between(loaded):
    reference, engine = loaded
    (ours,) = drawn(engine, {}, **PAIR)
    with torch.inference_mode():
        embedded = [
            [
                each.numpy()
                for each in reference.encode_prompt(
                    prompt=prompt,
                    device="cpu",
                    num_images_per_prompt=1,
                    do_classifier_free_guidance=True,
                    negative_prompt=ASKED["negative_prompt"],
                )
            ]
            for prompt in (*ASKED["prompts"], "a dog")
        ]
    (one, negative, *pooled), (other, *_) = embedded
    given = dict(prompt_embeds=between(one, other, 0.3, -1), negative_prompt_embeds=negative)
    if pooled:
        given |= dict(
            pooled_prompt_embeds=between(pooled[0], embedded[1][2], 0.3, -1),
            negative_pooled_prompt_embeds=pooled[1],
        )
    h, w, channels = engine.programs.latent_shape
    noises = [
        np.array(jax.random.normal(jax.random.PRNGKey(seed), (1, channels, h, w)))
        for seed in (ASKED["seed"], 9)
    ]
    given |= dict(latents=between(*noises, 0.3))
    reference.set_progress_bar_config(disable=True)
    images = reference(
        **{
            name: torch.as_tensor(np.array(value), dtype=torch.float32)
            for name, value in given.items()
        },
        num_inference_steps=ASKED["steps"],
        guidance_scale=ASKED["guidance"],
        output_type="np",
    ).images
    assert_alike(ours, np.round(images[0] * 255).astype(int))


def test_the_ends_of_the_way_are_what_they_are_without_one_and_neighbours_change_nothing(loaded):
    _, engine = loaded
    (plain,) = drawn(engine, {})
    assert np.array_equal(drawn(engine, {}, **{**PAIR, "share": 0})[0], plain)
    own = [None, {"to_seed": 9, "share": 0.5}, PAIR, {"to_prompt": "a dog", "share": 1.0}]
    together = drawn(engine, {}, prompts=["a cat"] * 4, overrides=own)
    assert np.array_equal(together[0], plain)
    assert len({each.tobytes() for each in together}) == 4
    compiled = count_compilations()
    for index, settings in enumerate(own):
        (alone,) = drawn(
            engine, {}, prompts=[*[""] * index, "a cat"], overrides=[*[None] * index, settings]
        )
        assert np.array_equal(alone, together[index])
    assert compiled() == 0
    (there,) = drawn(engine, {}, prompts=["a dog"])
    assert_alike(drawn(engine, {}, to_prompt="a dog", share=1.0)[0], there.astype(int))


def test_a_file_says_what_its_picture_was_on_the_way_to(loaded):
    _, engine = loaded
    request = Request.check({**ASKED, **PAIR, "to_prompt": "a dog, 3:4"}, engine.catalog)
    text = read_parameters(engine.to_png(np.zeros((64, 64, 3), np.uint8), request))
    assert 'Second prompt: "a dog, 3:4", Second seed: 9, Share of the way: 0.3' in text
    (made,) = parse_parameters(text).pictures
    assert (made.to_prompt, made.to_seed, made.share) == ("a dog, 3:4", 9, 0.3)


def test_what_cannot_be_on_the_way_is_refused_in_a_sentence(loaded):
    _, engine = loaded
    for values, complaint in (
        (dict(init_image="0" * 64), "cannot begin or end with a start picture"),
        (dict(share=2), "Share of the way should be from 0 to 1"),
        (dict(to_seed=-2), "Second seed should be from -1"),
    ):
        with pytest.raises(RequestError, match=complaint):
            Request.check({**ASKED, **PAIR, **values}, engine.catalog)


@pytest.mark.parametrize("kind", ["webp", "gif"])
def test_a_movie_shows_every_picture_in_order_for_so_long(kind, tmp_path):
    shades = [20, 120, 240, 90]
    write_movie(
        [np.full((8, 12, 3), shade, np.uint8) for shade in shades], tmp_path / f"a.{kind}", 80
    )
    with Image.open(tmp_path / f"a.{kind}") as movie:
        assert movie.n_frames == 4 and movie.size == (12, 8) and movie.info["loop"] == 0
        for number, shade in enumerate(shades):
            movie.seek(number)
            assert abs(np.asarray(movie.convert("RGB")).mean() - shade) < 4
            assert movie.info["duration"] == 80


def test_ffmpeg_is_given_the_pixels_as_they_are(tmp_path, monkeypatch):
    program = tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\ncat > "{tmp_path}/given"\necho "$@" > "{tmp_path}/said"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pictures = list(np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8))
    write_movie(pictures, tmp_path / "a.mp4", 40)
    assert (tmp_path / "given").read_bytes() == b"".join(map(np.ndarray.tobytes, pictures))
    said = (tmp_path / "said").read_text()
    assert "-s 7x5 -r 25.0 -i -" in said and said.endswith(f"{tmp_path / 'a.mp4'}\n")
    program.write_text("#!/bin/sh\necho no such codec >&2\nexit 1\n")
    with pytest.raises(OSError, match="ffmpeg failed: no such codec"):
        write_movie(pictures, tmp_path / "a.mp4", 40)


@pytest.mark.slow("compiles for a journey by a command")
def test_a_journey_goes_from_one_picture_to_the_other(least, tmp_path):
    asked = ("--model", least, "--steps", 2, "--devices", 1)
    code, out, err = run(
        "journey",
        *asked,
        "--prompt",
        "a cat",
        "--to-prompt",
        "a dog",
        "--seed",
        3,
        "--to-seed",
        9,
        "--pictures",
        8,
        "--movie",
        "gif",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    *pictures, movie = out.splitlines()
    assert movie == str(tmp_path / "journey.gif")
    assert sorted(pictures) == [str(tmp_path / f"{number:02}.png") for number in range(8)]
    made = [read_png(tmp_path / f"{number:02}.png").pictures[0] for number in range(8)]
    np.testing.assert_allclose([each.share for each in made], [*np.arange(7) / 7, 0], atol=1e-9)
    assert {(each.prompt, each.seed) for each in made[:7]} == {("a cat", 3)}
    assert (made[7].prompt, made[7].seed) == ("a dog", 9)
    with Image.open(tmp_path / "journey.gif") as movie:
        assert movie.n_frames == 8
    pixels = [np.asarray(Image.open(tmp_path / f"{n:02}.png")) for n in range(8)]
    assert len({each.tobytes() for each in pixels}) == 8


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "A journey needs another prompt or another seed to go to."),
        (("--to-seed", 1, "--movie", "mp4"), "An MP4 needs ffmpeg, which is not installed here"),
    ],
)
def test_a_journey_that_leads_nowhere_is_refused_at_once(flags, told, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("journey", "--prompt", "a", *flags, "--out", tmp_path / "out")
    assert code == 2 and told in err and not (tmp_path / "out").exists()
