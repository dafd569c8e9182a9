// The line "Say the change" over a picture, or in the dock for selected ones: words draw them anew.

import { register } from "./actions.js";
import { $, cards, listen } from "./dom.js";
import { drawChanged } from "./remake.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */

const line = () => $("#change");
/** @param {Part} form */
const words = (form) => $("[name=words]", form);

/** The card that the line lies on. */
const card = () => /** @type {Part} */ (line().closest(".card"));

/** Whether all of these cards' pictures are of models that edit. @param {number[]} indices */
const edits = (indices) => indices.every((index) => $("figure[data-edits]", cards()[index]));

/**
 * Shows how much changes only where that can be said.
 * @param {Part} form
 * @param {number[]} indices
 */
export function showStrength(form, indices) {
    /** @type {Part} */ ($("[type=range]", form).parentElement).hidden = edits(indices);
}

/** Puts the line over a picture; what was written there before is chosen. @param {number} index */
function open(index) {
    cards()[index].append(line());
    showStrength(line(), [index]);
    line().hidden = false;
    words(line()).focus();
    words(line()).select();
}

/** Takes the line away, not what is written there; its picture has the focus then. */
function close() {
    line().hidden = true;
    ($(".view", card()) ?? $(".prompt textarea", card())).focus();
}

/**
 * What a key does in the line: "draw", "close", or nothing, where it is left to the browser.
 * @param {Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "isComposing">} event
 */
export function meaning({ key, ctrlKey, metaKey, isComposing }) {
    if (isComposing) return "";
    if (key === "Escape") return "close";
    return key === "Enter" && (ctrlKey || metaKey) ? "draw" : "";
}

/**
 * Draws pictures as a form says, which is emptied once that has begun; returns whether it has.
 * @param {Part} form
 * @param {number[]} indices
 */
export async function drawSaid(form, indices) {
    const said = words(form).value;
    const asked = { indices, words: said, strength: Number($("[type=range]", form).value) };
    // A change before this one has filled in its values then.
    const drawn = state.changing.then(() => drawChanged(asked));
    state.changing = drawn.catch(() => {});
    const began = await drawn;
    if (began && words(form).value === said) words(form).value = "";
    return began;
}

/** Draws what the line says; it stays where that is refused. */
async function draw() {
    const index = cards().indexOf(card());
    close();
    if (!(await drawSaid(line(), [index])) && line().hidden) open(index);
}

listen("submit", (target, event) => {
    if (target !== line()) return;
    event.preventDefault();
    draw();
});
// Before other keys: these neither stop a run nor draw all pictures.
listen(
    "keydown",
    (target, event) => {
        const does = target.closest("#change") && meaning(/** @type {KeyboardEvent} */ (event));
        if (!does) return;
        event.preventDefault();
        event.stopPropagation();
        if (does === "draw") draw();
        else close();
    },
    true,
);

register({
    change: ({ index }) => open(Number(index)),
    leave_change: close,
});
