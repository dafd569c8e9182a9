// The server may be away, or the network: the line says so, and the page finds back by itself.

import { register } from "./actions.js";
import { $, cards, listen, title } from "./dom.js";
import { hooks } from "./hooks.js";
import { offer, takeBack, tell } from "./line.js";
import { begin, drawAgain, showGo } from "./run.js";
import { ask, request } from "./server.js";
import { state } from "./state.js";
import { RUN, readStored, session } from "./storage.js";

const SILENCE = 4_000; // ms without a word of a run that goes on, after which it is looked for
const RETRY = 2_000; // ms

const words = () => $("#generate").dataset;

/** Whether the server answers. */
async function answers() {
    try {
        const options = { cache: /** @type {const} */ ("no-store"), method: "HEAD" };
        await fetch("robots.txt", { ...options, signal: AbortSignal.timeout(SILENCE) });
        return true;
    } catch {
        return false;
    }
}

/** Call when the server has said something of a run: while that goes on, silence is looked into. */
export function expectMore() {
    clearTimeout(state.away.timer);
    if ($("#line .busy")) state.away.timer = setTimeout(check, SILENCE);
}

/** Finds out whether the server is there, and says so if it is not. */
export async function check() {
    clearTimeout(state.away.timer);
    if (await answers()) {
        if (state.away.since) await comeBack();
        else expectMore();
        return;
    }
    if (!state.away.since) leave();
    else say();
    state.away.timer = setTimeout(check, RETRY);
}

function leave() {
    state.away.since = Date.now();
    state.away.busy = $("#line .busy") !== null;
    showFinished();
    say();
    showGo();
}

function say() {
    const { away, offline } = words();
    tell(String(navigator.onLine ? away : offline), "away", !$("#line .away"));
    document.title = `${$("#line p").textContent} · ${title()}`;
}

/** Puts the last finished picture back wherever one was under way. */
function showFinished() {
    for (const [index, card] of cards().entries()) {
        const figure = $("figure", card);
        const image = /** @type {import("./types").Part | null} */ ($("img", figure));
        const before = state.away.finished[index];
        if (!figure.matches(".forming, .waiting, .asked")) continue;
        if (image && before) image.src = before;
        figure.className = "stopped";
    }
}

/** Notes which pictures are finished. */
export function noteFinished() {
    state.away.finished = cards().map(
        (card, index) =>
            $("figure.done img", card)?.getAttribute("src") ?? state.away.finished[index] ?? null,
    );
}

async function comeBack() {
    const { busy } = state.away;
    Object.assign(state.away, { since: null, busy: false });
    tell("", "idle");
    state.run.version = 0;
    hooks.changed();
    const { line } = await ask("look");
    if (line === undefined) return location.reload(); // it is another server, with another page
    takeBack(line);
    await resume(busy);
}

/**
 * Shows the run that this browser was shown last. One that was `busy` and is not on the server any
 * more can be drawn again; Gradio loads the page anew when the server has started anew.
 * @param {boolean} busy
 */
export async function resume(busy) {
    const last = readStored(session, RUN);
    const { run } = await begin(request("show"), !busy);
    showGo();
    if (!busy || run || !last) return;
    state.run.seed = last.seed;
    const { unfinished, again } = words();
    offer(String(unfinished), "wrong", "draw_again", String(again));
}

addEventListener("offline", check);
addEventListener("online", check);
listen("visibilitychange", () => {
    if (!document.hidden && state.away.since) check();
});

register({ draw_again: () => drawAgain() });
