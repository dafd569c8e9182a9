// Panels and menus: one panel at a time is open; it takes the focus, and gives it back.

import { register } from "./actions.js";
import { $, isRightToLeft, listen } from "./dom.js";
import { hooks } from "./hooks.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */

const MENU = 240; // pixels of a menu's width, if there are so many

/** Opens a panel by its button, or closes it. @param {Part} button */
function toggle(button) {
    const opens = button.ariaExpanded !== "true";
    fold();
    if (!opens) return;
    button.ariaExpanded = "true";
    const panel = $(`#${button.getAttribute("aria-controls")}`);
    if (button.dataset.index) state.panelIndex = Number(button.dataset.index);
    panel.toggleAttribute("data-open", true);
    document.documentElement.toggleAttribute("data-panel", true);
    panel.ariaLabel = button.ariaLabel ?? button.textContent;
    $("#sheet").scrollTop = 0;
    panel.focus({ preventScroll: true });
    hooks.panelOpened();
}

/**
 * Opens a panel unless it is open, and scrolls to a part of it.
 * @param {Part} button
 * @param {Part} [seen]
 */
export function unfold(button, seen) {
    if (button.ariaExpanded !== "true") toggle(button);
    seen?.scrollIntoView();
}

/** Closes the panel that is open; returns its button. */
export function fold() {
    const button = $(".fold[aria-expanded=true]");
    button?.setAttribute("aria-expanded", "false");
    $(".panel[data-open]")?.removeAttribute("data-open");
    document.documentElement.removeAttribute("data-panel");
    // A button in a menu cannot have the focus once that is closed.
    const menu = button?.closest("[popover]");
    (menu ? $(`[popovertarget=${menu.id}]`) : button)?.focus();
    return button;
}

/** The button of a panel for all boxes. @param {string} name */
export const panelButton = (name) => $(`[aria-controls=${name}-panel]`);

// A menu opens at its button, within the window, and moves with the page.
listen(
    "beforetoggle",
    (target, event) => {
        const { newState } = /** @type {ToggleEvent} */ (event);
        if (newState !== "open" || !target.matches(".menu")) return;
        const at = $(`[popovertarget=${target.id}]`).getBoundingClientRect();
        const room = document.documentElement.clientWidth - 8;
        const width = Math.min(MENU, room);
        const start = isRightToLeft() ? at.right - width : at.left;
        const below = at.top + at.bottom < innerHeight;
        Object.assign(target.style, {
            width: `${width}px`,
            left: `${Math.min(Math.max(4, start), room + 4 - width)}px`,
            top: below ? `${scrollY + at.bottom}px` : "auto",
            bottom: below ? "auto" : `${innerHeight - scrollY - at.top}px`,
        });
    },
    true,
);

register({
    fold: (_, button) => toggle(button),
    close(_, button) {
        const dialog = button.closest("dialog");
        if (dialog) dialog.close();
        else fold();
    },
});
