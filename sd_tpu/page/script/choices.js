// Fields whose choices change: with the server's models, with a model's sizes, with another field.

import { $, $$, settingField } from "./dom.js";
import { BOXES, OFFERED, state } from "./state.js";

/** @typedef {import("./types").Part} Part */

/** How many sizes are compared unless somebody chooses. */
const TICKED_SIZES = 3;

/**
 * What the chosen model's samplers are, and their spacings; null before the server has said it.
 * @type {Record<string, string[]> | null}
 */
let samplers = null;

/**
 * Offers sizes or models: for all boxes, for one, and to be compared.
 * @param {string} name
 * @param {string[]} values
 */
export function offerChoices(name, values) {
    const ticked = name === "size" ? TICKED_SIZES : BOXES;
    const all = $(`#all-${name}`);
    const overriding = $(`#overrides-${name}`);
    const options = () => values.map((each) => new Option(each, each));
    all.replaceChildren(...options());
    overriding.replaceChildren(overriding.options[0], ...options());
    all.dataset.options = overriding.dataset.options = String(values.length);
    const list = $(`#compare-panel [data-what=${name}]`);
    const tick = $("label", list);
    list.dataset.options = String(values.length);
    /** @type {HTMLElement} */ (tick.parentElement).replaceChildren(
        ...values.map((each, index) => {
            const label = /** @type {Part} */ (tick.cloneNode(true));
            Object.assign($("input", label), { value: each, checked: index < ticked });
            /** @type {Text} */ (label.lastChild).data = each;
            return label;
        }),
    );
}

/**
 * Sets a field, if it is one that can have the value.
 * @param {Part} field
 * @param {unknown} value
 */
export function choose(field, value) {
    if (field.type === undefined || typeof value !== "string") return;
    const there = field.options && [...field.options].some((option) => option.value === value);
    if (field.options && !there) {
        if (!OFFERED.includes(field.name)) return; // another page offered it
        field.add(new Option(value, value));
        field.dataset.options = String(field.options.length); // a single choice may be hidden
    }
    field.value = value;
}

/**
 * Offers only the choices that go with the value of the setting they depend on.
 * @param {string} [changed] the setting that has changed
 */
export function offerDependent(changed) {
    for (const field of $$("#settings-panel [data-per]")) {
        const { of, allowed } = JSON.parse(String(field.dataset.per));
        const known = (of === "sampler" && samplers) || allowed;
        const here = ["", ...(known[settingField(of).value] ?? [])];
        offerOnly(field, here);
        if (changed === of || !here.includes(field.value)) field.value = "";
    }
}

/**
 * Hides a field's other choices.
 * @param {Part} field
 * @param {string[]} values
 */
function offerOnly(field, values) {
    for (const option of field.options) {
        option.hidden = option.disabled = !values.includes(option.value);
    }
}

/**
 * Shows the models that the server has by now, and the sizes, samplers and numbers of steps of the
 * one that is chosen; notes how many reference pictures it takes.
 * @param {import("./types").Answer} answer
 */
export function showOffered({ presets = [], sizes, models = [], samplers: taken, references }) {
    state.references = references || 1;
    if (models.length > 1) renew("model", models);
    if (!sizes) return; // the model cannot be read
    if (taken) {
        samplers = taken;
        offerOnly(settingField("sampler"), Object.keys(taken));
        offerDependent();
    }
    const before = [...$("#all-size").options].map(({ value }) => value);
    if (!sizes.every((each) => before.includes(each)) || before.length > sizes.length + 1) {
        renew("size", sizes);
    }
    presets.forEach((steps, index) => {
        $$("#presets button")[index].dataset.steps = steps;
    });
    showPressed();
}

/**
 * @param {string} name
 * @param {string[]} values
 */
function renew(name, values) {
    const { value } = $(`#all-${name}`);
    offerChoices(name, values);
    choose($(`#all-${name}`), value);
    choose($(`#overrides-${name}`), state.overrides[state.panelIndex][name] ?? "");
}

/** Marks the preset whose number of steps is filled in. */
export function showPressed() {
    const steps = settingField("steps").value;
    for (const button of $$("#presets button")) {
        button.ariaPressed = String(button.dataset.steps === steps);
    }
}
