"""Teaching on an engine that draws: one step at a time, kept, gone on with, offered at once."""

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from sd_tpu import Engine, RequestError, app
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.page.teach import curve
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.sentence import Sentence
from sd_tpu.serving import teaching as module
from sd_tpu.serving.job import Done
from sd_tpu.serving.scheduler import Busy
from sd_tpu.serving.teaching import Teaching, TrainingRequest
from sd_tpu.serving.training_run import DONE, FAILED, STOPPED, TRAINING, WAITING, TrainingRun
from sd_tpu.training.encoding import ExampleEncoder

ME, OTHER = "a" * 32, "b" * 32
PATIENCE = 300.0  # seconds


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WISH = TrainingRequest(
    owner=ME,
    model="",
    name="zork",
    kind="thing",
    steps=8,
    rank=4,
    pictures=[png(number) for number in range(4)],
    captions=["", "on a hill", "", ""],
    prompts=["a zork", "a house"],
)


class Server:
    """Teaching on an engine, which can be begun anew on the same folders."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.loras, self.folder = engine, loras_of(engine), folder
        self.teaching = Teaching.open(engine, folder, self.loras)

    def until(self, status: str, name: str = "zork"):
        deadline = time.monotonic() + PATIENCE
        while (run := self.run(name)).status != status:
            assert time.monotonic() < deadline and run.status not in {FAILED} - {status}, run
            time.sleep(0.01)
        return run

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def takes(self, steps: int) -> None:
        """Waits until so many steps have been taken."""
        self.wait_for(lambda: self.run().step >= steps)

    def run(self, name: str = "zork"):
        return next(each for each in self.teaching.runs(ME) if each.name == name)

    def draw(self, prompt: str, **values) -> np.ndarray:
        return np.asarray(self.engine.draw(prompt, seed=5, steps=4, **values)[0])

    def close(self) -> None:
        self.teaching.close()
        for file in self.loras.iterdir():
            file.unlink()
        self.engine.adapters.look_again()


def loras_of(engine: Engine) -> Path:
    folder = engine.adapters._loras.path
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def engine(least, tmp_path_factory) -> Iterator[Engine]:
    """An engine on one device, with no LoRAs yet."""
    with Engine.open(least, devices=1, lora_dir=tmp_path_factory.mktemp("loras")) as engine:
        yield engine


@pytest.fixture
def server(engine, tmp_path) -> Iterator[Server]:
    server = Server(engine, tmp_path / "teaching")
    yield server
    server.close()


@pytest.mark.slow("compiles all for one device and for two")
def test_several_devices_train_together(least, engine, tmp_path):
    (tmp_path / "loras").mkdir()
    two = Engine.open(least, devices=2, lora_dir=tmp_path / "loras")
    server = Server(two, tmp_path / "teaching")
    before = server.draw("a cat")
    server.teaching.start(WISH)
    assert server.until(DONE).losses[-1][0] == WISH.steps
    assert np.array_equal(server.draw("a cat"), before)
    assert not np.array_equal(server.draw("a cat <lora:zork:1>"), before)
    server.teaching.start(dataclasses.replace(WISH, name="blob", steps=100_000))
    server.until(TRAINING, "blob")
    server.wait_for(lambda: server.run("blob").step >= 3)
    server.teaching.stop(ME, server.run("blob").id)
    stopped = server.until(STOPPED, "blob")
    server.close()
    two.close()
    fewer = Server(engine, tmp_path / "teaching")
    fewer.teaching.resume(ME, stopped.id)
    fewer.wait_for(lambda: fewer.run("blob").step > stopped.step)
    assert fewer.run("blob").batch == 2
    fewer.close()


@pytest.mark.slow("trains and draws")
def test_a_lora_is_taught_beside_what_is_drawn_and_offered_at_once(server, monkeypatch):
    train, steps = server.engine.worker._train, []  # when each step began and ended

    def timed(training):
        begun = time.monotonic()
        seconds = train(training)
        steps.append((begun, time.monotonic()))
        return seconds

    monkeypatch.setattr(server.engine.worker, "_train", timed)
    before = server.draw("a cat")
    server.teaching.start(dataclasses.replace(WISH, steps=400))
    server.until(TRAINING)
    server.takes(5)
    for _ in range(3):
        request = Request.check(
            {"prompts": ["a cat"], "seed": 5, "steps": 4}, server.engine.catalog
        )
        job = server.engine.submit(request)
        since = time.monotonic()
        assert isinstance([*job.events()][-1], Done)
        until = time.monotonic()
        waited = [begun for begun, ended in list(steps) if ended > since and begun < until]
        # One more may begin between the end of the picture and our hearing of it.
        assert len(waited) <= 2, "a picture waited for more than one step"
        assert server.run().status == TRAINING
    assert np.array_equal(server.draw("a cat"), before), "others' pictures have changed"
    run = server.until(DONE)
    assert run.kept == [100, 200, 300, 400]
    assert [step for step, _ in run.losses][-1] == 400
    assert {"zork", "zork-100"} <= server.engine.adapters.loras().keys()
    taught = server.draw("a cat <lora:zork:1>")
    assert not np.array_equal(taught, before)
    assert np.array_equal(server.draw("a cat"), before)
    assert not (server.folder / run.id / "pictures").exists(), "pictures are deleted after"
    server.wait_for(lambda: len(run.samples(0)) == len(run.samples(400)) == 2)
    assert run.samples(400)[0] != run.samples(0)[0]
    half = (server.loras / "zork-200.safetensors").read_bytes()
    with pytest.raises(RequestError, match="not there any more"):
        server.teaching.keep(OTHER, run.id, 200)
    assert server.teaching.keep(ME, run.id, 200) == "zork"
    assert [*server.loras.iterdir()] == [server.loras / "zork.safetensors"]
    assert (server.loras / "zork.safetensors").read_bytes() == half
    assert server.teaching.runs(ME) == [] and [*server.folder.iterdir()] == [server.folder / "lock"]


def test_a_run_whose_server_was_killed_goes_on_to_the_same_file(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVED_SECONDS", 0.0)
    found = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        server = Server(engine, folder / "teaching")
        run = server.teaching.start(dataclasses.replace(WISH, steps=60))
        if killed:
            server.wait_for((run.folder / "state.safetensors").exists)
            with server.teaching._change:  # as it is at a `kill -9`
                copy_tree(server.folder, folder / "copy")
                copy_tree(server.loras, folder / "loras")
            server.close()
            shutil.copytree(folder / "loras", server.loras, dirs_exist_ok=True)
            server = Server(engine, folder / "copy")
            (again,) = server.teaching.runs(ME)
            assert again.status == STOPPED and 0 < again.step <= 60
            with pytest.raises(RequestError, match="not there any more"):
                server.teaching.resume(OTHER, again.id)
            server.teaching.resume(ME, again.id)
        server.until(DONE)
        found.append(load_file(server.loras / "zork.safetensors"))
        server.close()
    for name, factor in found[0].items():
        np.testing.assert_array_equal(found[1][name], factor)


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.unfinished"))


def test_a_stopped_run_can_be_gone_on_with_or_discarded_and_others_wait(server):
    teaching = server.teaching
    first = teaching.start(dataclasses.replace(WISH, steps=100_000))
    second = teaching.start(dataclasses.replace(WISH, name="blob"))
    server.until(TRAINING)
    server.takes(3)
    assert server.run("blob").status == WAITING and teaching.ahead(second) == 1
    with pytest.raises(RequestError, match="The name Zork is taken"):
        teaching.start(dataclasses.replace(WISH, name="Zork"))
    third = teaching.start(dataclasses.replace(WISH, name="c"))
    with pytest.raises(Busy, match="Too much is being taught"):
        teaching.start(dataclasses.replace(WISH, name="d"))
    teaching.stop(ME, third.id)
    teaching.stop(ME, first.id)
    stopped = server.until(STOPPED)
    assert stopped.kept == [stopped.step] and (first.folder / "pictures").exists()
    assert f"zork-{stopped.step}" in server.engine.adapters.loras()
    server.until(DONE, "blob")
    teaching.resume(ME, first.id)
    server.until(TRAINING)
    server.takes(stopped.step + 1)
    teaching.stop(ME, first.id)
    server.until(STOPPED)
    teaching.discard(ME, first.id)
    assert not first.folder.exists()
    assert not [name for name in server.engine.adapters.loras() if name.startswith("zork")]


@pytest.mark.parametrize(
    ("changes", "count", "sentence"),
    [
        ({}, 1, "A model is taught by 4 to 40 pictures, not 1"),
        ({}, 500, "pictures, not 500"),
        (dict(name="a/b"), 4, "cannot be the name"),
        (dict(name=""), 4, "Give what is taught a name"),
        (dict(kind="animal"), 4, "There is no kind 'animal'"),
        (dict(rank=3), 4, "rank should be from 4"),
        (dict(steps=0), 4, "steps should be"),
        (dict(model="nowhere"), 4, "There is no model 'nowhere'"),
    ],
)
def test_what_cannot_be_taught_is_a_sentence(page_teaching, changes, count, sentence):
    with pytest.raises(RequestError, match=sentence):
        page_teaching.check(dataclasses.replace(WISH, **changes), count)


@pytest.mark.parametrize(
    ("flags", "teaches"),
    [
        ("", True),
        ("--no-teach", False),
        ("--host 0.0.0.0", False),
        ("--host 0.0.0.0 --teach", True),
        ("--allowed-host draw.example.org", False),
        ("--share", False),
    ],
)
def test_only_this_machine_is_offered_teaching_unless_flags_say_otherwise(
    flags, teaches, monkeypatch
):
    monkeypatch.delenv("GRADIO_SERVER_NAME", raising=False)
    assert app._teaches(app.make_parser().parse_args(flags.split())) is teaches


@pytest.mark.parametrize("name", ["Mine", "mine", "other", "mine-2"])
def test_a_name_whose_files_are_there_or_will_be_is_taken(page_teaching, name):
    (page_teaching._loras / "mine-2.safetensors").touch()
    (page_teaching._loras / "other.safetensors").touch()
    with pytest.raises(RequestError, match=f"The name {name} is taken"):
        page_teaching.check(dataclasses.replace(WISH, name=name), 4)
    page_teaching.check(dataclasses.replace(WISH, name="mine-2b"), 4)


def test_a_run_that_nobody_goes_on_with_is_forgotten_with_its_pictures(page_teaching, tmp_path):
    for name, days in (("old", 8), ("new", 6)):
        run = page_teaching._run(dataclasses.replace(WISH, name=name))
        values = {**vars(run), "folder": tmp_path / name, "status": STOPPED}
        TrainingRun.begin(WISH.pictures, **values)
        then = time.time() - days * 86400
        os.utime(tmp_path / name / "run.json", (then, then))
    teaching = Teaching.open(page_teaching._engine, tmp_path, page_teaching._loras)
    assert [run.name for run in teaching.runs(ME)] == ["new"]
    assert not (tmp_path / "old").exists() and (tmp_path / "new" / "pictures" / "3").exists()
    with pytest.raises(OSError, match="another server uses"):
        Teaching.open(page_teaching._engine, tmp_path, page_teaching._loras)
    teaching.close()


@pytest.fixture(scope="module")
def page_teaching(engine, tmp_path_factory) -> Iterator[Teaching]:
    """A teaching that refuses what it is asked for, with a folder of LoRAs of its own."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "loras").mkdir()
    teaching = Teaching.open(engine, folder / "teaching", folder / "loras")
    yield teaching
    teaching.close()


