// The progress of the run that is shown, as the server's line tells it: what else follows from it.

import { $, title } from "./dom.js";
import { showHistory } from "./history.js";
import { showJourney } from "./journey.js";
import { progress } from "./line.js";
import { look } from "./look.js";
import { settle, showGo } from "./run.js";
import { state } from "./state.js";
import { session, store } from "./storage.js";
import { showUndo } from "./undo.js";

/** Call when anything in the line has changed. */
export function lineChanged() {
    const line = $("#line p");
    if (!line) return;
    const busy = line.classList.contains("busy");
    const fromServer = line.dataset.at !== undefined;
    showGo();
    store(session, "sd_tpu busy", busy);
    const share = Math.round(100 * (progress()?.value ?? 0));
    document.title = busy && share ? `${share} % · ${title()}` : `${title()} · sd_tpu`;
    if (fromServer) serverLineChanged(line, busy);
    else state.line.busy ||= busy; // a quick run is over by the time that the server tells of it
}

/**
 * @param {import("./types").Part} line
 * @param {boolean} busy
 */
function serverLineChanged({ classList, dataset }, busy) {
    state.line.running = ["busy", "single"].filter((each) => classList.contains(each));
    if (dataset.run === state.run.name) state.run.version = Number(dataset.version);
    settle();
    if (!busy) showUndo();
    if (state.line.busy && !busy) {
        showHistory();
        if (state.journey && classList.contains("over")) openJourney();
        state.journey = false;
    }
    state.line.busy = busy;
    if (classList.contains("wrong")) {
        // The run has failed.
        state.edited = false;
        look(true);
    }
}

async function openJourney() {
    if (await showJourney()) $("#journey").showModal();
}
