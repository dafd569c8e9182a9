"""Live: a box's picture is drawn again while its prompt is written, and nothing else is."""

import dataclasses
import re
import threading
import time

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe

from sd_tpu import settings
from sd_tpu.gallery.files import PictureFile
from sd_tpu.gallery.run import Backend
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.language import ENGLISH
from sd_tpu.pictures.images import read_png
from sd_tpu.serving.job import Cancelled, Done, ImageReady
from sd_tpu.settings import RequestError
from tests.support.asking import following, make_request
from tests.support.jobs import BlockingEvents
from tests.support.pages import served
from tests.support.visitor import (
    LONG,
    PATIENCE,
    PROMPTS,
    alts,
    box,
    choose,
    expect,
    figures,
    fill,
    generate,
    make,
    newcomer,
    of_all,
    says,
    setting,
    stop,
    tool,
    tools,
    unfold,
    visit,
)

PIXELS = np.zeros((8, 8, 3), np.uint8)
THREE = ["first", "second", "third", *[""] * 5]


# --- what a run becomes -------------------------------------------------------------------------


class Waiting(BlockingEvents):
    """A job that draws what it is told to."""

    address = ""

    def __init__(self, request, client):
        self.request, self.client, self.unwanted = request, client, set()
        self._events, self._change = [], threading.Condition()

    def happens(self, *events):
        with self._change:
            self._events += events
            self._change.notify()

    @property
    def cancelled(self):
        return self.unwanted >= set(self.request.indices())

    def cancel(self, index=None):
        self.unwanted.update(self.request.indices() if index is None else [index])
        if self.cancelled:
            self.happens(Cancelled())

    def events(self):
        over = False
        while not over:
            with self._change:
                while not self._events:
                    self._change.wait()
                event = self._events.pop(0)
            over = isinstance(event, Cancelled | Done)
            yield event


class Engine:
    """Jobs that wait."""

    defaults = settings.Picture()

    def __init__(self):
        self.jobs = []

    def submit(self, request, *, client="", **_):
        if len(self.jobs) == 9:
            raise RequestError("Too many people are waiting; please try again in a minute.")
        self.jobs.append(Waiting(request, client))
        return self.jobs[-1]


class Files:
    """A disk where a picture's name says what it was made from."""

    def add(self, request, index, pixels, browser):
        asked = request.pictures[index]
        name = f"{asked.prompt} {asked.seed}"
        return PictureFile(f"{name}.png", f"{name}.webp")


ASKED = make_request(prompts=("a", "b", "c"), seed=3)


def begun():
    """A run of three pictures, and its engine."""
    engine = Engine()
    return Runs(Backend(engine, Files(), Inputs())).start(ASKED, browser="me"), engine


def alone(run, index, prompt):
    return settings.Picture(prompt=prompt, model="m", seed=run.seed_for(index) + index)


def draw(job):
    job.happens(*(ImageReady(index, PIXELS) for index in job.request.indices()), Done(1.0))


def until(true):
    for _ in range(500):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("it never came true")


def in_state(run, state):
    return [card for card in run.cards if card.state == state]


def names(run):
    return {index: picture.png for index, picture in run.pictures().items()}


def test_one_picture_is_drawn_again_with_its_seed_and_the_others_stay():
    run, engine = begun()
    draw(engine.jobs[0])
    until(lambda: run.over)
    before = dict(run.pictures())
    seen = run.version
    assert run.redraw(1, alone(run, 1, "new"), live=True) and not run.over
    assert in_state(run, "waiting")[0].before.picture.png == "b 4.png", "what was there still is"
    draw(engine.jobs[1])
    snapshots = list(following(run, "me", seen))
    assert {card.index for snapshot in snapshots for card in snapshot.cards} == {1}
    heard = [ENGLISH.translate(text) for snapshot in snapshots for text in snapshot.news]
    assert heard == ["Picture 2 is ready."]
    assert run.pictures() == {**before, 1: PictureFile("new 4.png", "new 4.webp")}
    assert run.request.prompts == ("a", "new", "c") and run.request.values()["overrides"] == []