def test_without_memory_enough_it_says_what_would_fit(server, monkeypatch):
    engine = server.engine
    engine.ready.wait()
    limit = engine.weights.memory + engine.texts.memory + 400_000
    monkeypatch.setattr(engine.scheduler._memory, "limit", limit)
    server.teaching.start(WISH)
    run = server.until(FAILED)
    assert "Teaching this model at 32x32 takes" in run.message
    assert "About 24x24 would fit" in run.message


def test_a_training_that_fails_is_told_and_others_draw_on(server, monkeypatch):
    take = module.Trainer.take

    def broken(trainer, params):
        if trainer.done == 5:
            raise MemoryError("no room")
        return take(trainer, params)

    monkeypatch.setattr(module.Trainer, "take", broken)
    server.teaching.start(WISH)
    assert "no room" in server.until(FAILED).message
    assert server.draw("a cat").any()
    threads = threading.active_count()
    monkeypatch.undo()
    server.teaching.resume(ME, server.run().id)
    run = server.until(DONE)
    assert [step for step, _ in run.losses] == [1, 2, 3, 4, 5, 6, 7, 8], "4 was kept last"
    assert len(curve(run.losses).split()) == 8
    assert threading.active_count() <= threads


def test_a_run_whose_lora_could_not_be_written_takes_no_other_step(server, monkeypatch):
    write = module.Trainer.write

    def full(trainer, file, state):
        if file.name == "zork.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(trainer, file, state)

    monkeypatch.setattr(module.Trainer, "write", full)
    server.teaching.start(WISH)
    message = server.until(FAILED).message
    assert message == "Teaching failed: No space left on device", "a path is on the page"
    monkeypatch.undo()
    server.teaching.resume(ME, server.run().id)
    run = server.until(DONE)
    assert run.step == WISH.steps and run.kept[-1] == WISH.steps
    assert (server.loras / "zork.safetensors").exists()


