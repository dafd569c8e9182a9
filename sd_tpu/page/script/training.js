// How trainings go that this browser has begun: their progress, their kept states, their buttons.

import { register } from "./actions.js";
import { $, $$, make } from "./dom.js";
import { news } from "./line.js";
import { ask } from "./server.js";
import { state } from "./state.js";

/** @typedef {import("./types").Fields<"teach">} Fields */
/** @typedef {import("./types").Part} Part */

const AGAIN = 2_000; // ms until it is asked again how they go
const { teach } = state;
export const isOpen = () => $("#teach-panel[data-open]") !== null;

/** Shows how runs go, while the panel is open. */
export async function watch() {
    clearTimeout(teach.watching);
    showRuns(await ask("teach", { act: "show", seen: teach.seen }));
    if (isOpen()) teach.watching = setTimeout(watch, AGAIN);
}

/** @param {import("./types").Answer} answer */
export function showRuns({ runs }) {
    if (!runs) return;
    const list = $("#teach-panel .runs");
    for (const section of $$("section", list)) {
        if (runs.some(({ id }) => id === section.dataset.id)) continue;
        keepingFocus(section, () => section.remove());
    }
    for (const { id, status, actions, samples, key } of runs) {
        const section = $(`[data-id="${id}"]`, list) ?? begin(id);
        $(".status", section).innerHTML = status;
        announce(section);
        // Buttons keep the focus as long as they are the same.
        if (section.dataset.actions !== actions) {
            keepingFocus(section, () => {
                $(".bar", section).innerHTML = actions;
            });
        }
        section.dataset.actions = actions;
        if (samples === undefined || teach.seen[id] === key) continue;
        const shown = $(".samples", section);
        keepingFocus(section, () => {
            shown.innerHTML = samples;
        });
        shown.hidden = samples === "";
        teach.seen[id] = key;
        state.completion.since = -Infinity; // another LoRA may be there
    }
}

/** Says how a run goes on once that has changed. @param {Part} section */
function announce(section) {
    const [name, said] = [$("h2", section), $("p", section)];
    const { status } = section.dataset;
    section.dataset.status = said.dataset.status;
    if (status && status !== said.dataset.status) news(`${name.textContent}: ${said.textContent}`);
}

/**
 * Does what may take the focused button away; the focus goes to the next one.
 * @param {Part} section
 * @param {() => void} change
 */
function keepingFocus(section, change) {
    const held = section.contains(document.activeElement);
    change();
    if (!held || section.contains(document.activeElement)) return;
    const next = section.isConnected ? $("button", section) : $("#teach-panel .runs button");
    (next ?? $("#teach-panel [type=file]")).focus();
}

/** @param {string} id */
function begin(id) {
    const section = make("section", {});
    section.dataset.id = id;
    section.setAttribute("aria-labelledby", `run-${id}`);
    const samples = make("div", {
        className: "samples",
        tabIndex: 0,
        hidden: true,
        role: "region",
    });
    samples.ariaLabel = String($("#teach-panel .runs").dataset.samples);
    section.append(
        make("div", { className: "status" }),
        make("div", { className: "bar" }),
        samples,
    );
    $("#teach-panel .runs").append(section);
    return /** @type {Part} */ (section);
}

register({
    async teach({ act, id, step }) {
        const fields = { act: /** @type {Fields["act"]} */ (act), id, step: Number(step ?? 0) };
        showRuns(await ask("teach", fields));
    },
});
