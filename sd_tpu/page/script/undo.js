// Undo and redo of what was filled in, with the run whose pictures were there. They belong to this
// tab, which may be loaded again, and to this model.

import { register } from "./actions.js";
import { $, title } from "./dom.js";
import { fill, readForm } from "./form.js";
import { hooks } from "./hooks.js";
import { tell } from "./line.js";
import { state } from "./state.js";
import { readStored, session, store } from "./storage.js";
import { isSame, parseStacks, push, step } from "./undo-stack.js";

const key = () => `sd_tpu past ${title()}`;

/** @param {import("./undo-stack.js").Stacks} stacks */
function keepStacks({ past, future }) {
    Object.assign(state.undo, { past, future });
    store(session, key(), [past, future]);
}

export function restoreUndo() {
    Object.assign(state.undo, parseStacks(readStored(session, key())));
}

/** The run that is shown, or will be once the server has answered. */
const run = () => state.awaited?.shown ?? state.run.name;

/** Whether a snapshot is what is shown. @param {import("./types").Snapshot} snapshot */
export const isShown = (snapshot) => isSame(snapshot, readForm(), run());

/** Enables the buttons whose step would change something. */
export function showUndo() {
    if (!state.arrived) return;
    const buttons = [$("#undo"), $("#redo")];
    const active = document.activeElement;
    const nowhere = document.body;
    if (active !== nowhere) state.undo.focused = buttons.some((button) => button === active);
    // A run that is about to be shown fills the boxes itself.
    buttons[0].disabled = state.pending.size > 0 || state.undo.past.every(isShown);
    buttons[1].disabled = state.pending.size > 0 || state.undo.future.every(isShown);
    // A button that is disabled loses the focus, in some browsers at once; the other takes it.
    const lost =
        document.activeElement === nowhere ||
        /** @type {import("./types").Part} */ (document.activeElement).disabled;
    if (state.undo.focused && lost) buttons.find((button) => !button.disabled)?.focus();
}

/**
 * Call before the form is replaced, or only the pictures are (`drawn`). If nothing is replaced
 * then, it costs no step.
 */
export function remember(form = readForm(), drawn = false) {
    keepStacks(push(state.undo, { form, run: run(), drawn }, isShown));
}

/** Forgets steps that only bring pictures back: the server has forgotten one's, so all before it. */
export function forgetDrawn() {
    const { past, future } = state.undo;
    const left = (/** @type {import("./types").Snapshot[]} */ list) =>
        list.filter(({ drawn }) => !drawn);
    keepStacks({ past: left(past), future: left(future) });
}

/** Fills in a form that can be taken back. @param {import("./types").FormPart} form */
export function replace(form) {
    remember();
    fill(form);
}

/** @param {boolean} back */
function take(back) {
    const now = { form: readForm(), run: run() };
    const taken = step(state.undo, back, now, isShown);
    if (!taken) return;
    keepStacks(taken);
    state.edited = true; // what was wrong may not be any more
    const { target } = taken;
    fill(target.form);
    tell(String($("#undo").dataset.undone), "idle", true);
    if (target.run && target.run !== now.run) hooks.showRun(target.run, false);
}

register({ undo: () => take(true), redo: () => take(false) });