def test_a_trainee_that_has_taken_all_steps_ends_at_once():
    def unexpected(*_):
        raise AssertionError("a step beyond the last")

    trainer = SimpleNamespace(is_over=True, is_encoded=True, take=unexpected)
    trainee = module._Trainee(SimpleNamespace(steps=8), trainer, unexpected)
    assert trainee.step({}) is False
    trainee.work()


# --- what is refused, and forgotten -------------------------------------------------------------


@pytest.fixture
def queue(page_teaching, tmp_path) -> Teaching:
    """A teaching whose runs only wait."""
    (tmp_path / "loras").mkdir()
    return Teaching(page_teaching._engine, tmp_path / "runs", tmp_path / "loras")


def test_of_two_starts_at_once_one_has_the_name(queue, monkeypatch):
    begin = TrainingRun.begin

    def beside(pictures, **values):
        monkeypatch.undo()
        queue.start(WISH)
        return begin(pictures, **values)

    monkeypatch.setattr(TrainingRun, "begin", beside)
    with pytest.raises(RequestError, match="The name zork is taken"):
        queue.start(WISH)
    (run,) = queue.runs(ME)
    assert [*queue._folder.iterdir()] == [run.folder]


def test_one_browser_and_one_network_leave_room_for_others(queue, monkeypatch):
    def start(name, owner, address):
        wish = dataclasses.replace(WISH, name=name, owner=owner, address=address)
        return queue.start(wish)

    for name, owner in zip("abc", (ME, ME, OTHER), strict=True):
        start(name, owner, "10.0.0.1")
    for owner, address in ((OTHER, "10.0.0.1"), ("c" * 32, "10.0.0.1")):
        with pytest.raises(Busy, match="Too much is being taught"):
            start("d", owner, address)
    run = start("d", "c" * 32, "10.0.0.2")
    assert "10.0.0" not in (run.folder / "run.json").read_text()
    for each in queue._runs.values():
        each.status = STOPPED
    monkeypatch.setattr(module, "OWNER_RUNS", 2)
    with pytest.raises(Busy):
        start("e", ME, "")
    monkeypatch.setattr(module, "NETWORK_RUNS", 3)
    with pytest.raises(Busy):
        start("e", "d" * 32, "10.0.0.1")
    start("e", "d" * 32, "10.0.0.2")


