"""The parts of the page that are HTML: cells of the gallery, the progress line, the viewer.

A picture lives in a cell of its own, so its place never moves while others come and go. Cells are
HTML instead of Gradio's images because the file offered must be the PNG with its settings, byte for
byte, and because a preview must turn into the picture without a flicker.
"""

import sys
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

import jax

from sd_tpu.config import ModelCard
from sd_tpu.engine import Engine
from sd_tpu.images import VERSION
from sd_tpu.page.files import SMALL, url
from sd_tpu.page.labels import words
from sd_tpu.page.links import write_link
from sd_tpu.page.run import Run
from sd_tpu.page.snapshot import Cell
from sd_tpu.page.texts import Language, Phrase, label
from sd_tpu.request import Settings
from sd_tpu.tokenizer import LENGTH

# Tells Python which button of a cell was clicked, and what its data-* attributes say; with
# data-confirm the browser asks first.
TRIGGER = """element.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-do]");
    const question = asked?.dataset.confirm;
    if (asked && (!question || confirm(question))) trigger("click", { ...asked.dataset });
});"""


def heading(card: ModelCard, language: Language) -> str:
    """The page's title, what to do, and what the model can draw if that is little.

    Its `lang` and `dir` are those of the page: page.js looks there. The card may be in English
    alone.
    """
    say, tag, details = language.say, language.tag, ""
    if card.details:
        text, spoken = card.told("details", tag)
        details = (f'<details><summary>{say("details")}</summary>'
                   f'<p lang="{spoken}" dir="auto">{escape(text)}</p></details>')
    text, spoken = card.told("hint", tag)
    hint = f'<bdi lang="{spoken}">{escape(text)}</bdi>' if text else say("hint")
    return (f'<header lang="{tag}" dir="{language.direction}"><h1>{say("heading")}</h1>'
            f'<p>{hint} {say("skipped")} <span class="keys">{say("keys")}</span></p>{details}'
            '</header>')


def fold(key: str) -> str:
    """A button that shows and hides the panel of this name.

    Gradio's accordion makes its contents when it opens, and loses what is typed at that moment.
    """
    return ('<button type="button" class="fold" aria-expanded="false" '
            f'aria-controls="{key}-panel">'
            f'{label(key)}</button>')


def own_fold(number: int, language: Language) -> str:
    """The small button below a box that shows and hides the panel of its own settings."""
    name = language.say("own_fold", number=number)
    return (f'<button type="button" class="fold own" aria-expanded="false" '
            f'aria-controls="own-{number}-panel" aria-label="{name}" title="{name}"></button>')


def summary(text: str, clear: str, panel: str) -> str:
    """What is set in a panel, also while it is folded away, and a button that clears it."""
    return (f'<p class="own-summary"><span dir="auto" title="{escape(text)}">{escape(text)}</span>'
            f'<button type="button" data-do="clear" data-then="{panel}" aria-label="{clear}" '
            f'title="{clear}">✕</button></p>')


def counter(count: int, lost: str, unknown: Sequence[str], language: Language) -> str:
    """How many of the model's tokens a prompt takes, its end that the model will not see, and words
    that mean nothing to the model."""
    tokens = text = Phrase("tokens", count=count, limit=LENGTH)
    if lost:
        text = Phrase("tokens_lost", tokens=tokens, lost=lost)
    elif unknown:
        text = Phrase("tokens_unknown", tokens=tokens, words=list(unknown))
    text, kind = language.translate(text), "tokens over" if lost else "tokens"
    return f'<p class="{kind}" title="{escape(text)}">{escape(text)}</p>'


def size_note(defaults: Settings, language: Language) -> str:
    """What can be said of the pictures' size, and of settings elsewhere."""
    text = language.say("size", width=defaults.width, height=defaults.height)
    return f'<p class="note">{language.say("own_hint")} {text}</p>'


def progress(text: str, kind: str, share: float = 0.0) -> str:
    """The progress line with its bar; read aloud is not this, which changes every step."""
    return (f'<p class="{kind}">{escape(text)}</p>'
            f'<progress value="{share:.3f}" max="1" aria-hidden="true"></progress>')


def news(text: str) -> str:
    """What is read aloud; it may hold words of whoever made a link or named a file."""
    return escape(text)


def figure(cell: Cell, size: tuple[int, int], language: Language) -> str:
    """The cell; size is width and height, kept free from the start so that nothing shifts."""
    width, height = size
    return (f'<figure class="{cell.state}" data-place="{cell.place}">'
            f'<div style="aspect-ratio: {width} / {height}">{_content(cell, size, language)}</div>'
            f'<figcaption>{_caption(cell, language)}</figcaption></figure>')


