"""Pictures of styles are drawn once, with the lowest turn, while somebody looks at them."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from sd_tpu.gallery import style_board
from sd_tpu.gallery.style_board import StyleBoard
from sd_tpu.serving.job import Cancelled, Done, Failed, ImageReady, Progress
from sd_tpu.settings import Picture, RequestError

PIXELS = np.full((300, 200, 3), 90, np.uint8)


class FakeEngine:
    """An engine that notes the styles it draws; `jobs` are what others have asked for."""

    def __init__(self):
        self.drawn: list[str] = []
        self.jobs, self.interrupted, self.own = 0, False, 0
        self.held, self.training, self.fails = {"weights"}, False, 0
        self.templates = {"Ink": ("ink {prompt}", ""), "Bad": ("bad", "")}
        opened = SimpleNamespace(
            defaults=Picture(steps=9),
            checkpoint=SimpleNamespace(
                card=SimpleNamespace(prompts=("a fox",)), parameters=SimpleNamespace(source="here")
            ),
            written=(),
            weights="weights",
        )
        self.catalog = SimpleNamespace(
            open=lambda model: opened, styles=SimpleNamespace(templates=lambda: self.templates)
        )

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            taking=True, jobs=self.jobs + self.own, held=self.held, training=self.training
        )

    def submit(self, request, **_) -> SimpleNamespace:
        (picture,) = request.pictures
        if picture.style == "Bad":
            raise RequestError("It is too long.")
        assert (picture.prompt, picture.steps) == ("a fox", 4)
        cancelled: list[bool] = []

        def events() -> Iterator:
            self.own = 1
            if self.interrupted:
                self.jobs = 1
            yield Progress(1, 4, {}, 1.0)
            self.own = 0
            if self.fails:
                self.fails -= 1
                yield Failed("The devices have no memory left.")
                return
            if cancelled:
                yield Cancelled()
                return
            self.drawn.append(picture.style)
            yield ImageReady(0, PIXELS, False)
            yield Done(1.0)

        return SimpleNamespace(events=events, cancel=lambda: cancelled.append(True))


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    monkeypatch.setattr(style_board, "PAUSE_SECONDS", 0.001)
    return FakeEngine()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def names(board: StyleBoard) -> list[str]:
    """Return the styles that have pictures."""
    return [name for name, file in board.look("")[0].items() if file]


def test_each_is_drawn_once_and_again_only_where_its_template_is_another(engine, tmp_path):
    engine.jobs = 1  # nothing is drawn while somebody waits
    board = StyleBoard(engine, tmp_path / "styles")
    assert [*board.look("")[0]] == ["", "Ink", "Bad"] and names(board) == []
    engine.jobs = 0
    until(lambda: names(board) == ["", "Ink"])
    until(lambda: not board.look("")[1])  # one cannot be drawn
    until(lambda: not board._drawing)
    again = StyleBoard(engine, tmp_path / "styles")
    until(lambda: "Bad" not in names(again) and not again._drawing)
    assert engine.drawn == ["", "Ink"]
    engine.templates["Ink"] = ("brush {prompt}", "")
    assert names(board) == [""]
    until(lambda: engine.drawn == ["", "Ink", "Ink"])


def test_nothing_is_begun_while_somebody_waits_and_what_is_begun_is_left(engine, tmp_path):
    engine.jobs = 1
    board = StyleBoard(engine, tmp_path)
    board.look("")
    time.sleep(0.02)
    assert engine.drawn == []
    engine.jobs, engine.interrupted = 0, True
    until(lambda: engine.jobs == 1)  # somebody comes as the first is drawn
    time.sleep(0.02)
    assert engine.drawn == [] and names(board) == []
    engine.jobs, engine.interrupted = 0, False
    until(lambda: names(board) == ["", "Ink"])


def test_nothing_is_drawn_once_nobody_looks(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(style_board, "WATCHED_SECONDS", 0.01)
    engine.jobs = 1
    board = StyleBoard(engine, tmp_path)
    board.look("")
    until(lambda: not board._drawing)
    engine.jobs = 0
    time.sleep(0.01)
    assert engine.drawn == []


@pytest.mark.parametrize("reason", ["another model is on the devices", "a model is taught"])
def test_nothing_is_brought_for_it_and_no_training_slowed(engine, tmp_path, reason):
    engine.training = reason == "a model is taught"
    engine.held = {"weights"} if engine.training else set()
    board = StyleBoard(engine, tmp_path)
    assert board.look("")[1]
    time.sleep(0.02)
    assert engine.drawn == []
    engine.training, engine.held = False, {"weights"}
    until(lambda: names(board) == ["", "Ink"])


def test_after_a_failure_it_rests(engine, tmp_path, monkeypatch):
    engine.fails = 1
    board = StyleBoard(engine, tmp_path)
    board.look("")
    until(lambda: not board._drawing)
    assert board.look("") == (dict.fromkeys(["", "Ink", "Bad"]), True) and not board._drawing
    monkeypatch.setattr(style_board, "FAILURE_SECONDS", 0.0)
    until(lambda: names(board) == ["", "Ink"])


def test_a_folder_that_cannot_be_written_is_not_tried_again_at_once(engine, tmp_path, caplog):
    (tmp_path / "styles").write_text("a file")
    board = StyleBoard(engine, tmp_path / "styles")
    for _ in range(3):
        board.look("")
        until(lambda: not board._drawing)
    assert engine.drawn == [""] and len(caplog.records) == 1
