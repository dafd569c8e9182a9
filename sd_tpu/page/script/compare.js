// Comparisons: the first prompt with several values of one setting.

import { register } from "./actions.js";
import { $, $$ } from "./dom.js";
import { fixedSeed } from "./form.js";
import { fold } from "./panels.js";
import { compare } from "./remake.js";
import { BOXES, SEEDS } from "./state.js";

/**
 * Successive seeds, which begin again after the largest.
 * @param {number} first
 * @param {number} count
 * @param {number} seeds how many there are
 */
export const successive = (first, count, seeds) =>
    Array.from({ length: count }, (_, index) => (first + index) % seeds);

/** Shows the values of a setting that can be compared. @param {import("./types").Part} choice */
export function showValues({ value, dataset }) {
    const lists = $$("#compare-panel [data-what]");
    for (const list of lists) list.hidden = list.dataset.what !== value;
    const values = $("#compare-panel .values");
    values.hidden = lists.some((list) => !list.hidden);
    const first = fixedSeed() ?? Math.floor(Math.random() * SEEDS);
    $("input", values).value =
        value === "seed" ? successive(first, BOXES, SEEDS).join(", ") : String(dataset.values);
}

register({
    compare() {
        const what = $("[name=what]:checked").value;
        const list = $(`#compare-panel [data-what="${what}"]`);
        const values = list
            ? $$(":checked", list).map((tick) => tick.value)
            : $("#compare-panel .values input").value;
        fold();
        compare({ what, values });
    },
});
