// Keys on a card: it is one stop for Tab, its prompt. Escape goes from there to the picture, where
// letters do what its buttons do and arrows go from picture to picture. They are keys of the
// keyboard, whatever letters a language has there.

import { $, $$, boxes, cards, isRightToLeft, listen } from "./dom.js";
import { fold, panelButton, unfold } from "./panels.js";
import { isSelected, pick } from "./selection.js";

/** @typedef {import("./types").Part} Part */

/** What a key presses on the card that has the focus. */
const BUTTONS = {
    KeyR: ".actions > [data-do=redraw]",
    KeyC: ".actions > [data-do=change]",
    KeyV: ".actions > [data-do=vary]",
    KeyK: ".actions > [data-do=keep]",
    KeyF: ".draft",
    KeyS: ".actions > [data-do=star]",
    KeyD: ".actions > a[download]",
    KeyM: ".actions > [popovertarget]",
    KeyO: ".below [data-do=fold]",
    KeyB: ".menu [data-do=boards]",
    KeyP: ".below [data-do=bookmark]",
    KeyX: ".overrides-summary button",
};

/** What a key presses, or comes to, where that card is selected. */
const ON_SELECTED = {
    KeyR: "#selection [data-do=redraw_selected]",
    KeyC: "#selection [name=words]",
    KeyV: "#selection [data-do=around]",
    KeyK: "#selection [data-do=keep_selected]",
    KeyD: "#selection [data-do=zip_selected]",
};

/** What had the focus before the list of keys. @type {Part | null} */
let before = null;

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

/** Takes what lies on the cards out of Tab's way; what is in an open menu, line or strip stays. */
export function leaveOneStop() {
    for (const each of $$("#cards :is(button, a):not([popover] *, #change *, .strip *)"))
        each.tabIndex = -1;
}

/** How many cards a row has. */
export function columns() {
    const tops = cards().map((card) => Math.round(card.getBoundingClientRect().top));
    return tops.filter((top) => top === tops[0]).length;
}

/** The picture of a card, or what stands for it. @param {Part} card */
export const pictureOf = (card) => $(".view", card) ?? $(".below .fold", card);

function toggleKeys() {
    const closes = $("#keys-panel[data-open]") !== null;
    if (!closes) before = /** @type {Part} */ (document.activeElement);
    if (closes) fold();
    else unfold(panelButton("keys"));
    if (closes) before?.focus();
}

/**
 * Does what a key means on a picture; returns whether it means anything.
 * @param {KeyboardEvent} event
 * @param {Part} card
 * @param {Part} target
 */
function press({ key, code, shiftKey }, card, target) {
    const all = cards();
    const index = all.indexOf(card);
    const selector = BUTTONS[/** @type {keyof typeof BUTTONS} */ (code)];
    const onAll = isSelected(index) && ON_SELECTED[/** @type {keyof typeof ON_SELECTED} */ (code)];
    if (onAll) {
        const part = $(onAll);
        if (part.name) part.focus();
        else part.click();
    } else if (selector) {
        $(selector, card)?.click();
        const items = $$(".menu:popover-open > :is(button, a)");
        items.find((item) => item.checkVisibility())?.focus();
    } else if (key === "?") toggleKeys();
    else if (key === "Escape" && $("#stop").disabled) boxes()[index].focus();
    else if (key === " ") {
        if (!target.matches(".view")) return false; // but a button, which it presses
        pick(index, shiftKey ? "range" : "toggle");
    } else if (/^[1-8]$/.test(key)) pictureOf(all[Number(key) - 1]).focus();
    else if (key.startsWith("Arrow")) {
        const to = neighbour(index, key, columns(), all.length, isRightToLeft());
        pictureOf(all[to]).focus();
        if (shiftKey && !isSelected(index)) pick(index, "alone");
        if (shiftKey) pick(to, "range");
    } else return false;
    return true;
}

listen(
    "keydown",
    (target, event) => {
        const key = /** @type {KeyboardEvent} */ (event);
        const card = /** @type {Part | null} */ (target.closest("#cards > .card"));
        if (key.key === "?" && target.closest("#keys-panel")) toggleKeys();
        if (target.closest("#change")) return; // which has keys of its own
        if (!card || key.ctrlKey || key.metaKey || key.altKey || key.isComposing) return;
        if ($("dialog[open], .menu:popover-open")) return;
        // Escape closes what is open first.
        if (
            key.key === "Escape" &&
            $("#ghost:not([hidden]), #suggestions:not([hidden]), .panel[data-open]")
        )
            return;
        if (target.matches("textarea")) {
            if (key.key !== "Escape") return;
            pictureOf(card).focus();
        } else if (!press(key, card, target)) return;
        key.preventDefault();
        key.stopPropagation();
    },
    true,
);
