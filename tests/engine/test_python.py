"""Pictures from Python: `sd_tpu.Engine` draws them, tells how it goes, and runs its examples."""

import asyncio
import doctest
import time
from types import SimpleNamespace

import pytest

import sd_tpu
from benchmarks.report import count_compilations
from sd_tpu import Cancelled, Done, DrawingError, DrawnImage, Engine, Failed, Progress, read_png
from sd_tpu.sentence import Sentence
from sd_tpu.serving.client import EngineClient


def run_examples(documented, **names) -> None:
    """Runs a docstring's examples as somebody would type them."""
    runner = doctest.DocTestRunner()
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, "examples", globs=names)
    runner.run(test)
    assert runner.tries
    assert not runner.failures


@pytest.mark.parametrize("name", ["draw", "stream", "draw_async"])
def test_the_examples_of_docstrings_run(name, page_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(getattr(EngineClient, name), engine=page_engine, asyncio=asyncio, **vars(sd_tpu))


@pytest.mark.slow("opens the bundled model, and compiles it where that was never done")
def test_three_lines_draw_with_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(sd_tpu)
    assert read_png(tmp_path / "cat.png").pictures[0].prompt == "a cat"


@pytest.mark.slow("opens the bundled model, and compiles it where that was never done")
def test_with_closes_an_engine(tmp_path, monkeypatch):
    closed, close = [], Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine) or close(engine))
    run_examples(Engine.open, Engine=Engine)
    assert len(closed) == 1


def test_an_engine_that_is_opened_again_compiles_nothing(least):
    drawn, compiled = [], []
    for _ in range(2):
        count = count_compilations()
        with Engine.open(least, devices=1) as engine:
            drawn.append(engine.draw("a cat", steps=2))
        assert engine.programs.traces == {"encode": 1, "advance": 1, "decode": 1}
        compiled.append(count())
    assert drawn[0] == drawn[1]
    assert compiled[1] == 0


def test_a_stream_tells_steps_previews_pictures_and_the_end(page_engine):
    events = [*page_engine.stream(["a", "", "b"], steps=3, seed=4)]
    steps = [event for event in events if isinstance(event, Progress)]
    assert any(event.previews for event in steps)
    drawn = [event for event in events if isinstance(event, DrawnImage)]
    assert sorted(image.index for image in drawn) == [0, 2]
    assert {image.settings.seed for image in drawn} == {4, 6}
    assert isinstance(events[-1], Done)


def test_whoever_leaves_a_stream_cancels_it(slow_engine):
    cancelled = slow_engine.status().tally.ended["cancelled"]
    for event in slow_engine.stream("a", steps=200):
        if isinstance(event, Progress):
            break
    while slow_engine.jobs():
        time.sleep(0.01)
    assert slow_engine.status().tally.ended["cancelled"] == cancelled + 1


def test_an_event_loop_streams_the_same(page_engine):
    async def drawn():
        return [
            event
            async for event in page_engine.stream_async("a", steps=2, previews=False)
            if isinstance(event, DrawnImage)
        ]

    assert asyncio.run(drawn()) == page_engine.draw("a", steps=2)


@pytest.mark.parametrize(
    "end, sentence",
    [(Failed(Sentence("The lamp is out.")), "lamp"), (Cancelled(), "was cancelled")],
)
def test_pictures_that_are_not_drawn_raise(page_engine, monkeypatch, end, sentence):
    job = SimpleNamespace(events=lambda: iter([end]), cancel=lambda: None)
    monkeypatch.setattr(page_engine, "submit", lambda *_, **__: job)
    with pytest.raises(DrawingError, match=sentence):
        page_engine.draw("a")
