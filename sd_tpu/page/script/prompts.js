// Buttons that fill in prompts: samples, a pasted list, a word.

import { register } from "./actions.js";
import { $, boxes } from "./dom.js";
import { write } from "./form.js";
import { tell } from "./line.js";
import { fold } from "./panels.js";
import { generate } from "./run.js";
import { BOXES, state } from "./state.js";
import { remember, replace } from "./undo.js";

/** @returns {string[][]} */
const sampleSets = () => JSON.parse(String($("[data-samples]").dataset.samples));

/** @param {string[]} texts */
function shuffled(texts) {
    const drawn = texts.map((text) => /** @type {const} */ ([Math.random(), text]));
    return drawn.sort(([one], [other]) => one - other).map(([, text]) => text);
}

/** @param {string} text */
export const lines = (text) =>
    text
        .split("\n")
        .map((line) => line.trim())
        .filter(Boolean);

register({
    copy_first: () =>
        replace({
            prompts: Array(BOXES).fill(
                boxes()
                    .map((box) => box.value)
                    .find((text) => text.trim()) ?? "",
            ),
        }),
    clear: () => replace({ prompts: [], own: [] }),
    samples() {
        const sets = sampleSets();
        replace({ prompts: sets[state.samples++ % sets.length], own: [] });
    },
    surprise() {
        if ($("#generate").disabled) return;
        const all = sampleSets().flat().filter(Boolean);
        replace({ prompts: shuffled(all).slice(0, BOXES), own: [] });
        generate();
    },
    word(_, { textContent: word }) {
        remember();
        state.completion.box ??= boxes()[0];
        const { box } = state.completion;
        const { value } = box;
        const at = Number(box.selectionStart);
        const before = value.slice(0, at);
        const put = `${before && !/\s$/.test(before) ? " " : ""}${word}`;
        write(box, `${before}${put}${value.slice(at)}`);
        box.selectionStart = box.selectionEnd = at + put.length;
    },
    fill(_, button) {
        const prompts = lines($("#list-panel textarea").value);
        const { empty, filled, many } = button.dataset;
        if (!prompts.length) return tell(String(empty), "wrong", true);
        replace({ prompts, own: [] });
        const told =
            prompts.length > BOXES
                ? String(many).replace("%", String(prompts.length))
                : String(filled);
        tell(told, "idle", true);
        fold();
    },
});
