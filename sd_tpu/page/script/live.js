// Live: a box is drawn again shortly after somebody has stopped typing in it.

import { isKept } from "./cards.js";
import { $, boxes } from "./dom.js";
import { begin } from "./run.js";
import { request } from "./server.js";
import { state } from "./state.js";

const PAUSE = 500; // ms without a key

/** Call when a box, or its overrides, have changed. @param {number} index */
export function drawSoon(index) {
    clearTimeout(state.pauses[index]);
    if (!$("#live input").checked) return;
    state.pauses[index] = setTimeout(() => {
        if (isKept(index)) return; // also since the last key
        // The pending run may fill the box anew.
        if (state.pending.size) drawSoon(index);
        else draw(index);
    }, PAUSE);
}

/** Call when something for all boxes has changed. */
export function drawAllSoon() {
    boxes().forEach((box, index) => {
        if (box.value.trim()) drawSoon(index);
    });
}

/** @param {number} index */
function draw(index) {
    state.keep[index] = false;
    begin(request("live", { index }));
    // The card may be at the window's end; but what is typed in comes first.
    for (const seen of [`#cards [data-index="${index}"]`, ":focus"]) {
        $(seen)?.scrollIntoView({ block: "nearest" });
    }
}
