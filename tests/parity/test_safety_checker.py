"""The safety checker: it says what PyTorch's says, and what it objects to is blurred."""

import dataclasses
import json

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from flax import nnx
from flax.jax_utils import replicate
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPImageProcessorPil

from sd_tpu import FlaxStableDiffusionPipeline, FlaxStableDiffusionSafetyChecker, app, models
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, SafetyCheckerConfig
from sd_tpu.cli.drawing import ProgressLine, take_all
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.gallery.files import Files
from sd_tpu.gallery.run import Backend
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.http import create_api
from sd_tpu.http.access import Access
from sd_tpu.pictures.images import blurred
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import BLURRED, ImageReady
from tests.support.asking import following
from tests.support.parity import compiled
from tests.support.serving import served

SIDE = 28
TINY = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=SIDE,
    patch_size=7,
)
ANY, NONE = -2.0, 2.0  # thresholds of cosines that all pictures pass, and that none does


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checker as PyTorch writes it, whose thresholds lie among the cosines it finds."""
    torch.manual_seed(0)
    text = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    checker = StableDiffusionSafetyChecker(
        CLIPConfig(vision_config=TINY, text_config=text, projection_dim=16)
    )
    for name in ("concept_embeds", "special_care_embeds"):
        getattr(checker, name).data.normal_()
    checker.concept_embeds_weights.data.uniform_(0.3, 0.6)
    checker.special_care_embeds_weights.data.uniform_(-0.2, 0.2)
    folder = tmp_path_factory.mktemp("checker") / "safety_checker"
    checker.save_pretrained(folder)
    return folder


def opened(folder, dtype=jnp.float32):
    config = SafetyCheckerConfig.from_dict(json.loads((folder / "config.json").read_text()))
    graph, shapes = weights.abstract(
        lambda rngs: models.StableDiffusionSafetyChecker(config, dtype=dtype, rngs=rngs)
    )
    return nnx.merge(graph, weights.load([folder / "model.safetensors"], shapes))


@pytest.mark.parametrize("size", [(28, 28), (40, 64), (96, 56), (17, 21)])
@pytest.mark.slow("compiles a safety checker, and runs that of PyTorch")
def test_it_finds_what_pytorchs_finds(folder, size):
    pictures = np.random.default_rng(0).integers(0, 256, (24, *size, 3)).astype(np.uint8)
    pictures[::2] = pictures[::2] // 8 + 30 * np.arange(4, 8)[:3].astype(np.uint8)
    theirs = StableDiffusionSafetyChecker.from_pretrained(folder).eval()
    taken = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)(
        [Image.fromarray(picture) for picture in pictures], return_tensors="pt"
    ).pixel_values
    scores = np.asarray(
        compiled(models.StableDiffusionSafetyChecker.scores, opened(folder), pictures)
    )
    # Pillow rounds between the two directions, too.
    off = np.abs(
        models.safety_checker.preprocess(pictures, SIDE) - taken.permute(0, 2, 3, 1).numpy()
    )
    assert np.mean(off > 2.1 / 255 / 0.26) < 0.005
    with torch.inference_mode():
        _, wanted = theirs.forward_onnx(taken, torch.ones(len(pictures), 1, 1, 3))
    found = np.any(scores > 0, axis=-1)
    close = np.abs(scores).min(-1) < 2e-3  # rounding decides
    assert close.mean() < 0.3 and np.array_equal(found[~close], wanted.numpy()[~close])
    if size == (28, 28):
        assert 0 < found.sum() < len(found), "some are safe, others not"


@pytest.mark.parametrize("cosine, unsafe", [(0.2004, False), (0.2006, True)])
def test_scores_have_three_digits_as_pytorchs_have(folder, monkeypatch, cosine, unsafe):
    ours = opened(folder)
    for threshold in (ours.concept_embeds_weights, ours.special_care_embeds_weights):
        threshold[...] = jnp.full_like(threshold[...], 0.2)
    monkeypatch.setattr(
        models.safety_checker,
        "_cosines",
        lambda found, concepts: jnp.full((1, len(concepts)), cosine),
    )
    picture = np.zeros((1, 28, 28, 3), np.uint8)
    found = compiled(models.StableDiffusionSafetyChecker.__call__, ours, picture)
    assert found.tolist() == [unsafe]


def test_its_thresholds_are_exact_in_any_precision(folder):
    exact, rough = opened(folder), opened(folder, jnp.bfloat16)
    assert rough.visual_projection.kernel.dtype == jnp.bfloat16
    for name in ("concept_embeds_weights", "special_care_embeds_weights"):
        assert np.array_equal(getattr(rough, name)[...], getattr(exact, name)[...])
        assert getattr(rough, name)[...].dtype == jnp.float32


def with_thresholds(checkpoint, checker, folder, threshold: float):
    """A checkpoint with a checker beside it that objects to everything or to nothing."""
    for part in checkpoint.iterdir():
        if part.name != "model_index.json":
            (folder / part.name).symlink_to(part)
    index = json.loads((checkpoint / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "config.json").symlink_to(checker / "config.json")
    tensors = load_file(checker / "model.safetensors")
    for name in ("concept_embeds_weights", "special_care_embeds_weights"):
        tensors[name] = np.full_like(tensors[name], threshold)
    # As published files spell them
    tensors = {
        name.replace("vision_model.", "vision_model.vision_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, folder / "safety_checker" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def strict(least, folder, tmp_path_factory):
    """An engine whose checker objects to everything, beside a model "lenient" whose own does not,
    and the folder of its model."""
    shelf = tmp_path_factory.mktemp("shelf")
    for name, threshold in (("strict", ANY), ("lenient", NONE)):
        (shelf / name).mkdir()
        with_thresholds(least, folder, shelf / name, threshold)
    model = shelf / "strict"
    with Engine.open(model, models=shelf, devices=1, safety_checker=True) as engine:
        yield engine, model


def drawn(engine, **values) -> list[ImageReady]:
    request = Request.check(
        {"prompts": ["a cat", "", "a dog"], "steps": 2, "seed": 3, **values}, engine.catalog
    )
    return [event for event in engine.submit(request).events() if isinstance(event, ImageReady)]


@pytest.mark.slow("compiles a safety checker, and runs that of PyTorch")
def test_what_it_objects_to_is_blurred_and_said_to_be(strict):
    engine, model = strict
    assert not Checkpoint.open(model).model.checks_safety, "nobody has asked it"
    plain = drawn(engine, model="lenient")
    assert not any(event.unsafe for event in plain)
    for event, wanted in zip(drawn(engine), plain, strict=True):
        assert event.unsafe and np.array_equal(event.pixels, blurred(wanted.pixels))
        assert event.pixels.std() < 0.75 * wanted.pixels.std()


@pytest.mark.slow("compiles a safety checker, and runs that of PyTorch")
def test_whoever_asked_is_told_of_what_is_blurred(strict, tmp_path, capsys):
    engine, _ = strict
    asked = Request.check({"prompts": ["a cat"], "steps": 2}, engine.catalog)
    run = Runs(Backend(engine, Files(tmp_path, engine.to_png), Inputs())).start(
        asked, browser="0" * 32
    )
    assert f"seed {asked.seed}. {BLURRED}" in [*following(run, "a tab")][-1].line.text
    assert take_all(engine.submit(asked), lambda _: None, ProgressLine())
    assert f"{BLURRED}.\n" in capsys.readouterr().err
    with served(create_api(engine, Access())) as address:
        answer = httpx.post(f"{address}/sdapi/v1/txt2img", json={"prompt": "a cat", "steps": 2})
    assert json.loads(answer.json()["info"])["comments"] == [str(BLURRED)]


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "::1"], False),
        (["--host", "0.0.0.0"], True),
        (["--share"], True),
        (["--allowed-host", "pictures.example.org"], True),
        (["GRADIO_SHARE=true"], True),
        (["GRADIO_SHARE=1"], False),  # nor does Gradio share then
        (["KAGGLE_KERNEL_RUN_TYPE=Interactive"], True),
        (["KAGGLE_KERNEL_RUN_TYPE=Interactive", "--no-share"], False),
    ],
)
def test_it_is_asked_where_the_page_is_served_to_others(flags, others, monkeypatch):
    for variable in [flag for flag in flags if "=" in flag]:
        monkeypatch.setenv(*variable.split("="))
    flags = [flag for flag in flags if "=" not in flag]

    class Opened(Exception):
        """The flags have been read."""

    def open_engine(args):
        raise Opened(args.safety_checker)

    monkeypatch.delenv("GRADIO_SERVER_NAME", raising=False)
    monkeypatch.setattr(app, "open_engine", open_engine)
    for said, wanted in (
        ([], others),
        (["--safety-checker"], True),
        (["--no-safety-checker"], False),
    ):
        with pytest.raises(Opened) as opened:
            app.main([*flags, *said, "--no-history"])
        assert opened.value.args == (wanted,)


def test_one_that_is_only_a_pickle_is_refused_with_the_way_out(least, folder, tmp_path):
    index = with_thresholds(least, folder, tmp_path, ANY)
    (index / "safety_checker" / "model.safetensors").rename(
        index / "safety_checker" / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match="Or leave it out with --no-safety-checker"):
        Checkpoint.from_pretrained(index, safety_checker=True)
    Checkpoint.open(index)


def test_checkpoints_without_one_are_drawn_with_as_ever(least):
    checkpoint = Checkpoint.open(least, safety_checker=True)
    assert not checkpoint.model.checks_safety
    assert checkpoint.model == Checkpoint.open(least).model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vision_config": None}, "vision_config is missing"),
        ({"vision_config": {**TINY, "patch_size": 9}}, "does not divide into patch_size=9"),
        ({"vision_config": {**TINY, "num_hidden_layers": 10**9}}, "num_hidden_layers=1000000000"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, told):
    with pytest.raises(CheckpointError, match=told):
        SafetyCheckerConfig.from_dict({"vision_config": TINY, "projection_dim": 16, **change})


def test_only_pictures_that_are_wanted_are_looked_at(least, folder, tmp_path):
    checkpoint, params = Checkpoint.from_pretrained(
        with_thresholds(least, folder, tmp_path, ANY), safety_checker=True
    )
    look = jax.jit(checkpoint.model.is_unsafe)
    assert look(params, np.zeros((32, 32, 3), np.uint8))
    other = dataclasses.replace(checkpoint.model, safety_checker=None)
    assert not other.checks_safety


# --- in the Flax pipelines ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked(least, folder, tmp_path_factory):
    """(pipeline, params) of a checkpoint whose checker objects to everything, and its folder."""
    index = with_thresholds(least, folder, tmp_path_factory.mktemp("checked"), ANY)
    return *FlaxStableDiffusionPipeline.from_pretrained(index, dtype=jnp.bfloat16), index


def call(pipeline, params, **values):
    ids = pipeline.prepare_inputs(["a cat", "a dog"])
    return pipeline(ids, params, jax.random.PRNGKey(0), 2, **values)


@pytest.mark.slow("compiles a safety checker, and runs that of PyTorch")
def test_a_flax_pipeline_blacks_what_it_objects_to_and_says_which(checked):
    pipeline, params, _ = checked
    thresholds = params["safety_checker"]["concept_embeds_weights"]
    assert thresholds.dtype == jnp.float32
    assert params["safety_checker"]["visual_projection"]["kernel"].dtype == jnp.bfloat16
    for given in (params, replicate(params)):
        with pytest.warns(UserWarning, match="may not be safe for work are black"):
            output = call(pipeline, given)
        assert not output.images.any() and output.nsfw_content_detected.tolist() == [True] * 2
    lenient = {
        name: params["safety_checker"][name] + NONE - ANY
        for name in ("concept_embeds_weights", "special_care_embeds_weights")
    }
    images, unsafe = call(
        pipeline,
        {**params, "safety_checker": {**params["safety_checker"], **lenient}},
        return_dict=False,
    )
    assert images.std() > 0.05 and unsafe.tolist() == [False] * 2
    without = {name: value for name, value in params.items() if name != "safety_checker"}
    output = call(pipeline, without)
    assert output.nsfw_content_detected is False and np.array_equal(output.images, images)


@pytest.mark.slow("compiles a safety checker, and runs that of PyTorch")
def test_programs_ask_the_checker_themselves_or_leave_it_out(checked):
    pipeline, params, index = checked
    pictures = [Image.fromarray(np.full((40, 64, 3), shade, np.uint8)) for shade in (9, 99)]
    assert isinstance(pipeline.feature_extractor, CLIPImageProcessorPil), "the other logs a warning"
    features = pipeline.feature_extractor(pictures, return_tensors="np").pixel_values
    assert features.shape == (2, 3, SIDE, SIDE)
    asked = jax.jit(lambda params: pipeline.safety_checker(features, params=params))
    assert np.all(asked(params["safety_checker"]))
    other = FlaxStableDiffusionPipeline(**pipeline.components)
    assert other.safety_checker is pipeline.safety_checker
    alone, own = FlaxStableDiffusionPipeline.from_pretrained(
        index, dtype=jnp.bfloat16, safety_checker=None
    )
    assert alone.safety_checker is alone.feature_extractor is None and "safety_checker" not in own
    assert call(alone, own).nsfw_content_detected is False
    checker = FlaxStableDiffusionSafetyChecker.from_pretrained(index / "safety_checker")
    assert np.all(jax.jit(checker)(features))
    assert checker.params["concept_embeds"].shape == (17, 16)


def test_a_pipeline_with_a_checker_is_saved_as_pytorch_reads_it(checked, tmp_path):
    pipeline, params, _ = checked
    pipeline.save_pretrained(tmp_path, params)
    theirs = StableDiffusionPipeline.from_pretrained(tmp_path)
    assert np.all(theirs.safety_checker.concept_embeds_weights.detach().numpy() == ANY)
    names = load_file(tmp_path / "safety_checker" / "model.safetensors").keys()
    assert "vision_model.vision_model.embeddings.class_embedding" in names, "as published ones"
    weight = theirs.safety_checker.vision_model.embeddings.class_embedding.detach().numpy()
    ours = params["safety_checker"]["vision_model"]["vision_model"]["embeddings"]["class_embedding"]
    assert np.array_equal(weight, ours.astype(jnp.float32))
    assert type(theirs.feature_extractor).__name__.startswith("CLIPImageProcessor")
    again, read = FlaxStableDiffusionPipeline.from_pretrained(tmp_path)
    assert again.safety_checker is not None and "safety_checker" in read


def test_a_flax_pipeline_draws_without_a_checker_that_cannot_be_read(least, folder, tmp_path):
    index = with_thresholds(least, folder, tmp_path, ANY)
    (index / "safety_checker" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="Pictures are not checked"):
        pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(index)
    assert pipeline.safety_checker is None and "safety_checker" not in params
