"""Look of the page: colours here, layout in page.css, behaviour in script/."""

import json
from pathlib import Path

import gradio as gr

from sd_tpu.settings import HANDED_IN, MAX_PROMPTS, MAX_SEED, SETTINGS, SIDES, Name, Picture


def theme() -> gr.themes.Base:
    """System fonts, so that no other host is asked for any; one accent on warm greys."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.indigo,
        secondary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.stone,
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "Consolas", "monospace"),
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_padding="0px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_500",
        input_border_color_focus_dark="*primary_400",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        error_text_color_dark="#fca5a5",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_700",
        button_primary_text_color="white",
        button_secondary_background_fill="*neutral_200",
        button_secondary_background_fill_hover="*neutral_300",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover_dark="*neutral_700",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
    )


def style(defaults: Picture) -> str:
    """Return the layout, for pictures of the defaults' shape."""
    shape = f":root {{ --aspect: {defaults.width / defaults.height:.4f}; }}\n"
    return shape + (_HERE / "page.css").read_text(encoding="utf-8")


_HERE = Path(__file__).parent
ICON = str(_HERE / "icon.svg")
# Made of script/ by `make script`; its first line says so.
_SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8").split("\n", 1)[1]
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
HEAD = f"<script>window.sdTpuSettings = {json.dumps(TABLE)};\n{_SCRIPT}</script>"
