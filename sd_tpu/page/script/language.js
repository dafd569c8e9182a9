// The page's language: the server's choice of those that the browser asks for, or what was chosen.

import { $ } from "./dom.js";
import { local, readStored, store } from "./storage.js";

const address = new URL(location.href);

/** @param {string} language */
function load(language) {
    address.hash = location.hash;
    address.searchParams.set("lang", language);
    location.replace(address);
}

/** @param {string} language */
export function chooseLanguage(language) {
    store(local, "sd_tpu language", language);
    load(language);
}

const chosen = readStored(local, "sd_tpu language");
const shown = document.documentElement.lang.split("-")[0];
if (chosen && chosen !== shown && !address.searchParams.has("lang")) load(chosen);

// Gradio sets the document's language to the browser's; the heading has the page's.
new MutationObserver(() => {
    const heading = $("header[lang]");
    const root = document.documentElement;
    if (!heading || (heading.lang === root.lang && heading.dir === root.dir)) return;
    Object.assign(root, { lang: heading.lang, dir: heading.dir });
}).observe(document, { subtree: true, childList: true, attributeFilter: ["lang"] });
