"""Runs on the page: pictures form in their places, stop, go on, and are found again."""

import asyncio
import dataclasses
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import gradio as gr
import pytest
from anyio.from_thread import start_blocking_portal

from sd_tpu.gallery import run as run_module
from sd_tpu.gallery.files import Files, PictureFile
from sd_tpu.gallery.history import HistoryError
from sd_tpu.gallery.run import Backend, Run
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.status import STARTING, queued
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.language import ENGLISH
from sd_tpu.page import schema
from sd_tpu.page.actions import Actions
from sd_tpu.page.events import ActionRequest, RunStream
from sd_tpu.pictures.images import read_png
from sd_tpu.serving.job import (
    COMPILING,
    LOADING,
    WAITING,
    Cancelled,
    Done,
    Failed,
    ImageReady,
    Progress,
    Queued,
)
from sd_tpu.serving.scheduler import Busy
from sd_tpu.settings import RequestError
from tests.support.asking import following, make_request
from tests.support.jobs import FakeJob
from tests.support.pages import picture_file
from tests.support.visitor import (
    LONG,
    PATIENCE,
    PROMPTS,
    alts,
    box,
    corners,
    expect,
    figures,
    fill,
    generate,
    make,
    newcomer,
    press,
    says,
    seed_box,
    setting,
    stop,
    unfold,
    visit,
)


def test_eight_prompts_become_eight_pictures_in_their_places(tab):
    fill(tab, PROMPTS, seed=40)
    before = corners(tab)
    make(tab)
    assert alts(tab) == PROMPTS
    for i, prompt in enumerate(PROMPTS):
        expect(figures(tab).nth(i)).to_contain_text(prompt)
        expect(figures(tab).nth(i)).to_contain_text(f"Seed {40 + i}")
        width = (
            figures(tab)
            .nth(i)
            .locator("img")
            .evaluate("image => image.decode().then(() => image.naturalWidth)")
        )
        assert width == 32
    assert corners(tab) == before, "the layout has shifted"
    says(tab, "seed 40")


def test_the_seed_that_is_named_is_that_of_the_seed_box_whichever_pictures_are_drawn(tab):
    fill(tab, ["a cat", "a dog", *[""] * 6], seed=7)
    make(tab)
    box(tab, 2).fill("a fox")
    make(tab)
    expect(tab.locator("#line")).to_have_text(re.compile(r"s, seed 7\s*$"))
    press(tab, tab.get_by_role("button", name="Redraw picture 2"))
    expect(tab.locator("#line")).to_have_text(re.compile(r"Done in [\d.]+ s\s*$"))
    press(tab, tab.get_by_role("button", name="Vary picture 2"))
    says(tab, "Done in")
    expect(tab.locator("#line")).to_have_text(
        re.compile(rf"s, seed {seed_box(tab).input_value()}\s*$")
    )


def test_an_empty_box_is_skipped_and_keeps_its_place(tab):
    fill(tab, ["first", "", "   ", "fourth", "", "", "", ""], seed=7)
    make(tab)
    assert alts(tab) == ["first", "fourth"]
    expect(figures(tab).nth(0).locator("img")).to_have_attribute("alt", "first")
    expect(figures(tab).nth(3).locator("img")).to_have_attribute("alt", "fourth")
    expect(figures(tab).nth(3)).to_contain_text("Seed 10")


def test_previews_form_and_stop_ends_the_run(tab, slow_engine):
    fill(tab, PROMPTS, steps=LONG)
    generate(tab).click()
    says(tab, re.compile(rf"Step \d+ of {LONG}, about \d+ (s|min) left"))
    expect(tab.locator("figure.forming img").first).to_be_visible(timeout=PATIENCE)
    stop(tab).click()
    says(tab, "Stopped")
    expect(tab.locator("figure.stopped")).to_have_count(8)
    expect(tab.get_by_role("link", name="Download picture")).to_have_count(0)
    assert not slow_engine.occupied
    fill(tab, PROMPTS)
    make(tab)
    expect(tab.get_by_role("link", name="Download picture")).to_have_count(8)


