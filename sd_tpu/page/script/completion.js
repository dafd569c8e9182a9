// Completion: the list of texts below the prompt box that is being written in.

import { $, $$, boxes, listen, make } from "./dom.js";
import { news } from "./line.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { bookmarks, earlierPrompts } from "./storage.js";
import { moved, suggestions } from "./suggestions.js";

/** @typedef {import("./types").Part} Part */
/** @typedef {import("./types").Suggestion} Suggestion */

const FRESH = 60_000; // ms for which the server's words count
const completion = state.completion;

/** What is written, and where the cursor is. @param {Part} box */
const cursor = ({ value, selectionStart }) => `${selectionStart} ${value}`;

/** Asks which words prompts can use here, unless that is known. @param {Part} box */
async function learnWords(box) {
    if (Date.now() - completion.since < FRESH) return;
    completion.since = Date.now();
    const { value } = box;
    completion.words = (await ask("known")).known ?? [];
    if (document.activeElement === box && box.value !== value) suggest(box); // somebody types
}

/** Another model has other words. */
export function forgetWords() {
    completion.since = -Infinity;
}

/** @param {Part} box */
export function suggest(box) {
    offer(
        box,
        suggestions(box.value, Number(box.selectionStart), {
            words: completion.words,
            bookmarks: bookmarks(),
            earlier: earlierPrompts(),
        }),
    );
}

/** Closes the list, if it is open. */
export function closeSuggestions() {
    if (completion.box && completion.offered.length) offer(completion.box, []);
}

/** Whether suggestions for what is written where the cursor is now are open. */
export function isOffered() {
    if (completion.box && cursor(completion.box) !== completion.cursor) closeSuggestions();
    return completion.offered.length > 0;
}

/**
 * @param {Part} box
 * @param {Suggestion[]} found
 */
function offer(box, found) {
    const list = $("#suggestions");
    const opens = found.length && !completion.offered.length;
    Object.assign(completion, { offered: found, chosen: -1, cursor: cursor(box) });
    list.hidden = !found.length;
    for (const each of boxes()) {
        for (const name of ["controls", "activedescendant"]) each.removeAttribute(`aria-${name}`);
    }
    if (!found.length) return;
    list.replaceChildren(
        ...found.map(([, text], number) =>
            make("div", {
                dir: "auto",
                id: `suggestion-${number}`,
                textContent: text,
                role: "option",
                ariaSelected: false,
            }),
        ),
    );
    const card = /** @type {Part} */ (box.closest(".card"));
    card.append(list);
    box.setAttribute("aria-controls", "suggestions");
    box.setAttribute("aria-autocomplete", "list");
    // Below what is written, or, where there is no room, above it.
    const { top, bottom } = box.getBoundingClientRect();
    const from = card.getBoundingClientRect();
    const room = (visualViewport?.height ?? innerHeight) - bottom > list.offsetHeight;
    Object.assign(
        list.style,
        room
            ? { top: `${bottom - from.top}px`, bottom: "auto" }
            : { top: "auto", bottom: `${from.bottom - top}px` },
    );
    if (opens) news(String(list.dataset.told).replace("%", String(found.length)));
}

/**
 * Lets a key choose among what is offered; returns whether it does.
 * @param {string} key
 */
export function complete(key) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (key === "Escape") closeSuggestions();
    else if (by) {
        completion.chosen = moved(completion.chosen, by, completion.offered.length);
        for (const [number, option] of $$("#suggestions > *").entries()) {
            option.ariaSelected = String(number === completion.chosen);
        }
        completion.box?.setAttribute("aria-activedescendant", `suggestion-${completion.chosen}`);
    } else if (completion.chosen >= 0 && (key === "Enter" || key === "Tab"))
        insert(completion.chosen);
    else return false;
    return true;
}

/** @param {number} number of a suggestion */
function insert(number) {
    const [from, text] = completion.offered[number];
    const box = /** @type {Part} */ (completion.box);
    closeSuggestions();
    box.setRangeText(text, from, Number(box.selectionStart), "end");
    box.dispatchEvent(new Event("input", { bubbles: true }));
}

listen("selectionchange", isOffered);
listen("focusin", (target) => {
    if (!boxes().includes(target)) return;
    completion.box = target;
    learnWords(target);
    if (!target.value) suggest(target);
});
listen("mousedown", (target, event) => {
    // The box keeps the focus.
    if (target.closest("#suggestions")) event.preventDefault();
});
listen("click", (target) => {
    const option = target.closest("#suggestions > *");
    if (option && isOffered()) insert(Number(option.id.split("-")[1]));
});
listen("focusout", (target) => {
    if (target === completion.box) offer(target, []);
    if (target.matches?.("textarea")) target.scrollTop = 0; // or half of a line is seen first
});
