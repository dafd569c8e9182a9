"""The command line, in this process, on a tiny checkpoint."""

import argparse
import dataclasses
import hashlib
import shutil
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from benchmarks.make_checkpoint import lora, single_file
from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.cli import devices, flags, generate
from sd_tpu.pictures.images import BLANK, KEY, read_png, to_png
from sd_tpu.request import AnyModelCatalog, SingleModelCatalog
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import COMPILING, Done, Failed, ImageReady, Progress, Queued
from sd_tpu.serving.resolve import ResolvedRequest
from sd_tpu.settings import Picture
from sd_tpu.wildcards import Wildcards
from tests.support.asking import make_request
from tests.support.command import run
from tests.support.networks import make_adapter, make_controlnet, make_encoder, make_tiny
from tests.support.processes import told_by

LONG_PROMPT = "a dog " * 120


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """Eight devices are there before a command asks for another number of them."""
    return jax.devices()


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.fixture(scope="module")
def generated(least, tmp_path_factory):
    """What `generate` did with three prompts, one of them blank and one too long."""
    folder = tmp_path_factory.mktemp("out") / "new" / "folder"
    before = engine_threads()
    code, out, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat, café 猫",
        "--prompt",
        "",
        "--prompt",
        LONG_PROMPT,
        "--negative",
        "blur",
        "--seed",
        7,
        "--steps",
        2,
        "--sampler",
        "heun",
        "--spacing",
        "karras",
        "--guidance",
        3.25,
        "--guidance-start",
        0.25,
        "--guidance-stop",
        0.75,
        "--cache-interval",
        2,
        "--token-downsampling",
        2,
        "--devices",
        1,
        "--out",
        folder,
    )
    left = [thread for thread in engine_threads() if thread not in before]
    return SimpleNamespace(folder=folder, code=code, out=out, err=err, left=left)


# --- generate -----------------------------------------------------------------------------------


def test_generate_writes_a_picture_for_each_prompt_under_its_place_and_a_grid(generated):
    assert (generated.code, generated.left) == (0, [])
    names = sorted(file.name for file in generated.folder.iterdir())
    assert names == ["00.png", "02.png", "grid.png"]
    assert sorted(generated.out.split()) == [str(generated.folder / name) for name in names]


def test_the_grid_holds_the_pictures_in_their_places(generated):
    first, last, grid = (
        np.asarray(Image.open(generated.folder / name)) for name in ("00.png", "02.png", "grid.png")
    )
    assert first.shape == (32, 32, 3) and first.std() > 0
    np.testing.assert_array_equal(grid, np.hstack([first, np.full_like(first, BLANK), last]))


def test_the_grid_takes_pictures_of_different_sizes(tmp_path, monkeypatch):
    drawn = [np.full((height, width, 3), 200, np.uint8) for height, width in ((64, 64), (32, 96))]

    def take_all(job, take, line) -> bool:
        for index, pixels in enumerate(drawn):
            take(ImageReady(index, pixels))
        return True

    monkeypatch.setattr(generate, "take_all", take_all)
    request = make_request(prompts=("a", "b"))
    line = SimpleNamespace(keep=lambda: None)
    assert generate._save(SimpleNamespace(request=request), tmp_path, to_png, line, {}) == 0
    assert Image.open(tmp_path / "grid.png").size == (192, 64)


def test_each_file_carries_the_request_that_makes_it_again(generated, least):
    whole = make_request(
        prompts=("a cat, café 猫", "", LONG_PROMPT.strip()),
        negative_prompt="blur",
        seed=7,
        steps=2,
        sampler="heun",
        spacing="karras",
        guidance=3.25,
        guidance_start=0.25,
        guidance_stop=0.75,
        cache_interval=2,
        width=32,
        height=32,
        model=least.name,
    )
    assert read_png(generated.folder / "grid.png") == whole
    assert read_png(generated.folder / "00.png") == whole.only(0)
    assert read_png(generated.folder / "02.png") == whole.only(2)
    assert whole.pictures[2].seed == 9
    assert "Token downsampling: 2, " in Image.open(generated.folder / "00.png").text[KEY]


