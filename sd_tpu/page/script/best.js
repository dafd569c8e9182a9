// Pick the best: two pictures at a time, of which the better one stays, until one is left.

import { register } from "./actions.js";
import { $, $$, cards, listen } from "./dom.js";
import { hooks } from "./hooks.js";
import { tell } from "./line.js";
import { pictured, select } from "./selection.js";
import { state } from "./state.js";

/** @typedef {{ pair: number[], rest: number[] }} Round */

const dialog = () => $("#best");

/** @type {Round} */
let round = { pair: [], rest: [] };
let count = 0; // of all rounds

/**
 * The next round: the better one stays where it is, and another comes in the other's place.
 * @param {Round} round
 * @param {number} side of the better one
 * @returns {Round}
 */
export function after({ pair, rest: [next, ...rest] }, side) {
    return { pair: pair.map((index, at) => (at === side ? index : next)), rest };
}

function show() {
    const asked = $("p", dialog());
    asked.textContent = String(asked.dataset.count)
        .replace("%", String(count - round.rest.length))
        .replace("§", String(count));
    for (const [side, image] of $$("img", dialog()).entries()) {
        const index = round.pair[side];
        image.src = String(state.away.finished[index]);
        image.alt = `${index + 1}: ${$("figure img", cards()[index])?.alt ?? ""}`;
    }
}

/** @param {number} side */
function choose(side) {
    const winner = round.pair[side];
    if (round.rest.length) {
        round = after(round, side);
        show();
        return;
    }
    dialog().close();
    select([]);
    state.keep[winner] = true;
    hooks.changed();
    $(".view", cards()[winner])?.focus();
    tell(String(dialog().dataset.kept).replace("%", String(winner + 1)), "over", true);
}

listen("keydown", (_, event) => {
    const side = { ArrowLeft: 0, ArrowUp: 0, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (side !== undefined && dialog()?.open) choose(side);
});

register({
    best() {
        const selected = pictured();
        const all = [...cards().keys()].filter((index) => state.away.finished[index]);
        const [one, other, ...rest] = selected.length > 1 ? selected : all;
        round = { pair: [one, other], rest };
        count = rest.length + 1;
        show();
        dialog().showModal();
    },
    better: ({ side }) => choose(Number(side)),
});
