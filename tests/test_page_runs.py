"""Runs on the page: pictures form in their places, stop, go on, and are found again."""

import re
import threading
import time

import pytest
from playwright.sync_api import expect
from visitor import (
    LONG,
    PATIENCE,
    PROMPTS,
    alts,
    box,
    corners,
    figures,
    fill,
    generate,
    make,
    says,
    seed_box,
    stop,
    visit,
)

from sd_tpu.job import COMPILING, Cancelled, Done, Failed, ImageReady, Progress, Queued
from sd_tpu.page import run as run_module
from sd_tpu.page.files import Picture
from sd_tpu.page.run import Run
from sd_tpu.page.runs import Runs
from sd_tpu.page.texts import ENGLISH
from sd_tpu.page.works import Work, Works
from sd_tpu.request import Request


def test_eight_prompts_become_eight_pictures_in_their_places(tab):
    fill(tab, PROMPTS, seed=40)
    before = corners(tab)
    make(tab)
    assert alts(tab) == PROMPTS
    for i, prompt in enumerate(PROMPTS):
        expect(figures(tab).nth(i)).to_contain_text(prompt)
        expect(figures(tab).nth(i)).to_contain_text(f"Seed {40 + i}")
        width = figures(tab).nth(i).locator("img").evaluate(
            "image => image.decode().then(() => image.naturalWidth)"
        )
        assert width == 32
    assert corners(tab) == before, "the layout has shifted"
    says(tab, "seed 40")


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
    assert not any(slow_engine._occupants)
    fill(tab, PROMPTS)
    make(tab)
    expect(tab.get_by_role("link", name="Download picture")).to_have_count(8)


def test_escape_stops_and_a_refusal_clears_what_was_stopped(tab, slow_engine):
    fill(tab, PROMPTS)
    make(tab)
    fill(tab, PROMPTS, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    box(tab, 1).press("Escape")
    says(tab, "Stopped")
    expect(tab.locator("figure.stopped")).to_have_count(8)
    expect(tab.get_by_role("button", name="Download all")).to_be_disabled()
    fill(tab, PROMPTS, steps=0)
    generate(tab).click()
    says(tab, "Steps should be from 1 to 200, not 0.")
    expect(tab.locator("figure.blank")).to_have_count(8)


@pytest.fixture
def busy_engine(slow_engine):
    """The engine with one run in its slots and one that waits."""
    asked = Request(prompts=("a",) * 8, steps=LONG, height=32, width=32)
    ahead = [slow_engine.submit(asked) for _ in range(2)]
    yield slow_engine
    for job in ahead:
        job.cancel()


def test_stop_ends_a_run_that_still_waits_at_once(tab, busy_engine, monkeypatch):
    reached, held, advance = threading.Event(), threading.Event(), busy_engine._advance

    def hold(slots, rows):
        reached.set()
        held.wait()
        return advance(slots, rows)

    fill(tab, PROMPTS)
    generate(tab).click()
    says(tab, "Queued as number 2")
    monkeypatch.setattr(busy_engine, "_advance", hold)
    try:
        assert reached.wait(PATIENCE / 1000)
        stop(tab).click()
        says(tab, "Stopped")  # while the engine does not get on with what is ahead
    finally:
        held.set()


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


def test_a_phone_that_slept_through_its_run_finds_it_again(tab, busy_engine):
    fill(tab, PROMPTS)
    generate(tab).click()
    says(tab, "Queued as number 2")
    tab.evaluate("""() => {
        window.slept = true;
        const show = (hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        };
        const now = Date.now();
        show(true);
        Date.now = () => now + 60_000;
        show(false);
    }""")
    tab.wait_for_function("!window.slept")
    says(tab, "Queued as number 2")
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


def test_a_run_that_nobody_follows_any_more_is_given_up(visitor, address, slow_engine, monkeypatch):
    monkeypatch.setattr(Runs.start, "__kwdefaults__", {**Runs.start.__kwdefaults__, "grace": 1})
    with visitor.new_page() as tab:
        visit(tab, address)
        fill(tab, PROMPTS, steps=LONG)
        generate(tab).click()
        says(tab, "Step")
        job = next(occupant.job for occupant in slow_engine._occupants if occupant)
    given_up = time.monotonic() + PATIENCE / 1000
    while any(slow_engine._occupants):
        assert time.monotonic() < given_up
        time.sleep(0.05)
    assert any(job.rows_left.values()), "the job of a closed tab went on to its end"


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


class FakeJob:
    """A job whose events have already happened."""

    number = 1

    def __init__(self, *events):
        self.request = Request(prompts=("a", "b"), steps=20, seed=3)
        self._events = events

    def events(self):
        return iter(self._events)

    def cancel(self, place=None):
        pass


class NoRoom:
    """A disk that is full."""

    def add(self, *_):
        raise OSError("No space left on device")


class Idle:
    """An engine where every picture takes a second."""

    def seconds(self, alone):
        return 1.0


class Busy(Works):
    """What was asked for before takes a while."""

    def wait(self, job):
        return 40


def test_a_run_that_nobody_ever_follows_is_given_up(monkeypatch):
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.1)
    job, over = FakeJob(), threading.Event()
    job.cancel = over.set
    job.events = lambda: iter(over.wait, True)
    Run(job, Idle(), NoRoom(), Works(), grace=0)
    assert over.wait(5)


