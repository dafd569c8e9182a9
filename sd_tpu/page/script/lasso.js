// A rectangle that a mouse drags over the sheet selects the cards that it touches.

import { $, cards, listen, make } from "./dom.js";
import { select } from "./selection.js";
import { state } from "./state.js";

/** @typedef {{ left: number, top: number, right: number, bottom: number }} Box */

const LEAST = 6; // pixels after which it is dragged
// Parts with an answer of their own to a mouse.
const ELSEWHERE =
    "button, a, input, textarea, select, label, img, header, footer, dialog, form, .menu, #bar, " +
    "#suggestions, .facts, .remark";

/** Where the drag began, on the page, and what was selected. */
/** @type {{ x: number, y: number, before: number[], shown: HTMLElement | null } | null} */
let drag = null;

/**
 * @param {Box} one
 * @param {Box} other
 */
export const touches = (one, other) =>
    one.left < other.right &&
    other.left < one.right &&
    one.top < other.bottom &&
    other.top < one.bottom;

/**
 * The rectangle between two corners.
 * @returns {Box}
 */
export const between = (
    /** @type {{ x: number, y: number }} */ one,
    /** @type {{ x: number, y: number }} */ other,
) => ({
    left: Math.min(one.x, other.x),
    top: Math.min(one.y, other.y),
    right: Math.max(one.x, other.x),
    bottom: Math.max(one.y, other.y),
});

function end() {
    drag?.shown?.remove();
    drag = null;
}

listen("pointerdown", (target, event) => {
    const { button, pointerType, pageX: x, pageY: y, clientX } = event;
    const { shiftKey, ctrlKey, metaKey } = event;
    const onSheet = !target.closest(ELSEWHERE) && clientX < document.documentElement.clientWidth;
    if (button || pointerType !== "mouse" || !onSheet || !state.arrived) return;
    if ($("dialog[open], .menu:popover-open")) return;
    const adds = shiftKey || ctrlKey || metaKey;
    drag = { x, y, before: adds ? state.selection.indices : [], shown: null };
});

listen("pointermove", (_, { pageX: x, pageY: y, buttons }) => {
    if (!drag) return;
    if (!(buttons & 1)) return end();
    if (!drag.shown && Math.hypot(x - drag.x, y - drag.y) < LEAST) return;
    if (!drag.shown) {
        drag.shown = make("div", { id: "lasso" });
        $(".gradio-container").append(drag.shown);
    }
    const { left, top, right, bottom } = between(drag, { x, y });
    Object.assign(drag.shown.style, {
        left: `${left}px`,
        top: `${top}px`,
        width: `${right - left}px`,
        height: `${bottom - top}px`,
    });
    const seen = drag.shown.getBoundingClientRect();
    const touched = [...cards().entries()].filter(([, card]) =>
        touches(seen, card.getBoundingClientRect()),
    );
    select([...new Set([...drag.before, ...touched.map(([index]) => index)])]);
    if (touched.length) state.selection.anchor = touched[0][0];
});

// A click on the bare sheet ends the selection, unless it was meant to add to it.
listen("pointerup", () => {
    if (drag && !drag.shown) select(drag.before);
    end();
});
listen("pointercancel", end);
listen("selectstart", (_, event) => {
    if (drag) event.preventDefault(); // no text
});