def test_escape_stops_and_gives_old_pictures_back_and_a_refusal_clears_others(tab, slow_engine):
    fill(tab, ["first", *[""] * 7], seed=6)
    make(tab)
    fill(tab, ["new", "second", *[""] * 6], steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    expect(tab).to_have_title(re.compile(r"^\d+ % · "), timeout=PATIENCE)
    setting(tab, "Steps").press("Escape")  # which closes the settings
    box(tab, 1).press("Escape")  # while somebody writes it means nothing
    says(tab, "Step")
    box(tab, 1).blur()
    tab.keyboard.press("Escape")
    says(tab, "Stopped")
    expect(tab.locator("figure.done")).to_have_count(1)
    expect(tab.locator("figure.stopped")).to_have_count(1)
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download picture 1").click()
    asked = read_png(download.value.path())
    assert (asked.prompts, asked.seed, asked.pictures[0].steps) == (("first",), 6, 2)
    fill(tab, PROMPTS, steps=0)
    generate(tab).click()
    says(tab, "Steps should be from 1 to 200, not 0.")
    expect(tab.locator("figure.done")).to_have_count(1)
    expect(tab.locator("figure.blank")).to_have_count(7)


def test_whoever_is_next_is_not_told_that_he_is_number_one():
    assert "1" not in queued(1, WAITING, None) + queued(1, COMPILING, None)
    assert queued(2, WAITING, None) == "Queued as number 2"


@pytest.fixture
def held_engine(page_engine, monkeypatch):
    """The engine while it does not get on with what somebody else has asked for."""
    reached, released, execute = threading.Event(), threading.Event(), page_engine.worker.execute

    def hold(plan):
        reached.set()
        released.wait()
        return execute(plan)

    monkeypatch.setattr(page_engine.worker, "execute", hold)
    ahead = page_engine.submit(
        make_request(prompts=("a",), steps=2, height=32, width=32, model=page_engine.catalog.first)
    )
    assert reached.wait(PATIENCE / 1000)
    yield page_engine
    released.set()
    ahead.cancel()


def test_stop_ends_a_run_that_still_waits_at_once(tab, held_engine):
    fill(tab, PROMPTS)
    generate(tab).click()
    says(tab, re.compile("Starting"))
    stop(tab).click()
    says(tab, "Stopped")


def test_what_goes_on_does_not_answer_for_what_is_asked_for_and_stop_ends_all_of_it(
    tab, slow_engine, monkeypatch
):
    fill(tab, ["first", "second", *[""] * 6])
    make(tab)
    setting(tab, "Steps").fill(str(LONG))
    tab.get_by_role("button", name="Redraw picture 1").click()
    says(tab, "Step")
    stop(tab).focus()
    line = tab.locator("#line p")
    expect(line).not_to_have_text(line.inner_text())
    expect(stop(tab)).to_be_focused()
    start, released = Runs.start, threading.Event()
    monkeypatch.setattr(
        Runs,
        "start",
        lambda *given, **more: (released.wait(PATIENCE / 1000), start(*given, **more))[1],
    )
    generate(tab).click()
    says(tab, "Step")  # of what goes on
    expect(generate(tab)).to_be_disabled()
    expect(figures(tab).nth(1)).to_have_class(re.compile("asked"))
    tab.get_by_role("button", name="Vary picture 2").click()
    stop(tab).click()
    released.set()
    expect(box(tab, 1)).to_have_value("second", timeout=PATIENCE)
    says(tab, "Stopped")
    expect(stop(tab)).to_be_disabled()
    expect(generate(tab)).to_be_enabled()


def test_a_refusal_says_when_there_is_room_again(tab, page_engine, monkeypatch):
    def refuse(request, **_):
        raise Busy(
            "Too many of your pictures are waiting; please try again when some are done.",
            retry_after=40,
        )

    monkeypatch.setattr(page_engine, "submit", refuse)
    generate(tab).click()
    says(tab, "please try again when some are done. There should be room in about 40 s.")


def test_all_that_a_browser_asks_for_is_asked_for_in_its_name(tab, page_engine, monkeypatch):
    asked, submit = [], page_engine.submit
    monkeypatch.setattr(
        page_engine,
        "submit",
        lambda request, **options: (asked.append(options["client"]), submit(request, **options))[1],
    )
    fill(tab, ["first", *[""] * 7])
    make(tab)
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    make(tab)
    name, again = asked
    assert re.fullmatch("[0-9a-f]{32}", name) and name == again


def test_a_run_is_found_again_after_a_reload(tab, slow_engine):
    fill(tab, PROMPTS, seed=11, steps=LONG)
    generate(tab).click()
    says(tab, re.compile("Step [1-9]"))
    tab.reload()
    says(tab, re.compile(rf"Step \d+ of {LONG}"))
    expect(stop(tab)).to_be_enabled()
    expect(figures(tab).nth(7)).to_contain_text("Seed 18")
    stop(tab).click()
    says(tab, "Stopped")


def test_who_cannot_reach_the_server_is_told_so_keeps_his_pictures_and_can_try_again(tab):
    fill(tab, ["first", *[""] * 7])
    make(tab)
    tab.route(re.compile("component_server"), lambda route: route.abort())
    box(tab, 1).fill("second")
    generate(tab).click()
    says(tab, "The server failed; please try again.")
    expect(tab.locator("figure.done:not(.asked)")).to_have_count(1)
    tab.unroute_all()
    make(tab)
    assert alts(tab) == ["second"]


def test_two_tabs_of_a_browser_see_the_same_run_and_either_can_stop_it(
    tab, visitor, address, slow_engine
):
    fill(tab, PROMPTS, seed=11, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    with visitor.new_page() as other:
        other.goto(address)
        says(other, re.compile(rf"Step \d+ of {LONG}"))
        expect(figures(other).nth(7)).to_contain_text("Seed 18")
        stop(other).click()
        says(other, "Stopped")
    says(tab, "Stopped")
    expect(tab.locator("figure.stopped")).to_have_count(8)


# A phone sleeps and wakes with this in its line; from then on what takes 3 s takes a tenth of one.
SLEEP = """(line) => {
    const { now } = Date, { setTimeout } = window;
    const show = (hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    };
    show(true);
    document.querySelector("#line p").textContent = line;
    Date.now = () => now() + 60_000;
    window.waits = 0;
    window.setTimeout = (wake, wait, ...more) => {
        window.waits += wait === 3000;
        return setTimeout(wake, wait === 3000 ? 100 : wait, ...more);
    };
    show(false);
    Date.now = now;
}"""
WAITED = "() => window.waits > 2"  # it has asked the server twice, and goes on waiting


def test_a_phone_that_slept_through_its_run_finds_it_again_and_loses_nothing(
    tab, held_engine, monkeypatch
):
    # The line is the same whether or not it is known by now how long others take.
    monkeypatch.setattr(run_module, "queued", lambda *_: STARTING.text)
    # It wakes while the run has no name yet: what it would hear then is of the one before.
    start, look, named = Runs.start, Actions._do_look, threading.Event()

    def started(*given, **more):
        time.sleep(0.5)
        run = start(*given, **more)
        named.set()
        return run

    def looked(*given):
        told = look(*given)
        time.sleep(0 if named.is_set() else 1)
        return told

    monkeypatch.setattr(Runs, "start", started)
    monkeypatch.setattr(Actions, "_do_look", looked)
    fill(tab, PROMPTS)
    generate(tab).click()
    says(tab, "Starting…")
    tab.evaluate("window.slept = true")
    tab.evaluate(SLEEP, "Starting…")
    tab.wait_for_function(WAITED)  # as that is true
    tab.wait_for_selector("#line p[data-at]")  # by now it is the server that says so
    unfold(tab, "Paste a list")
    tab.locator("#list-panel textarea").fill("a fox")
    tab.evaluate(SLEEP, "Step 1 of 2")
    tab.wait_for_function(WAITED)
    tab.evaluate("""() => {
        document.querySelector("#painter").showModal();
        document.querySelector("#list-panel textarea").value = "";
        window.waits = 0;
    }""")
    tab.wait_for_function(WAITED)
    assert tab.evaluate("window.slept")
    tab.evaluate("document.querySelector('#painter').close()")
    tab.wait_for_function("!window.slept")
    says(tab, "Starting…")
    stop(tab).click()
    says(tab, "Stopped")


def test_pictures_are_still_there_after_a_reload(tab):
    fill(tab, ["first", "second", *[""] * 6], seed=5)
    make(tab)
    tab.reload()
    expect(tab.locator("figure.done")).to_have_count(2, timeout=PATIENCE)
    assert alts(tab) == ["first", "second"]
    tab.get_by_role("button", name="Reuse last").click()
    expect(seed_box(tab)).to_have_value("5")


def test_a_link_or_a_file_that_is_opened_shows_its_pictures_while_they_are_there(
    tab, visitor, address
):
    fill(tab, ["first", "", "third", *[""] * 5], seed=5)
    make(tab)
    link = tab.locator("#collection [data-link]").get_attribute("data-link")
    file = picture_file(tab, 3)
    fill(tab, ["later", *[""] * 7])
    make(tab)
    tab.evaluate("link => { location.hash = link; }", link)
    says(tab, "The link's prompts, seed and settings are in the boxes.")
    expect(tab.locator("figure.done")).to_have_count(2)
    assert alts(tab) == ["first", "third"]
    tab.get_by_role("button", name="Undo").click()
    expect(tab.locator("#picture-1 img")).to_have_attribute("alt", "later")
    unfold(tab, "Read a picture")
    tab.locator("#read-panel input[type=file]").set_input_files(
        {"name": "third.png", "mimeType": "image/png", "buffer": file}
    )
    expect(tab.locator("#picture-1 img")).to_have_attribute("alt", "third")
    press(tab, generate(tab))
    says(tab, "These pictures are here already: choose a new seed to draw others.")
    with newcomer(visitor, address) as other:
        visit(other, f"{address}#{link}")
        says(other, "The link's prompts, seed and settings are in the boxes.")
        expect(other.locator("figure.done")).to_have_count(0)


def test_a_run_that_nobody_follows_any_more_is_given_up(visitor, address, slow_engine, monkeypatch):
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 1)
    with visitor.new_page() as tab:
        visit(tab, address)
        fill(tab, PROMPTS, steps=LONG)
        generate(tab).click()
        says(tab, "Step")
        (job,) = slow_engine.jobs()
    given_up = time.monotonic() + PATIENCE / 1000
    while slow_engine.jobs():
        assert time.monotonic() < given_up
        time.sleep(0.05)
    assert isinstance(job.end, Cancelled), "the job of a closed tab went on to its end"


@pytest.mark.slow("draws long runs in a browser")
def test_two_people_see_and_stop_only_what_is_their_own(chromium, tab, address, slow_engine):
    mine = [f"mine {i}" for i in range(8)]
    fill(tab, mine, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    with chromium.new_context() as somebody, somebody.new_page() as other:
        visit(other, address)
        expect(other.locator("figure.blank")).to_have_count(8)
        fill(other, ["theirs"] * 8, steps=LONG)
        generate(other).click()
        says(other, re.compile("Queued|Step"))
        stop(other).click()
        says(other, "Stopped")
        expect(other.locator("figure")).to_contain_text(["theirs"] * 8)
    says(tab, "Step")
    expect(tab.locator("figure.forming")).to_have_count(8)
    assert alts(tab) == mine
    stop(tab).click()
    says(tab, "Stopped")


def test_screen_readers_hear_of_beginning_pictures_and_end_but_of_no_step(tab):
    tab.evaluate("""() => {
        window.heard = [];
        const news = document.querySelector("#news [role=status]");
        new MutationObserver(() => heard.push(news.textContent)).observe(
            news, { childList: true, characterData: true, subtree: true });
    }""")
    fill(tab, ["first", "second", *[""] * 6], steps=60)
    make(tab)
    heard = " ".join(tab.evaluate("heard"))
    assert heard.startswith("Making 2 pictures.")
    assert re.search("1, 2 are ready|1 is ready.*2 is ready", heard)
    assert "Done in" in heard and "Step" not in heard


def test_after_a_reload_screen_readers_hear_of_the_picture_that_is_redrawn_alone(visitor, address):
    with newcomer(visitor, address) as tab:
        fill(tab, ["one", "two", "three", *[""] * 5])
        make(tab)
        tab.reload()
        tab.wait_for_function("window.sdTpu?.arrived")
        expect(tab.locator("figure.done")).to_have_count(3)
        tab.evaluate("""() => {
            window.heard = [];
            const news = document.querySelector("#news");
            new MutationObserver(() => heard.push(news.textContent)).observe(
                news, { childList: true, characterData: true, subtree: true });
        }""")
        press(tab, figures(tab).first.locator(".actions > [data-do=redraw]"))
        says(tab, "Done in")
        heard = " ".join(tab.evaluate("heard"))
    assert "Picture 1 is ready." in heard and not re.search("Pictures? [^.]*[23]", heard)


class Room:
    """A disk with room."""

    def add(self, *_):
        return PictureFile("picture.png", "picture.webp")


class NoRoom:
    """A disk that is full."""

    def add(self, *_):
        raise OSError("No space left on device")


ASKED = make_request(prompts=("a", "b"), steps=20, seed=3)


def run_of(job, files=None, history=None, request=ASKED, live=False, **whose):
    """A run of which this is the job."""

    def submit(drawn, **_):
        job.request = drawn
        return job

    engine = SimpleNamespace(submit=submit)
    backend = Backend(engine, files or NoRoom(), Inputs(), history)
    return Run(backend, request, **whose).begin(live=live)


def test_runs_wait_without_a_thread_each():
    class Job(FakeJob):  # which takes no thread itself
        async def events_async(self):
            for event in self.events():
                yield event

    before = {*threading.enumerate()}
    runs = [run_of(Job(), browser="me") for _ in range(20)]
    begun = {*threading.enumerate()} - before
    assert all(each.name.startswith("runs") for each in begun), begun
    assert len(runs) > len(begun)


def test_a_run_that_nobody_ever_follows_is_given_up(monkeypatch):
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.1)
    job, over = FakeJob(), threading.Event()
    job.cancel = over.set
    job.events = lambda: iter(over.wait, True)
    run_of(job)
    assert over.wait(5)


def test_a_run_is_told_to_the_few_tabs_that_were_opened_last():
    job, over = FakeJob(), threading.Event()
    job.cancel = over.set
    job.events = lambda: iter(over.wait, True)  # none until it is cancelled
    run = run_of(job, browser="me")
    tabs = [following(run, f"tab {number}") for number in range(run_module.MAX_SUBSCRIBERS + 1)]
    for tab in tabs:
        next(tab)
    assert not run.is_streamed_to("tab 0") and [*tabs[0]] == []
    assert all(run.is_streamed_to(f"tab {number}") for number in range(1, len(tabs)))
    run.stop()


def test_who_comes_back_in_time_takes_the_run_over_however_often(monkeypatch):
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 3.0)
    job = FakeJob()
    over = threading.Event()
    job.cancel = over.set
    job.events = lambda: iter(over.wait, True)  # none until it is cancelled
    run = run_of(job, browser="me")

    def glance():
        follower = following(run, "somebody")
        next(follower)
        follower.close()

    glance()
    time.sleep(2)
    glance()
    assert not over.wait(1.5), "the timer of the first departure ended it"
    assert over.wait(10)


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([Queued(1, COMPILING)], "Compiling for the first time…"),
        ([Queued(1, COMPILING, 70)], "Compiling for the first time… Starting in about 70 s…"),
        ([Queued(2, COMPILING)], "Compiling for the first time… Queued as number 2"),
        (
            [Queued(2, LOADING, 9)],
            "Loading the model… Queued as number 2, about 9 s until it starts",
        ),
        ([Queued(1, LOADING)], "Loading the model…"),
        ([Queued(1, WAITING)], "Starting…"),
        ([Queued(1, WAITING, 7)], "Starting in about 7 s…"),
        ([Queued(3, WAITING)], "Queued as number 3"),
        ([Queued(3, WAITING, 40)], "Queued as number 3, about 40 s until it starts"),
        ([Progress(4, 20, {})], "Step 4 of 20"),
        ([Progress(4, 20, {}, 150)], "Step 4 of 20, about 2 min left"),
        ([Cancelled()], "Stopped"),
        ([Done(1.25)], "Done in 1.2 s, seed 3"),
        ([Failed("The device is out of memory.")], "The device is out of memory."),
        ([ImageReady(0, None)], "The server failed; please try again."),
    ],
)
def test_the_line_says_what_is_happening(events, sentence):
    run = run_of(FakeJob(*events))
    for _ in range(100):
        if ENGLISH.translate(run.line.text) == sentence:
            break
        time.sleep(0.05)
    assert ENGLISH.translate(run.line.text) == sentence


