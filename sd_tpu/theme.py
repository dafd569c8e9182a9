"""What the page looks like: colours, layout, the two icons, and the keys it listens to."""

import gradio as gr


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
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
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
        button_large_text_size="*text_md",
        button_large_text_weight="500",
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


# Ctrl+Enter, or Cmd+Enter on a Mac, in any of the page's fields.
SHORTCUT = """() => document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey))
        document.querySelector("#generate").click();
})"""

_DIE = ("M4 1h8a3 3 0 0 1 3 3v8a3 3 0 0 1-3 3H4a3 3 0 0 1-3-3V4a3 3 0 0 1 3-3z"
        "m.7 2.3a1.4 1.4 0 1 0 0 2.8 1.4 1.4 0 0 0 0-2.8z"
        "M8 6.6a1.4 1.4 0 1 0 0 2.8 1.4 1.4 0 0 0 0-2.8z"
        "m3.3 3.3a1.4 1.4 0 1 0 0 2.8 1.4 1.4 0 0 0 0-2.8z")
_AGAIN = "M8 2a6 6 0 1 0 5.7 7.9l-1.9-.6A4 4 0 1 1 11 5.3L9 7.3h6V1.3l-2.6 2.6A6 6 0 0 0 8 2z"


def _icon(path: str) -> str:
    """A drawing of 16x16 units as a CSS image; it takes no request."""
    return ("url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' "
            f"viewBox='0 0 16 16'%3E%3Cpath fill-rule='evenodd' d='{path}'/%3E%3C/svg%3E\")")


STYLE = """
.gradio-container > .main { padding: 16px clamp(16px, 3vw, 32px); }
.gradio-container main { width: 100%; max-width: 1240px; margin: 0 auto !important; }
footer > :not(.show-api) { display: none; }
textarea { unicode-bidi: plaintext; }
.html-container { padding: 0 !important; }
.form { border: 0 !important; background: none !important; box-shadow: none !important; }
header h1 { font-size: 1.5rem; font-weight: 650; margin: 0; line-height: 1.3; }
header p { margin: 4px 0 0; color: var(--body-text-color-subdued); }
:focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }

#prompts > .form, #gallery { display: grid; gap: 16px; overflow: visible;
    grid-template-columns: repeat(4, minmax(0, 1fr)); }
#settings { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px 14px; }
#settings .form { gap: 16px; align-items: end; }
#settings input[type=number] { height: 42px; }
#settings .wrap-inner { min-height: 40px; }

#actions { justify-content: space-between; align-items: end; gap: 12px 24px; }
#seeds, #go { width: auto; flex: 0 1 auto; flex-wrap: nowrap; align-items: end; gap: 8px; }
#seeds .form { flex: 0 1 220px; }
#seeds button, #go button { flex: 0 0 auto; white-space: nowrap; height: 42px; padding: 0 16px; }
#go #generate { min-width: 168px !important; }
#go #stop { min-width: 96px !important; }
#seeds .form, #seed { overflow: visible !important; white-space: nowrap; }
#seed input { height: 42px; }
#roll::before, #reuse::before { content: ""; width: 1em; height: 1em; margin-right: .5em;
    background: currentColor; mask: DIE center / contain no-repeat; }
#reuse::before { mask-image: AGAIN; }

#status [role=status] { min-height: 34px; }
#status p { margin: 0; }
#status .wrong { color: var(--error-text-color); font-weight: 600; }
#status progress { width: 100%; height: 4px; appearance: none; border: 0; border-radius: 2px;
    overflow: hidden; background: var(--border-color-primary); display: block; margin-top: 6px;
    visibility: hidden; }
#status .busy + progress { visibility: visible; }
#status progress::-webkit-progress-bar { background: var(--border-color-primary); }
#status progress::-webkit-progress-value { background: var(--color-accent); transition: width .2s; }
#status progress::-moz-progress-bar { background: var(--color-accent); }
#status small { display: block; margin: 2px 0 6px; font-size: .8125rem;
    color: var(--body-text-color-subdued); }

figure { margin: 0; }
figure > div { display: grid; place-items: center; overflow: hidden; border-radius: 8px;
    outline: 1px solid var(--border-color-primary); outline-offset: -1px;
    background: var(--neutral-200); color: var(--neutral-600); }
.dark figure > div { background: var(--neutral-900); color: var(--neutral-400); }
figure img { width: 100%; height: 100%; object-fit: cover; display: block; }
figure img.small { image-rendering: pixelated; }
figure .number { font-size: 1.25rem; }
figure.waiting > div { animation: breathe 1.6s ease-in-out infinite alternate; }
figure.stopped img { opacity: .45; }
figcaption { height: 50px; margin-top: 6px; font-size: .875rem; line-height: 22px; }
figcaption .words { display: block; white-space: nowrap; overflow: hidden;
    text-overflow: ellipsis; }
figcaption .facts { display: flex; justify-content: space-between; align-items: center;
    gap: 6px; height: 28px; font-size: .8125rem; white-space: nowrap;
    color: var(--body-text-color-subdued); }
figcaption .facts span { overflow: hidden; text-overflow: ellipsis; }
figcaption a { padding: 1px 8px; border: 1px solid var(--border-color-primary); line-height: 22px;
    border-radius: 6px; color: var(--link-text-color); text-decoration: none; font-weight: 500; }
figcaption a:hover { border-color: var(--link-text-color); }
@media (hover: none), (max-width: 700px) { header .keys { display: none; } }
@media (hover: none) { textarea, input { font-size: 16px !important; } } /* else iOS zooms in */
@keyframes breathe { to { opacity: .55; } }
@media (prefers-reduced-motion: reduce) { figure.waiting > div { animation: none; } }

.about { margin: 8px 0 0; font-size: .8125rem; color: var(--body-text-color-subdued); }

@media (max-width: 700px) {
    #prompts > .form { grid-template-columns: minmax(0, 1fr); gap: 12px; }
    #gallery { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
    #seeds, #go { flex: 1 1 100%; }
    #seeds .form { flex: 1 1 0; }
    #seeds button { padding: 0 12px; }
    #go #generate { flex: 1 1 auto; }
    #status [role=status] { min-height: 58px; }
    figcaption .facts { font-size: .75rem; }
}
""".replace("DIE", _icon(_DIE)).replace("AGAIN", _icon(_AGAIN))