def test_the_next_redraw_cancels_the_one_before_and_who_follows_is_told_of_both():
    run, engine = begun()
    draw(engine.jobs[0])
    until(lambda: run.over)
    seen = run.version
    run.redraw(1, alone(run, 1, "n"))
    telling = following(run, "me", seen)
    next(telling)
    assert run.is_streamed_to("me") and run.redraw(1, alone(run, 1, "new"))
    assert not run.redraw(1, alone(run, 1, "new")), "that is on its way already"
    assert [job.cancelled for job in engine.jobs] == [False, True, False]
    engine.jobs[1].happens(ImageReady(1, PIXELS))
    draw(engine.jobs[2])
    assert list(telling)[-1].line.kind == "over"
    assert names(run) == {0: "a 3.png", 1: "new 4.png", 2: "c 5.png"}


def test_who_follows_a_run_is_told_once_however_often_it_is_asked_for():
    run, engine = begun()
    telling = following(run, "me")
    next(telling)
    assert list(following(run, "me")) == [], "what is told twice may come in another order"
    draw(engine.jobs[0])
    assert list(telling)[-1].line.kind == "over"
    run.redraw(1, alone(run, 1, "new"))
    draw(engine.jobs[1])
    assert list(following(run, "me"))[-1].line.kind == "over"


def test_a_picture_is_taken_from_a_run_that_goes_on_with_the_others():
    run, engine = begun()
    run.redraw(1, alone(run, 1, "new"))
    run.redraw(4, alone(run, 4, "fifth"))
    main, second, fifth = engine.jobs
    assert main.unwanted == {1} and second.request.indices() == [1]
    assert second.client == main.client == "me"
    draw(second)
    draw(fifth)
    until(lambda: len(run.pictures()) == 2)
    assert not run.over
    draw(main)
    until(lambda: run.over)
    assert names(run) == {0: "a 3.png", 1: "new 4.png", 2: "c 5.png", 4: "fifth 7.png"}


def test_what_was_there_stays_until_its_successor_comes_and_stop_gives_it_back():
    run, engine = begun()
    draw(engine.jobs[0])
    until(lambda: run.over)
    again = Runs(Backend(engine, Files(), Inputs())).start(
        make_request(prompts=("x", "y", "", "z"), seed=30), former=run
    )
    assert [card.before and card.before.picture.png for card in in_state(again, "waiting")] == [
        "a 3.png",
        "b 4.png",
        None,
    ]
    engine.jobs[1].happens(ImageReady(0, PIXELS))
    until(lambda: 0 in again.pictures())
    again.stop()
    until(lambda: again.over)
    assert names(again) == {0: "x 30.png", 1: "b 4.png"}
    assert again.request.prompts == ("x", "b", "", "z") and again.request.pictures[1].seed == 4
    assert [card.index for card in in_state(again, "stopped")] == [3]
    again.redraw(1, alone(again, 1, "new"))
    again.redraw(1, alone(again, 1, "newer"))
    again.stop()
    until(lambda: again.over)
    assert names(again) == {0: "x 30.png", 1: "b 4.png"}


def test_a_journey_stays_until_another_is_there():
    run, engine = begun()
    draw(engine.jobs[0])
    run.draw_journey(ASKED)
    draw(engine.jobs[1])
    until(lambda: run.over and run.journey)
    run.draw_journey(make_request(prompts=("x", "y"), seed=9))
    engine.jobs[2].happens(ImageReady(0, PIXELS))
    run.stop()
    until(lambda: run.over)
    assert [picture.png for picture in run.journey] == ["a 3.png", "b 4.png", "c 5.png"]
    assert names(run) == {0: "a 3.png", 1: "b 4.png", 2: "c 5.png"}


def test_stop_ends_redraws_as_well():
    run, _ = begun()
    run.redraw(1, alone(run, 1, "new"))
    run.stop()
    until(lambda: run.over)
    assert [card.index for card in in_state(run, "stopped")] == [0, 1, 2]
    assert run.redraw(1, alone(run, 1, "new")), "what was stopped can be redrawn"


def test_what_is_refused_leaves_all_as_it_was():
    run, engine = begun()
    run.redraw(1, alone(run, 1, "new"))
    while len(engine.jobs) < 9:
        engine.submit(ASKED)
    with pytest.raises(RequestError):
        run.redraw(1, alone(run, 1, "newer"))
    assert run.request.prompts[1] == "new" and not engine.jobs[1].cancelled


