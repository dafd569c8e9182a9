// How long drawing will take, before anybody presses: on the button, on the presets, by the model.

import { $, $$ } from "./dom.js";
import { BOXES } from "./state.js";

const UNKNOWN = 3_000; // ms after which it is asked again
const MINUTE = 60_000;
const LONG = 90; // seconds from which on it is the time of day that matters

/**
 * A time as people say it.
 * @param {number} seconds
 * @param {DOMStringMap} words sentences in which `%` stands for a number
 */
export function duration(seconds, { seconds: few, minutes: many }) {
    const [text, count] = seconds < LONG ? [few, Math.ceil(seconds)] : [many, seconds / 60];
    return String(text).replace("%", String(Math.max(1, Math.round(count))));
}

/**
 * When it is done: in so many seconds, or at which time of day.
 * @param {number} seconds
 * @param {DOMStringMap} words
 */
export function ready(seconds, words, now = Date.now()) {
    if (seconds < LONG) return duration(seconds, words);
    const at = new Date(now + 1000 * seconds);
    const clock = at.toLocaleTimeString($("header[lang]").lang, {
        hour: "2-digit",
        minute: "2-digit",
    });
    return String(words.ready).replace("%", clock);
}

/**
 * For how many milliseconds an estimate holds: until something is known, or the clock has moved on.
 * @param {import("./types").Answer} answer
 */
export function lasts({ draw }) {
    if (!draw?.count) return undefined;
    return draw.seconds === null ? UNKNOWN : draw.seconds < LONG ? undefined : MINUTE;
}

/** @param {import("./types").Answer} answer */
export function showEstimates({ draw, change, pace, paces = [] }) {
    const button = $("#generate");
    $("#selection .primary small").textContent =
        change == null ? "" : ready(change, button.dataset);
    const { eight, some, none } = button.dataset;
    if (draw) {
        const text = draw.count === BOXES ? eight : draw.count ? some : none;
        $("#generate span").textContent = String(text).replace("%", String(draw.count));
        $("#generate small").textContent =
            draw.seconds === null ? "" : ready(draw.seconds, button.dataset);
    }
    if (pace === undefined) return;
    /** @param {number | null | undefined} seconds */
    const ofEight = (seconds) =>
        seconds == null
            ? ""
            : String(button.dataset.pace).replace("%", duration(seconds, button.dataset));
    $("#model small").textContent = ofEight(pace);
    for (const [index, preset] of $$("#presets button").entries()) {
        preset.title = ofEight(paces[index]);
    }
}
