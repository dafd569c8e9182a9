"""What a folder of checkpoints offers, and one engine with several of them."""

import dataclasses
import os
import shutil
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sd_tpu.checkpoint import library
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.library import Library
from sd_tpu.families.checkpoint import Parameters
from sd_tpu.gallery.files import captions
from sd_tpu.page.compare import comparable, comparison, read_comparison
from sd_tpu.page.layout import choices_of
from sd_tpu.pictures.images import read_parameters
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.serving import catalog
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import COMPILING, Done, Failed, ImageReady, Queued
from sd_tpu.settings import Picture, RequestError

COUNT = 8


def test_checkpoints_are_named_by_their_paths_and_what_only_configures_one_is_none(tmp_path):
    for name in (
        "a.safetensors",
        "b.ckpt",
        ".hidden.safetensors",
        'deep/er/ä, "x".safetensors',
        "folder/model_index.json",
        "folder/unet/x.safetensors",
        "a/model_index.json",
        "of blocks/modular_model_index.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / os.fsdecode(b"\xff.safetensors")).touch()
    (tmp_path / "folder.safetensors.d").mkdir()
    found = Library(tmp_path).paths()
    assert list(found) == ["a", 'deep/er/ä, "x"', "folder", "of blocks", "\ufffd"]
    assert found["folder"] == tmp_path / "folder" and found["a"] == tmp_path / "a.safetensors"


@pytest.mark.parametrize("name", ["café-noir", "수채화"])
def test_both_normal_forms_of_a_name_are_one(tmp_path, name):
    apart = unicodedata.normalize("NFD", name)
    (tmp_path / f"{apart}/{apart}").mkdir(parents=True)
    (tmp_path / f"{apart}/{apart}/model_index.json").touch()
    shelf = Library(tmp_path)
    assert [*shelf.paths()] == [f"{name}/{name}"]
    assert shelf.find(f"{name}/{apart}") == tmp_path / apart / apart
    (tmp_path / f"{apart}.safetensors").touch()
    assert shelf.find(name) == tmp_path / f"{apart}.safetensors"
    (tmp_path / f"{name}.safetensors").touch()
    shelf = Library(tmp_path)
    assert [*shelf.paths()] == [name, f"{name} (2)"]
    assert shelf.find(apart) == tmp_path / f"{name}.safetensors"


def test_a_link_that_leads_nowhere_hides_nothing_else(tmp_path):
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    assert list(Library(tmp_path).paths()) == ["a"]


def test_a_new_file_is_found_at_once_and_one_that_vanished_is_soon_forgotten(tmp_path, monkeypatch):
    shelf = Library(tmp_path)
    assert shelf.find("a") is None and shelf.paths() == {}
    (tmp_path / "a.safetensors").touch()
    assert shelf.find("a") == tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors").unlink()
    monkeypatch.setattr(library, "RESCAN_SECONDS", 0.0)
    assert shelf.paths() == {}
    shutil.rmtree(tmp_path)
    assert shelf.paths() == {}


def test_fifty_thousand_files_take_little_time(tmp_path):
    for number in range(50_000):
        (tmp_path / f"{number}.safetensors").touch()
    shelf, begun = Library(tmp_path), time.monotonic()
    assert len(shelf.paths()) == 50_000
    scanned = time.monotonic()
    assert len(shelf.paths()) == 50_000 and shelf.find("49999")
    print(f"library | 50,000 files | {scanned - begun:.2f} s")
    assert scanned - begun < 10 and time.monotonic() - scanned < 0.5


# --- an engine with several ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(checkpoints, tmp_path_factory):
    """A folder of eight fine-tunes, each with its own numbers; what is damaged and what vanishes
    beside them."""
    folder = tmp_path_factory.mktemp("models")
    for number in range(COUNT):
        target = folder / f"tune {number}"
        shutil.copytree(checkpoints["sd1"], target)
        file = target / "unet" / "diffusion_pytorch_model.safetensors"
        save_file(
            {
                name: tensor * np.float32(1 + 0.05 * number)
                for name, tensor in load_file(file).items()
            },
            file,
            metadata={"format": "pt"},
        )
    (folder / "broken.safetensors").write_bytes(b"nothing")
    shutil.copytree(folder / "tune 1", folder / "hollow")
    (folder / "hollow" / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 100)
    (folder / "tune 3" / "sd_tpu.json").write_text('{"name": "x", "steps": 7, "guidance": 3.0}')
    return folder


@pytest.fixture(scope="module")
def engine(shelf):
    """On eight devices, the first fine-tune on all of them."""
    engine = Engine.open(shelf / "tune 0", models=shelf)
    yield engine
    engine.close()


def ask(engine, prompts, **values) -> Request:
    return Request.check({"prompts": prompts, "steps": 3, **values}, engine.catalog)


def drawn(job) -> dict[int, np.ndarray]:
    events = list(job.events())
    assert isinstance(events[-1], Done), events[-1]
    return {e.index: e.pixels for e in events if isinstance(e, ImageReady)}


def test_each_model_brings_its_defaults_and_what_is_asked_for_wins(engine):
    first, third = (
        Request.check({"prompts": ["a"], "model": model}, engine.catalog).pictures[0]
        for model in ("", "tune 3")
    )
    assert (first.model, first.steps, first.height) == ("tune 0", 20, 32)
    assert (third.model, third.steps, third.guidance) == ("tune 3", 7, 3.0)
    mixed = Request.check(
        {"prompts": ["a", "b"], "guidance": 5.0, "overrides": [None, {"model": "tune 3"}]},
        engine.catalog,
    )
    assert [(p.model, p.steps, p.guidance) for p in mixed.pictures] == [
        ("tune 0", 20, 5.0),
        ("tune 3", 7, 5.0),
    ]
    assert mixed.pictures[1].seed == 1
    assert Request.check(mixed.values(), engine.catalog) == mixed


@pytest.mark.slow("draws with eight fine-tunes")
def test_eight_fine_tunes_draw_in_one_batch_as_each_does_alone_and_nothing_is_compiled(engine):
    own = [{"model": f"tune {number}"} for number in range(COUNT)]
    request = ask(engine, ["a cat"] * COUNT, seed=5, overrides=own)
    together = drawn(engine.submit(request))
    assert len({pixels.tobytes() for pixels in together.values()}) == COUNT
    placed = {name.name for device in range(8) for name in engine.worker.weights.names(device)}
    assert placed == {f"tune {number}" for number in range(COUNT)}
    for index in (0, 3, 7):
        alone = drawn(engine.submit(request.only(index)))
        assert np.array_equal(alone[0], together[index])
    assert engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}
    assert set(engine.scheduler._batch_states) == {engine.batch}


