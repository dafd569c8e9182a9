// The server may be away, or the network: the line says so, and the page finds back by itself.

import { register } from "./actions.js";
import { $, cards, listen, title } from "./dom.js";
import { hooks } from "./hooks.js";
import { offer, takeBack, tell } from "./line.js";
import { begin, drawAgain, showGo } from "./run.js";
import { ask, request } from "./server.js";
import { state } from "./state.js";
import { RUN, readStored, session, store } from "./storage.js";
import { holdsWork } from "./wake.js";

const SILENCE = 4_000; // ms without a word of a run that goes on, after which it is looked for
const RETRY = 2_000; // ms
const PATIENCE = 2; // refused requests, after which the page is loaded anew
const PROXY = 500; // the status from which on it is a proxy that answers

const words = () => $("#generate").dataset;

/** Whether the server answers. */
async function answers() {
    try {
        const options = { cache: /** @type {const} */ ("no-store"), method: "HEAD" };
        const signal = AbortSignal.timeout(SILENCE);
        return (await fetch("robots.txt", { ...options, signal })).status < PROXY;
    } catch {
        return false;
    }
}

/** Call when the server has said something of a run: while that goes on, silence is looked into. */
export function expectMore() {
    if (state.away.since) return void check();
    clearTimeout(state.away.timer);
    if ($("#line .busy")) state.away.timer = setTimeout(check, SILENCE);
}

/** Finds out whether the server is there, and says so if it is not. */
export async function check() {
    const { away } = state;
    if (away.checking) return;
    clearTimeout(away.timer);
    away.checking = true;
    try {
        const there = (await answers()) && navigator.onLine; // which may have changed meanwhile
        if (there && away.since) await comeBack();
        else if (!there && away.since) say();
        else if (!there) leave();
    } finally {
        away.checking = false;
        if (away.since) away.timer = setTimeout(check, RETRY);
        else expectMore();
    }
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
        $(".facts", figure)?.remove(); // of what was under way
    }
}

/** Notes which pictures are finished. */
export function noteFinished() {
    state.away.finished = cards().map(
        (card, index) =>
            $("figure.done img", card)?.getAttribute("src") ??
            ($("figure.blank", card) ? null : (state.away.finished[index] ?? null)),
    );
}

/** Shows the page's run again, or loads a page that the server does not understand anew. */
async function comeBack() {
    const { away } = state;
    const { line } = await ask("look");
    if (line === undefined) {
        // Time and again it is another server, with another page.
        if (++away.refused > PATIENCE && !holdsWork()) location.reload();
        return;
    }
    const { busy } = away;
    Object.assign(away, { since: null, busy: false, refused: 0 });
    if (!busy) takeBack(line);
    state.run.version = 0;
    hooks.changed();
    await resume(busy);
}

/**
 * Shows the run that this browser was shown last. One that was `busy` and is not on the server any
 * more can be drawn again; Gradio loads the page anew when the server has started anew.
 * @param {boolean} busy
 */
export async function resume(busy) {
    const last = readStored(session, RUN);
    const expected = busy || Boolean(last?.unfinished);
    const { run, unreachable } = await begin(request("show"), !expected);
    showGo();
    if (!expected || run || unreachable || !last) return;
    state.run.seed = last.seed;
    store(session, RUN, { ...last, unfinished: true }); // until there is another
    const { unfinished, again } = words();
    if (last.does === "generate") offer(String(unfinished), "wrong", "draw_again", String(again));
    else tell(String(unfinished), "wrong", true);
}

addEventListener("offline", check);
addEventListener("online", check);
listen("visibilitychange", () => {
    if (!document.hidden && state.away.since) check();
});

register({ draw_again: () => drawAgain() });
