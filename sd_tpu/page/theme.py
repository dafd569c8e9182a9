"""Look of the page: colours here, layout in page.css, behaviour in script/."""

import json
import re
from pathlib import Path

import gradio as gr

from sd_tpu.settings import HANDED_IN, MAX_PROMPTS, MAX_SEED, SETTINGS, SIDES, Name, Picture

# Paper, ink, and one colour for what is kept or under way; errors are amber. By light and dark.
COLOURS = {
    "body_background_fill": ("#f5f3ef", "#0f0e0d"),
    "background_fill_primary": ("#fffefc", "#1a1816"),
    "body_text_color": ("#1b1815", "#f4f0ea"),
    "body_text_color_subdued": ("#6b645b", "#a29a90"),
    "border_color_primary": ("#e2ddd4", "#2b2825"),
    "input_background_fill": ("#fffefc", "#141210"),
    "input_border_color": ("#d3ccc0", "#3a3632"),
    "input_border_color_focus": ("#d8421b", "#ff6b3d"),
    "input_placeholder_color": ("#6b645b", "#a29a90"),
    "error_text_color": ("#8f5200", "#ffbe5c"),
    "button_primary_background_fill": ("#1b1815", "#f4f0ea"),
    "button_primary_background_fill_hover": ("#3c3732", "#d9d3ca"),
    "button_primary_text_color": ("#fffefc", "#0f0e0d"),
    "button_secondary_background_fill": ("#ebe7df", "#24211e"),
    "button_secondary_background_fill_hover": ("#e0dacf", "#37332f"),
    "button_secondary_text_color": ("#1b1815", "#f4f0ea"),
    "link_text_color": ("#1b1815", "#f4f0ea"),
    "block_background_fill": ("transparent", "transparent"),
}


def theme() -> gr.themes.Base:
    """Return a contact sheet on paper, in system fonts, so that no other host is asked for any."""
    values = {
        name + mode: colour
        for name, both in COLOURS.items()
        for mode, colour in zip(("", "_dark"), both, strict=True)
    }
    return gr.themes.Base(
        primary_hue=gr.themes.colors.stone,
        secondary_hue=gr.themes.colors.stone,
        neutral_hue=gr.themes.colors.stone,
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "Consolas", "monospace"),
    ).set(block_border_width="0px", block_padding="0px", input_border_width="1px", **values)


def style(defaults: Picture) -> str:
    """Return the layout, for pictures of the defaults' shape, without comments and line breaks."""
    shape = f":root {{ --aspect: {defaults.width / defaults.height:.4f}; }}\n"
    rules = (_HERE / "page.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", shape + rules, flags=re.DOTALL))


def script() -> str:
    """Return the script, made of script/ by `make script`, and what it knows of settings."""
    text = (_HERE / "page.js").read_text(encoding="utf-8")
    return f"window.sdTpuSettings = {json.dumps(TABLE)};\n{text}"


_HERE = Path(__file__).parent
ICON = str(_HERE / "icon.svg")
# The table of settings as script/state.js needs it.
TABLE = {
    "boxes": MAX_PROMPTS,
    "seeds": MAX_SEED + 1,
    "sides": sorted(SIDES),
    "offered": [
        "size",
        *(
            name
            for name, setting in SETTINGS.items()
            if isinstance(setting.kind, Name) and setting.common
        ),
    ],
    "uses": {
        name: HANDED_IN[setting.section]
        for name, setting in SETTINGS.items()
        if setting.of_upload and setting.suggest
    },
}
# Hides Gradio's notices of connections, which the page's line tells in the page's words. Here, as
# Gradio keeps rules of `css` to what is within its container.
HEAD = "<style>.toast-wrap { display: none !important; }</style>"
