"""Opening the page: the link's request in its boxes, or what was in them last, and all in words of
the visitor's language."""

from collections.abc import Callable
from typing import Any

import gradio as gr
from gradio.events import Dependency

from sd_tpu.engine import Engine
from sd_tpu.page.asking import QUIET
from sd_tpu.page.layout import Form, Updates, View
from sd_tpu.page.links import read_link
from sd_tpu.page.own import own_choices
from sd_tpu.page.texts import ENGLISH, Language, Translations, language_of
from sd_tpu.request import Request, RequestError


def connect(engine: Engine, page: gr.Blocks, texts: Translations, form: Form, view: View
            ) -> Dependency:
    """Fills the page when it opens; returns what ends with that."""
    arrived = page.load(_restore(engine, page, texts, form, view),
                        form.saved, {form.saved, *form.inputs(), view.line, view.news,
                                     *texts.updates(page, ENGLISH)}, queue=False,
                        js="(saved) => window.sdTpu.arrive(saved)", **QUIET)
    for after in (arrived.then, arrived.failure):
        after(None, [form.saved, *form.inputs()], form.saved, **QUIET,
              js="(...values) => window.sdTpu.saveAll(...values)")
    return arrived


def _restore(engine: Engine, page: gr.Blocks, texts: Translations, form: Form,
             view: View) -> Callable[[dict, gr.Request], Updates]:
    """What fills the boxes when the page opens: the link's request, or what was in them last."""

    def restore(saved: dict, visitor: gr.Request) -> Updates:
        link, shown = saved.pop("link", ""), saved.pop("shown", "")
        language = language_of(visitor)
        labels = {}
        if language is not ENGLISH:
            labels = own_choices(form.own, language) | form.compare.choices(language)
        if shown != language.tag:
            for component, update in texts.updates(page, language).items():
                labels[component] = {**labels.get(component, {}), **update}
        return {**labels, **{component: _both(labels.get(component), update)
                             for component, update in fill(saved, link, language).items()}}

    def fill(saved: dict, link: str, language: Language) -> Updates:
        updates = {form.saved: saved,
                   **form.show_kept(saved.get("form"), engine.defaults, language)}
        if not link:
            return updates
        try:
            request = Request.check(read_link(link), engine.defaults)
        except RequestError as error:
            return {**updates, **view.tell(language.translate(error.sentence), "wrong")}
        return {**updates, **form.show_request(request, language),
                **view.tell(language.say("link_opened"))}

    return restore


def _both(label: dict | None, update: Any) -> Any:
    """An update of a component, whose texts may change as well."""
    if not label:
        return update
    return {**label, **(update if isinstance(update, dict) else gr.update(value=update))}