def test_progress_and_lost_words_are_told_in_plain_lines(generated):
    lines = generated.err.splitlines()
    assert lines[0] == "Seed 7"
    assert lines[1].startswith("Loading ")
    assert lines[2].startswith("Prompt 3 is too long for the model")
    assert "“dog a dog" in lines[2]
    assert lines[-1].startswith("Done in ") and lines[-1].endswith(" s.")
    assert "\r" not in generated.err and "\x1b" not in generated.err


@pytest.mark.slow("runs the command in a process of its own")
def test_a_single_file_draws_with_a_lora_an_embedding_another_decoder_and_no_guidance(
    least, tmp_path
):
    file = tmp_path / "tune.safetensors"
    single_file(least, file)
    for name in ("loras", "embeddings"):
        (tmp_path / name).mkdir()
    lora(least, tmp_path / "loras" / "ink.safetensors", 4, 0)
    vectors = np.random.default_rng(0).standard_normal((2, 32), np.float32)
    save_file({"emb_params": vectors}, tmp_path / "embeddings" / "cat.safetensors")
    make_tiny().save_pretrained(tmp_path / "TAESD")
    asked = (
        "generate",
        "--model",
        file,
        "--prompt",
        "a cat",
        "--guidance",
        0,
        "--steps",
        2,
        "--seed",
        7,
        "--devices",
        1,
    )
    more = (
        "--lora-dir",
        tmp_path / "loras",
        "--embedding-dir",
        tmp_path / "embeddings",
        "--decoder",
        tmp_path / "TAESD",
        "--prompt",
        "a cat <lora:ink:9>",
        "--override",
        2,
        "seed",
        7,
    )
    told, pixels = [], []
    for out, flags_ in (("plain", ()), ("more", more)):
        code, _, err = run(*asked, *flags_, "--out", tmp_path / out)
        assert code == 0, err
        for picture in sorted((tmp_path / out).glob("0?.png")):
            told.append(Image.open(picture).text[KEY])
            pixels.append(np.asarray(Image.open(picture)).tobytes())
    plain, embedded, fused = told
    assert len({*pixels}) == 3
    model = hashlib.sha256(file.read_bytes()).hexdigest()[:10]
    assert all(
        f"CFG scale: 0, Seed: 7, Size: 32x32, Model hash: {model}, Model: tune" in each
        for each in told
    )
    assert "VAE" not in plain and "VAE: TAESD" in embedded
    assert "Lora hashes" not in embedded and 'Lora hashes: "ink: ' in fused


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--lora-dir", "gone' cannot be read"),
        ("--embedding-dir", "gone' cannot be read"),
        ("--decoder", "gone"),
    ],
)
def test_what_is_not_where_a_flag_says_is_a_sentence(least, tmp_path, flag, sentence):
    code, out, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        flag,
        tmp_path / "gone",
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code != 0 and not out and sentence in err.splitlines()[-1]


