// Remarks of the server on the form: unknown words, a box's overrides, what is wrong and where.

import { showOffered } from "./choices.js";
import { $, $$, boxes, overridesButton, seedBox } from "./dom.js";
import { lasts, showEstimates } from "./estimate.js";
import { showInputs } from "./inputs.js";
import { takeBack } from "./line.js";
import { panelButton, unfold } from "./panels.js";
import { ask } from "./server.js";
import { SIDES, state } from "./state.js";

const DELAY = 150; // ms after a change
const RETRY = 3_000; // ms after which it is asked again which models there are

export function lookSoon() {
    clearTimeout(state.look.timer);
    state.look.timer = setTimeout(look, DELAY);
}

/** @param {boolean} open whether to open the panel with the field that is wrong */
export async function look(open = false) {
    const looking = state.look;
    const number = ++looking.number;
    looking.open = looking.open || open;
    const answer = await ask("look", {
        fresh: looking.models,
        indices: state.selection.indices.filter((index) => state.away.finished[index]),
        strength: Number($("#selection [name=strength]").value),
    });
    if (number !== looking.number) return;
    const { remarks, summaries } = answer;
    if (!remarks || !summaries) {
        // No answer came, or a refusal that has been said.
        if (looking.models && !answer.message) looking.timer = setTimeout(look, RETRY);
        return;
    }
    looking.models = false;
    showOffered(answer);
    showEstimates(answer);
    Object.assign(state.inputs, answer.inputs);
    showInputs();
    $$(".below .remark").forEach((element, index) => {
        show(element, remarks[index] ?? "");
    });
    $$(".below .overrides").forEach((element, index) => {
        show(element, summaries[index]);
    });
    show($(".faster"), answer.faster ?? "");
    showLive(answer.slow ?? "");
    const offered = $("#line button") !== null;
    if ($("#line .wrong") && !offered && state.edited && !answer.wrong) takeBack(answer.line ?? "");
    blame(answer.culprit ?? {}, looking.open);
    looking.open = false;
    const again = lasts(answer);
    if (again) looking.timer = setTimeout(look, again);
}

/**
 * @param {Element} element
 * @param {string} html
 */
function show(element, html) {
    if (element.innerHTML !== html) element.innerHTML = html;
}

/** Turns Live off while the pictures are too slow for it. @param {string} slow the reason, if so */
function showLive(slow) {
    const live = $("#live input");
    const looking = state.look;
    looking.live = looking.live || (live.checked && slow !== "");
    // Not `disabled`: whoever comes to it by keyboard is to learn why it is off.
    Object.assign(live, {
        ariaDisabled: String(slow !== ""),
        checked: slow === "" && (live.checked || looking.live),
    });
    if (slow === "") looking.live = false;
    $("#live .note").textContent = slow;
}

/**
 * Marks the field that something is wrong with, and shows it.
 * @param {{ setting?: string, index?: number | null }} culprit
 * @param {boolean} open
 */
function blame({ setting, index = null }, open) {
    for (const field of $$("[aria-invalid]")) field.removeAttribute("aria-invalid");
    if (!setting) return;
    const inOwn = index !== null && setting !== "prompt";
    const field = fieldOf(setting, index);
    if (open && field?.closest(".panel")) {
        unfold(inOwn ? overridesButton(index) : panelButton("settings"));
        field.closest("details")?.toggleAttribute("open", true);
    }
    if (!inOwn || state.panelIndex === index) field?.setAttribute("aria-invalid", "true");
    if (open) field?.focus();
}

/**
 * The field of a setting for one box, or for all where the index is null.
 * @param {string} setting
 * @param {number | null} index
 */
function fieldOf(setting, index) {
    if (setting === "prompt") return boxes()[index ?? 0];
    if (setting === "seed" && index === null) return seedBox();
    const panel = index === null ? "#settings-panel" : "#overrides-panel";
    return $(`${panel} [name=${SIDES.includes(setting) ? "size" : setting}]`);
}
