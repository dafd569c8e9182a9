// Buttons that fill in settings: the seed, the presets, back to the defaults.

import { register } from "./actions.js";
import { $, $$, overridesButton, settingField, title } from "./dom.js";
import { fixedSeed } from "./form.js";
import { tell } from "./line.js";
import { drawSoon } from "./live.js";
import { panelButton, unfold } from "./panels.js";
import { state } from "./state.js";
import { replace } from "./undo.js";

/** Fills in exact pictures again, where settings cost likeness for speed. */
function resetAll() {
    const exact = $$("#settings-panel [data-default]").map((field) => [
        field.name,
        field.dataset.default,
    ]);
    replace({ settings: Object.fromEntries(exact) });
    panelButton("settings").focus();
}

/** @param {number} index */
function resetBox(index) {
    replace({ overrides: state.overrides.map((box, each) => (each === index ? {} : box)) });
    overridesButton(index).focus();
    drawSoon(index);
}

/** Marks the seed's field while each run draws a new one, and names the model that is chosen. */
export function showChosen() {
    $("#seed").classList.toggle("random", fixedSeed() === null);
    $("#model bdi").textContent = settingField("model")?.value || title();
}

register({
    choose_model() {
        const field = settingField("model");
        if (field.options.length < 2) return unfold(panelButton("about"));
        unfold(panelButton("settings"), field);
        field.focus();
    },
    random({ announced }) {
        replace({ seed: "-1" });
        tell(String(announced), "idle", true);
    },
    reuse({ none }) {
        if (state.run.name) replace({ seed: String(state.run.seed) });
        else tell(String(none), "wrong", true);
    },
    preset: ({ steps }) => replace({ settings: { steps: String(steps) } }),
    reset({ index }) {
        if (index === undefined) resetAll();
        else resetBox(Number(index));
    },
});
