// Runs: one is asked for after the other, shown, and stopped, also before it has a name.

import { register } from "./actions.js";
import { isKept, keepOnlyPictures } from "./cards.js";
import { closeSuggestions } from "./completion.js";
import { $, $$, boxes, make } from "./dom.js";
import { fill } from "./form.js";
import { hooks } from "./hooks.js";
import { tell } from "./line.js";
import { look } from "./look.js";
import { ask, send, request, stream } from "./server.js";
import { state } from "./state.js";
import { RUN, rememberPrompts, session, store } from "./storage.js";
import { forgetDrawn, isShown, remember, showUndo } from "./undo.js";

/** @typedef {import("./types").Answer} Answer */
/** @typedef {import("./types").Asked} Asked */

const FRAME = 20; // ms after which the browser has painted what was said

/**
 * Asks for a run after those before it, and shows it; with `before`, how it ended is not announced again.
 * @param {Asked} asked
 * @param {boolean} before
 * @returns {Promise<Answer>}
 */
export function begin(asked, before = false) {
    if (asked.do === "show" && asked.shown) {
        state.awaited = asked;
        showUndo();
    }
    const begun = state.turn.then(async () => {
        const answer = await send({ ...asked, run: state.run.name });
        if (state.awaited === asked) state.awaited = null;
        if (answer.kind === "wrong") showRefused();
        if (answer.filled) {
            // Meanwhile somebody may have typed on.
            if (!isShown({ form: asked.form, run: null, drawn: false })) remember();
            fill(answer.filled);
        }
        if (!answer.run) {
            if (asked.do === "show" && asked.shown && !answer.unreachable) forgetDrawn();
            showUndo();
            return answer;
        }
        const version = answer.run === state.run.name ? state.run.version : 0;
        state.run = { name: answer.run, seed: answer.seed ?? null, version };
        if (asked.do !== "show") {
            store(session, RUN, { does: asked.do, seed: state.run.seed });
        }
        stream(request("watch", { seen: version, before }));
        return answer;
    });
    state.turn = begun.catch(() => {}); // a failure keeps nobody from trying again
    return begun;
}

/** Empties unfinished pictures, which would look like an answer to what was refused. */
function showRefused() {
    for (const figure of $$("#cards figure.stopped")) {
        figure.className = "blank";
        $("div", figure).replaceChildren(
            make("span", { className: "number", textContent: Number(figure.dataset.index) + 1 }),
        );
        $("figcaption", figure).replaceChildren();
    }
    look(true);
}

/**
 * Draws what is filled in, or something made of it, in the cards that `takes` names; returns
 * whether that has begun.
 * @param {Asked} asked
 * @param {(index: number) => boolean} takes
 */
export async function drawIn(asked, takes) {
    const drawn = asked.do === "generate" || asked.do === "larger"; // and the boxes stay
    if (!drawn || state.run.name) remember(asked.form, drawn);
    announce(asked);
    closeSuggestions();
    $$("#cards figure").forEach((figure, index) => {
        figure.classList.toggle("asked", takes(index));
    });
    // Storage and Gradio take their time: what is said is painted first.
    await new Promise((resolve) => {
        setTimeout(resolve, FRAME);
    });
    rememberPrompts(asked.form.prompts);
    hooks.changed();
    const began = await attempt(asked);
    if (!began) return false;
    keepOnlyPictures(); // a card that was empty is not kept once it is drawn
    hooks.changed();
    return true;
}

/** @param {number} index */
export const isFree = (index) => !isKept(index);
/** Whether a box has a prompt, or a picture to draw something like. @param {number} index */
export const isFilled = (index) =>
    boxes()[index].value.trim() !== "" || $(".such", $$("#cards > .card")[index]) !== null;

export function generate() {
    if ($("#generate").disabled) return;
    drawIn(request("generate"), (index) => isFree(index) && isFilled(index));
}

/** Draws what is filled in with the seed of the last run, which has been lost. */
export function drawAgain() {
    state.run.name = null; // there is no step back to it
    const asked = request("generate");
    if (state.run.seed !== null) asked.form.seed = String(state.run.seed);
    drawIn(asked, (index) => isFree(index) && isFilled(index));
    $("#go button:enabled")?.focus();
}

/**
 * Says that a run is asked for, which can be stopped from now on.
 * @param {Asked} asked
 */
function announce(asked) {
    state.pending.set(asked, false);
    tell(String($("#generate").dataset.starting), "busy");
    return asked;
}

/** Asks for a run that is announced; returns whether it has begun. @param {Asked} asked */
async function attempt(asked) {
    let began = false;
    try {
        const { run, message } = await begin(asked);
        const stopped = state.pending.get(asked);
        const { failed, starting } = $("#generate").dataset;
        if (!run && !message) tell(String(failed), "wrong", true);
        // Until the line is the run's own it may say how another goes, beside which more can begin.
        if (run && !message && $("#line p").dataset.run !== run) tell(String(starting), "busy");
        if (stopped) ask("stop");
        began = Boolean(run) && !stopped;
    } finally {
        state.pending.delete(asked);
        if (!began) settle();
        showGo();
        showUndo();
    }
    return began;
}

/** Announces a run and asks for it; returns whether it has begun. @param {Asked} asked */
export const start = (asked) => attempt(announce(asked));

/** Cards no longer look as if a picture were asked for. */
export function settle() {
    if (state.pending.size) return;
    for (const figure of $$("figure.asked")) figure.classList.remove("asked");
}

export function stop() {
    state.journey = false;
    if (!state.pending.size) ask("stop");
    for (const asked of state.pending.keys()) state.pending.set(asked, true);
}

/** Enables Draw and Stop as far as they do something; one takes the other's focus. */
export function showGo() {
    const line = $("#line p").classList;
    const busy = line.contains("busy");
    const focused = /** @type {import("./types").Part} */ (document.activeElement);
    $("#stop").disabled = (!busy && !state.pending.size) || state.away.since !== null;
    $("#generate").disabled =
        (busy && !line.contains("single")) || state.pending.size > 0 || state.away.since !== null;
    if (focused?.disabled && focused.closest("#go")) $("#go button:enabled")?.focus();
}

/** Puts prompt, seed and settings of a card's picture back. @param {number} index */
export const again = (index) => ask("again", { index }).then(() => $("#generate").focus());

register({
    generate,
    stop,
    again: ({ index }) => again(Number(index)),
    zip: () => ask("zip"),
    grid: () => ask("grid"),
});