def _content(cell: Cell, size: tuple[int, int], language: Language) -> str:
    source = url(cell.picture.shown) if cell.picture else cell.preview
    if not source:
        return f'<span class="number">{cell.place + 1}</span>'
    small = ' class="small"' if max(size) < SMALL else ""
    described = _described(cell, language)
    image = (f'<img src="{source}" alt="{escape(described)}"{small} width="{size[0]}" '
             f'height="{size[1]}">')
    if not cell.picture:
        return image
    name = escape(language.say("view", number=cell.place + 1, prompt=described))
    return f'<button type="button" class="view" aria-label="{name}">{image}</button>'


def _described(cell: Cell, language: Language) -> str:
    """The prompt, and what sets the picture apart."""
    if not cell.named:
        return cell.prompt
    return language.say("labelled", label=words(cell.named, language), prompt=cell.prompt)


def _caption(cell: Cell, language: Language) -> str:
    if cell.state == "blank":
        return ""
    seed = "" if "seed" in cell.named else language.say("cell_seed", seed=cell.seed)
    label = f"<b>{escape(words(cell.named, language))}</b>" if cell.named else ""
    actions = _actions(cell, language) if cell.picture else language.say(f"cell_{cell.state}")
    return (f'<span class="words" title="{escape(_described(cell, language))}">'
            f'{label}<span dir="auto">{escape(cell.prompt)}</span></span>'
            f'<span class="facts"><span class="seed">{seed}</span>'
            f'<span class="actions">{actions}</span></span>')


def _actions(cell: Cell, language: Language) -> str:
    number, file = cell.place + 1, cell.picture.png
    return (_button("again", number, language) + _button("vary", number, language)
            + f'<a href="{url(file)}" download="{escape(Path(file).name)}" '
              f'aria-label="{language.say("png_help", number=number)}">PNG</a>')


def _button(do: str, number: int, language: Language) -> str:
    name = language.say(f"{do}_help", number=number)
    return (f'<button type="button" data-do="{do}" data-place="{number - 1}" aria-label="{name}" '
            f'title="{name}">{language.say(do)}</button>')


def collection(run: Run | None, language: Language) -> str:
    """What can be done with all pictures of a run, and with its request; what cannot be done says
    why and keeps its place.
    """
    say = language.say
    none = f' disabled title="{say("no_pictures")}"'
    off = "" if run and run.pictures() else none
    # Live may have taken the last prompt away.
    link = escape(write_link(run.request)) if run and run.request.places() else ""
    return (f'<button type="button" data-do="zip"{off}>{say("zip")}</button>'
            f'<button type="button" data-do="grid"{off}>{say("grid")}</button>'
            f'<button type="button" data-link="{link}" data-copied="{say("link_copied")}" '
            f'data-prompt="{say("link_prompt")}"{"" if link else none}>{say("link")}</button>')


def viewer(language: Language) -> str:
    """The full-screen view, which page.js fills and opens."""
    say = language.say
    return f"""<dialog id="viewer" aria-label="{say("viewer")}">
<div class="stage"><img alt=""></div>
<p class="words" dir="auto" aria-live="polite"></p><p class="facts"></p>
<div class="bar"><button type="button" data-step="-1" aria-label="{say("previous")}">←</button>
<button type="button" data-step="1" aria-label="{say("next")}">→</button>
<a class="png" download>{say("download_png")}</a>
<button type="button" data-close>{say("close")}</button></div></dialog>"""


def about(engine: Engine, language: Language) -> str:
    """What the pictures are made with; it takes no offence at what is not a TPU."""
    say = language.say
    devices = list(engine.mesh.devices.flat)
    kind = f"{len(devices)} × {devices[0].device_kind.replace('cpu', 'CPU')}"
    made_on = kind if devices[0].platform == "tpu" else say("no_tpu", devices=kind)
    state = "healthy" if engine.ready.is_set() else "compiles"
    health = language.translate(engine.failure or Phrase(state))
    defaults, models = engine.defaults, engine.pipeline.models
    rows = {
        "about_model": _bdi(engine.pipeline.card.name),
        "about_devices": escape(made_on),
        "about_precision": _bdi(str(models.dtype)),
        "about_sizes": say("sizes", width=defaults.width, height=defaults.height),
        "about_versions": _bdi(_versions()),
        "about_health": escape(health),
    }
    if models.token_downsampling > 1:
        rows["about_downsampling"] = _bdi(str(models.token_downsampling))
    terms = "".join(f"<dt>{say(key)}</dt><dd>{value}</dd>" for key, value in rows.items())
    return f'<details class="about"><summary>{say("about")}</summary><dl>{terms}</dl></details>'


def _bdi(text: str) -> str:
    """A text in its own direction, whatever the page's is."""
    return f"<bdi>{escape(text)}</bdi>"


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("flax", "gradio"))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"sd_tpu {VERSION}, JAX {jax.__version__}, {packages}, Python {python}"