def test_what_cannot_be_loaded_is_a_sentence_and_the_others_go_on(engine, monkeypatch):
    with pytest.raises(RequestError, match=r"broken cannot be loaded: broken\.safetensors is dam"):
        ask(engine, ["a"], model="broken")
    with monkeypatch.context() as patch:  # an error of the system without a number
        patch.setattr(engine.catalog, "_reopen", Mock(side_effect=OSError("The disk is gone.")))
        with pytest.raises(RequestError, match=r"broken cannot be loaded: The disk is gone\."):
            ask(engine, ["a"], model="broken")
    with pytest.raises(RequestError, match=r"There is no model 'gone'; there are tune 0, broken"):
        ask(engine, ["a"], model="gone")
    events = list(engine.submit(ask(engine, ["a"], model="hollow")).events())
    assert isinstance(events[-1], Failed) and "damaged" in events[-1].message
    assert "\n" not in events[-1].message
    assert ": hollow/unet/diffusion_pytorch_model.safetensors" in events[-1].message
    assert len(drawn(engine.submit(ask(engine, ["a"])))) == 1


def test_a_page_is_no_larger_for_more_models(engine):
    name = next(
        each
        for each in comparable(engine.defaults, choices_of(engine.catalog), [], False)
        if each.name == "model"
    )
    assert [key for key, *_ in name.listed] == [engine.catalog.first], "page.js asks for the others"