def test_emptied_boxes_take_their_pictures_along_down_to_the_last():
    run, engine = begun()
    draw(engine.jobs[0])
    until(lambda: run.over)
    run.redraw(0, alone(run, 0, "new"))
    for index in range(3):
        assert run.redraw(index, None)
    assert engine.jobs[1].cancelled and run.over and not run.pictures()
    run.redraw(2, alone(run, 2, "back"))
    draw(engine.jobs[2])
    until(lambda: run.over)
    assert names(run) == {2: "back 5.png"}


def test_nobody_has_more_than_one_job_a_box():
    run, engine = begun()
    draw(engine.jobs[0])
    until(lambda: run.over)
    for text in ("n", "ne", "new"):
        for index in (0, 2):
            run.redraw(index, alone(run, index, text))
    assert sum(not job.cancelled for job in engine.jobs[1:]) == 2


def test_a_run_is_given_up_for_the_next_unless_another_tab_looks_at_it():
    run, engine = begun()
    telling = following(run, "another tab")
    next(telling)
    run.unsubscribe("me")
    run.stop_if_unwatched()
    assert not engine.jobs[0].cancelled
    telling.close()
    run.stop_if_unwatched()
    assert engine.jobs[0].cancelled


def test_the_engine_knows_what_a_picture_takes_before_any_is_drawn(page_engine):
    assert page_engine.ready.wait(300)
    quick, long = (
        page_engine.seconds(dataclasses.replace(page_engine.defaults, steps=steps))
        for steps in (1, 100)
    )
    assert 0 < quick < long
    assert (
        page_engine.seconds(
            dataclasses.replace(page_engine.defaults, steps=1, sampler="heun", spacing="")
        )
        > 0
    )


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fast(request, monkeypatch):
    """However busy the machine is, a picture takes no time."""
    if "tab" in request.fixturenames or "address" in request.fixturenames:
        engine = request.getfixturevalue("page_engine")
        monkeypatch.setattr(engine, "seconds", lambda *asked: sum(one.steps for one in asked) / 100)


# Each picture and its box, on the page.
PLACES = """() => [...document.querySelectorAll(".card")].map((card) =>
    ["figure", "textarea"].map((part) => {
        const { x, bottom, y } = card.querySelector(part).getBoundingClientRect();
        return { x, bottom: bottom + scrollY, y: y + scrollY };
    }))"""


def switch(tab):
    return tools(tab).get_by_label("Live", exact=True)


def sources(tab):
    return tab.locator("#cards img").evaluate_all("all => all.map(image => image.src)")


def write(tab, number, text):
    """Types like a person, who takes less than half a second to a key."""
    box(tab, number).focus()
    tab.keyboard.press("ControlOrMeta+a")
    tab.keyboard.type(text, delay=20)


def drawn(tab, number, text):
    """Waits for the picture of this prompt."""
    image = figures(tab).nth(number - 1)
    # In this order: the picture before it is done as well, and seen while this one is drawn.
    expect(image.locator("img")).to_have_attribute("alt", text, timeout=PATIENCE)
    expect(image).to_have_class(re.compile(r"\bdone\b"), timeout=PATIENCE)


def test_only_the_picture_of_the_box_that_is_typed_in_is_drawn_again(tab):
    fill(tab, THREE, seed=-1)
    make(tab)
    before, facts = sources(tab), figures(tab).locator(".seed").all_inner_texts()
    link = of_all(tab).get_attribute("data-link")
    switch(tab).check()
    write(tab, 3, "another")
    drawn(tab, 3, "another")
    assert sources(tab)[:2] == before[:2] and sources(tab)[2] != before[2]
    assert figures(tab).locator(".seed").all_inner_texts() == facts, "no other seed"
    expect(tab.locator("#news")).to_have_text("Picture 3 is ready.")
    expect(stop(tab)).to_be_disabled()
    expect(of_all(tab)).to_have_attribute("data-link", link.replace("third", "another"))
    with tab.expect_download() as download:
        figures(tab).nth(2).get_by_role("link").click()
    assert read_png(download.value.path()).prompts == ("another",)
    tab.reload()
    expect(tab.locator("figure.done")).to_have_count(3, timeout=PATIENCE)
    assert alts(tab) == ["first", "second", "another"]
    expect(switch(tab)).to_be_checked()


