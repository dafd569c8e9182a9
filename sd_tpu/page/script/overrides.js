// The panels of settings: for a single box, whose empty fields show the value for all, and sliders.

import { choose } from "./choices.js";
import { $$, seedBox, settingField } from "./dom.js";
import { fixedSeed } from "./form.js";
import { showInputs, showUses } from "./inputs.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */

/** The number that a slider goes with. @param {Part} slider */
export const numberOf = (slider) => /** @type {Part} */ (slider.previousElementSibling);

export function showOverrides() {
    const seed = fixedSeed();
    const overrides = state.overrides[state.panelIndex];
    for (const field of $$("#overrides-panel [name]")) {
        field.value = "";
        choose(field, overrides[field.name] ?? "");
        const common = settingField(field.name);
        if (common) field.placeholder = common.value || common.placeholder || "";
        else if (field.name === "seed") {
            field.placeholder =
                seed === null ? seedBox().placeholder : String(seed + state.panelIndex);
        }
    }
    for (const slider of $$("#overrides-panel [type=range]")) {
        slider.value = numberOf(slider).value || numberOf(slider).placeholder;
    }
    showInputs();
    showUses();
}

/** Moves the sliders for all boxes to their numbers. */
export function showSliders() {
    for (const slider of $$("#settings-panel [type=range]")) {
        slider.value = numberOf(slider).value;
    }
}