def test_a_comparison_of_models_has_one_picture_of_each(engine):
    asked = {"what": "model", "values": [f"tune {number}" for number in range(COUNT)]}
    made = comparison(ask(engine, ["a cat"], seed=3), *read_comparison(asked))
    assert [*captions(made).values()] == asked["values"]
    pictures = drawn(engine.submit(made))
    assert len({pixels.tobytes() for pixels in pictures.values()}) == COUNT
    alone = ask(engine, ["a cat"], seed=3, model="tune 5")
    assert np.array_equal(drawn(engine.submit(alone))[0], pictures[5])


def test_a_new_size_is_compiled_in_the_background_while_others_draw(engine):
    drawn(engine.submit(ask(engine, ["a"])))
    large = engine.submit(ask(engine, ["a cat"], height=32, width=64))
    first = next(event for event in large.events() if isinstance(event, Queued))
    assert first.reason == COMPILING and first.seconds > 0
    assert len(drawn(engine.submit(ask(engine, ["a"])))) == 1 and not large.end
    assert drawn(large)[0].shape == (32, 64, 3)
    assert engine.seconds(ask(engine, ["a"], height=32, width=64).pictures[0]) > 0


def test_pictures_of_one_request_may_differ_in_size_and_are_as_each_is_alone(engine):
    request = ask(
        engine, ["a cat"] * 3, overrides=[None, {"width": 64}, {"width": 64, "model": "tune 2"}]
    )
    together = drawn(engine.submit(request))
    assert [pixels.shape for _, pixels in sorted(together.items())] == [
        (32, 32, 3),
        (32, 64, 3),
        (32, 64, 3),
    ]
    for index, pixels in together.items():
        assert np.array_equal(drawn(engine.submit(request.only(index)))[0], pixels)
    assert len(engine.scheduler._batch_states) == 2


@pytest.mark.parametrize(
    "height, width, sentence",
    [
        (33, 32, "multiples of 8"),
        (0, 32, "Height should be from 1"),
        (64, 128, "too large: here pictures have at most 4096 pixels"),
    ],
)
def test_a_size_that_cannot_be_is_refused_in_a_sentence(engine, height, width, sentence):
    with pytest.raises(RequestError, match=sentence):
        ask(engine, ["a"], height=height, width=width)


def test_what_needs_a_mask_or_less_than_the_models_size_is_not_drawn_by_tiles(engine, monkeypatch):
    large = Picture(prompt="a", model="tune 2", height=128, width=128, init_image="x", strength=0.5)
    engine.catalog.check(large)
    for other in (dict(fit="extend"), dict(mask="y"), dict(strength=1.0)):
        with pytest.raises(RequestError, match="at most 4096 pixels"):
            engine.catalog.check(dataclasses.replace(large, **other))
    monkeypatch.setattr(engine.catalog, "_max_pixels", 256)
    with pytest.raises(RequestError, match="at most 256 pixels"):
        engine.catalog.check(large)


def test_sizes_to_choose_from_are_about_of_the_models_own_area(engine):
    sizes = engine.catalog.sizes("tune 2")
    assert sizes[0] == (32, 32) and (24, 40) in sizes and (40, 24) in sizes
    assert all(0.75 < height * width / 32**2 < 1.3 for height, width in sizes)


def test_a_picture_names_its_model_and_a_single_files_hash(engine):
    request = ask(engine, ["a"], model="tune 3")
    text = read_parameters(engine.to_png(np.zeros((8, 8, 3), np.uint8), request))
    assert "Model: tune 3, " in text and "Model hash" not in text


def test_a_file_that_is_opened_again_has_the_hash_that_it_has_then(engine, monkeypatch):
    hashes = iter(["old", "new"])
    monkeypatch.setattr(Parameters, "hash", lambda self: next(hashes))
    engine.catalog.forget("tune 3")
    engine.catalog.open("tune 3")
    assert engine.catalog.hash("tune 3") == engine.catalog.hash("tune 3") == "old"
    engine.catalog.forget("tune 3")
    engine.catalog.open("tune 3")
    assert engine.catalog.hash("tune 3") == "new"
    engine.catalog.forget("tune 3")  # others ask this engine as well