class FakeHistory:
    """A history that has room for so many pictures and stores them in a thread, once it may."""

    def __init__(self, room: int = 100):
        self.room, self.stored, self.dropped = room, [], []
        self.proceed, self._writer = threading.Event(), ThreadPoolExecutor(1)
        self.proceed.set()

    def add_later(self, owner, file, picture, done, *, name, run, index):
        def write():
            assert self.proceed.wait(5)
            if len(self.stored) == self.room:
                done(HistoryError("The disk is full."))
            else:
                self.stored.append((owner, file.read_bytes(), picture.seed, name, run, index))
                done(None)

        self._writer.submit(write)

    def drop(self, browser, name):
        self.dropped.append(name)


@pytest.fixture
def disk(tmp_path):
    """Where pictures are files."""
    (tmp_path / "picture.png").write_bytes(b"png")
    return SimpleNamespace(add=lambda *_: PictureFile(str(tmp_path / "picture.png"), ""))


def test_a_run_is_over_once_its_pictures_are_in_the_history(disk):
    history = FakeHistory()
    history.proceed.clear()
    run = run_of(FakeJob(ImageReady(1, None), Done(1.0)), disk, history, browser="me")
    lines = (snapshot.line.kind for snapshot in following(run, "somebody"))
    assert "over" in lines and not run.over and run.cards[1].kept and not history.stored
    history.proceed.set()
    assert list(lines)[-1:] in ([], ["over"]) and run.over
    assert history.stored == [("me", b"png", 4, run.cards[1].kept, run.key, 1)]


