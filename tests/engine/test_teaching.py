"""Teaching from a folder of pictures to a LoRA's file, on tiny checkpoints."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from sd_tpu import CheckpointError, Engine, RequestError, TeachingStopped, teach
from sd_tpu.checkpoint.adapters import changed_by_lora
from sd_tpu.checkpoint.weights import shapes as shapes_of
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.training import step as step_module
from sd_tpu.training import teach as module
from sd_tpu.training.options import Options
from sd_tpu.training.pictures import bucket, captioned, read_examples, words_of_name
from sd_tpu.training.step import Pool
from sd_tpu.training.teach import Estimate, Lesson
from tests.support import anima, flux, flux2, sd3, tiny, z_image
from tests.support.command import run
from tests.support.reference import LEAST, make_torch_pipeline

HOW = dict(name="zork", steps=6, rank=4, learning_rate=0.01, size=(32, 32))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Five pictures of two shapes, one with a caption."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(5):
        size = (48, 80, 3) if number == 4 else (64, 64, 3)
        pixels = rng.integers(0, 255, size, np.uint8)
        Image.fromarray(pixels).save(folder / f"zork {number}.png")
    (folder / "zork 2.txt").write_text("a zork on a hill")
    return folder


@pytest.fixture(scope="module")
def squares(pictures, tmp_path_factory) -> Path:
    """Pictures of one shape, for which one program is compiled."""
    folder = tmp_path_factory.mktemp("squares") / "pictures"
    shutil.copytree(pictures, folder)
    (folder / "zork 4.png").unlink()
    return folder


@pytest.fixture(scope="module")
def taught(least, squares, tmp_path_factory) -> Path:
    """The LoRA of a run on one device."""
    out = tmp_path_factory.mktemp("taught") / "zork.safetensors"
    return teach(least, squares, out=out, devices=1, **HOW)


def test_the_same_seed_gives_the_same_file_by_the_same_programs_and_another_another(
    least, squares, taught, tmp_path, monkeypatch
):
    other = {**HOW, "seed": 1}
    differs = teach(least, squares, out=tmp_path / "b.safetensors", devices=1, **other)
    assert load_file(differs).keys() == load_file(taught).keys()
    assert differs.read_bytes() != taught.read_bytes()
    monkeypatch.setattr(step_module, "loss", None)  # which is called where a step is traced
    monkeypatch.setattr(StableDiffusion, "encode_prompt", None)
    again = teach(least, squares, out=tmp_path / "a.safetensors", devices=1, **HOW)
    assert again.read_bytes() == taught.read_bytes()


def test_a_run_that_was_killed_goes_on_to_the_same_file(
    least, squares, taught, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SAVED_SECONDS", 0)
    monkeypatch.setattr(module, "REPORTED_SECONDS", 0)
    out = tmp_path / "zork.safetensors"

    def killed(event):
        if isinstance(event, Lesson) and event.step == 4:
            raise MemoryError

    arguments = dict(out=out, devices=1, **HOW)
    with pytest.raises(MemoryError):
        teach(least, squares, on_event=killed, **arguments)
    assert not out.exists()
    with pytest.raises(RequestError, match="go on with --resume"):
        teach(least, squares, **arguments)
    with pytest.raises(RequestError, match="its rank was 4, and is 8 now"):
        teach(least, squares, resume=True, **{**arguments, "rank": 8})
    steps = []
    teach(
        least,
        squares,
        resume=True,
        on_event=lambda event: isinstance(event, Lesson) and steps.append(event.step),
        **arguments,
    )
    assert steps[0] == 4
    assert out.read_bytes() == taught.read_bytes()
    assert [*tmp_path.iterdir()] == [out]


def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(
    least, squares, taught, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "REPORTED_SECONDS", 0)
    out = tmp_path / "zork.safetensors"

    def interrupt(event):
        if isinstance(event, Lesson) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TeachingStopped, match="Stopped after step 2") as stopped:
        teach(least, squares, out=out, devices=1, on_event=interrupt, **HOW)
    assert stopped.value.file == tmp_path / "zork.teaching"
    changed = tmp_path / "pictures"
    shutil.copytree(squares, changed)
    (changed / "zork 1.txt").write_text("a zork in the sea")
    with pytest.raises(RequestError, match="pictures or their captions have changed"):
        teach(least, changed, out=out, devices=1, resume=True, **HOW)
    teach(least, squares, out=out, devices=1, resume=True, **HOW)
    assert out.read_bytes() == taught.read_bytes()


@pytest.mark.slow("compiles a step twice, once of several devices")
def test_batches_on_several_devices_that_make_a_step_teach_as_one_batch_on_one(
    least, squares, tmp_path
):
    how = {**HOW, "steps": 3, "optimizer": "prodigy", "caption_dropout": 0.4}
    one, other = (
        load_file(teach(least, squares, out=tmp_path / name, **{**how, **different}))
        for name, different in {
            "a.safetensors": dict(devices=1, batch=8),
            "b.safetensors": dict(devices=4, batch=4, accumulate=2),
        }.items()
    )
    for name, factor in one.items():
        np.testing.assert_allclose(other[name], factor, atol=1e-4 * np.abs(factor).max())


def test_the_file_says_what_was_taught_and_how(taught):
    with safe_open(taught, framework="np") as file:
        metadata = file.metadata()
        names = [*file.keys()]
    assert metadata["ss_output_name"] == "zork"
    assert metadata["ss_network_dim"] == metadata["ss_network_alpha"] == "4"
    told = json.loads(metadata["sd_tpu"])
    assert told["steps"] == 6 and told["captions"] == 4 and told["learning_rate"] == 0.01
    assert "/" not in told["model"]
    assert all(name.startswith("unet.") and ".attn" in name for name in names)


@pytest.mark.parametrize("layout", ["sd1", "sd2"])
@pytest.mark.slow("draws with PyTorch and compiles a step and the programs that draw")
def test_diffusers_draws_with_the_file_as_the_engine_does(squares, tmp_path, layout):
    pipeline = make_torch_pipeline(layout, **LEAST)
    pipeline.save_pretrained(tmp_path / "model")
    how = {**HOW, "learning_rate": 0.05, "feed_forward": True, "text_encoders": True}
    file = teach(tmp_path / "model", squares, out=tmp_path / "zork.safetensors", devices=1, **how)
    assert any(name.startswith("text_encoder.") for name in load_file(file))
    pipeline.scheduler = DDIMScheduler.from_config(
        pipeline.scheduler.config, clip_sample=False, set_alpha_to_one=False
    )
    pipeline.set_progress_bar_config(disable=True)
    latents = np.array(jax.random.normal(jax.random.PRNGKey(3), (4, 8, 8)))

    def by_pytorch() -> np.ndarray:
        return pipeline(
            "a zork",
            latents=torch.from_numpy(latents)[None],
            num_inference_steps=4,
            guidance_scale=3.0,
            output_type="np",
        ).images[0]

    before = by_pytorch()
    pipeline.load_lora_weights(str(tmp_path), weight_name=file.name)
    wanted = np.round(255 * by_pytorch())
    assert np.abs(wanted - 255 * before).mean() > 2
    with Engine.open(tmp_path / "model", devices=1, lora_dir=tmp_path) as engine:
        (picture,) = engine.draw(
            "a zork <lora:zork:1>",
            seed=3,
            steps=4,
            guidance=3.0,
            sampler="ddim",
            width=wanted.shape[1],
            height=wanted.shape[0],
        )
    assert (np.abs(np.asarray(picture) - wanted) <= 2).mean() >= 0.995


# --- pictures and captions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("zork_on-a beach (3)", "zork on a beach"),
        ("IMG_20261128", ""),
        ("DSC0012 sunset", "sunset"),
        ("猫", "猫"),
        ("07", ""),
    ],
)
def test_a_files_name_says_what_it_shows_unless_a_camera_gave_it(stem, words):
    assert words_of_name(stem) == words


@pytest.mark.parametrize(
    ("text", "kind", "caption"),
    [
        ("", "thing", "a zork"),
        ("Zork", "thing", "a zork"),
        ("on a beach", "thing", "a zork, on a beach"),
        ("two ZORKs", "thing", "a zork, two ZORKs"),
        ("two red zork", "thing", "two red zork"),
        ("on a beach", "person", "zork, on a beach"),
        ("", "person", "zork"),
        ("a house", "style", "a house in the style of zork"),
        ("", "style", "in the style of zork"),
    ],
)
def test_captions_name_what_is_taught(text, kind, caption):
    assert captioned(text, "zork", kind) == caption


@pytest.mark.parametrize(
    ("shown", "size"),
    [
        ((1000, 1000), (512, 512)),
        ((1100, 1000), (512, 512)),
        ((1200, 900), (448, 576)),
        ((900, 1200), (576, 448)),
        ((3000, 500), (320, 704)),
    ],
)
def test_pictures_are_looked_at_in_the_nearest_of_five_shapes(shown, size):
    assert bucket(shown, (512, 512), 64) == size


def test_captions_come_from_text_files_first(pictures):
    examples = read_examples(pictures, "zork", "thing", (64, 64), 16)
    assert [each.caption for each in examples] == ["a zork"] * 2 + ["a zork on a hill"] + [
        "a zork"
    ] * 2
    assert examples[4].size != examples[0].size == (64, 64)
    assert examples[4].pixels().shape == (*examples[4].size, 3)


def test_pictures_of_a_step_are_of_one_size_and_each_is_as_likely():
    from sd_tpu.training.encoding import Encoded

    def encoded(number: int) -> Encoded:
        side = 4 if number == 3 else 8
        latents = np.full((side, side, 1), number, np.float32)
        return Encoded(latents, np.float32(1), np.float32(0))

    options = Options(name="zork", batch=2, caption_dropout=0.25)
    pool = Pool([encoded(number) for number in range(4)], options)
    seen, with_text = np.zeros(4), []
    for step in range(400):
        batch = pool.batch(step)
        numbers = batch["latents"][0, :, 0, 0, 0].astype(int)
        assert batch["number"].tolist() == [[0, 1]]
        assert (3 in numbers) == (numbers.tolist() == [3, 3])
        assert 3 in numbers or numbers[0] != numbers[1]
        np.add.at(seen, numbers, 1)
        with_text += batch["text"].ravel().tolist()
    assert seen.min() > 150 and seen.max() < 250
    assert 0.7 < np.mean(with_text) < 0.8


# --- what cannot be taught ----------------------------------------------------------------------


def refused(checkpoint, folder: Path, tmp_path: Path, **changes) -> str:
    with pytest.raises((RequestError, CheckpointError)) as caught:
        teach(checkpoint, folder, **{"out": tmp_path / "z.safetensors", **HOW, **changes})
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert not (tmp_path / "z.safetensors").exists()
    return message


def copies(pictures: Path, folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        shutil.copy(pictures / "zork 0.png", folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("count", [0, 1, 3, 41, 500])
def test_too_few_and_too_many_pictures_are_refused(least, pictures, tmp_path, count):
    folder = copies(pictures, tmp_path / "some", count)
    message = refused(least, folder, tmp_path)
    assert message.endswith(f"has {count}.") and "4 to 40 pictures" in message


def test_a_text_file_called_png_is_refused(least, pictures, tmp_path):
    folder = copies(pictures, tmp_path / "some", 5)
    (folder / "3.png").write_text("this is a text")
    assert "3.png is in no format that is read here" in refused(least, folder, tmp_path)


def test_a_caption_in_another_encoding_is_refused(least, pictures, tmp_path):
    folder = copies(pictures, tmp_path / "some", 5)
    (folder / "3.txt").write_bytes("ein grüner Zork".encode("latin-1"))
    assert "3.txt is no text in UTF-8" in refused(least, folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(name="a/b"), "cannot be the name"),
        (dict(name="../zork"), "cannot be the name"),
        (dict(name=""), "Give what is taught a name"),
        (dict(name="<zork>"), "cannot be the name"),
        (dict(rank=2), "rank should be from 4 to 128"),
        (dict(rank=256), "rank should be from 4 to 128"),
        (dict(steps=0), "steps should be"),
        (dict(kind="animal"), "There is no kind 'animal'; there are thing, person, style"),
        (dict(optimizer="sgd"), "There is no optimizer 'sgd'"),
        (dict(batch=3, devices=2), "A batch of 3 pictures cannot be divided over 2 devices"),
        (dict(learning_rate=float("nan")), "learning rate should be"),
        (dict(resume=True), "There is no run to resume"),
        (dict(out="zork.bin"), "should end in .safetensors"),
        (dict(out="no/such/folder/zork.safetensors"), "There is no folder"),
    ],
)
def test_what_is_not_possible_is_a_sentence(least, pictures, tmp_path, changes, sentence):
    assert sentence in refused(least, pictures, tmp_path, **changes)


def test_a_name_that_is_taken_is_refused(least, pictures, taught):
    before = taught.read_bytes()
    with pytest.raises(RequestError, match="The name is taken"):
        teach(least, pictures, out=taught, **HOW)
    assert taught.read_bytes() == before


def test_distilled_models_are_refused_with_what_to_teach_instead(least, pictures, tmp_path):
    folder = tmp_path / "sd-turbo"
    shutil.copytree(least, folder)
    message = refused(folder, pictures, tmp_path)
    assert "distilled" in message and "Teach the model that it was distilled from" in message
    plain = tmp_path / "quick"
    shutil.copytree(least, plain)
    (plain / "sd_tpu.json").write_text('{"name": "quick", "steps": 4, "guidance": 0}')
    assert "distilled" in refused(plain, pictures, tmp_path)
    scheduler = plain / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text())
    (plain / "sd_tpu.json").unlink()
    scheduler.write_text(json.dumps({**config, "prediction_type": "sample"}))
    assert "predicts pictures" in refused(plain, pictures, tmp_path)


# --- the command --------------------------------------------------------------------------------


def test_the_command_tells_time_and_memory_progress_and_the_file(least, squares, taught, tmp_path):
    out = tmp_path / "zork.safetensors"
    flags = "--name zork --steps 6 --rank 4 --learning-rate 0.01 --size 32 --devices 1".split()
    places = ["--model", least, "--pictures", squares, "--out", out]
    code, told, err = run("teach", *flags, *places)
    assert code == 0 and told.splitlines() == [str(out)]
    assert "4 pictures, looked at as" in err and "GB on each device" in err
    assert "Step 6 of 6, loss " in err
    assert out.read_bytes() == taught.read_bytes()
    code, _, err = run("teach", *flags, *places)
    assert code == 2 and "The name is taken" in err


@pytest.mark.slow("compiles a step for two shapes")
def test_an_estimate_comes_before_the_first_step(least, pictures, tmp_path):
    events = []
    teach(least, pictures, out=tmp_path / "z.safetensors", devices=1, on_event=events.append, **HOW)
    kinds = [type(event) for event in events]
    assert kinds.index(Estimate) < kinds.index(Lesson)
    assert events[kinds.index(Estimate)].bytes > 1 << 16
    assert events[-1].step == events[-1].steps == 6


FAMILIES = {
    "SDXL": lambda folder: tiny.make_pipeline("sdxl", **tiny.SHALLOW["sdxl"]),
    "SD 3.5": lambda folder: sd3.make_pipeline(folder, "SD 3.5 medium", t5=True),
    "Z-Image": lambda folder: z_image.make_pipeline(folder, shift=6.0),
    "klein": lambda folder: flux2.make_pipeline(folder, distilled=False),
    "FLUX.1": lambda folder: flux.make_pipeline(folder, dev=True),
    "Anima": anima.make_pipeline,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
@pytest.mark.slow("compiles a step of each family")
def test_each_family_is_taught_and_its_file_fits_it(squares, tmp_path, family):
    FAMILIES[family](tmp_path / "tokenizer").save_pretrained(tmp_path / "model")
    clip = family.startswith("SD")
    how = {**HOW, "steps": 2, "caption_dropout": 0.5, "text_encoders": clip}
    file = teach(tmp_path / "model", squares, out=tmp_path / "z.safetensors", devices=1, **how)
    factors = load_file(file)
    assert all(np.isfinite(each).all() for each in factors.values())
    checkpoint = Checkpoint.open(tmp_path / "model")
    shapes = {part: shapes_of(of) for part, of in checkpoint.parameters.shapes.items()}
    changed = changed_by_lora(file, shapes)
    assert 2 * sum(map(len, changed.values())) == len(factors)
    assert changed.keys() == {
        checkpoint.model.denoiser,
        *(checkpoint.model.encoders if clip else ()),
    }
    if not clip:
        with pytest.raises(RequestError, match="is a language model, which is not taught"):
            teach(
                tmp_path / "model",
                squares,
                out=tmp_path / "y.safetensors",
                **{**HOW, "text_encoders": True},
            )


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: z_image.make_pipeline(folder, shift=3.0),
        lambda folder: flux2.make_pipeline(folder, distilled=True),
        lambda folder: flux.make_pipeline(folder, dev=False),
    ],
    ids=["Z-Image-Turbo", "klein", "schnell"],
)
def test_distilled_transformers_are_refused(squares, tmp_path, make):
    make(tmp_path / "tokenizer").save_pretrained(tmp_path / "model")
    assert "was distilled into a few steps" in refused(tmp_path / "model", squares, tmp_path)