def test_pictures_of_all_runs_are_bounded(queue, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 2 * sum(map(len, WISH.pictures)) - 1)
    run = queue.start(WISH)
    with pytest.raises(Busy):
        queue.start(dataclasses.replace(WISH, name="b"))
    run.forget_pictures()
    queue.start(dataclasses.replace(WISH, name="b"))


def test_a_run_goes_on_however_many_are_kept(queue, monkeypatch):
    run = queue.start(WISH)
    queue.stop(ME, run.id)
    monkeypatch.setattr(module, "MAX_RUNS", 1)
    queue.resume(ME, run.id)
    assert run.status == WAITING


def test_others_are_answered_while_a_run_that_stops_takes_its_step(queue):
    run = queue.start(WISH)
    stepped = threading.Event()
    queue._trainee = SimpleNamespace(run=run, stop=lambda: stepped.wait(PATIENCE))
    stopping = threading.Thread(target=queue.stop, args=(ME, run.id))
    stopping.start()
    asked: list[list[TrainingRun]] = []
    asking = threading.Thread(target=lambda: asked.append(queue.runs(ME)))
    asking.start()
    asking.join(10)
    answered = len(asked)
    stepped.set()
    stopping.join()
    asking.join()
    assert answered == 1


def test_nothing_stays_of_a_run_that_cannot_be_written(queue, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TrainingRun, "save", full)
    with pytest.raises(OSError, match="No space"):
        queue.start(WISH)
    assert [*queue._folder.iterdir()] == [] and queue.runs(ME) == []