def test_of_what_is_drawn_again_the_last_that_could_be_kept_stays_in_the_history(disk):
    history = FakeHistory(room=2)
    job = FakeJob(*[ImageReady(0, None)] * 4, Done(1.0))
    run = run_of(job, disk, history, ASKED.only(0), browser="me", live=True)
    assert list(following(run, "somebody"))[-1].line.text.endswith("The disk is full.")
    assert history.dropped == [history.stored[0][3]] and run.cards[0].kept is None


def test_what_is_drawn_again_while_it_is_being_kept_is_dropped_once_it_is(disk):
    history = FakeHistory()
    history.proceed.clear()
    run = run_of(
        FakeJob(*[ImageReady(0, None)] * 2, Done(1.0)),
        disk,
        history,
        ASKED.only(0),
        browser="me",
        live=True,
    )
    assert any(snapshot.line.kind == "over" for snapshot in following(run, "somebody"))
    assert not history.dropped
    history.proceed.set()
    list(following(run, "somebody"))
    first, second = (name for *_, name, _, _ in history.stored)
    assert history.dropped == [first] and run.cards[0].kept == second


def submit(request, **_):
    job = FakeJob(*[ImageReady(index, None) for index in request.indices()], Done(1.0))
    job.request = request
    return job


@pytest.mark.parametrize("asked", [ASKED, ASKED.only(0)])
def test_what_generate_has_accepted_stays_when_somebody_types_on(disk, asked):
    history = FakeHistory()
    runs = Runs(Backend(SimpleNamespace(submit=submit), disk, Inputs(), history))
    typing = runs.start(ASKED.only(0), browser="me", live=True)
    list(following(typing, "somebody"))
    typed = typing.cards[0].kept
    run = runs.start(asked, former=typing, browser="me") or typing  # nothing else is to be drawn
    list(following(run, "somebody"))
    for each in {run, typing}:  # to which somebody may go back
        each.redraw(0, dataclasses.replace(ASKED.pictures[0], prompt="more"), live=True)
        list(following(each, "somebody"))
        assert each.cards[0].live and each.cards[0].kept not in (None, typed)
    assert typed not in history.dropped


