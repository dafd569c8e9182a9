"""What visitors leave behind in the server's memory: next to nothing, and that not for long."""

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice

import gradio as gr
import httpx
import numpy as np
import pytest

from sd_tpu import gradio_compat
from sd_tpu.gallery import run as run_module
from sd_tpu.gallery import runs as runs_module
from sd_tpu.gallery.files import Files
from sd_tpu.gallery.run import Backend, Run
from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.page import build, close, launch
from sd_tpu.request import Request
from tests.support.asking import following, make_request
from tests.support.visitor import LONG

WARM_UP, VISITS, ROUNDS = 5, 8, 4
MANY = 45  # more than a server has threads for handlers by default
KEPT_OF_A_CALL = 4096  # bytes: what Gradio notes of the last 10,000 events is about 700
KEPT_OF_A_PAGE = 32768  # bytes: a Gradio session has 450,000 before anything happens in it


@pytest.fixture(scope="module")
def page(page_engine) -> Iterator[gr.Blocks]:
    """A page that is served."""
    page = build(page_engine)
    assert page_engine.ready.wait(300)
    launch(page)
    yield page
    close(page)


@pytest.fixture(scope="module")
def http(page) -> Iterator[httpx.Client]:
    """Whoever visits it."""
    # A connection for each request: the server ends an idle one after five seconds, and counting
    # the memory may take as long.
    with httpx.Client(
        base_url=f"{page.server.address}gradio_api/",
        timeout=60,
        limits=httpx.Limits(max_keepalive_connections=0),
    ) as http:
        yield http


def left_by(visit: Callable[[str], None]) -> float:
    """Bytes that stay of each visit.

    That is what the best of several rounds leaves: threads, buffers and caches that grow once are
    in one round, what each visit leaves for good is in all.
    """
    for number in range(WARM_UP):
        visit(f"early{number}")
    names, left = (f"visit{number}" for number in count()), []
    gc.collect()
    gc.freeze()  # what is there already, which else is looked through time and again
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for name in islice(names, VISITS):
                visit(name)
            gc.collect()
            left.append((tracemalloc.get_traced_memory()[0] - before) / VISITS)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    return min(left)


FORM = {"prompts": [], "seed": "", "settings": {}, "overrides": [], "keep": []}
MESSAGE = {"lang": "ko", "browser": None, "run": None, "form": FORM}
WATCH = {**MESSAGE, "do": "watch", "seen": 0, "before": False}


def hub_of(page: gr.Blocks) -> tuple[dict, dict]:
    """What page.js asks through, and what tells it of a run."""
    (hub,) = [each for each in page.config["components"] if each["props"].get("elem_id") == "hub"]
    (watch,) = [
        each
        for each in page.config["dependencies"]
        if [hub["id"], "click"] in [list(target) for target in each["targets"]]
    ]
    return hub, watch


@contextmanager
def opened(page: gr.Blocks, http: httpx.Client, session: str) -> Iterator[None]:
    """A page in a browser, which asks for an answer and for what lasts."""
    hub, asks = hub_of(page)
    with http.stream("GET", f"heartbeat/{session}") as heart:
        beats = heart.iter_lines()  # which would end the answer if it were thrown away
        assert next(beats) == "data: ALIVE"
        look = {
            "session_hash": session,
            "component_id": hub["id"],
            "fn_name": "answer",
            "data": {**MESSAGE, "do": "about"},
        }
        assert "jax" in http.post("component_server", json=look).json()["about"]
        asked = {
            "fn_index": asks["id"],
            "session_hash": session,
            "trigger_id": hub["id"],
            "data": [],
            "event_data": {**WATCH, "run": "gone"},
        }
        http.post("queue/join", json=asked).raise_for_status()
        with http.stream("GET", "queue/data", params={"session_hash": session}) as told:
            end = next(line for line in told.iter_lines() if "process_completed" in line)
        assert '"success":true' in end.replace(" ", "")
        yield


@pytest.mark.slow("asks the server hundreds of times")
def test_a_program_leaves_nothing_behind(http):
    def ask(session: str) -> None:
        answer = http.post("run/samplers", json={"data": [], "session_hash": session})
        assert answer.json()["data"][0]

    def call(_: str) -> None:
        event = http.post("call/samplers", json={"data": []}).json()["event_id"]
        assert "complete" in http.get(f"call/samplers/{event}").text

    assert left_by(ask) < KEPT_OF_A_CALL
    assert left_by(call) < KEPT_OF_A_CALL