def test_a_picture_and_its_mask_are_taken_from_files(least, tmp_path):
    start = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    mask = np.zeros((32, 32), np.uint8)
    mask[:, 16:] = 255
    Image.fromarray(start).save(tmp_path / "start.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    code, _, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--steps",
        4,
        "--init-image",
        tmp_path / "start.png",
        "--strength",
        0.5,
        "--mask",
        tmp_path / "mask.png",
        "--mask-blur",
        0,
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    drawn = np.asarray(Image.open(tmp_path / "00.png"))
    np.testing.assert_array_equal(drawn[:, :16], start[:, :16])
    assert np.mean(drawn[:, 16:] == start[:, 16:]) < 0.5
    assert "Denoising strength: 0.5, " in Image.open(tmp_path / "00.png").text[KEY]


@pytest.mark.slow("compiles two sizes")
def test_pictures_are_drawn_again_larger_from_what_they_became(least, tmp_path):
    asked = (
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--prompt",
        "a dog",
        "--steps",
        4,
        "--devices",
        1,
    )
    small, again = tmp_path / "small", tmp_path / "again"
    for more in (["--out", small], ["--larger", 1.95, "--strength", 0.5, "--out", again]):
        code, _, err = run(*asked, *more)
        assert code == 0, err
    with Image.open(again / "01.png") as image:
        assert (
            "Denoising strength: 0.5, Hires upscale: 2, Hires steps: 2, Hires upscaler: "
            in (image.text[KEY])
        )
    made = read_png(again / "01.png").pictures[0]
    assert (made.width, made.height, made.strength) == (64, 64, 0.5)
    code, _, err = run(
        *asked[:3],
        "--prompt",
        "a dog",
        "--seed",
        1,
        "--steps",
        4,
        "--size",
        "64x64",
        "--init-image",
        small / "01.png",
        "--strength",
        0.5,
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    assert np.array_equal(Image.open(tmp_path / "00.png"), Image.open(again / "01.png"))
    assert Image.open(again / "grid.png").size == (128, 64)


def test_a_picture_is_drawn_four_times_as_large_by_tiles(least, tmp_path):
    code, _, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--steps",
        4,
        "--larger",
        4,
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    with Image.open(tmp_path / "00.png") as image:
        assert image.size == (128, 128) and "Hires upscale: 4" in image.text[KEY]


def test_pictures_that_would_be_too_large_are_refused_before_they_are_drawn(least, tmp_path):
    code, out, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--larger",
        8,
        "--size",
        "40x40",
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert (code, out) == (2, "") and "A picture of 320x320 is too large" in err.splitlines()[-1]
    code, _, err = run("generate", "--prompt", "a", "--larger", 1, "--out", tmp_path)
    assert code == 2 and "'1' should be above 1 and at most 8" in err


@pytest.mark.slow("compiles with a ControlNet")
def test_pictures_follow_the_lines_of_another_by_controlnets_of_their_own(
    least, least_pipeline, tmp_path
):
    for seed, name in enumerate(("lines", "depth")):
        make_controlnet(least_pipeline.unet, seed).save_pretrained(tmp_path / name)
    photo = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8).repeat(5, 0).repeat(5, 1)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    code, _, err = run(
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--prompt",
        "a dog",
        "--steps",
        2,
        "--controlnet",
        tmp_path / "lines",
        "--controlnet",
        tmp_path / "depth",
        "--override",
        2,
        "controlnet",
        "depth",
        "--override",
        2,
        "control_scale",
        0.6,
        "--control-image",
        tmp_path / "photo.png",
        "--control-scale",
        0.8,
        "--control-start",
        0.25,
        "--control-stop",
        1,
        "--detector",
        "canny",
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    for number, used in enumerate(("Model: lines, Weight: 0.8", "Model: depth, Weight: 0.6")):
        with Image.open(tmp_path / f"0{number}.png") as image:
            assert (
                f'ControlNet 0: "Module: canny, {used}, Guidance Start: 0.25, Guidance End: 1"'
            ) in image.text[KEY]


@pytest.mark.slow("compiles with an IP-Adapter")
def test_a_picture_is_drawn_after_a_reference_picture(least, least_pipeline, tmp_path):
    make_adapter(least_pipeline.unet, tmp_path / "adapter.safetensors")
    make_encoder(tmp_path / "eyes")
    photo = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    given = (
        "generate",
        "--model",
        least,
        "--prompt",
        "a cat",
        "--steps",
        2,
        "--reference-scale",
        0.6,
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    adapter = (
        "--ip-adapter",
        tmp_path / "adapter.safetensors",
        "--image-encoder",
        tmp_path / "eyes",
        "--reference",
        tmp_path / "photo.png",
    )
    code, _, err = run(*given, *adapter)
    assert code == 0, err
    with Image.open(tmp_path / "00.png") as image:
        assert "IP-Adapter: adapter" in image.text[KEY]
    code, _, err = run(*given)
    assert code == 2 and "Reference strength says how a reference picture is used" in err


@pytest.mark.parametrize("flag", ["--init-image", "--control-image", "--reference"])
def test_a_picture_that_cannot_be_read_is_named(flag, tmp_path):
    (tmp_path / "cut.png").write_bytes(b"no picture at all")
    code, _, err = run(
        "generate", "--prompt", "a cat", flag, tmp_path / "cut.png", "--out", tmp_path / "out"
    )
    assert (code, err.splitlines()[-1]) == (
        2,
        f"{tmp_path / 'cut.png'} is in no format that is read here; save it as PNG.",
    )
    assert not (tmp_path / "out").exists()


def test_a_prompt_may_have_its_own_model_and_settings(least, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(least, tmp_path / "models" / name)
    file = tmp_path / "models" / "second" / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: 2 * values for name, values in load_file(file).items()}, file)
    code, _, err = run(
        "generate",
        "--model",
        "first",
        "--models",
        tmp_path / "models",
        "--prompt",
        "a cat",
        "--prompt",
        "a cat",
        "--steps",
        2,
        "--override",
        2,
        "model",
        "second",
        "--override",
        2,
        "seed",
        0,
        "--override",
        2,
        "guidance",
        3,
        "--devices",
        1,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    first, second = (read_png(tmp_path / name).pictures[0] for name in ("00.png", "01.png"))
    assert (first.model, first.steps, first.seed) == ("first", 2, 0)
    assert second == dataclasses.replace(first, model="second", guidance=3.0)
    assert (tmp_path / "00.png").read_bytes() != (tmp_path / "01.png").read_bytes()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ("--override", 9, "steps", 3),
            "--override should begin with the number of a prompt, from 1 to 8, not '9'.",
        ),
        (("--override", "x", "steps", 3), "from 1 to 8, not 'x'."),
        (("--override", "0000000019", "steps", 3), "from 1 to 8, not '0000000019'."),
        (
            ("--override", 1, "stepz", 3),
            "--override 1: there is no setting 'stepz'; there are model, ",
        ),
        (
            ("--override", 1, "steps", "many"),
            "Steps of prompt 1 should be a whole number, not 'many'.",
        ),
        (
            ("--override", 1, "strength", 0.5),
            "Strength says how a start picture is used: give one with --init-image.",
        ),
        (("--override", 2, "steps", 3), "--override 2: there is no prompt 2."),
        (("--strength", 0.5), "Strength says how a start picture is used"),
        (("--mask-blur", 1), "Mask blur says how a start picture is used"),
        (
            ("--control-scale", 0.5),
            "says how a control picture is used: give one with --control-image.",
        ),
        (("--override", 1, "detector", "canny"), "Detector says how a control picture is used"),
    ],
)
def test_what_would_change_nothing_is_refused(flags, sentence, monkeypatch, tmp_path):
    _, code, _, err = run_fake(monkeypatch, tmp_path, flags=flags)
    assert code == 2 and sentence in err.splitlines()[-1]


