// Completion: the list of texts below the prompt box that is being written in.

import { $, $$, boxes, listen, make } from "./dom.js";
import { news } from "./line.js";
import { continuation, showGhost } from "./ghost.js";
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
    const { known = [], endings = [] } = await ask("known");
    Object.assign(completion, { words: known, endings });
    if (document.activeElement === box && box.value !== value)
        suggest(box, completion.ghost !== ""); // somebody types
}

/** Another model has other words. */
export function forgetWords() {
    completion.since = -Infinity;
}

/**
 * Offers what completes a prompt: in a list, and to somebody who writes on in grey as well.
 * @param {Part} box
 */
export function suggest(box, writes = false) {
    const at = Number(box.selectionStart);
    const known = { ...completion, bookmarks: bookmarks(), earlier: earlierPrompts() };
    const keys = !matchMedia("(hover: none)").matches; // fingers take it from the list
    const ghost = writes && keys ? continuation(box.value, at, known) : "";
    offer(box, suggestions(box.value, at, known), ghost);
}

const isOpen = () => completion.offered.length > 0 || completion.ghost !== "";

/** Closes the list, if it is open, and takes the grey text away. */
export function closeSuggestions() {
    if (completion.box && isOpen()) offer(completion.box, []);
}

/** Whether suggestions for what is written where the cursor is now are open. */
export function isOffered() {
    if (completion.box && cursor(completion.box) !== completion.cursor) closeSuggestions();
    return isOpen();
}

/**
 * @param {Part} box
 * @param {Suggestion[]} found
 * @param {string} ghost
 */
function offer(box, found, ghost = "") {
    const list = $("#suggestions");
    const opens = found.length && !completion.offered.length;
    const told = showGhost(box, ghost);
    Object.assign(completion, { offered: found, ghost, chosen: -1, cursor: cursor(box) });
    list.hidden = !found.length;
    for (const each of boxes()) {
        for (const name of ["controls", "activedescendant"]) each.removeAttribute(`aria-${name}`);
    }
    const listed = opens ? String(list.dataset.announced).replace("%", String(found.length)) : "";
    if (told || listed) news([told, listed].filter(Boolean).join(". ")); // in one breath
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
}

/**
 * Lets a key choose among what is offered; returns whether it does.
 * @param {KeyboardEvent} event
 */
export function complete({ key, shiftKey }) {
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
    else if (key === "Tab" && !shiftKey && completion.ghost)
        write(completion.ghost, Number(completion.box?.selectionStart));
    else return false;
    return true;
}

/** @param {number} number of a suggestion */
function insert(number) {
    const [from, text] = completion.offered[number];
    write(text, from);
}

/**
 * @param {string} text
 * @param {number} from where it begins
 */
function write(text, from) {
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
