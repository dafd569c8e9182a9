// Selected cards, by their numbers or by keys: the dock speaks of them, and acts on them all.

import { register } from "./actions.js";
import { isKept } from "./cards.js";
import { drawSaid, showStrength } from "./change.js";
import { $, $$, boxes, cards, listen } from "./dom.js";
import { hooks } from "./hooks.js";
import { news, tell } from "./line.js";
import { lookSoon } from "./look.js";
import { drawAround, redraw } from "./remake.js";
import { ask } from "./server.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */
/** @typedef {"alone" | "toggle" | "range"} How */

const form = () => $("#selection");
const selected = () => state.selection.indices;

/** @param {number} index */
export const isSelected = (index) => selected().includes(index);

/** The selected cards that have a finished picture. */
export const pictured = () => selected().filter((index) => state.away.finished[index]);

/** The cards whose pictures are changed with all others: those that are not kept. */
const drawnAnew = () =>
    [...cards().keys()].filter((index) => state.away.finished[index] && !isKept(index));

/** Whether a card has something that can be selected with all others. @param {number} index */
const isSomething = (index) => state.away.finished[index] || boxes()[index].value.trim();

/**
 * The selection once a card is picked: it alone, which ends one of it alone; it in or out; or all
 * from the last one on to it.
 * @param {number[]} indices
 * @param {number} anchor where a range begins
 * @param {number} index
 * @param {How} how
 */
export function picked(indices, anchor, index, how) {
    if (how === "range") {
        const [from, to] = [Math.min(anchor, index), Math.max(anchor, index)];
        return Array.from({ length: to - from + 1 }, (_, at) => from + at);
    }
    const others = indices.filter((each) => each !== index);
    if (how === "alone") return indices.length === 1 && !others.length ? [] : [index];
    return others.length < indices.length ? others : [...indices, index];
}

/** @param {number[]} indices */
export function select(indices) {
    const before = String(selected());
    state.selection.indices = [...indices].sort((one, other) => one - other);
    showSelection();
    if (String(selected()) === before) return;
    $(".primary small", form()).textContent = "";
    lookSoon();
    const { announced, none } = form().dataset;
    news(indices.length ? String(announced).replace("%", numbers()) : String(none));
}

const numbers = () =>
    selected()
        .map((index) => index + 1)
        .join(", ");

/**
 * @param {number} index
 * @param {How} how
 */
export function pick(index, how) {
    const { indices, anchor } = state.selection;
    const from = indices.length ? anchor : index;
    state.selection.anchor = how === "range" ? from : index;
    select(picked(indices, from, index, how));
}

export function showSelection() {
    for (const [index, card] of cards().entries()) {
        card.classList.toggle("selected", isSelected(index));
        $(".below .number", card).ariaPressed = String(isSelected(index));
    }
    const there = pictured();
    form().hidden = !selected().length;
    $(".chosen bdi", form()).textContent = numbers();
    showStrength(form(), there);
    showStrength($("#all"), drawnAnew());
    const change = $(".primary", form());
    $("span", change).textContent = String(change.dataset.count).replace("%", String(there.length));
    for (const button of $$(".primary, .verbs *, .signs *", form())) {
        button.disabled = there.length < Number(button.dataset.least ?? 1);
    }
    const keep = $("[data-do=keep_selected]", form());
    keep.ariaPressed = String(there.length > 0 && there.every(isKept));
}

/** Ends the selection; the card that was picked last has the focus if the dock had it. */
function deselect() {
    const card = cards()[state.selection.anchor];
    if (form().contains(document.activeElement)) {
        ($(".view", card) ?? $(".prompt textarea", card)).focus();
    }
    select([]);
}

listen("click", (target, event) => {
    const number = /** @type {Part | null} */ (target.closest(".below .number"));
    if (!number) return;
    const { shiftKey, ctrlKey, metaKey, pointerType } = /** @type {PointerEvent} */ (event);
    // A finger has no keys beside it, and a screen reader presses a switch.
    const adds = ctrlKey || metaKey || pointerType !== "mouse";
    pick(Number(number.dataset.index), shiftKey ? "range" : adds ? "toggle" : "alone");
});

listen("submit", (target, event) => {
    if (!target.closest("#selecting")) return;
    event.preventDefault();
    const words = $("[name=words]", target);
    const indices = target === form() ? pictured() : drawnAnew();
    if (!indices.length) return tell(String(target.dataset.none), "wrong", true);
    // Stop takes the button's place; a finger's keyboard would take half of the window.
    if (!matchMedia("(hover: none)").matches) words.focus();
    drawSaid(target, indices).then((began) => {
        if (!began && !target.hidden) words.focus();
    });
});

const OPEN = "dialog[open], .menu:popover-open, .panel[data-open], #suggestions:not([hidden])";

listen(
    "keydown",
    (target, event) => {
        const { key, ctrlKey, metaKey, isComposing } = /** @type {KeyboardEvent} */ (event);
        const writes = target.closest("input:not([type=range]), textarea, select") !== null;
        if (isComposing || $(OPEN) || target.closest("#change, textarea")) return;
        if (key.toLowerCase() === "a" && (ctrlKey || metaKey) && !writes) {
            select([...cards().keys()].filter(isSomething));
        } else if (key === "Escape" && selected().length) deselect();
        else if (key === "Enter" && (ctrlKey || metaKey) && target.closest("#selecting")) {
            /** @type {any} */ (target.closest("form")).requestSubmit();
        } else return;
        event.preventDefault();
        event.stopImmediatePropagation(); // a card has other plans for Escape
    },
    true,
);

register({
    deselect,
    around: ({ strength, index }) =>
        drawAround({ indices: index ? [Number(index)] : pictured(), strength: Number(strength) }),
    redraw_selected() {
        for (const index of selected()) if (isSomething(index)) redraw(index);
    },
    keep_selected() {
        const keep = !pictured().every(isKept);
        for (const index of pictured()) state.keep[index] = keep;
        hooks.changed();
    },
    zip_selected: () => ask("zip", { indices: pictured() }),
});
