// Keys on a card: it is one stop for Tab, its prompt. Escape goes from there to the picture, where
// letters do what its buttons do and arrows go from picture to picture.

import { $, $$, boxes, cards, isRightToLeft, listen } from "./dom.js";
import { fold, panelButton, unfold } from "./panels.js";

/** @typedef {import("./types").Part} Part */

/** What a letter presses on the card that has the focus. */
const LETTERS = {
    r: ".actions > [data-do=redraw]",
    v: ".actions > [data-do=vary]",
    k: ".actions > [data-do=keep]",
    s: ".actions > [data-do=star]",
    d: ".actions > a[download]",
    m: ".actions > [popovertarget]",
    o: ".below [data-do=fold]",
};

/**
 * The index of the card that a key goes to from another; the same if there is none there.
 * @param {number} index
 * @param {string} key
 * @param {number} columns how many cards a row has
 * @param {number} count
 * @param {boolean} rightToLeft
 */
export function neighbour(index, key, columns, count, rightToLeft) {
    const forth = rightToLeft ? -1 : 1;
    const by = { ArrowRight: forth, ArrowLeft: -forth, ArrowDown: columns, ArrowUp: -columns }[key];
    const to = index + (by ?? 0);
    return to >= 0 && to < count ? to : index;
}

/** Takes what lies on the cards out of Tab's way; what is in an open menu stays. */
export function leaveOneStop() {
    for (const each of $$("#cards :is(button, a):not([popover] *)")) each.tabIndex = -1;
}

/** The cards of a row. */
function columns() {
    const tops = cards().map((card) => Math.round(card.getBoundingClientRect().top));
    return tops.filter((top) => top === tops[0]).length;
}

/** @param {number} index */
const picture = (index) => $(".view", cards()[index]) ?? boxes()[index];

/** @param {KeyboardEvent} event @param {Part} target */
function onPicture(event, target) {
    const all = cards();
    const index = all.indexOf(/** @type {Part} */ (target.closest(".card")));
    const selector = LETTERS[/** @type {keyof typeof LETTERS} */ (event.key.toLowerCase())];
    if (selector) $(selector, all[index])?.click();
    else if (event.key === "Escape") boxes()[index].focus();
    else if (event.key.startsWith("Arrow")) {
        picture(neighbour(index, event.key, columns(), all.length, isRightToLeft())).focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
}

listen(
    "keydown",
    (target, event) => {
        const key = /** @type {KeyboardEvent} */ (event);
        if (key.ctrlKey || key.metaKey || key.altKey || key.isComposing) return;
        if ($("dialog[open], .menu:popover-open")) return;
        const writes = target.matches("input, textarea, select");
        if (target.closest("#cards") && !writes) onPicture(key, target);
        if (key.defaultPrevented) return;
        if (target.matches("#cards textarea") && key.key === "Escape") {
            const view = $(".view", /** @type {Part} */ (target.closest(".card")));
            if ($("#suggestions:not([hidden])") || $(".panel[data-open]") || !view) return;
            view.focus();
        } else if (!writes && key.key === "?") {
            if (!$("#keys-panel[data-open]")) unfold(panelButton("keys"));
            else fold();
        } else if (!writes && /^[1-8]$/.test(key.key)) {
            picture(Number(key.key) - 1).focus();
        } else return;
        key.preventDefault();
        key.stopPropagation();
    },
    true,
);
