// Pictures that are made of those that are there: compared, larger, changed, varied, drawn again.

import { register } from "./actions.js";
import { $, $$, cards } from "./dom.js";
import { isDraft, keptDrafts } from "./cards.js";
import { begin, drawIn, isFilled, isFree } from "./run.js";
import { request } from "./server.js";
import { state } from "./state.js";
import { remember } from "./undo.js";

/** Draws a comparison, which takes all cards. @param {import("./types").Fields<"compare">} more */
export const compare = (more) => drawIn(request("compare", more), () => true);

/** Draws a picture again at twice its size. @param {number} index */
export const drawLarger = (index) => drawIn(request("larger", { index }), (each) => each === index);

/**
 * Draws pictures again, changed as words say; returns whether that has begun.
 * @param {import("./types").Fields<"change">} more
 */
export const drawChanged = (more) =>
    drawIn(request("change", more), (each) => more.indices.includes(each));

/**
 * Draws new pictures from those of cards: in cards without a prompt, or else in strips below them.
 * @param {import("./types").Fields<"around">} more
 */
export function drawAround(more) {
    const there = (/** @type {number} */ index) => more.indices.includes(index);
    const empty = (/** @type {number} */ index) =>
        isFree(index) && !isFilled(index) && !there(index);
    return drawIn(request("around", more), empty);
}

/** Draws drafts again with more steps and the same seeds. @param {number[]} indices */
const finish = (indices) =>
    drawIn(request("finish", { indices }), (each) => indices.includes(each));

/** Draws what lies beside a picture. @param {import("./types").Fields<"extend">} more */
export const drawExtended = (more) =>
    drawIn(request("extend", more), (each) => each === more.index);

/** Draws what a card asks for, with a new seed. @param {number} index */
export const redraw = (index) => begin(request("redraw", { index }));

/**
 * Takes a picture of a card's strip into the card, or the strip away.
 * @param {number} index
 * @param {number | null} variant
 */
async function choose(index, variant) {
    const buttons = $$(".strip button:enabled", cards()[index]);
    for (const each of buttons) each.disabled = true;
    if (variant !== null) remember();
    const { run } = await begin(request("choose", { index, variant }));
    if (!run) for (const each of buttons) each.disabled = false;
    $(".view", cards()[index])?.focus();
}

register({
    choose: ({ index, name }) => choose(Number(index), name === undefined ? null : Number(name)),
    redraw: ({ index }) => redraw(Number(index)),
    finish({ index }) {
        const selected = state.selection.indices;
        finish(selected.includes(Number(index)) ? selected.filter(isDraft) : [Number(index)]);
    },
    finish_kept: () => finish(keptDrafts()),
    vary: ({ index }) => drawIn(request("vary", { index: Number(index) }), isFree),
    larger: ({ index }) => drawLarger(Number(index)),
});
