// The line "Say the change" over a picture, whose words draw that anew.

import { register } from "./actions.js";
import { $, cards, listen } from "./dom.js";
import { drawChanged } from "./run.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */

const line = () => $("#change");
const words = () => $("#change [name=words]");
const strength = () => $("#change [type=range]");

/** The card that the line lies on. */
const card = () => /** @type {Part} */ (line().closest(".card"));

/** Puts the line over a picture; what was written there before is chosen. @param {Part} figure */
function open(figure) {
    /** @type {Part} */ (figure.closest(".card")).append(line());
    /** @type {Part} */ (strength().parentElement).hidden = figure.dataset.edits !== undefined;
    line().hidden = false;
    words().focus();
    words().select();
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

/** Draws what the line says; it stays where that is refused. */
async function draw() {
    const place = cards().indexOf(card());
    const said = words().value;
    const asked = { place, words: said, strength: Number(strength().value) };
    close();
    // A change before this one has filled in its values then.
    const drawn = state.changing.then(() => drawChanged(asked));
    state.changing = drawn.catch(() => {});
    if (await drawn) {
        if (words().value === said) words().value = "";
    } else if (line().hidden) open($("figure", cards()[place]));
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
    change: (_, button) => open(/** @type {Part} */ (button.closest("figure"))),
    leave_change: close,
});