@pytest.mark.slow("types and waits for pictures in a browser")
def test_typing_on_cancels_what_was_on_its_way_and_goes_on_in_another_box(tab, slow_engine):
    fill(tab, THREE, seed=7, steps=LONG)
    switch(tab).check()
    jobs, submit = [], slow_engine.submit
    slow_engine.submit = lambda request, **options: (
        jobs.append(submit(request, **options)) or (jobs[-1])
    )
    try:
        write(tab, 2, "a")
        expect(figures(tab).nth(1)).to_have_class("forming", timeout=PATIENCE)
        setting(tab, "Steps").fill("25")  # counts from the next typing on
        write(tab, 2, "a fox")
        expect(figures(tab).nth(1)).to_contain_text("a fox", timeout=PATIENCE)
        write(tab, 3, "a hen")
        expect(figures(tab).nth(2)).to_contain_text("a hen", timeout=PATIENCE)
        drawn(tab, 2, "a fox")
        drawn(tab, 3, "a hen")
    finally:
        del slow_engine.submit
    # A busy browser types slowly, and there are others in between.
    first, *between, fox, hen = [isinstance(job.end, Cancelled) for job in jobs]
    assert first and all(between) and not fox and not hen
    expect(figures(tab).nth(1)).to_contain_text("Seed 8")
    expect(figures(tab).nth(2)).to_contain_text("Seed 9")
    expect(tab.locator("figure.blank")).to_have_count(6)


def test_two_boxes_changed_before_the_page_hears_of_its_first_run_are_in_one(
    tab, page_engine, monkeypatch
):
    def slowly(request, submit=page_engine.submit, **options):
        time.sleep(1)
        return submit(request, **options)

    monkeypatch.setattr(page_engine, "submit", slowly)
    switch(tab).check()
    box(tab, 1).fill("a fox")
    box(tab, 2).fill("a hen")
    drawn(tab, 1, "a fox")
    drawn(tab, 2, "a hen")


@pytest.mark.parametrize("phone", [False, True])
def test_each_picture_stands_above_its_box_and_comes_into_view(visitor, address, phone):
    with newcomer(visitor, address, phone=phone) as tab:
        places = tab.evaluate(PLACES)
        room = 36 if phone else 24  # a finger's width, but for what lies over the edge
        for picture, written in places:
            assert 0 <= written["x"] - picture["x"] <= room, "its number stands before it"
            assert written["y"] >= picture["bottom"]
        rows = [round(picture["y"]) for picture, _ in places]
        assert len(set(rows)) == (4 if phone else 2) and rows == sorted(rows)
        switch(tab).check()
        assert tab.evaluate(PLACES) == places, "nothing should move"
        box(tab, 8).focus()
        write(tab, 8, "far below")
        drawn(tab, 8, "far below")
        bar = tab.locator("#bar").bounding_box()["y"]
        for part in (figures(tab).nth(7), box(tab, 8)):
            place = part.bounding_box()
            assert place["y"] >= 0 and place["y"] + place["height"] <= bar


def test_what_was_wrong_is_said_in_sight_and_no_longer_once_it_is_right(tab):
    fill(tab, THREE)
    make(tab)
    switch(tab).check()
    write(tab, 8, "eight")
    drawn(tab, 8, "eight")
    unfold(tab, "Settings for prompt 8")
    interval = tab.get_by_role("group", name="Settings for prompt 8").get_by_label("Cache int")
    interval.fill("3")
    drawn(tab, 8, "cache interval 3: eight")
    interval.fill("30")
    says(tab, "Cache interval of prompt 8 should be from 1 to 10, not 30.")
    expect(tab.locator("#line")).to_be_in_viewport(ratio=0.99)
    interval.fill("3")
    says(tab, "Done in")
    interval.fill("x")
    says(tab, "should be a whole number, not 'x'.")
    switch(tab).uncheck()
    interval.fill("3")
    says(tab, re.compile(r"^\s*Done in [\d.]+ s, seed \d+\s*$"))


def test_what_is_typed_in_stays_in_view(tab):
    tab.set_viewport_size({"width": 820, "height": 700})
    fill(tab, THREE)
    make(tab)
    switch(tab).check()
    unfold(tab, "Settings for prompt 2")
    steps = tab.get_by_role("group", name="Settings for prompt 2").get_by_label("Steps")
    steps.fill("3")
    drawn(tab, 2, "3 steps: second")
    expect(steps).to_be_in_viewport(ratio=0.99)