class FakeEngine:
    """Stands where the model would be; its job has the events it is told."""

    def __init__(self, *events):
        self.catalog = self.defaults = Picture(model="m", height=8, width=8)
        self.ready, self._events = threading.Event(), events
        self.closed = self.cancelled = False

    @property
    def resolver(self):
        return SimpleNamespace(resolve=lambda request, inputs: ResolvedRequest(request, {}))

    def queue(self, resolved, *, previews):
        return self.submit(resolved.request, previews=previews, inputs={})

    def to_png(self, pixels, request, **facts):
        return to_png(pixels, request, **facts)

    def submit(self, request, *, previews, inputs):
        self.request = request
        return SimpleNamespace(request=request, events=self._play, cancel=self._cancel)

    def _play(self):
        for event in self._events:
            if event is KeyboardInterrupt:
                raise event
            yield event

    def _cancel(self):
        self.cancelled = True

    def close(self):
        self.closed = True


def run_fake(monkeypatch, tmp_path, *events, flags=(), ready=True):
    engine = FakeEngine(*events)
    if ready:
        engine.ready.set()
    monkeypatch.setattr(generate, "open_engine", lambda args: engine)
    return engine, *run("generate", "--prompt", "a cat", "--out", tmp_path, *flags)


def test_interrupting_cancels_the_job_and_keeps_what_is_finished(monkeypatch, tmp_path):
    engine, code, out, err = run_fake(
        monkeypatch, tmp_path, ImageReady(0, np.zeros((8, 8, 3), np.uint8)), KeyboardInterrupt
    )
    assert code == 130 and err.endswith("Stopped.\n")
    assert engine.cancelled and engine.closed
    assert out == f"{tmp_path / '00.png'}\n" and len(list(tmp_path.iterdir())) == 1


