"""Every string of the page, by key: other languages are further dictionaries with these keys.

Labels of Gradio's components are looked up by the browser, in its own language (`label`).
Sentences with facts in them are made here (`say`).
"""

import gradio as gr
from gradio.i18n import I18nData

ENGLISH = {
    # the prompts
    "heading": "Eight prompts, eight pictures",
    "hint": "Write what you would like to see.",
    "details": "What can it draw?",
    "skipped": "Empty boxes are skipped.",
    "keys": "Ctrl+Enter generates, Esc stops.",
    "prompt": "Prompt",
    "prompt_placeholder": "Left empty: skipped",
    "copy_first": "Copy the first to all",
    "clear": "Clear",
    "samples": "Sample prompts",
    "tokens": "{count} / {limit} tokens",
    "tokens_lost": "{tokens}, not seen: “{lost}”",
    "tokens_unknown": "{tokens}, unknown: “{words}”",
    "too_many_characters": "{count} of at most {limit} characters",
    "list": "Paste a list",
    "list_label": "One prompt a line",
    "list_fill": "Fill the boxes",
    "list_empty": "The list is empty: write one prompt a line.",
    "list_filled": "The list is in the boxes.",
    "list_too_long": "The list has {count} prompts; the first {limit} are in the boxes.",
    # a picture that is read
    "read": "Read a picture",
    "read_label": "A PNG made here or by A1111",
    "read_done": "The prompts, the seed and the settings of {file} are in the boxes.",
    "read_size": "It was made at {width}×{height}; here pictures are {here_width}×{here_height}.",
    # the settings
    "settings": "Settings",
    "negative": "Negative prompt",
    "negative_help": "What the pictures should not show.",
    "steps": "Steps",
    "steps_help": "More of them take longer and refine more.",
    "guidance": "Guidance",
    "guidance_help": "More follows the prompt more strictly.",
    "sampler": "Sampler",
    "sampler_help": "The method that turns noise into a picture.",
    "spacing": "Spacing",
    "spacing_help": "How the steps are spread over the noise.",
    "own": "the model's own",
    "own_value": "{value} (the model's own)",
    "size": "Size: {width}×{height} pixels, the one size that this server has compiled.",
    "seed": "Seed (-1 draws a new one)",
    "seed_placeholder": "a new one",
    "random": "Random",
    "reuse": "Reuse last",
    "generate": "Generate",
    "stop": "Stop",
    # while it works
    "ready": "Ready",
    "starting": "Starting…",
    "making": "Making {count}.",
    "one_picture": "1 picture",
    "pictures": "{count} pictures",
    "compiling": "Compiling for the first time…",
    "queued": "Queued as number {position}",
    "queued_wait": "Queued as number {position}, about {time} until it starts",
    "step": "Step {step} of {steps}",
    "step_left": "Step {step} of {steps}, about {time} left",
    "seconds": "{count} s",
    "minutes": "{count} min",
    "done": "Done in {seconds:.1f} s, seed {seed}",
    "stopped": "Stopped",
    "picture_ready": "Picture {places} is ready.",
    "pictures_ready": "Pictures {places} are ready.",
    "server_failed": "The server failed; please try again.",
    # the pictures
    "cell_waiting": "Waiting",
    "cell_forming": "Forming",
    "cell_stopped": "Stopped",
    "cell_seed": "Seed {seed}",
    "view": "View picture {number}: {prompt}",
    "again": "Again",
    "again_help": "Again: put prompt, seed and settings of picture {number} back",
    "vary": "Vary",
    "vary_help": "Vary picture {number}: its prompt in all boxes, seeds running on",
    "png_help": "Download picture {number} as PNG",
    "again_done": "Prompt, seed and settings of picture {number} are in the boxes.",
    "vary_done": "The prompt of picture {number} is in all boxes, the seeds run on from its own.",
    "zip": "Download all (ZIP)",
    "grid": "Download as one picture",
    "link": "Copy link",
    "link_copied": "Link copied",
    "link_prompt": "Copy this link:",
    "link_opened": "The link's prompts, seed and settings are in the boxes.",
    "link_bad": "The link cannot be read.",
    "gone": "The pictures are no longer on the server.",
    "viewer": "Picture, full screen",
    "previous": "Previous picture",
    "next": "Next picture",
    "close": "Close",
    "download_png": "Download PNG",
    # the history
    "history": "History",
    "history_empty": "There is nothing yet: every picture that you make is kept here.",
    "history_no_favourites": "There are no favourites yet: the star of a picture makes it one.",
    "history_only": "Favourites only",
    "history_clear": "Delete all",
    "history_clear_sure": "Delete all pictures of your history for good, favourites too?",
    "history_more": "Show more",
    "history_gone": "This picture is no longer in your history.",
    "history_again": "Use",
    "history_again_help": "Use: put prompt, seed and settings of “{prompt}” into the boxes",
    "history_again_done": "Prompt, seed and settings of the picture are in the boxes.",
    "history_save": "PNG",
    "history_save_help": "Download “{prompt}” as PNG",
    "history_favourite_help": "Favourite: “{prompt}”",
    "history_delete_help": "Delete “{prompt}”",
    "history_delete_sure": "Delete this picture for good?",
    "history_deleted": "The picture is deleted.",
    "history_cleared": "All pictures are deleted.",
    # the server
    "about": "About this server",
    "about_model": "Model",
    "about_devices": "Devices",
    "about_precision": "Precision",
    "about_sizes": "Sizes",
    "about_versions": "Versions",
    "about_health": "Health",
    "sizes": "{width}×{height}, compiled",
    "no_tpu": "no TPU here, so it takes a little longer",
    "healthy": "ready",
    "compiles": "compiling",
}

LANGUAGES = gr.I18n(en=ENGLISH)


def label(key: str) -> I18nData:
    """The string for a component of Gradio's, which the browser shows in its language."""
    return LANGUAGES(key)


def say(key: str, **facts) -> str:
    """The string, with the facts it speaks of."""
    return ENGLISH[key].format(**facts)


def duration(seconds: float) -> str:
    """A time that is only an estimate."""
    if seconds < 90:
        return say("seconds", count=max(1, round(seconds)))
    return say("minutes", count=round(seconds / 60))
