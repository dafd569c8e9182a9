// The progress line: what the page says there before, or in place of, the server.

import { $, make } from "./dom.js";
import { state } from "./state.js";

/**
 * @param {string} text
 * @param {string} kind
 * @param {boolean} aloud
 */
export function tell(text, kind, aloud = false) {
    const line = $("#line p");
    const running = kind === "busy" ? [] : state.line.running;
    if (kind === "busy") progress().value = 0;
    line.textContent = text;
    line.className = [kind, ...running].join(" "); // a run that goes on stays busy
    delete line.dataset.at;
    if (kind === "wrong") state.edited = false;
    if (aloud) news(text);
}

/**
 * Says something with a button behind it that acts on it.
 * @param {string} text
 * @param {string} kind
 * @param {string} action
 * @param {string} label
 */
export function offer(text, kind, action, label) {
    tell(`${text} `, kind, true);
    const button = make("button", { type: "button", textContent: label });
    button.dataset.do = action;
    $("#line p").append(button);
}

/**
 * Shows the server's line again, since what was wrong is right now. The elements stay: Gradio takes
 * away only those that it has put there.
 * @param {string} html
 */
export function takeBack(html) {
    const before = make("template", { innerHTML: html }).content;
    const line = $("#line p");
    const { textContent, className, dataset } = $("p", before);
    Object.assign(line, { textContent, className });
    progress().value = progress(before).value;
    line.dataset.at = dataset.at;
}

/** Lets screen readers read a sentence. @param {string} text */
export function news(text) {
    $("#news [role=status]").textContent = text;
}

/** The bar of the line. @param {ParentNode} within @returns {HTMLProgressElement} */
export const progress = (within = $("#line")) =>
    /** @type {HTMLProgressElement} */ (within.querySelector("progress"));
