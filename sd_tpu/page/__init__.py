"""The page: a 2x4 gallery with a prompt below each picture, and the same for programs."""

import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import fastapi
import gradio as gr
from gradio.tunneling import CURRENT_TUNNELS
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from sd_tpu.http.assets import Assets
from sd_tpu.page import api
from sd_tpu.page.events import Answers, Asked, Watch
from sd_tpu.page.files import fetch_nothing
from sd_tpu.page.layout import Translations, make_page
from sd_tpu.page.sessions import remember_nothing
from sd_tpu.page.theme import HEAD, ICON, style, theme
from sd_tpu.pictures.files import Files
from sd_tpu.pictures.history import History
from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.pictures.uploads import Inputs
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.run import MAX_FOLLOWERS, Studio
from sd_tpu.serving.runs import KEEP_SECONDS, Runs
from sd_tpu.serving.scheduler import Limits

# At each event Gradio's browser part visits all components on which any event so far shows its
# progress, by default its outputs, also where nothing of it is to be seen.
QUIET = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
# That go on at the same time: more than one address can have, as those that follow a run hold one.
EVENTS = (MAX_FOLLOWERS + 1) * Limits().address_jobs
CLOSE_SECONDS = 2.0  # in which what is being sent may still go out


def build(engine: EngineClient, history: History | None = None) -> gr.Blocks:
    """The page on an engine, which keeps browsers' pictures in the history, if there is one;
    `launch` shows it.
    """
    fetch_nothing()
    card, texts = engine.pipeline.card, Translations()
    with gr.Blocks(title=f"{card.name} · sd_tpu", analytics_enabled=False, fill_width=True,
                   delete_cache=(3600, KEEP_SECONDS)) as page:
        files = Files(Path(page.GRADIO_CACHE), engine.to_png)
        page.temp_file_sets.append(files.names)  # Gradio prunes them
        runs = Runs(Studio(engine, files, Inputs(), history))
        answers = Answers(runs)

        def answer(asked: Any, visitor: gr.Request) -> dict:
            return answers.answer(Asked.of(asked, visitor))

        async def watch(event: gr.EventData, visitor: gr.Request) -> AsyncIterator[dict]:
            asked = Asked.of(event._data, visitor)
            async for updates in shown.follow(asked, visitor.session_hash):
                yield updates

        def leave(visitor: gr.Request) -> None:
            runs.leave(visitor.session_hash)

        view = make_page(engine, texts, answer, history=history is not None)
        shown = Watch(runs, view)
        view.hub.click(watch, None, view.outputs(), trigger_mode="multiple", concurrency_limit=None,
                       **QUIET)
        page.load(None, None, None, js="() => { window.sdTpu.arrive(); }", **QUIET)
        api.offer(runs)
        page.unload(leave)
    # Gradio's own names for them: `launch` hands them over.
    page.i18n_instance, page.css = texts, style(engine.defaults)
    page.leave = runs.leave  # `remember_nothing` says who has gone
    return page


def launch(page: gr.Blocks, middleware: Sequence[Middleware] = (), **options) -> str:
    """Serves the page in the background, behind the middleware; returns its address. Options are
    Gradio's own."""
    _, local, shared = page.launch(max_threads=EVENTS, prevent_thread_lock=True, quiet=True,
                                   **_served(page, middleware), **options)
    remember_nothing(page)
    return shared or local


def mount(page: gr.Blocks, middleware: Sequence[Middleware] = (), **options) -> fastapi.FastAPI:
    """The page behind the middleware as an ASGI application, for another server than Gradio's.
    Options are those of Gradio's `mount_gradio_app`."""
    page.max_threads = EVENTS
    page.queue()
    site = gr.mount_gradio_app(fastapi.FastAPI(openapi_url=None), page, "/", show_error=False,
                               **_served(page, middleware), **options)
    page.app = site.routes[-1].app  # Gradio leaves another there, which nobody serves
    remember_nothing(page)
    return site


def _served(page: gr.Blocks, middleware: Sequence[Middleware]) -> dict[str, Any]:
    """How the page is served, in Gradio's words."""
    return dict(
        theme=theme(),
        css=page.css,
        head=HEAD,
        i18n=page.i18n_instance,
        favicon_path=ICON,
        pwa=True,  # can be installed
        max_file_size=MAX_FILE_BYTES,
        footer_links=["api"],
        run_history=False,
        # Gradio sends answers as they are.
        app_kwargs={"middleware": [
            *middleware, Middleware(Assets, components={block.get_block_name() for block
                                                        in page.blocks.values()}),
            Middleware(GZipMiddleware)]},
    )


def close(page: gr.Blocks) -> None:
    """Ends what `launch` began, as far as it is to end now: what is open is not waited for."""
    for tunnel in CURRENT_TUNNELS:
        tunnel.kill()
    if page.is_running:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # on what is broken off
        page.app.stop_event.set()  # of pages that listen
        page.server.should_exit = page.server.force_exit = True
        page.server.thread.join(CLOSE_SECONDS)