def test_a_model_that_is_written_anew_is_drawn_anew(engine, shelf, monkeypatch):
    for module in (library, catalog):
        monkeypatch.setattr(module, "RESCAN_SECONDS", 0.0)
    there, file = shelf / "anew", "unet/diffusion_pytorch_model.safetensors"
    shutil.copytree(shelf / "tune 1", there)
    try:
        before = drawn(engine.submit(ask(engine, ["a"], model="anew")))[0]
        queued = engine.catalog.opened("anew").weights
        (there / "notes.txt").write_text("nothing of the model's")
        assert engine.catalog.open("anew").weights == queued
        shutil.copy(shelf / "tune 2" / file, there / file)
        after = drawn(engine.submit(ask(engine, ["a"], model="anew")))[0]
        with pytest.raises(CheckpointError, match="written anew"):
            engine._read(queued, None)
    finally:
        shutil.rmtree(there)
    for pixels, model in ((before, "tune 1"), (after, "tune 2")):
        np.testing.assert_array_equal(
            pixels, drawn(engine.submit(ask(engine, ["a"], model=model)))[0]
        )
    assert engine.catalog.open("anew") is engine.catalog.opened("anew"), "gone, but on the devices"


def test_a_file_that_is_hashed_keeps_no_other_model_waiting(engine, monkeypatch):
    reached, released = threading.Event(), threading.Event()

    def slowly(parameters):
        if parameters.source.name == "tune 5":
            reached.set()
            assert released.wait(30)
        return ""

    monkeypatch.setattr(Parameters, "hash", slowly)
    monkeypatch.setattr(engine.catalog, "_hashes", {})
    for name in ("tune 5", "tune 6"):
        engine.catalog.open(name)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(engine.catalog.hash, "tune 5")
        assert reached.wait(30)
        other = pool.submit(engine.catalog.hash, "tune 6")
        try:
            assert other.result(30) == ""
        finally:
            released.set()
        assert slow.result(30) == ""


def test_a_fault_of_the_scheduler_ends_the_jobs_and_the_next_are_served(engine, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(engine.scheduler, "schedule", lambda now: 1 / 0)
        failed = list(engine.submit(ask(engine, ["a"])).events())[-1]
    assert isinstance(failed, Failed) and "division by zero" in failed.message
    assert len(drawn(engine.submit(ask(engine, ["a"] * 8)))) == 8


def test_within_a_bound_the_least_recently_used_leaves_and_comes_back(shelf, tmp_path):
    for number in range(3):
        shutil.copytree(shelf / f"tune {number}", tmp_path / f"tune {number}")
    alone, _ = open_models(tmp_path / "tune 0", dtype="float32")
    idle = Engine(alone, make_mesh(1))  # of which nothing is compiled
    one, batch = idle.weights.memory + idle.texts.memory, idle.batch.memory
    idle.worker.close()
    engine = Engine.open(tmp_path / "tune 0", models=tmp_path, devices=1, memory=batch + 2 * one)
    engine.scheduler._kept.limit = 0  # or a prompt would need no text encoder the second time
    names, before = ["tune 0", "tune 1", "tune 2", "tune 0", "tune 1"], {}
    for name in names:
        pixels = drawn(engine.submit(ask(engine, ["a"], model=name)))[0]
        assert np.array_equal(before.setdefault(name, pixels), pixels)
        assert sum(weights.memory for weights in engine.worker.weights.names(0)) <= 2 * one
    request = ask(engine, ["a"], model="tune 2")
    shutil.rmtree(tmp_path / "tune 2")  # it has left, and cannot come back
    failed = list(engine.submit(request).events())[-1]
    assert isinstance(failed, Failed) and "\n" not in failed.message
    assert "tune 2" in failed.message and str(tmp_path) not in failed.message
    pixels = drawn(engine.submit(ask(engine, ["a"])))[0]
    assert np.array_equal(before["tune 0"], pixels)
    engine.close()
    assert len({pixels.tobytes() for pixels in before.values()}) == 3
    assert jax.device_count() == 8