def test_without_the_switch_nothing_is_drawn(tab):
    fill(tab, THREE)
    make(tab)
    before = sources(tab)
    switch(tab).check()
    switch(tab).uncheck()
    write(tab, 1, "something else")
    switch(tab).check()
    write(tab, 2, "another")
    drawn(tab, 2, "another")  # before that the first would have been
    assert sources(tab)[::2] == before[::2] and alts(tab) == ["first", "another", "third"]
    switch(tab).uncheck()
    told = figures(tab).first.locator(".words")
    assert told.evaluate("words => words.getBoundingClientRect().height") > 10, "of which it is"
    write(tab, 1, "first")
    tab.wait_for_function("!document.querySelector('figure.other')")
    assert told.evaluate("words => words.getBoundingClientRect().height") < 2


def test_an_emptied_box_leaves_its_place_blank(tab):
    fill(tab, THREE)
    make(tab)
    switch(tab).check()
    box(tab, 2).fill("")
    expect(figures(tab).nth(1)).to_have_class("blank", timeout=PATIENCE)
    assert alts(tab) == ["first", "third"]
    box(tab, 1).fill("")
    box(tab, 3).fill(" ")
    expect(tab.locator("figure.blank")).to_have_count(8, timeout=PATIENCE)
    expect(tool(tab, "Download all (ZIP)")).to_be_disabled()
    write(tab, 1, "again")
    drawn(tab, 1, "again")


def test_a_boxs_own_settings_count_as_typing(tab):
    fill(tab, THREE, seed=1)
    make(tab)
    switch(tab).check()
    unfold(tab, "Settings for prompt 1")
    own = tab.get_by_role("group", name="Settings for prompt 1")
    own.get_by_label("Steps").fill("5")
    expect(figures(tab).first.locator("b")).to_have_text("5 steps", timeout=PATIENCE)
    choose(own.get_by_label("Sampler"), "Heun")
    expect(figures(tab).first.locator("b")).to_have_text("Heun · 5 steps", timeout=PATIENCE)
    drawn(tab, 1, "Heun · 5 steps: first")


def test_what_is_refused_is_said_and_loses_nothing(tab):
    fill(tab, THREE)
    make(tab)
    before = sources(tab)
    switch(tab).check()
    box(tab, 1).fill("w " * 2001)
    says(tab, "Prompt 1 has 4002 characters; at most 4000 are accepted.")
    assert sources(tab) == before
    expect(generate(tab)).to_be_enabled()


def test_generate_goes_on_from_a_redraw(tab, slow_engine):
    fill(tab, THREE)
    make(tab)
    switch(tab).check()
    setting(tab, "Steps").fill(str(LONG))
    setting(tab, "Steps").blur()
    write(tab, 1, "slow")
    expect(stop(tab)).to_be_enabled(timeout=PATIENCE)
    setting(tab, "Steps").fill("2")
    setting(tab, "Steps").blur()
    box(tab, 1).press("Control+Enter")
    says(tab, "Done in")
    drawn(tab, 1, "slow")
    assert alts(tab) == ["slow", "second", "third"]
    expect(stop(tab)).to_be_disabled()


def test_a_slow_server_offers_no_live(tab, page_engine, monkeypatch):
    why = (
        "With these settings a picture takes about 12 s here; Live is for pictures that take "
        "3 s at most."
    )
    fill(tab, THREE)
    switch(tab).check()
    monkeypatch.setattr(page_engine, "seconds", lambda *pictures: 11.5)
    write(tab, 1, "too slow")
    # The line says it as well, unless Live is off by the time at which it would draw.
    expect(tab.locator("#live .note")).to_have_text(why, timeout=PATIENCE)
    expect(switch(tab)).to_be_disabled()
    expect(switch(tab)).not_to_be_checked()
    switch(tab).focus()
    expect(tab.locator("#live .note")).to_have_css("opacity", "1")
    switch(tab).press("Space")
    expect(switch(tab)).not_to_be_checked()
    tab.reload()
    expect(switch(tab)).to_be_disabled(timeout=PATIENCE)
    monkeypatch.setattr(page_engine, "seconds", lambda *pictures: 1.0)
    unfold(tab, "Settings")
    setting(tab, "Steps").fill("3")
    expect(switch(tab)).to_be_checked(timeout=PATIENCE)
    expect(tab.locator("#live .note")).to_have_text("")


def test_the_switch_is_reached_and_used_by_keyboard_alone(tab):
    fill(tab, THREE)
    tab.get_by_role("button", name="More tools").focus()
    tab.keyboard.press("Enter")
    tool(tab, "Clear").focus()
    tab.keyboard.press("Tab")
    expect(switch(tab)).to_be_focused()
    tab.keyboard.press("Space")
    expect(switch(tab)).to_be_checked()