def test_what_is_on_its_way_to_a_card_that_is_kept_comes_with_the_next_run_as_well(disk):
    backend = Backend(SimpleNamespace(submit=submit), disk, Inputs())
    run = Runs(backend).start(ASKED, browser="me")
    list(following(run, "somebody"))
    anew, other = (
        dataclasses.replace(ASKED.pictures[0], prompt=prompt) for prompt in ("anew", "other")
    )
    backend.engine.submit = lambda request, **_: FakeJob()  # which does not get on
    run.redraw(0, anew)
    backend.engine.submit = submit
    again = Runs(backend).start(ASKED.replaced(0, other), former=run, keep=[0, 1], browser="me")
    list(following(again, "somebody"))
    assert [card.asked for card in again.cards[:2]] == [anew, ASKED.pictures[1]]
    assert again.count == 1


VARIANTS = make_request(prompts=["b"] * 4, steps=20, seed=50)


@pytest.fixture
def begun_strip(disk):
    """Runs, and one with two pictures, under the second of which one of four variants has come."""
    runs = Runs(Backend(SimpleNamespace(submit=submit), disk, Inputs()))
    run = runs.start(ASKED, browser="me")
    list(following(run, "somebody"))
    job = FakeJob(ImageReady(0, None))  # which does not get on
    job.request = VARIANTS
    runs.backend.engine.submit = lambda *_, **__: job
    run.draw_strip(1, VARIANTS)
    wait_until(lambda: run.cards[1].variants[0].picture)
    return runs, run


