// Actions of buttons: `data-do` names an action, and the module that owns it registers it here.

import { $, listen } from "./dom.js";

/** @typedef {import("./types").Action} Action */

/** @type {Record<string, Action>} */
const actions = {};

/** @param {Record<string, Action>} more */
export function register(more) {
    for (const name of Object.keys(more)) {
        if (name in actions) throw new Error(`two modules register the action ${name}`);
    }
    Object.assign(actions, more);
}

/**
 * Calls the action of each button that is clicked, after `before` was told of the click.
 * @param {(button: import("./types").Part) => void} before
 */
export function dispatchClicks(before) {
    listen("click", (target, event) => {
        const button = /** @type {import("./types").Part} */ (target.closest("[data-do]"));
        if (target.matches("#live [aria-disabled=true]")) event.preventDefault();
        if (button) before(button);
        // Closing a menu gives the focus back.
        if (target.closest("button, a")) {
            /** @type {HTMLElement} */ (target.closest(".menu"))?.hidePopover();
        }
        if (button) actions[String(button.dataset.do)](button.dataset, button);
        else if (target.id === "viewer") $("#viewer").close();
    });
}