@pytest.mark.slow("types and waits for pictures in a browser")
def test_the_history_keeps_the_last_of_what_was_drawn_in_a_box(
    chromium, page_engine, tmp_path, address
):
    with served(page_engine, tmp_path) as place, chromium.new_context() as context:
        tab = visit(context.new_page(), place)
        fill(tab, THREE)
        make(tab)
        switch(tab).check()
        for text in ("one", "two", "three"):
            write(tab, 1, text)
            drawn(tab, 1, text)
        keep = tab.get_by_role("button", name="Keep picture 1")
        keep.click()
        expect(keep).to_have_attribute("aria-pressed", "true")
        write(tab, 1, "four")
        write(tab, 2, "five")  # takes its turn after the box before
        drawn(tab, 2, "five")
        assert alts(tab) == ["three", "five", "third"], "what is kept is not drawn again"
        unfold(tab, "History")
        expect(tab.locator("#history-panel p[title]")).to_have_text(
            ["first", "three", "second", "five", "third"], timeout=PATIENCE
        )


def test_what_is_typed_just_before_a_comparison_is_not_drawn_into_it(tab, monkeypatch):
    fill(tab, THREE)
    start = Runs.start
    monkeypatch.setattr(
        Runs, "start", lambda *given, **more: (time.sleep(1), start(*given, **more))[1]
    )  # longer than a pause
    unfold(tab, "Compare")
    compared = tab.get_by_role("radio", name="Steps", exact=True)
    compared.check()
    switch(tab).check()
    box(tab, 2).fill("typed")
    tab.get_by_role("button", name="Run comparison").click()
    expect(box(tab, 2)).to_have_value("first")
    says(tab, "Done in")
    tab.wait_for_timeout(700)  # after which what was typed would be on its way
    expect(figures(tab).nth(1).locator(".words")).to_have_text("first")
    expect(stop(tab)).to_be_disabled()


def test_what_comes_where_a_kept_picture_has_gone_is_not_kept(tab, monkeypatch):
    fill(tab, THREE)
    make(tab)
    for number in (1, 2):
        tab.get_by_role("button", name=f"Keep picture {number}").click()
    monkeypatch.setattr(Runs, "latest", lambda *_: None)  # as of a server that was started anew
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    expect(tab.locator(".card.kept")).to_have_count(0)
    switch(tab).check()
    for text in ("one", "two"):
        write(tab, 1, text)
        drawn(tab, 1, text)
    make(tab)
    expect(tab.get_by_role("button", name="Keep picture 2")).to_have_attribute(
        "aria-pressed", "false"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("seconds", [1.0, 12.0])
def test_axe_finds_nothing_and_a_phone_scrolls_nowhere(
    visitor, address, page_engine, monkeypatch, scheme, seconds
):
    monkeypatch.setattr(page_engine, "seconds", lambda *pictures: seconds)
    with newcomer(visitor, address, scheme, phone=True) as tab:
        expect(switch(tab)).to_be_enabled(enabled=seconds < 3, timeout=PATIENCE)
        if seconds < 3:
            switch(tab).check()
        assert Axe().run(tab)["violations"] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_redraw_draws_one_picture_with_a_new_seed_and_the_seven_others_stay(tab):
    fill(tab, PROMPTS, seed=40)
    make(tab)
    before = sources(tab)
    box(tab, 3).fill("another")
    redraw = tab.get_by_role("button", name="Redraw picture 3")
    redraw.click()
    tab.wait_for_function(
        "before => document.querySelectorAll('#cards img')[2].src != before", arg=before[2]
    )
    drawn(tab, 3, "another")
    expect(generate(tab)).to_be_enabled()
    after = sources(tab)
    assert [a == b for a, b in zip(after, before, strict=True)] == [i != 2 for i in range(8)]
    seeds = figures(tab).locator(".seed").all_inner_texts()
    assert seeds[2] != "Seed 42" and seeds[3] == "Seed 43"
    expect(generate(tab)).to_be_enabled()
    box(tab, 3).fill("")  # then what the picture shows is drawn
    redraw.click()
    tab.wait_for_function(
        "before => document.querySelectorAll('#cards img')[2].src != before", arg=after[2]
    )
    drawn(tab, 3, "another")
    assert sources(tab)[:2] == before[:2]