def wait_until(holds):
    given_up = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < given_up
        time.sleep(0.02)


def test_what_a_strip_lacks_is_drawn_by_the_run_that_follows(begun_strip):
    runs, run = begun_strip
    asked = []
    runs.backend.engine.submit = lambda request, **_: asked.append(request) or submit(request)
    chosen = dataclasses.replace(run.cards[1].variants[0], index=0)
    again = runs.start(
        run.request.replaced(0, chosen.asked), former=run, keep=[1], taken={0: chosen}, browser="me"
    )
    list(following(again, "somebody"))
    assert [request.indices() for request in asked] == [[1, 2, 3]]
    variants = again.cards[1].variants
    assert [(each.index, each.asked) for each in variants] == [*enumerate(VARIANTS.pictures)]
    assert all(each.picture for each in variants) and again.cards[0].picture == chosen.picture


def test_a_strip_that_the_run_which_follows_may_not_draw_has_what_had_come(begun_strip):
    runs, run = begun_strip

    def refuse(*_, **__):
        raise Busy("Too much waits.", 1)

    runs.backend.engine.submit = refuse
    chosen = dataclasses.replace(run.cards[1].variants[0], index=0)
    again = runs.start(
        run.request.replaced(0, chosen.asked), former=run, keep=[1], taken={0: chosen}, browser="me"
    )
    assert [each.index for each in again.cards[1].variants] == [0] and again.over