@pytest.mark.slow("visits hundreds of times")
def test_a_page_that_is_closed_leaves_little(page, http):
    def visit(session: str) -> None:
        with opened(page, http, session):
            pass

    assert left_by(visit) < KEPT_OF_A_PAGE
    assert not page.state_holder.session_data


def test_nothing_is_kept_of_a_visitor_that_another_would_see(page):
    number, component = next(iter(page.blocks.items()))
    page.state_holder["somebody"][number] = "secret"
    for visitor in ("somebody", "another"):
        assert page.state_holder[visitor][number] is component


def test_what_nobody_listens_to_is_not_drawn(page, http, slow_engine, monkeypatch):
    event = next(each for each in page.config["dependencies"] if each["api_name"] == "generate")
    info = http.get("info").json()["named_endpoints"]["/generate"]["parameters"]
    given = {"prompts": ["a fox"] * 8, "steps": LONG}
    asked = [given.get(each["parameter_name"], each.get("parameter_default")) for each in info]
    for number in range(5):
        http.post(
            "queue/join",
            json={"fn_index": event["id"], "session_hash": f"silent{number}", "data": asked},
        ).raise_for_status()
    deadline = time.monotonic() + 60
    while len(slow_engine.jobs()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    monkeypatch.setattr(gradio_compat, "SILENT_SECONDS", 0.5)
    while slow_engine.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not any(name.startswith("silent") for name in page._queue.pending_messages_per_session)


def test_those_who_follow_a_run_keep_nobody_from_being_served(page, http, slow_engine, monkeypatch):
    monkeypatch.setattr(run_module, "MAX_SUBSCRIBERS", MANY)
    asked = Request.check({"prompts": ["a fox"], "steps": LONG}, slow_engine.catalog)
    run = page.unsubscribe.__self__.start(asked, browser="0" * 32)
    tabs = [f"tab{number}" for number in range(MANY)]

    async def follow(client: httpx.AsyncClient, tab: str) -> None:
        hub, watch = hub_of(page)
        await client.post(
            "queue/join",
            json={
                "fn_index": watch["id"],
                "session_hash": tab,
                "trigger_id": hub["id"],
                "data": [],
                "event_data": {**WATCH, "run": run.key},
            },
        )
        async with client.stream("GET", "queue/data", params={"session_hash": tab}) as told:
            async for _ in told.aiter_bytes():
                pass

    async def crowd() -> None:
        async with httpx.AsyncClient(
            base_url=f"{page.server.address}gradio_api/",
            timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client:
            following = [asyncio.create_task(follow(client, tab)) for tab in tabs]
            while not all(map(run.is_streamed_to, tabs)) or page.limiter.borrowed_tokens >= MANY:
                assert not run.over, "each holds a thread all the time"
                await asyncio.sleep(0.02)
            await asyncio.to_thread(visit)
            for each in following:
                each.cancel()

    def visit() -> None:
        with opened(page, http, "somebody else"):
            pass

    asyncio.run(crowd())
    run.stop()


def test_names_without_end_of_one_address_leave_others_their_runs(
    page_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(runs_module, "MAX_KEPT", 4)
    runs = Runs(Backend(page_engine, Files(tmp_path, page_engine.to_png), Inputs()))
    request = make_request(["one"], height=32, width=32, model="", steps=1)

    def begin(browser: str, address: str) -> Run:
        run = runs.start(request, browser=browser, address=address)
        [*_] = following(run, "tab")
        return run

    mine = begin("me", "away")
    for number in range(8):
        last = begin(f"name {number}", "crowd")
    assert runs.latest("me") is mine and runs.latest("name 7") is last
    assert runs.latest("name 0") is None


def test_a_grid_is_made_once_and_anew_when_a_picture_is_another(page_engine, tmp_path):
    made = []

    def to_png(pixels, request):
        made.append(pixels.shape)
        return page_engine.to_png(pixels, request)

    kept = Files(tmp_path, to_png)
    request = make_request(["one", "two"], height=32, width=32, model="", steps=1)
    pictures = {
        index: kept.add(request, index, np.full((32, 32, 3), index, np.uint8)) for index in range(2)
    }
    first, again = (kept.grid(request, pictures) for _ in range(2))
    assert first == again and len(made) == 3
    assert kept.archive(pictures) == kept.archive(dict(pictures))
    assert kept.grid(request, {0: pictures[0]}) != first
    assert kept.archive({0: pictures[0]}) != kept.archive(pictures)
