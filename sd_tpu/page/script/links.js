// Links that bring a form along: copied, and opened.

import { register } from "./actions.js";
import { $, $$ } from "./dom.js";
import { tell } from "./line.js";
import { ask, connected } from "./server.js";

/** What the server tells of all pictures of the run that is shown. */
const ofAll = () => $("#collection [data-run]").dataset;

/** Enables what can be done with all pictures, as far as there are any. */
export function showOfAll() {
    const there = ofAll();
    for (const button of $$("[data-needs]")) {
        button.disabled = !there[String(button.dataset.needs)];
        button.dataset.reason ??= button.title;
        button.title = button.disabled ? String(button.dataset.reason) : "";
    }
}

/** @param {import("./types").Part} button */
async function copy(button) {
    const address = new URL(location.href);
    address.searchParams.delete("lang"); // others read it in their own language
    address.hash = String(ofAll().link);
    const link = String(address);
    try {
        await navigator.clipboard.writeText(link);
        tell(
            String(ofAll().without ? button.dataset.without : button.dataset.copied),
            "idle",
            true,
        );
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