@pytest.mark.parametrize("way", ["redraw", "start", "gather"])
def test_a_card_that_is_given_back_has_no_variants_that_nothing_draws(begun_strip, way):
    runs, run = begun_strip
    engine = runs.backend.engine
    engine.submit, engine.as_drawn = lambda *_, **__: FakeJob(Cancelled()), lambda asked: asked
    engine.catalog = SimpleNamespace(models=lambda: ["m"], check=lambda _: None)
    other = dataclasses.replace(ASKED.pictures[1], prompt="other")
    if way == "redraw":
        run.redraw(1, other)
    elif way == "start":
        run = runs.start(ASKED.replaced(1, other), former=run, browser="me")
    else:
        run = runs.gather(ASKED, "me", "")
    wait_until(lambda: run.over)
    assert run.cards[1].picture and [each.index for each in run.cards[1].variants] == [0]


def test_nothing_is_wrong_where_a_variant_has_been_taken_already(begun_strip):
    runs, run = begun_strip
    actions = object.__new__(Actions)
    actions.runs = runs
    for index, variant in ((0, 0), (1, 3)):  # no strip, and a variant that is yet to come
        asked = {"do": "choose", "run": run.key, "index": index, "variant": variant}
        assert actions.answer(ActionRequest(asked, "")) == {"run": run.key, "seed": run.seed}


def test_a_variant_that_the_history_has_no_room_for_is_not_taken_to_be_there(disk):
    history = FakeHistory(room=3)
    runs = Runs(Backend(SimpleNamespace(submit=submit), disk, Inputs(), history))
    run = runs.start(ASKED, browser="me")
    list(following(run, "somebody"))
    run.draw_strip(1, VARIANTS)
    list(following(run, "somebody"))
    wait_until(lambda: run.over)
    assert [bool(each.kept) for each in run.cards[1].variants] == [True, False, False, False]
    assert all(card.kept for card in run.cards[:2])


def test_what_has_begun_is_shown_where_variants_are_refused(page_engine, tmp_path, monkeypatch):
    assert page_engine.ready.wait(300)
    runs = Runs(Backend(page_engine, Files(tmp_path, page_engine.to_png), Inputs()))
    form = {
        "prompts": [*["a"] * 7, ""],
        "seed": "3",
        "settings": {"steps": "2"},
        "overrides": [{}] * 8,
        "keep": [],
    }
    message = {"form": form, "browser": "0" * 32}
    first = Actions(runs).answer(ActionRequest({"do": "generate", **message}, ""))
    list(following(runs.find(first["run"]), "somebody"))

    def refuse(*_):
        raise RequestError("Too much waits.")

    monkeypatch.setattr(Run, "draw_strip", refuse)
    message |= {"run": first["run"], "indices": [0, 1], "strength": 0.5}
    answer = Actions(runs).answer(ActionRequest({"do": "around", **message}, ""))
    assert (answer["message"], answer["kind"]) == ("Too much waits.", "wrong")
    assert not answer["news"]  # it would be read aloud in place of the message
    assert answer["filled"]["prompts"] == ["a"] * 8
    assert runs.find(answer["run"]).cards[7].asked
    message |= {"run": answer["run"], "form": form | answer["filled"]}
    answer = Actions(runs).answer(ActionRequest({"do": "around", **message}, ""))
    assert answer == {"message": "Too much waits.", "kind": "wrong"}  # and nothing has begun


OWN = dataclasses.replace(ASKED.pictures[1], seed=9)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (ASKED.replaced(0, None), "Done in 1.0 s, seed 3"),  # as where the first one is kept
        (ASKED.replaced(1, OWN), "Done in 1.0 s, seed 3"),
        (ASKED.replaced(0, None).replaced(1, OWN), "Done in 1.0 s"),
    ],
)
def test_the_seed_that_is_named_gives_what_was_drawn_again_at_its_place(request_, sentence):
    run = run_of(FakeJob(Done(1.0)), request=request_, browser="me", seed=3)
    assert str(list(following(run, "somebody"))[-1].line.text) == sentence


def test_whoever_comes_for_a_redraw_is_told_of_what_that_drew_alone(disk):
    def submit(request, **_):
        job = FakeJob(*(ImageReady(index, None) for index in request.indices()), Done(1.0))
        job.request = request
        return job

    run = Runs(Backend(SimpleNamespace(submit=submit), disk, Inputs())).start(ASKED, browser="me")
    list(following(run, "somebody"))
    run.redraw(0, dataclasses.replace(ASKED.pictures[0], prompt="anew"))
    news = [
        ENGLISH.translate(sentence)
        for snapshot in following(run, "a page loaded anew")
        for sentence in snapshot.news
    ]
    assert news == ["Picture 1 is ready.", "Done in 1.0 s, seed 3"]


