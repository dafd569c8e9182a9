"""The page: eight prompts and a seed above a 2x4 gallery, and the same for programs."""

from functools import partial

import gradio as gr

from sd_tpu.engine import MAX_WAITING, Engine
from sd_tpu.history import History
from sd_tpu.images import MAX_FILE_BYTES
from sd_tpu.page import api, cells, events, live, past
from sd_tpu.page.asking import QUIET
from sd_tpu.page.files import Files
from sd_tpu.page.keeping import Keeper
from sd_tpu.page.layout import make_form, make_tools, make_view
from sd_tpu.page.runs import KEEP_SECONDS, Runs
from sd_tpu.page.texts import Translations, language_of
from sd_tpu.page.theme import HEAD, STYLE, theme


def build(engine: Engine, history: History | None = None) -> gr.Blocks:
    """The page on an engine, which keeps browsers' pictures in the history, if there is one;
    `launch` shows it.
    """
    card, texts = engine.pipeline.card, Translations()
    with gr.Blocks(title=f"{card.name} · sd_tpu", analytics_enabled=False, fill_width=True,
                   delete_cache=(3600, KEEP_SECONDS)) as page:
        gr.HTML(texts.render(partial(cells.heading, card)), apply_default_css=False,
                js_on_load=None)
        tools, compare = make_tools(engine)
        switch = live.make_switch()
        form = make_form(engine, texts, tools, compare)
        view = make_view(engine, texts)
        files = Files(page, engine.to_png)
        runs = Runs(engine, Keeper(files, history))
        if history:
            past.offer(engine, history, form, view, files)
        about = gr.HTML(texts.render(partial(cells.about, engine)), apply_default_css=False,
                        js_on_load=None)
        api.offer(engine, runs)

        def tell_about(visitor: gr.Request) -> str:
            return cells.about(engine, language_of(visitor))

        def leave(visitor: gr.Request) -> None:
            runs.leave(visitor.session_hash)

        page.load(tell_about, None, about, queue=False, **QUIET)
        ends = events.connect(engine, page, texts, form, view, runs, files)
        live.connect(engine, page, form, view, runs, switch, ends)
        page.unload(leave)
    page.i18n_instance = texts  # Gradio's own name for it: `launch` hands it over
    return page


def launch(page: gr.Blocks, **options) -> str:
    """Serves the page in the background; returns its address. Options are Gradio's own."""
    _, local, shared = page.launch(
        theme=theme(),
        css=STYLE,
        head=HEAD,
        i18n=page.i18n_instance,
        # Each visitor who waits or watches holds a thread; Stop and the files need some as well.
        max_threads=MAX_WAITING + 60,
        max_file_size=MAX_FILE_BYTES,
        footer_links=["api"],
        run_history=False,
        prevent_thread_lock=True,
        quiet=True,
        **options,
    )
    return shared or local
