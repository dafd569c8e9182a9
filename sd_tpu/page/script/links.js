// Links that bring a form along: copied, and opened.

import { register } from "./actions.js";
import { ask, connected } from "./server.js";

const SHOWN = 2_000; // ms for which a button says that its link is copied

/** @param {import("./types").Part} button */
async function copy(button) {
    const link = `${location.origin}${location.pathname}${location.search}#${button.dataset.link}`;
    try {
        await navigator.clipboard.writeText(link);
        button.dataset.label ??= String(button.textContent);
        const { label } = button.dataset;
        button.textContent = String(button.dataset.copied);
        setTimeout(() => {
            button.textContent = label;
        }, SHOWN);
    } catch {
        // Without https there is no clipboard.
        prompt(button.dataset.prompt, link);
    }
}

/** Fills in what the address of the page brings along, if it does. */
export async function openLink() {
    if (location.hash.length <= 1) return;
    await connected;
    const link = location.hash.slice(1);
    history.replaceState(null, "", location.pathname + location.search);
    await ask("link", { link });
}

addEventListener("hashchange", openLink);

register({ link: (_, button) => copy(button) });
