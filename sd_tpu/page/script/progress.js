// The progress of the run that is shown, as the server's line tells it: what else follows from it.

import { $, listen, title } from "./dom.js";
import { showHistory } from "./history.js";
import { hooks } from "./hooks.js";
import { endJourney, followJourney } from "./journey.js";
import { progress } from "./line.js";
import { look, lookSoon } from "./look.js";
import { settle, showGo } from "./run.js";
import { state } from "./state.js";
import { BUSY, session, store } from "./storage.js";
import { showUndo } from "./undo.js";
import { followViewed } from "./viewer.js";

/** Call when anything in the line has changed. */
export function lineChanged() {
    const line = $("#line p");
    if (!line) return;
    const busy = line.classList.contains("busy");
    if (line.classList.contains("away")) return; // what is told by away.js alone
    const fromServer = line.dataset.at !== undefined;
    showGo();
    store(session, BUSY, busy);
    if (fromServer) serverLineChanged(line, busy);
    else state.line.busy ||= busy; // a quick run is over by the time that the server tells of it
    showTitle();
}

/** The title of the tab says how far a run is, and that it is over until somebody looks. */
function showTitle() {
    const busy = $("#line .busy") !== null;
    const share = Math.round(100 * (progress()?.value ?? 0));
    const over = state.line.unseen && !busy ? "✓ " : "";
    document.title = busy && share ? `${share} % · ${title()}` : `${over}${title()} · sd_tpu`;
}

/**
 * @param {import("./types").Part} line
 * @param {boolean} busy
 */
function serverLineChanged({ classList, dataset }, busy) {
    state.line.running = ["busy", "single"].filter((each) => classList.contains(each));
    hooks.heard();
    followJourney();
    if (busy || state.line.busy) followViewed();
    if (dataset.run === state.run.name) state.run.version = Number(dataset.version);
    settle();
    if (!busy) showUndo();
    if (state.line.busy && !busy) {
        showHistory();
        endJourney(state.journey && classList.contains("over"));
        state.line.unseen = document.hidden;
        lookSoon(); // other pictures are there now
    }
    state.line.busy = busy;
    if (classList.contains("wrong")) {
        // The run has failed.
        state.edited = false;
        look(true);
    }
}

listen("visibilitychange", () => {
    if (document.hidden || !state.line.unseen) return;
    state.line.unseen = false;
    showTitle();
});
