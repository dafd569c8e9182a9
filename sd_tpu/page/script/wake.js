// A phone that slept: its connection may be gone, and a run is found again by loading the page.

import { $, listen, make } from "./dom.js";
import { ask } from "./server.js";
import { state } from "./state.js";

const NAP = 20_000;
const PATIENCE = 3_000; // ms

listen("visibilitychange", () => {
    if (document.hidden) {
        state.wake.hiddenSince = Date.now();
    } else if (Date.now() - state.wake.hiddenSince > NAP) {
        checkLater($("#line p").textContent);
    }
});

/** Whether something would be lost with the page: what is painted or pasted. */
export const holdsWork = () =>
    $("dialog[open]") !== null || Boolean($("#list-panel[data-open] textarea")?.value);

/** @param {string | null} before what the line said */
function checkLater(before) {
    clearTimeout(state.wake.timer);
    state.wake.timer = setTimeout(async () => {
        if (await mayBeStill(before)) checkLater(before);
    }, PATIENCE);
}

/**
 * Loads the page again if the line stands still and the server says something else; returns whether
 * to look again. A line may stand still for minutes and be true, and with the page goes what is
 * painted or pasted.
 * @param {string | null} before
 */
async function mayBeStill(before) {
    const still = () => $("#line .busy")?.textContent === before;
    // A run that has no name yet is not the one that the server would tell of.
    const { line } = still() && !state.pending.size ? await ask("look") : {};
    if (!still()) return false; // the server has sent something: it is connected
    const held = state.pending.size || line === undefined || holdsWork();
    const now = held ? before : $("p", make("template", { innerHTML: line }).content).textContent;
    if (now !== before) location.reload();
    return now === before;
}