def test_a_stream_whose_place_another_has_taken_says_no_more(disk, monkeypatch):
    """Or the line would stay at what the former run said last."""
    stream, first, second = two_runs(disk)
    reached, released = threading.Event(), threading.Event()

    def late(stream, cards, run, asked, show=RunStream._cards):
        if run is first:
            reached.set()
            assert released.wait(5)
        return show(stream, cards, run, asked)

    monkeypatch.setattr(RunStream, "_cards", late)

    async def lines(run):
        return [updates["line"] async for updates in stream_to_a_session(stream, run)]

    async def both():
        former = asyncio.create_task(lines(first))
        await asyncio.to_thread(reached.wait)
        shown = await lines(second)
        released.set()
        return await former, shown

    with start_blocking_portal() as portal:  # Playwright's loop runs in this thread
        former, latter = portal.call(both)
    assert former == [gr.skip()] and "Stopped" in latter[-2] and latter[-1] == gr.skip()


def test_of_two_streams_at_once_the_one_that_was_asked_for_last_goes_on(disk):
    """Gradio sends what each has yielded when it comes to it."""

    async def both(stream, *asked):
        former, latter = (stream_to_a_session(stream, run) for run in asked)
        shown = []

        async def show():
            async for updates in latter:
                shown.append(updates)

        await anext(former)
        showing = asyncio.create_task(show())
        await asyncio.sleep(0.1)
        assert not shown, "before what the former has yielded is sent"
        async with asyncio.timeout(5):
            former = [updates async for updates in former]
            await showing
        return former, shown

    with start_blocking_portal() as portal:
        former, shown = portal.call(both, *two_runs(disk))
    assert former == [{"line": gr.skip()}], "which Gradio sends once more when it ends"
    assert "Stopped" in shown[-2]["line"]


def test_a_stream_that_is_never_resumed_holds_no_other_up(disk, monkeypatch):
    """Gradio leaves the streams of a connection that was lost as they are."""
    monkeypatch.setattr("sd_tpu.page.events.LATE", 0.1)

    async def both(stream, *asked):
        former, latter = (stream_to_a_session(stream, run) for run in asked)
        await anext(former)
        async with asyncio.timeout(5):
            return [updates async for updates in latter]

    with start_blocking_portal() as portal:
        assert "Stopped" in portal.call(both, *two_runs(disk))[-2]["line"]


def two_runs(disk):
    """A `RunStream`, and two runs of a browser that it can show, the second stopped."""
    jobs = iter([FakeJob(), FakeJob(Cancelled())])
    runs = Runs(Backend(SimpleNamespace(submit=lambda *_, **__: next(jobs)), disk, Inputs()))
    view = SimpleNamespace(
        line="line", news="news", collection="collection", figures=range(8), size=(32, 32)
    )
    return RunStream(runs, view), *(runs.start(ASKED, browser="me") for _ in range(2))


def stream_to_a_session(stream, run):
    return stream.stream(ActionRequest({"run": run.key}, ""), "a session")


def test_stop_tells_of_no_picture_a_second_time(disk):
    told, job = threading.Event(), FakeJob()

    def events():
        yield ImageReady(0, None)
        assert told.wait(5)
        yield Cancelled()

    job.events = events
    news = []
    for snapshot in following(run := run_of(job, disk, browser="me"), "somebody"):
        news += [ENGLISH.translate(sentence) for sentence in snapshot.news]
        if run.pictures():
            told.set()
    assert news == ["Picture 1 is ready.", "Stopped"]
    assert [card.state for card in run.cards[:2]] == ["done", "stopped"]


def test_every_action_of_the_schema_has_a_method_and_no_method_is_left():
    methods = {name.removeprefix("_do_") for name in dir(Actions) if name.startswith("_do_")}
    assert methods == schema.ACTIONS


def test_a_fault_of_ours_is_not_told_as_what_somebody_filled_in(tab, monkeypatch, caplog):
    monkeypatch.setattr(Actions, "_do_generate", lambda *_: {}["a key of ours"])
    generate(tab).click()
    says(tab, "The server failed")
    assert "KeyError: 'a key of ours'" in caplog.text
    answer = object.__new__(Actions).answer(ActionRequest({"do": "_fill"}, ""))
    assert "load the page again" in answer["message"]
