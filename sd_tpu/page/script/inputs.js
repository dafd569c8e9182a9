// Pictures that are handed in: which box, or all, has which, and the small versions in the panels.

import { $, $$, boxes, settingField } from "./dom.js";
import { state, USES } from "./state.js";

/** @typedef {import("./types").Part} Part */

/**
 * The box that an element of a panel is about; undefined for all.
 * @param {Element} element
 */
export function boxIndexOf(element) {
    return element.closest("#overrides-panel") ? state.panelIndex : undefined;
}

/**
 * What a box has of a setting, or all have.
 * @param {number | undefined} index
 * @param {string} name
 */
export function valueFor(index, name) {
    const own = index === undefined ? "" : state.overrides[index]?.[name];
    return (own || settingField(name).value).trim();
}

/** The setting that an element of an upload's field belongs to. @param {Part} element */
export const uploadName = (element) =>
    $("[name]", /** @type {Element} */ (element.closest(".upload"))).name;

/** Whether a setting may be several pictures. @param {string} name */
export const takesSeveral = (name) => name === "reference";

export function showInputs() {
    for (const field of $$(".upload [name]")) {
        const names = valueFor(boxIndexOf(field), field.name).split(" ");
        const upload = /** @type {Element} */ (field.closest(".upload"));
        const images = $$("img", upload);
        while (images.length < names.length) {
            const another = /** @type {Part} */ (images[0].cloneNode());
            images[images.length - 1].after(another);
            images.push(another);
        }
        images.forEach((image, at) => {
            const small = state.inputs[names[at]];
            image.hidden = !small;
            if (small && image.src !== small) image.src = small;
        });
        // Also what the server has forgotten can be removed.
        $("[data-do=take_away]", upload).hidden = !names[0];
    }
    for (const button of $$("[data-do=paint]")) {
        button.disabled = !state.inputs[valueFor(boxIndexOf(button), "init_image")];
    }
    // Without the picture all strengths are the same; the first box with words is compared.
    const first = Math.max(
        0,
        boxes().findIndex((box) => box.value.trim()),
    );
    for (const [setting, image] of Object.entries(USES)) {
        const label = $(`[name=what][value=${setting}]`)?.closest("label");
        if (label) label.hidden = !valueFor(first, image);
    }
}

/** What the picture of the box can be used as, if it has one. */
export function showUses() {
    const uses = $("#overrides-panel .uses");
    if (uses) uses.hidden = !$(`[data-do=begin][data-index="${state.panelIndex}"]`);
}
