// Grey text behind the cursor: how a prompt would go on, which Tab takes.

import { $, $$ } from "./dom.js";

/** @typedef {import("./types").Part} Part */

const LEAST = 2; // letters after which a text may go on
const SLACK = 8; // pixels below the last line, which is seen whole

let told = ""; // what was read aloud last

/**
 * How a text goes on at its end: as a whole prompt that begins so, or, behind a comma, as a part of
 * one or as what a style puts there. It is "" if nothing is known to begin so.
 * @param {string} value
 * @param {number} at where the cursor is
 * @param {{ bookmarks: string[], earlier: string[], endings: string[] }} known
 */
export function continuation(value, at, { bookmarks, earlier, endings }) {
    if (at !== value.length) return "";
    const prompts = [...bookmarks, ...earlier];
    const whole = rest(value.trimStart(), prompts);
    const comma = value.lastIndexOf(",");
    if (whole || comma < 0) return whole;
    const parts = prompts.flatMap((prompt) => prompt.split(",").map((part) => part.trim()));
    const written = value.slice(comma + 1).trimStart();
    const before = value.slice(0, comma);
    return rest(
        written,
        [...endings, ...parts].filter((part) => !before.includes(part)),
    );
}

/**
 * What the first of these texts that begins as what is written has behind it.
 * @param {string} written
 * @param {string[]} texts
 */
function rest(written, texts) {
    const begins = written.toLowerCase();
    const found = texts.find(
        (text) => text.length > written.length && text.toLowerCase().startsWith(begins),
    );
    return found && written.trim().length >= LEAST ? found.slice(written.length) : "";
}

/**
 * Lays the text over its box, as much of it as there is room for.
 * @param {Part} ghost
 * @param {Part} box
 * @param {string} text
 */
function lay(ghost, box, text) {
    const card = /** @type {Part} */ (box.closest(".card"));
    const [written, more] = $$("span", ghost);
    const { left, top } = box.getBoundingClientRect();
    const from = card.getBoundingClientRect();
    card.append(ghost);
    Object.assign(ghost.style, {
        left: `${left - from.left + box.clientLeft}px`,
        top: `${top - from.top + box.clientTop}px`,
        width: `${box.clientWidth}px`,
        height: `${box.clientHeight}px`,
        padding: getComputedStyle(box).padding,
    });
    written.textContent = box.value;
    more.textContent = text;
    const room = box.scrollTop + box.clientHeight + SLACK;
    for (let shown = text; ghost.scrollHeight > room && shown.includes(" "); ) {
        shown = shown.slice(0, shown.lastIndexOf(" "));
        more.textContent = `${shown}…`;
    }
    ghost.scrollTop = box.scrollTop;
}

/**
 * Shows a text behind what is written in a box; returns what is to be read aloud of it, once.
 * @param {Part} box
 * @param {string} text
 */
export function showGhost(box, text) {
    const ghost = $("#ghost");
    ghost.hidden = !text;
    if (text) lay(ghost, box, text);
    const whole = text && box.value + text;
    if (whole === told) return "";
    told = whole;
    return whole && String(ghost.dataset.announced).replace("%", whole);
}
