// The script: where its modules come together: which of them act on
// a change, and what happens when the page arrives. Gradio calls `window.sdTpu`, and tests wait
// for it.

import { dispatchClicks } from "./actions.js";
import { check, expectMore, noteFinished, resume } from "./away.js";
import "./beside.js";
import "./best.js";
import "./boards.js";
import { leaveOneStop } from "./cardkeys.js";
import { showCards } from "./cards.js";
import "./change.js";
import { showPressed } from "./choices.js";
import "./compare.js";
import { $, $$, title } from "./dom.js";
import "./edits.js";
import "./focus.js";
import { fill, saveForm } from "./form.js";
import { giveFramesBack } from "./frames.js";
import { showHistory } from "./history.js";
import { hooks } from "./hooks.js";
import { showInputs } from "./inputs.js";
import "./keys.js";
import { openLink, showOfAll } from "./links.js";
import { lookSoon } from "./look.js";
import { showOverrides, showSliders } from "./overrides.js";
import "./painter.js";
import "./lasso.js";
import "./move.js";
import { lineChanged } from "./progress.js";
import "./prompts.js";
import { begin } from "./run.js";
import { showSelection } from "./selection.js";
import { ask, connected, connectTo, request } from "./server.js";
import { showChosen } from "./settings.js";
import { state } from "./state.js";
import { showStyles } from "./styles.js";
import { BUSY, local, readStored, session } from "./storage.js";
import { showTeaching } from "./teach.js";
import { restoreUndo, showUndo } from "./undo.js";
import { refreshViewed } from "./viewer.js";
import "./wake.js";

Object.assign(hooks, {
    unreachable: check,
    heard: expectMore,
    filled: showOverrides,
    changed() {
        showSliders();
        showPressed();
        showChosen();
        showInputs();
        showCards();
        showSelection();
        if (!state.browser) return;
        saveForm();
        showUndo();
        lookSoon();
    },
    panelOpened() {
        showOverrides();
        showHistory();
        showTeaching();
        showStyles();
        if ($("#about-panel[data-open]")) showAbout();
    },
    /** @type {typeof hooks.showRun} */
    showRun: (run, before) => begin(request("show", { shown: run }), before),
});

dispatchClicks(() => {
    if (!$("#line .wrong")) return;
    state.edited = true; // whoever goes on has read it
    lookSoon();
});

async function showAbout() {
    const { about } = await ask("about");
    $("#about-panel .about").innerHTML = about ?? "";
}

window.sdTpu = {
    connect: (answer, stream, upload) => connectTo({ answer, stream, upload }),
    /** Call when all elements are there. */
    async arrive() {
        await connected;
        const stored = readStored(local, `sd_tpu/${title()}`);
        state.browser = stored?.browser ?? newName();
        restoreUndo();
        if (stored?.live) $("#live input").checked = true;
        fill(stored?.form ?? {});
        this.arrived = state.arrived = true;
        giveFramesBack();
        markInert();
        showUndo();
        observe();
        resume(readStored(session, BUSY) === true);
        await openLink();
    },
};

/** A name for this browser that nobody can guess: its runs are found by it. */
function newName() {
    return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
        byte.toString(16).padStart(2, "0"),
    ).join("");
}

function cardsChanged() {
    noteFinished();
    showCards();
    showSelection();
    leaveOneStop();
    refreshViewed();
}

/** Gradio changes the elements of the line and of the cards, or makes them anew. */
function observe() {
    const any = { subtree: true, childList: true };
    new MutationObserver(lineChanged).observe($("#line"), { ...any, attributeFilter: ["data-at"] });
    new MutationObserver(cardsChanged).observe($("#cards"), { ...any, attributeFilter: ["class"] });
    new MutationObserver(showOfAll).observe($("#collection"), { ...any, attributes: true });
    showOfAll();
    leaveOneStop();
}

// Until what was saved is there, what is typed would be lost, and what is made would be nobody's.
function markInert() {
    for (const part of $$("#head, #cards, #bar")) part.inert = !state.arrived;
}

const arrival = new MutationObserver(() => {
    if (state.arrived) arrival.disconnect();
    else markInert();
});
arrival.observe(document, { subtree: true, childList: true });