def test_who_comes_back_in_time_takes_the_run_over_however_often():
    job = FakeJob()
    over = threading.Event()
    job.cancel = over.set
    job.events = lambda: iter(over.wait, True)  # none until it is cancelled
    run = Run(job, Idle(), NoRoom(), Works(), grace=1.0)

    def glance():
        follower = run.follow("somebody")
        next(follower)
        follower.close()

    glance()
    time.sleep(0.7)
    glance()
    assert not over.wait(0.7), "the timer of the first departure ended it"
    assert over.wait(5)


@pytest.mark.parametrize(("events", "sentence"), [
    ([Queued(1, COMPILING)], "Compiling for the first time…"),
    ([Queued(3, "waiting for a free place")],
     "Queued as number 3, about 40 s until it starts"),
    ([Progress(4, 20, {})], "Step 4 of 20"),
    ([Cancelled()], "Stopped"),
    ([Done(1.25)], "Done in 1.2 s, seed 3"),
    ([Failed("The device is out of memory.")], "The device is out of memory."),
    ([ImageReady(0, None)], "The server failed; please try again."),
])
def test_the_line_says_what_is_happening(events, sentence):
    run = Run(FakeJob(*events), Idle(), NoRoom(), Busy(), grace=30)
    for _ in range(100):
        if ENGLISH.translate(run._line.text) == sentence:
            break
        time.sleep(0.05)
    assert ENGLISH.translate(run._line.text) == sentence


class Room:
    """A disk with room."""

    def add(self, *_):
        return Picture("picture.png", "picture.webp")


class Keeping(Room):
    """What of its run could be seen while a picture was being kept."""

    def __init__(self):
        self.begun, self.seen = threading.Event(), []

    def keep(self, browser, picture, request):
        assert self.begun.wait(5)
        self.seen.append((browser, picture.png, request.seed, self.run.pictures()))


def test_a_picture_is_kept_for_its_browser_before_anybody_is_told_of_it():
    keeping = Keeping()
    keeping.run = Run(FakeJob(ImageReady(1, None), Done(1.0)), Idle(), keeping, Works(), 30, "me")
    keeping.begun.set()
    assert list(keeping.run.follow("somebody"))[-1].line.kind == "over"
    assert keeping.seen == [("me", "picture.png", 4, {})]
    assert list(keeping.run.pictures()) == [1]


class Full(Room):
    """A history that has room for so many pictures, by their names, and what was dropped of it."""

    def __init__(self, *names):
        self.names, self.dropped = iter(names), []

    def keep(self, *_):
        return next(self.names, None)

    def drop(self, browser, name):
        if name is not None:
            self.dropped.append(name)


def test_of_what_is_drawn_again_the_last_that_could_be_kept_stays_in_the_history():
    full = Full("first", "second")
    job = FakeJob(*[ImageReady(0, None)] * 4, Done(1.0))
    job.request = job.request.only(0)
    run = Run(job, Idle(), full, Works(), 30, "me", live=True)
    assert list(run.follow("somebody"))[-1].line.kind == "over"
    assert full.dropped == ["first"]


def test_what_was_asked_for_anew_while_it_was_being_kept_is_dropped():
    full = Full("old")
    run = Run(FakeJob(), Idle(), full, Works(), 30, "me", live=True)
    overtaken = Work(FakeJob(), Idle(), live=True)
    overtaken.places.clear()
    run._keep(overtaken, 0, Picture("picture.png", "picture.webp"))
    assert full.dropped == ["old"]
