"""The page: a 2x4 gallery with a prompt below each picture, and the same for programs."""

import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastapi
import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from sd_tpu import gradio_compat
from sd_tpu.gallery.files import Files
from sd_tpu.gallery.history import History
from sd_tpu.gallery.run import MAX_SUBSCRIBERS, Backend
from sd_tpu.gallery.runs import KEEP_SECONDS, Runs
from sd_tpu.gallery.uploads import Inputs
from sd_tpu.http.assets import Assets
from sd_tpu.http.server import Server, bind
from sd_tpu.page import api
from sd_tpu.page.actions import Actions
from sd_tpu.page.events import ActionRequest, RunStream
from sd_tpu.page.files import Uploads
from sd_tpu.page.layout import Texts, make_page
from sd_tpu.page.theme import HEAD, ICON, script, style, theme
from sd_tpu.page.turns import Turns
from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.scheduler import Busy, Limits
from sd_tpu.serving.teaching import Teaching

log = logging.getLogger(__name__)

# At each event Gradio's browser part visits all components on which any event so far shows its
# progress, by default its outputs, also where nothing of it is to be seen
# (decision 0026).
QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "show_progress_on": [],
    "api_visibility": "private",
}
# That go on at the same time: more than one address can have, as those that follow a run hold one.
EVENTS = (MAX_SUBSCRIBERS + 1) * Limits().address_jobs
PARALLEL = 2  # answers that read or make files, at a time: each can have a core for seconds
MOST = 64  # answers that one network waits for


def build(
    engine: EngineClient, history: History | None = None, teaching: Teaching | None = None
) -> gr.Blocks:
    """Build the page on an engine; `launch` shows it.

    The history, if there is one, keeps browsers' pictures; `teaching`, if there is one, trains
    LoRAs.
    """
    gradio_compat.fetch_nothing()
    gradio_compat.log_errors()
    card, texts = engine.checkpoint.card, Texts()
    with gr.Blocks(
        title=f"{card.name} · sd_tpu",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(3600, KEEP_SECONDS),
    ) as page:
        # Below what is handed in, which Gradio puts there and `Uploads` bounds.
        files = Files(Path(page.GRADIO_CACHE) / "pictures", engine.to_png)
        gradio_compat.prune(page, files.names)
        runs = Runs(Backend(engine, files, Inputs(), history))
        actions = Actions(runs, teaching)
        work = Turns(parallel=PARALLEL, most=MOST)
        history_turns = Turns(parallel=4 * PARALLEL, most=MOST)  # whose database another may hold
        looks = Turns(parallel=EVENTS, most=MOST)

        async def answer(asked: Any, visitor: gr.Request) -> dict:
            asked = ActionRequest.of(asked, visitor)
            action = asked.data.get("do")
            turns = work if asked.has_files else history_turns if action == "history" else looks
            try:
                return await turns.call(asked.address, actions.answer, asked)
            except Busy as error:
                return actions.refuse(error, asked)

        async def watch(event: gr.EventData, visitor: gr.Request) -> AsyncIterator[dict]:
            asked = ActionRequest.of(gradio_compat.message_of(event), visitor)
            async for updates in shown.stream(asked, visitor.session_hash):  # ty: ignore[invalid-argument-type]
                yield updates

        def unsubscribe(visitor: gr.Request) -> None:
            runs.unsubscribe(visitor.session_hash)  # ty: ignore[invalid-argument-type]

        view = make_page(
            engine, texts, answer, history=history is not None, teach=teaching is not None
        )
        shown = RunStream(runs, view)
        view.hub.click(
            watch, None, view.outputs(), trigger_mode="multiple", concurrency_limit=None, **QUIET
        )
        page.load(None, None, None, js="() => { window.sdTpu.arrive(); }", **QUIET)
        api.add_endpoints(runs)
        page.unload(unsubscribe)
    page.css = style(engine.defaults)  # Gradio's own name for it: `mount` hands it over
    page.texts = texts
    page.unsubscribe = runs.unsubscribe  # `mount` says who has gone
    page.server = None
    return page


def launch(
    page: gr.Blocks,
    middleware: Sequence[Middleware] = (),
    *,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    **options: Any,
) -> str:
    """Serve the page in the background, until it is closed.

    Args:
        page: from `build`.
        middleware: that stands before it.
        host: as `bind` takes it.
        port: as `bind` takes it.
        share: whether to make a public link through Gradio's servers.
        options: as `mount` takes them.

    Returns:
        The address: the public link, if there is one.

    Raises:
        ValueError: nothing can be served at this address.
        OSError: another program serves there.
    """
    page.server = Server(mount(page, middleware, **options), bind(host, port)).start()
    gradio_compat.set_address(page, page.server.address)
    return (share and _tunnel(page)) or page.server.address


def _tunnel(page: gr.Blocks) -> str:
    """Return the public link through Gradio's servers; "", and a line in the log, if it fails."""
    here = urlsplit(page.server.address)  # ty: ignore[missing-union-attribute]
    try:
        return gradio_compat.open_tunnel(page, str(here.hostname), here.port or 80)
    except Exception as error:  # of a download, a checksum, a program or a network
        log.warning("There is no public link: %s", error)
        return ""


def mount(page: gr.Blocks, middleware: Sequence[Middleware] = (), **options) -> fastapi.FastAPI:
    """Return the page behind the middleware as an ASGI application, for another server.

    Options are those of Gradio's `mount_gradio_app`.
    """
    page.max_threads = EVENTS
    page.queue()
    page.root_path = _folder(page.root_path)
    site = gr.mount_gradio_app(
        fastapi.FastAPI(openapi_url=None),
        page,
        "/",
        show_error=False,
        enable_monitoring=False,
        **_served(page, middleware),
        **options,
    )
    gradio_compat.serve_alone(page, site, page.unsubscribe)  # ty: ignore[missing-attribute]
    return site


def _served(page: gr.Blocks, middleware: Sequence[Middleware]) -> dict[str, Any]:
    """Return how the page is served, in Gradio's words."""
    return dict(
        theme=theme(),
        css=page.css,
        head=HEAD,
        favicon_path=ICON,
        pwa=True,  # can be installed
        max_file_size=MAX_FILE_BYTES,
        footer_links=["api"],
        run_history=False,
        # Gradio sends answers as they are.
        app_kwargs={
            "middleware": [
                *middleware,
                Middleware(Uploads),
                Middleware(
                    Assets,
                    components={block.get_block_name() for block in page.blocks.values()},
                    script=script(),
                    fill=page.texts.fill,  # ty: ignore[missing-attribute]
                ),
                Middleware(GZipMiddleware),
            ]
        },
    )


def _folder(root: str) -> str:
    """Return the folder of a site in which the page lies, as the router takes it.

    A whole address stays as it is.
    """
    return root if "://" in root else f"/{root.strip('/')}" * bool(root.strip("/"))


def close(page: gr.Blocks) -> None:
    """End `launch`'s server, if there is one, without waiting for open connections."""
    gradio_compat.close_tunnels()
    if page.server:
        gradio_compat.end_listening(page)
        page.server.close()