def test_what_the_engine_fails_at_is_told_and_is_exit_code_1(monkeypatch, tmp_path):
    _, code, out, err = run_fake(monkeypatch, tmp_path, Failed("Out of memory."))
    assert (code, out) == (1, "") and err.endswith("Out of memory.\n")


@pytest.mark.parametrize(
    "flags, strengths",
    [
        ((), (0.4, 0.4)),
        (("--override", 1, "strength", 0.6), (0.6, 0.4)),
        (("--strength", 0.6), (0.6, 0.4)),
    ],
)
def test_the_strength_of_the_second_drawing_is_not_that_of_the_first(
    monkeypatch, tmp_path, flags, strengths
):
    asked = []

    class Larger(FakeEngine):
        def submit(self, request, **options):
            asked.append(request)
            return super().submit(request, **options)

    black = np.zeros((8, 8, 3), np.uint8)
    engine = Larger(ImageReady(0, black), ImageReady(1, black), Done(1.0))
    engine.catalog = AnyModelCatalog()
    engine.ready.set()
    monkeypatch.setattr(generate, "open_engine", lambda args: engine)
    Image.fromarray(black).save(tmp_path / "photo.png")
    run(
        "generate",
        "--prompt",
        "a",
        "--prompt",
        "b",
        "--override",
        2,
        "init_image",
        tmp_path / "photo.png",
        "--larger",
        2,
        "--out",
        tmp_path,
        *flags,
    )
    first, second = asked
    own = 0.6 if "--strength" in flags else Picture().strength
    assert first.pictures[1].strength == own
    assert tuple(picture.strength for picture in second.pictures) == strengths


def test_values_left_open_are_the_models(monkeypatch, tmp_path):
    engine, *_ = run_fake(monkeypatch, tmp_path, Failed("x"))
    assert engine.request == make_request(prompts=("a cat",), height=8, width=8)


@pytest.mark.parametrize(
    "given, drawn",
    [
        (["a {red|blue} cat"], ("a red cat", "a blue cat")),
        (["a", "", "{b|c}"], ("a", "", "b", "c")),
        (["a", ""], ("a", "")),
    ],
)
def test_a_prompt_that_stands_for_several_is_drawn_as_often(given, drawn):
    class ModelCatalog(SingleModelCatalog):
        def fill(self, prompts, seed):
            return Wildcards().fill(prompts, seed)

    assert generate._filled({"prompts": given}, ModelCatalog(Picture(model="m"))).prompts == drawn


def test_a_seed_of_minus_one_is_drawn_and_told(monkeypatch, tmp_path):
    seeds = set()
    for _ in range(2):
        engine, _, _, err = run_fake(monkeypatch, tmp_path, Failed("x"), flags=("--seed", -1))
        assert err.startswith(f"Seed {engine.request.seed}\n")
        seeds.add(engine.request.seed)
    assert len(seeds) == 2


def test_spacings_of_a_model_that_is_not_here_yet_are_left_to_it(monkeypatch, tmp_path):
    engine, *_ = run_fake(
        monkeypatch, tmp_path, Failed("x"), flags=("--model", "org/name", "--spacing", "karras")
    )
    assert engine.request.pictures[0].spacing == "karras"


