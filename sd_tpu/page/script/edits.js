// Edits: every change of a field that a person types, chooses or picks comes through here.

import { offerDependent } from "./choices.js";
import { showValues } from "./compare.js";
import { forgetWords, suggest } from "./completion.js";
import { boxes, listen } from "./dom.js";
import { search } from "./history.js";
import { hooks } from "./hooks.js";
import { chooseLanguage } from "./language.js";
import { drawAllSoon, drawSoon } from "./live.js";
import { numberOf } from "./overrides.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { remember } from "./undo.js";
import { handInTo, read } from "./upload.js";
import { slide } from "./viewer.js";

/** @typedef {import("./types").Part} Part */

// Not by Gradio's own events: they miss what is pasted, dictated or put together.
listen("input", (target, event) => {
    if (state.filling || !state.arrived) return;
    state.edited = true;
    if (target.closest(".pair")) slide(target);
    if (target.closest("dialog, #change, #styles-panel")) return;
    if (target.type === "file") return pick(target);
    edit(
        target.type === "range" ? moved(target) : target,
        String(/** @type {InputEvent} */ (event).inputType ?? ""),
    );
    hooks.changed();
});

/** Takes the files that a field has. @param {Part} target */
function pick(target) {
    const files = [...(target.files ?? [])];
    if (target.closest(".upload")) handInTo(files, target);
    else read(files[0]);
    target.value = "";
}

/** The number of a slider that was moved, changed with it. @param {Part} slider */
function moved(slider) {
    const number = numberOf(slider);
    number.value = slider.value;
    return number;
}

/**
 * @param {Part} field
 * @param {string} inputType how a text was changed
 */
function edit(field, inputType) {
    const inSettings = field.closest("#settings-panel");
    const index = boxes().indexOf(field);
    if (field.closest("#overrides-panel")) override(field);
    else if (field.name === "model" && inSettings) changeModel(field.value);
    else if (field.name === "what") showValues(field);
    else if (field.type === "search") search(field.value);
    else if (field.id === "language") chooseLanguage(field.value);
    if (index >= 0) drawSoon(index);
    // Not while a text is pasted or still put together.
    if (index >= 0 && /^(insertText|delete)/.test(inputType))
        suggest(field, inputType === "insertText");
    if (field.closest("#settings-panel .handed")) drawAllSoon();
    if (inSettings) offerDependent(field.name);
}

/** @param {Part} field */
function override({ name, value }) {
    const overrides = state.overrides[state.panelIndex];
    if (value === "") delete overrides[name];
    else overrides[name] = value;
    drawSoon(state.panelIndex);
}

/** @param {string} model */
function changeModel(model) {
    remember(state.lastForm ?? undefined);
    forgetWords();
    ask("model", { model });
}
