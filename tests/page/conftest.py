"""The page in a real browser, one for each file.

Playwright keeps an event loop running in its thread for as long as it lasts, and tests of other
files could not call `asyncio.run` there.
"""

import shutil
import threading
from collections.abc import Iterator

import gradio_client
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from starlette.middleware import Middleware

from sd_tpu.http.access import Access
from sd_tpu.http.gate import Gate, Names
from sd_tpu.page import build, close, launch
from tests.support.visitor import DESKTOP, newcomer

# Tabs of one site share a process, and what it has compiled of the page.
FLAGS = ["--no-sandbox", "--disable-gpu", "--process-per-site"]


@pytest.fixture(scope="session")
def address(page_engine) -> Iterator[str]:
    """Where the page is served."""
    page = build(page_engine)
    assert page_engine.ready.wait(300)
    gate = Middleware(Gate, names=Names(), access=Access(), api=None, paths=())
    yield launch(page, mcp_server=True, middleware=[gate])
    close(page)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, without any visitor yet."""
    program = shutil.which("chromium-headless-shell")
    if not program:
        pytest.fail("The browser tests need Debian's chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visitor(chromium, address) -> Iterator[BrowserContext]:
    """Somebody, all of whose tabs share what the browser has cached and stored."""
    with chromium.new_context(viewport=DESKTOP, reduced_motion="reduce") as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.new_page().goto(f"{address}robots.txt")  # the process lasts as long as a tab does
        yield context


@pytest.fixture
def tab(visitor, address) -> Iterator[Page]:
    """The page as it looks to somebody who was never there."""
    with newcomer(visitor, address) as tab:
        yield tab


@pytest.fixture
def may_draw(page_engine, monkeypatch) -> Iterator[threading.Event]:
    """Event that the engine waits for before a row of any picture."""
    execute, go = page_engine.worker.execute, threading.Event()

    def hold(plan):
        if plan.rows:
            go.wait()
        return execute(plan)

    monkeypatch.setattr(page_engine.worker, "execute", hold)
    yield go
    go.set()


@pytest.fixture(scope="module")
def client(address) -> gradio_client.Client:
    """A program."""
    return gradio_client.Client(address, verbose=False)
