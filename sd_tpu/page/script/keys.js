// Keys for the whole page: Draw, Stop, and leafing through pictures.

import { complete, isOffered } from "./completion.js";
import { $, isRightToLeft, listen } from "./dom.js";
import { fold } from "./panels.js";
import { generate, stop } from "./run.js";
import { state } from "./state.js";
import { leaf } from "./viewer.js";

/**
 * By how many pictures a key leafs; undefined if it does not.
 * @param {string} key
 * @param {boolean} rightToLeft
 * @returns {number | undefined}
 */
export function leafsBy(key, rightToLeft) {
    const forth = rightToLeft ? -1 : 1;
    return { ArrowLeft: -forth, ArrowUp: -1, ArrowRight: forth, ArrowDown: 1 }[key];
}

listen("keydown", (target, event) => {
    const draws = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if ($("dialog[open]:not(#viewer)") || ($(".menu:popover-open") && !draws)) return;
    if ($("#viewer")?.open) {
        const by = leafsBy(event.key, isRightToLeft());
        if (by !== undefined && !event.shiftKey && !target.matches("input")) leaf(by);
    } else if (draws) {
        if (state.arrived) generate();
    } else if (
        target === state.completion.box &&
        !event.isComposing &&
        isOffered() &&
        complete(event)
    ) {
        event.preventDefault();
    } else if (event.key === "Escape" && !event.isComposing) {
        // Escape closes what is open first; in a field it means nothing more.
        if (!fold() && !target.closest("input, textarea, select")) stop();
    }
});