def test_a_folder_that_was_cut_off_goes_and_an_old_run_while_the_server_waits(
    queue, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "FORGETTING_SECONDS", 0.02)
    (tmp_path / "runs" / "cut" / "pictures").mkdir(parents=True)
    (tmp_path / "runs" / "cut" / "pictures" / "0").touch()
    teaching = Teaching.open(queue._engine, tmp_path / "runs", tmp_path / "loras")
    assert not (tmp_path / "runs" / "cut").exists()
    run = TrainingRun.begin(WISH.pictures, **{**vars(teaching._run(WISH)), "status": STOPPED})
    then = time.time() - 8 * 86400
    os.utime(run.folder / "run.json", (then, then))
    with teaching._change:
        teaching._runs[run.id] = run
    deadline = time.monotonic() + PATIENCE
    while run.folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    teaching.close()


@pytest.mark.parametrize("change", ["dtype", "damaged", "devices"])
def test_a_run_of_another_server_is_refused_in_words_of_the_page(queue, monkeypatch, change):
    checkpoint = queue._engine.catalog.open("").checkpoint
    run = queue.start(WISH)
    monkeypatch.setattr(module.Trainer, "compile", lambda _: None)
    monkeypatch.setattr(ExampleEncoder, "compile", lambda _: None)
    queue._prepared(run, checkpoint).save(run.state)
    queue._prepared(run, checkpoint)
    match change:
        case "dtype":
            monkeypatch.setattr(module, "identity", lambda *_: {"dtype": "bfloat16"})
        case "damaged":
            run.state.write_bytes(b"nothing")
        case "devices":
            monkeypatch.setattr(queue, "_engine", SimpleNamespace(mesh=make_mesh(2)))
    with pytest.raises(CheckpointError, match="This cannot be gone on with") as caught:
        queue._prepared(run, checkpoint)
    assert str(queue._folder) not in str(caught.value)


def test_why_a_run_failed_can_be_translated_after_a_restart(queue):
    run = queue.start(WISH)
    run.message = Sentence("Teaching failed: {reason}", reason=Sentence("It is {n}.", n=3))
    run.save()
    again = TrainingRun.restore(run.folder)
    assert again is not None
    assert again.message == run.message and again.message.template == run.message.template
    assert again.message.facts["reason"].facts == {"n": 3}


@pytest.mark.parametrize("asked", [True, False])
def test_a_server_without_a_folder_for_loras_starts_unless_teaching_was_asked_for(
    asked, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(app, "data_folder", lambda: tmp_path / "file")
    args = app.make_parser().parse_args(["--teach"] if asked else [])
    if asked:
        with pytest.raises(OSError, match="Not a directory"):
            app._made_lora_dir(args)
    else:
        assert app._made_lora_dir(args) is None
