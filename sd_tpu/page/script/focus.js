// The focus of buttons that are made anew, or go: the same button takes it, or the first.

import { $, listen } from "./dom.js";
import { state } from "./state.js";

const BUTTONS = "#cards :is([data-do], .icon), #history-panel [data-do]";
const PARTS = ["data-do", "data-act", "data-id", "data-index", "data-name", "popovertarget"];

listen("pointerdown", () => {
    state.focus = null;
});
listen("focusin", (target) => {
    const button = target.closest(BUTTONS);
    state.focus =
        button &&
        PARTS.filter((name) => button.hasAttribute(name))
            .map((name) => `[${name}="${button.getAttribute(name)}"]`)
            .join("");
});
new MutationObserver(() => {
    if (!state.focus || document.activeElement !== document.body) return;
    const same =
        $(state.focus) ??
        (state.focus.includes("data-id")
            ? ($("#history-panel [data-do]") ?? $("[aria-controls=history-panel]"))
            : null);
    same?.focus({ preventScroll: true });
}).observe(document, { subtree: true, childList: true });
