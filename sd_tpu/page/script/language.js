// The page's language: the browser's first that the page speaks, or the one that was chosen.

import { $ } from "./dom.js";
import { local, readStored, store } from "./storage.js";

const texts = window.gradio_config?.i18n_translations ?? {};
const language =
    [readStored(local, "sd_tpu language"), ...navigator.languages]
        .map((tag) => tag?.toLowerCase().split("-")[0])
        .find((tag) => tag in texts) ?? "en";

/**
 * Fills in the texts that Gradio keeps as markers.
 * @param {string} text
 */
const translate = (text) =>
    String(text).replace(/__i18n__{[^}]*"key": ?"([^"]*)"}/, (_, key) => texts[language][key]);

/** Replaces what Gradio has shown in another language, from what the page has brought along. */
export function speak() {
    const shown = Object.keys(texts).find((tag) => $("header[lang]").lang.split("-")[0] === tag);
    if (shown === language) return;
    for (const { type, props } of window.gradio_config.components) {
        const element = props.elem_id && document.getElementById(props.elem_id);
        if (!element || !/__i18n__/.test(JSON.stringify(props))) continue;
        if (type === "html") $(".html-container > *", element).innerHTML = translate(props.value);
        if (type !== "textbox") continue;
        $("textarea", element).placeholder = translate(props.placeholder);
        $("[data-testid=block-info]", element).textContent = translate(props.label);
    }
}

/** @param {string} chosen */
export function chooseLanguage(chosen) {
    store(local, "sd_tpu language", chosen);
    location.reload();
}

// Gradio sets the document's language to the browser's; the heading has the page's.
new MutationObserver(() => {
    const heading = $("header[lang]");
    const root = document.documentElement;
    if (!heading || (heading.lang === root.lang && heading.dir === root.dir)) return;
    Object.assign(root, { lang: heading.lang, dir: heading.dir });
}).observe(document, { subtree: true, childList: true, attributeFilter: ["lang"] });
