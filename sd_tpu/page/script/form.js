// The form: read, written, and kept by the browser.

import { choose, offerChoices, offerDependent } from "./choices.js";
import { $, boxes, seedBox, settingField, settingFields, title } from "./dom.js";
import { hooks } from "./hooks.js";
import { BOXES, state } from "./state.js";
import { local, store } from "./storage.js";

/** @typedef {import("./types").Form} Form */

/** @returns {Form} */
export function readForm() {
    return {
        prompts: boxes().map((box) => box.value),
        seed: seedBox().value,
        settings: Object.fromEntries(settingFields().map((field) => [field.name, field.value])),
        overrides: state.overrides.map((box) => ({ ...box })),
        keep: [...state.keep],
    };
}

/**
 * Fills in a form, or a part of one.
 * @param {import("./types").FormPart} form
 */
export function fill({ prompts, seed, settings = {}, sizes, own, overrides = own, keep }) {
    state.filling = true;
    try {
        if (prompts) for (const [index, box] of boxes().entries()) write(box, prompts[index] ?? "");
        if (seed !== undefined) seedBox().value = seed;
        if (sizes) offerChoices("size", sizes);
        for (const [name, value] of Object.entries(settings)) {
            const field = settingField(name);
            if (field) choose(field, value);
            offerDependent();
        }
        const each = { length: BOXES };
        if (overrides)
            state.overrides = Array.from(each, (_, index) => onlyTexts(overrides[index]));
        if (keep) state.keep = Array.from(each, (_, index) => keep[index] === true);
    } finally {
        state.filling = false;
    }
    hooks.filled();
    hooks.changed();
}

/**
 * The texts among overrides, which a browser may have stored long ago.
 * @param {Record<string, unknown> | null | undefined} stored
 * @returns {import("./types").Overrides}
 */
export function onlyTexts(stored) {
    const texts = Object.entries(stored ?? {}).filter(([, value]) => typeof value === "string");
    return /** @type {import("./types").Overrides} */ (Object.fromEntries(texts));
}

/**
 * Writes into a box so that Gradio learns of it, as it does of a key.
 * @param {import("./types").Part} box
 * @param {string} text
 */
export function write(box, text) {
    if (box.value === text) return;
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
}

/**
 * The settings of a form that have changed since an earlier one.
 * @param {Form} before
 * @param {Form} now
 */
export function changedSettings(before, now) {
    return Object.fromEntries(
        Object.entries(now.settings).filter(([name, value]) => value !== before.settings[name]),
    );
}

/**
 * The seed that a text is; null if a new one is to be drawn.
 * @param {string} text
 */
export function parseSeed(text) {
    return text.trim() !== "" && Number(text) >= 0 ? Number(text) : null;
}

export const fixedSeed = () => parseSeed(seedBox().value);

/** Keeps the form for the next visit. */
export function saveForm() {
    const form = readForm();
    const live = $("#live input").checked || state.look.live;
    store(local, `sd_tpu/${title()}`, { browser: state.browser, live, form });
    state.lastForm = form;
}