def test_nobody_waits_for_a_compilation_that_is_no_longer_wanted(monkeypatch, tmp_path):
    engine, *_ = run_fake(monkeypatch, tmp_path, Failed("x"), ready=False)
    assert not engine.closed
    engine, *_ = run_fake(monkeypatch, tmp_path, Failed("x"))
    assert engine.closed


def test_on_a_terminal_progress_stays_on_one_line(monkeypatch, tmp_path):
    class Terminal(StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("tests.support.command.StringIO", Terminal)
    pixels = np.zeros((8, 8, 3), np.uint8)
    _, code, _, err = run_fake(
        monkeypatch,
        tmp_path,
        Queued(1, COMPILING),
        Queued(1, "waiting for a free place"),
        Progress(1, 2, {}),
        Progress(1, 2, {}),
        ImageReady(0, pixels),
        Done(1.0),
    )
    assert code == 0
    assert err.split("\r", 1)[1] == (
        f"Seed 0\x1b[K\n\rLoading {BUNDLED_MODEL} ...\x1b[K"
        "\rCompiling, or loading what was compiled before ...\x1b[K"
        "\rStep 1 of 2\x1b[K\r\x1b[K\rDone in 1.0 s.\x1b[K\n"
    )


REFUSALS = {
    "steps": (["--steps", "2.5"], "Steps should be a whole number, not 2.5."),
    "guidance": (["--guidance", "nan"], "Guidance should be a number, not 'nan'."),
    "seed": (["--seed", "-2"], "Seed should be from 0 to 4294967295, not -2."),
    "guidance start": (["--guidance-start", "2"], "Guidance start should be from 0 to 1, not 2."),
    "guidance stop": (["--guidance-stop", "x"], "Guidance stop should be a number, not 'x'."),
    "cache interval": (["--cache-interval", "0"], "Cache interval should be from 1 to 10, not 0."),
    "sampler": (["--sampler", "x"], f"Sampler 'x' is unknown; there are {', '.join(SAMPLERS)}."),
    "spacing": (["--sampler", "lcm", "--spacing", "karras"], "LCM has no karras spacing; it has"),
    "spacing alone": (["--spacing", "karras"], "DDIM has no karras spacing; it has leading,"),
    "prompts": (["--prompt", "a"] * 8, "There are 9 prompts; at most 8 fit."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_values_are_refused_in_one_sentence_before_a_model_is_loaded(
    case, tmp_path, monkeypatch
):
    monkeypatch.setattr(generate, "open_engine", None)
    flags, sentence = REFUSALS[case]
    code, out, err = run("generate", "--prompt", "a cat", "--out", tmp_path / "new", *flags)
    assert (code, out) == (2, "")
    assert err.startswith(sentence) and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    (tmp_path / "model").mkdir()
    code, out, err = run(
        "generate", "--model", tmp_path / "model", "--prompt", "a cat", "--out", tmp_path
    )
    assert (code, out) == (2, "")
    *_, sentence = err.splitlines()
    assert str(tmp_path / "model") in sentence and "Traceback" not in err


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run("generate", "--prompt", "a cat", "--out", tmp_path / "file")
    assert (code, err) == (2, f"{tmp_path / 'file'}: File exists.\n")


def test_a_prompt_and_a_folder_must_be_given(tmp_path):
    assert run("generate", "--out", tmp_path)[0] == 2
    assert run("generate", "--prompt", "a cat")[0] == 2
    assert run()[0] == 2


# --- flags shared with the page -----------------------------------------------------------------


def parse(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(decoder_for="pictures")
    flags.add_model_flags(parser)
    return parser.parse_args(given)


@pytest.fixture
def opened(monkeypatch):
    """The calls that `open_engine` makes, in order."""
    calls = []
    monkeypatch.setattr(devices, "set_host_devices", lambda count: calls.append(count))
    monkeypatch.setattr(devices, "make_mesh", lambda count: calls.append("mesh") or make_mesh(1))
    monkeypatch.setattr(Engine, "open", lambda *args, **named: calls.append((*args, named)))
    return calls


def test_open_engine_hands_every_flag_on(opened):
    flags.open_engine(
        parse(
            "--model",
            "org/name",
            "--revision",
            "r",
            "--variant",
            "fp16",
            "--size",
            "768x512",
            "--dtype",
            "bfloat16",
            "--devices",
            "4",
            "--token-downsampling",
            "2",
            "--models",
            "m",
            "--max-pixels",
            "9999",
            "--memory",
            "1.5",
            "--tensor-parallel-size",
            "2",
            "--lora-dir",
            "l",
            "--embedding-dir",
            "e",
            "--decoder",
            "d",
            "--prompt-chunks",
            "2",
            "--wildcard-dir",
            "w",
            "--styles",
            "s.csv",
            "--prediction-type",
            "v_prediction",
            "--zero-snr",
            "--no-t5",
            "--weights",
            "int8",
            "--text-encoder",
            "t",
            "--vae",
            "a",
            "--safety-checker",
            "--controlnet",
            "c",
            "--ip-adapter",
            "i",
            "--image-encoder",
            "v",
        )
    )
    assert opened[-1] == (
        dict(
            model="org/name",
            models=Path("m"),
            revision="r",
            variant="fp16",
            dtype="bfloat16",
            devices=4,
            size=(512, 768),
            max_pixels=9999,
            memory=1_500_000_000,
            tensor_parallel=2,
            token_downsampling=2,
            decoder="d",
            decoder_for="pictures",
            prediction_type="v_prediction",
            zero_snr=True,
            t5=False,
            weights="int8",
            text_encoders=["t"],
            vae="a",
            lora_dir=Path("l"),
            embedding_dir=Path("e"),
            prompt_chunks=2,
            wildcard_dir=Path("w"),
            styles=Path("s.csv"),
            safety_checker=True,
            controlnets=["c"],
            ip_adapters=["i"],
            image_encoder=Path("v"),
        ),
    )


def test_without_flags_the_bundled_model_is_opened_as_it_wants(opened):
    flags.open_engine(parse())
    assert opened == [
        "mesh",
        (
            dict(
                model=BUNDLED_MODEL,
                models=None,
                revision=None,
                variant=None,
                dtype=None,
                devices=None,
                size=None,
                max_pixels=None,
                memory=None,
                tensor_parallel=None,
                token_downsampling=1,
                decoder=None,
                decoder_for="pictures",
                prediction_type=None,
                zero_snr=None,
                t5=True,
                weights=None,
                text_encoders=[],
                vae=None,
                lora_dir=None,
                embedding_dir=None,
                prompt_chunks=3,
                wildcard_dir=None,
                styles=None,
                safety_checker=False,
                controlnets=[],
                ip_adapters=[],
                image_encoder=None,
            ),
        ),
    ]


def test_host_devices_are_set_before_jax_is_asked_for_devices(opened):
    flags.open_engine(parse("--devices", "3"))
    assert opened[:2] == [3, "mesh"]


@pytest.mark.parametrize(
    "text, size",
    [
        ("768x512", (512, 768)),
        ("768X512", (512, 768)),
        (" 768 × 512 ", (512, 768)),
        ("768*512", (512, 768)),
        ("512", (512, 512)),
    ],
)
def test_sizes_are_read_width_first(text, size):
    assert parse("--size", text).size == size


@pytest.mark.parametrize(
    "flag, text, sentence",
    [
        ("--size", "big", "'big' should be like 512x512, width first"),
        ("--size", "1x2x3", "'1x2x3' should be like 512x512, width first"),
        ("--size", "-1x5", "should be like 512x512, width first"),
        ("--devices", "0", "'0' should be from 1 to 256"),
        ("--devices", "x", "'x' should be from 1 to 256"),
        ("--devices", "100000000000", "'100000000000' should be from 1 to 256"),
        ("--dtype", "int8", "invalid choice: 'int8'"),
        ("--token-downsampling", "0", "invalid choice: 0 (choose from 1, 2)"),
        ("--token-downsampling", "3", "invalid choice: 3 (choose from 1, 2)"),
        ("--token-downsampling", "1.5", "invalid int value: '1.5'"),
    ],
)
def test_a_bad_flag_is_told_with_what_it_should_be(flag, text, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(f"{flag}={text}")
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


# --- devices and samplers -----------------------------------------------------------------------


def test_devices_prints_what_the_guide_prints_and_that_this_is_no_tpu(monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16", lambda: False)
    assert run("devices") == (
        0,
        (
            "Found 8 JAX devices of type cpu.\n"
            "This is not a TPU but a CPU: everything works, at its own speed.\n"
        ),
        "",
    )
    assert run("devices", "--devices", 3)[1].startswith("Found 3 JAX devices of type cpu.\n")


def test_devices_says_which_dtype_a_cpu_that_multiplies_bfloat16_is_faster_in(monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16", lambda: True)
    monkeypatch.setattr(devices, "fastest_dtype", lambda platform: f"{platform}'s")
    assert run("devices")[1].endswith(
        "Full-size models are faster in cpu's here, which --dtype auto takes.\n"
    )
    assert run("devices", "--devices", 1)[1].startswith("Found 1 JAX device of type cpu.\n")


def test_what_only_asks_for_devices_imports_nothing_that_draws():
    """That takes seconds."""
    program = (
        "import sys; from sd_tpu import cli; cli.main(['devices']); "
        "print({'flax', 'transformers', 'pydantic', 'scipy', 'gradio'} & {*sys.modules})"
    )
    assert told_by(program).stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["generate", "journey", "teach"])
def test_what_is_wrong_with_flags_is_said_before_what_draws_is_imported(command):
    program = (
        "import contextlib, sys; from sd_tpu import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main([{command!r}, '--no-such-flag'])\n"
        "print({'flax', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    told = told_by(program)
    assert told.stdout == "set()\n" and "the following arguments are required" in told.stderr


def test_what_is_wrong_with_flags_is_said_before_the_page_is_imported():
    """That takes seconds as well; while a model compiles they cost nobody anything."""
    program = (
        "import sys; from sd_tpu import app; app.main(['--decoder-for', 'pictures']); "
        "print({'gradio', 'mcp', 'pandas'} & {*sys.modules})"
    )
    assert told_by(program).stdout == "set()\n"


def test_devices_says_nothing_more_on_a_tpu(monkeypatch):
    tpu = SimpleNamespace(device_kind="TPU v5 lite", platform="tpu")
    monkeypatch.setattr(devices, "find_devices", lambda count: [tpu] * 8)
    assert run("devices") == (0, "Found 8 JAX devices of type TPU v5 lite.\n", "")


def test_too_few_devices_and_none_at_all_are_one_sentence(monkeypatch):
    assert run("devices", "--devices", 9) == (2, "", "9 devices were asked for and 8 are here.\n")

    def fail(count):
        raise RuntimeError("Unable to initialize backend 'tpu'\nmore")

    monkeypatch.setattr(devices, "make_mesh", fail)
    assert run("devices") == (
        2,
        "",
        "JAX finds no device to work on (Unable to initialize backend 'tpu').\n",
    )


def test_samplers_lists_every_key_with_its_name_and_spacings():
    code, out, _ = run("samplers")
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert code == 0 and [key for key, _ in rows[1:]] == list(SAMPLERS)
    for key, rest in rows[1:]:
        assert rest.startswith(SAMPLERS[key].label)
        assert rest.endswith(" " + ", ".join(SAMPLERS[key].spacings))


def test_help_names_the_values_of_a_flag_that_the_samplers_command_does_not_list():
    said = " ".join(run("generate", "--help")[1].split())
    assert "One of cover, contain, stretch, extend." in said
    assert said.count("See `samplers`.") == 2
