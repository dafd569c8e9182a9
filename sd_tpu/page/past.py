"""The history on the page: what this browser has made, and what can be done with it."""

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from sd_tpu.engine import Engine
from sd_tpu.history import Entry, History, HistoryError
from sd_tpu.page import cells
from sd_tpu.page.asking import QUIET, browser_of
from sd_tpu.page.files import SMALL, Files, thumbnail, url
from sd_tpu.page.labels import all_words
from sd_tpu.page.layout import Form, Updates, View, put_picture
from sd_tpu.page.texts import Language, language_of
from sd_tpu.request import RequestError

MORE = 24  # pictures on a page of it; further ones come below
REFRESH = '<button type="button" data-do="refresh" hidden></button>'  # which page.js clicks
AFTER = "(file) => window.sdTpu.didInHistory(file)"


@dataclasses.dataclass(frozen=True)
class Look:
    """What of the history is shown: so many pages of the newest, of all or of the favourites."""

    pages: int = 1
    favourites_only: bool = False


def offer(engine: Engine, history: History, form: Form, view: View, files: Files) -> None:
    """Adds the history to the page that is being built."""
    gr.HTML(cells.fold("history"), apply_default_css=False, js_on_load=None)
    with gr.Column(elem_id="history-panel"):
        shown = gr.HTML(REFRESH, elem_id="history", js_on_load=cells.TRIGGER,
                        apply_default_css=False)
    past = _Past(history, form, view, files, shown, gr.State(Look()), engine)
    outputs = [past.shown, past.look, view.file, view.line, view.news, *form.inputs()]
    shown.click(past.act, {form.saved, past.look}, outputs, queue=False, trigger_mode="multiple",
                **QUIET).then(None, view.file, None, js=AFTER, **QUIET)


@dataclasses.dataclass(frozen=True)
class _Past:
    """What happens when something in the history's panel is clicked."""

    history: History
    form: Form
    view: View
    files: Files
    shown: gr.HTML
    look: gr.State
    engine: Engine

    def act(self, values: Mapping[Component, Any], event: gr.EventData,
            visitor: gr.Request) -> Updates:
        owner, language = browser_of(values[self.form.saved]), language_of(visitor)
        try:
            match event.do:
                case "again" | "save" | "view":
                    updates = self._use(owner, event, language)
                case _:
                    updates = self._change(owner, event, values[self.look], language)
        except OSError:
            updates = self._gone(language)
        except (HistoryError, RequestError) as error:
            updates = self.view.tell(language.translate(error.sentence), "wrong")
        # What is asked for by name is answered by name, also where it is gone.
        return {self.view.file: f"#{event.id}" if event.do == "view" else "", **updates}

    def _use(self, owner: str, event: gr.EventData, language: Language) -> Updates:
        file = self.history.picture(owner, event.id)
        if not file:
            raise FileNotFoundError
        if event.do != "again":
            address = url(self.files.copy(file))
            return {self.view.file: f"{address}#{event.id}" if event.do == "view" else address}
        told = language.say("history_again_done")
        return put_picture(self.form, self.view, file, told, self.engine, language)

    def _change(self, owner: str, event: gr.EventData, look: Look, language: Language) -> Updates:
        """Does what was asked for and shows what there is then."""
        say, news = language.say, {}
        match event.do:
            case "more":
                look = dataclasses.replace(look, pages=look.pages + 1)
            case "only":
                look = Look(favourites_only=not look.favourites_only)
            case "favourite":
                known = self.history.set_favourite(owner, event.id, event.to == "true")
                news = {} if known else self._gone(language)
            case "delete":
                known = self.history.delete(owner, event.id)
                deleted = {self.view.news: say("history_deleted")}
                news = deleted if known else self._gone(language)
            case "clear":
                self.history.clear(owner)
                news = {self.view.news: say("history_cleared")}
        return {self.look: look, self.shown: _contents(self.history, owner, look, language), **news}

    def _gone(self, language: Language) -> Updates:
        return self.view.tell(language.say("history_gone"), "wrong")


def _contents(history: History, owner: str, look: Look, language: Language) -> str:
    say, limit = language.say, look.pages * MORE
    entries = history.entries(owner, limit=limit + 1, favourites_only=look.favourites_only)
    if not entries and not look.favourites_only:
        return f'{REFRESH}<p class="empty">{say("history_empty")}</p>'
    if not entries:
        return f'{REFRESH}{_bar(look, language)}<p class="empty">{say("history_no_favourites")}</p>'
    items = "".join(_item(history, owner, entry, language) for entry in entries[:limit])
    more = _button("more", say("history_more"), "") if len(entries) > limit else ""
    return f"{REFRESH}{_bar(look, language)}<ul>{items}</ul>{more}"


def _bar(look: Look, language: Language) -> str:
    say = language.say
    pressed = str(look.favourites_only).lower()
    clear = f'data-confirm="{escape(say("history_clear_sure"))}"'
    return (f'<div class="bar">'
            f'{_button("only", say("history_only"), f"aria-pressed={pressed}")}'
            f'{_button("clear", say("history_clear"), clear)}</div>')


def _item(history: History, owner: str, entry: Entry, language: Language) -> str:
    request, prompt = entry.request, escape(entry.request.prompts[0])
    small = ' class="small"' if max(request.width, request.height) < SMALL else ""
    name = escape(language.say("history_view_help", prompt=entry.request.prompts[0]))
    return (f'<li><figure data-id="{entry.id}"><button type="button" class="view" data-do="view" '
            f'data-id="{entry.id}" aria-label="{name}">'
            f'<img src="{_source(history, owner, entry)}" alt="{prompt}"{small}></button>'
            f'<p class="words" dir="auto" title="{prompt}">{prompt}</p>'
            f'<p class="told">{_told(entry, language)}</p></figure>'
            f'<div class="actions">{_actions(entry, language)}</div></li>')


def _told(entry: Entry, language: Language) -> str:
    """When it was made, which page.js says as people there write it, and with which settings."""
    made = datetime.fromtimestamp(entry.made_at, UTC)
    return (f'<time datetime="{made.isoformat(timespec="seconds")}">{made:%Y-%m-%d %H:%M}</time>'
            f' · {escape(all_words(entry.request, language))}')


def _source(history: History, owner: str, entry: Entry) -> str:
    """The picture inside the page; nothing if its file is gone or broken, so that only its prompt
    is shown."""
    file = history.picture(owner, entry.id)
    try:
        return thumbnail(file) if file else ""
    except (OSError, SyntaxError):  # the latter is Pillow's for some broken PNGs
        return ""


def _actions(entry: Entry, language: Language) -> str:
    of, say = partial(_of, entry, language), language.say
    pressed, other = str(entry.favourite).lower(), str(not entry.favourite).lower()
    star = "★" if entry.favourite else "☆"
    sure = f'data-confirm="{escape(say("history_delete_sure"))}"'
    return (of("again", say("history_again")) + of("save", say("history_save"))
            + of("favourite", star, f'data-to="{other}" aria-pressed="{pressed}"')
            + of("delete", "✕", sure))


def _of(entry: Entry, language: Language, do: str, text: str, attributes: str = "") -> str:
    """A button of one picture."""
    name = escape(language.say(f"history_{do}_help", prompt=entry.request.prompts[0]))
    return _button(do, text, f'data-id="{entry.id}" aria-label="{name}" title="{name}" '
                             f'{attributes}')


def _button(do: str, text: str, attributes: str) -> str:
    return f'<button type="button" data-do="{do}" {attributes}>{text}</button>'
