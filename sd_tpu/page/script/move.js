// Cards change places: one is dragged by its number, or moved by Alt and an arrow key. With Alt in the
// drag, or with Shift beside the arrow, its prompt alone is copied there.

import { columns, neighbour, pictureOf } from "./cardkeys.js";
import { $, $$, boxes, cards, isRightToLeft, listen, make } from "./dom.js";
import { news } from "./line.js";
import { begin } from "./run.js";
import { select } from "./selection.js";
import { request } from "./server.js";
import { state } from "./state.js";
import { remember, replace } from "./undo.js";

/** @typedef {import("./types").Part} Part */

const LEAST = 6; // pixels after which it is dragged
const FRAME = 20; // ms
const TRIES = 50; // frames in which a picture comes behind its prompt

/** The card that is dragged. */
/** @type {{ from: number, x: number, y: number, shown: HTMLElement | null, to: number } | null} */
let drag = null;
let dragged = false; // whether the next click only ends a drag
/** @type {Promise<unknown>} */
let turn = Promise.resolve(); // when the next card may be moved

/**
 * Indices of cards once two of them have changed places.
 * @param {number[]} indices
 * @param {number} one
 * @param {number} other
 */
export const followed = (indices, one, other) =>
    indices.map((index) => (index === one ? other : index === other ? one : index));

/**
 * Prompts once one is copied; null if that changes nothing: no prompt gives way to none.
 * @param {string[]} prompts
 * @param {number} from
 * @param {number} to
 */
export function copied(prompts, from, to) {
    if (!prompts[from].trim() || prompts[to] === prompts[from]) return null;
    return prompts.map((prompt, index) => (index === to ? prompts[from] : prompt));
}

/**
 * Has two cards change places, with their pictures; returns whether they have.
 * @param {number} from
 * @param {number} to
 */
async function swap(from, to) {
    remember();
    const answer = await begin(request("swap", { index: from, to }), true);
    if (!answer.filled) return false;
    const { indices, anchor } = state.selection;
    [state.selection.anchor] = followed([anchor], from, to);
    select(followed(indices, from, to));
    news(String(answer.news));
    return true;
}

/**
 * @param {number} from
 * @param {number} to
 */
function copy(from, to) {
    const prompts = copied(
        boxes().map((box) => box.value),
        from,
        to,
    );
    if (!prompts) return;
    replace({ prompts });
    news(String($("#selection").dataset.copied).replace("%", String(to + 1)));
}

/**
 * Moves the card that has the focus, or copies its prompt, to the card that a key goes to; that has
 * the focus then.
 * @param {string} key
 * @param {boolean} copies
 */
async function step(key, copies) {
    const all = cards();
    const from = all.findIndex((card) => card.contains(document.activeElement));
    const to = neighbour(from, key, columns(), all.length, isRightToLeft());
    if (from < 0 || to === from) return;
    const pictured = $(".view", all[from]) !== null;
    if (copies) copy(from, to);
    else if (!(await swap(from, to))) return;
    pictureOf(all[to]).focus();
    for (let left = TRIES; !copies && pictured && left && !$(".view", all[to]); left--) {
        await new Promise((resolve) => {
            setTimeout(resolve, FRAME);
        });
    }
    if (all[to].contains(document.activeElement)) pictureOf(all[to]).focus();
}

listen(
    "keydown",
    (target, event) => {
        const { key, altKey, shiftKey, ctrlKey, metaKey } = event;
        const card = target.closest("#cards > .card");
        if (!card || !altKey || ctrlKey || metaKey || !key.startsWith("Arrow")) return;
        if (target.closest("textarea, #change") || $("dialog[open], .menu:popover-open")) return;
        event.preventDefault(); // or the browser would leave the page
        event.stopPropagation();
        if (event.repeat) return;
        turn = turn.then(() => step(key, shiftKey)).catch(() => {});
    },
    true,
);

/** Shows what is dragged and where to. @param {MouseEvent} event */
function show({ target, clientX, clientY, altKey }) {
    if (!drag) return;
    if (!drag.shown) {
        const picture = $(".view img", cards()[drag.from])?.getAttribute("src");
        drag.shown = make("div", { id: "carried", textContent: picture ? "" : drag.from + 1 });
        if (picture) drag.shown.append(make("img", { src: picture, alt: "" }));
        $(".gradio-container").append(drag.shown);
    }
    const card = /** @type {Part} */ (target).closest?.("#cards > .card");
    drag.to = cards().indexOf(/** @type {Part} */ (card));
    drag.shown.style.translate = `${clientX + 8}px ${clientY + 8}px`;
    showCopies(altKey);
    for (const each of $$(".card[data-onto]")) each.removeAttribute("data-onto");
    if (card && drag.to !== drag.from) card.setAttribute("data-onto", "");
}

/** Shows whether the prompt is copied; nothing else can be while something is drawn. @param {boolean} copies */
function showCopies(copies) {
    drag?.shown?.toggleAttribute("data-copies", copies);
    document.documentElement.dataset.carries = !copies && $("#line .busy") ? "nothing" : "";
}

function end() {
    for (const each of $$(".card[data-onto]")) each.removeAttribute("data-onto");
    document.documentElement.removeAttribute("data-carries");
    drag?.shown?.remove();
    drag = null;
    setTimeout(() => {
        dragged = false; // no click follows where the pointer has left what it was pressed on
    });
}

listen("pointerdown", (target, { button, pointerType, clientX: x, clientY: y }) => {
    dragged = false;
    const number = /** @type {Part | null} */ (target.closest(".below .number"));
    // A finger scrolls.
    if (!number || button || pointerType === "touch" || !state.arrived) return;
    drag = { from: Number(number.dataset.index), x, y, shown: null, to: -1 };
});

listen("pointermove", (_, event) => {
    if (!drag) return;
    if (!(event.buttons & 1)) return end();
    if (!drag.shown && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < LEAST) return;
    dragged = true;
    show(event);
});

listen("pointerup", (_, { altKey }) => {
    const { from, to, shown } = drag ?? { from: -1, to: -1, shown: null };
    end();
    if (!shown || to < 0 || to === from) return;
    if (altKey) copy(from, to);
    else turn = turn.then(() => swap(from, to)).catch(() => {});
});
listen("pointercancel", end);
listen("selectstart", (_, event) => {
    if (drag) event.preventDefault(); // no text
});

// Before anybody else: Escape ends the drag alone, and a click that ends one selects nothing.
addEventListener(
    "click",
    (event) => {
        if (dragged) event.stopPropagation();
        dragged = false;
    },
    true,
);
for (const type of /** @type {const} */ (["keydown", "keyup"])) {
    addEventListener(
        type,
        (event) => {
            if (!drag?.shown) return;
            event.preventDefault(); // Alt alone may open the browser's menu
            event.stopPropagation();
            showCopies(event.altKey);
            if (event.key === "Escape") end();
        },
        true,
    );
}
