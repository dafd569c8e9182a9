// Buttons that fill in prompts: samples, a pasted list, a word.

import { register } from "./actions.js";
import { $, boxes, listen } from "./dom.js";
import { write } from "./form.js";
import { offer, tell } from "./line.js";
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

// Marks before the lines of lists: "1.", "2)", "-", "*", "•".
const MARK = /^(?:\d{1,3}[.)]|[-*•–])\s+/;

/**
 * The prompts of a list, one a line, without the marks that most lines have.
 * @param {string} text
 */
export function lines(text) {
    const all = text
        .split("\n")
        .map((line) => line.trim())
        .filter(Boolean);
    const marked = all.filter((line) => MARK.test(line)).length;
    return 2 * marked > all.length ? all.map((line) => line.replace(MARK, "")) : all;
}

// Several lines that are pasted into a box may be meant for the boxes after it, too.
listen("paste", (target, event) => {
    const ofAll = target.closest("#all");
    const index = ofAll ? 0 : boxes().indexOf(target);
    const text = /** @type {ClipboardEvent} */ (event).clipboardData?.getData("text") ?? "";
    const prompts = lines(text);
    if (index < 0 || prompts.length < 2) return;
    if (ofAll) event.preventDefault(); // it has one line
    state.pasted = { index, prompts };
    const { offered, label } = $("#list-panel [data-do=fill]").dataset;
    const count = String(Math.min(prompts.length, BOXES - index));
    offer(String(offered).replace("%", count), "idle", "fill_pasted", String(label));
});

register({
    copy_first: () =>
        replace({
            prompts: Array(BOXES).fill(
                boxes()
                    .map((box) => box.value)
                    .find((text) => text.trim()) ?? "",
            ),
        }),
    clear: () => replace({ prompts: [], overrides: [] }),
    samples() {
        const sets = sampleSets();
        replace({ prompts: sets[state.samples++ % sets.length], overrides: [] });
    },
    surprise() {
        if ($("#generate").disabled) return;
        const all = sampleSets().flat().filter(Boolean);
        replace({ prompts: shuffled(all).slice(0, BOXES), overrides: [] });
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
    fill_pasted() {
        if (!state.pasted) return;
        const { index, prompts } = state.pasted;
        const before = boxes().map((box) => box.value);
        const after = before.slice(index + prompts.length);
        replace({ prompts: [...before.slice(0, index), ...prompts, ...after].slice(0, BOXES) });
        boxes()[index].focus();
        tell(String($("#list-panel [data-do=fill]").dataset.filled), "idle", true);
    },
    fill(_, button) {
        const prompts = lines($("#list-panel textarea").value);
        const { empty, filled, many } = button.dataset;
        if (!prompts.length) return tell(String(empty), "wrong", true);
        replace({ prompts, overrides: [] });
        const told =
            prompts.length > BOXES
                ? String(many).replace("%", String(prompts.length))
                : String(filled);
        tell(told, "idle", true);
        fold();
    },
});
