// Which box, or all, uses a picture that was handed in: pure, on lists of overrides.

/** @typedef {import("./types").Overrides} Overrides */

/**
 * Overrides once all boxes use an input. A mask for all is not one of the start pictures that boxes
 * have of their own, nor is a box's own mask one of another start picture for all.
 * @param {Overrides[]} overrides
 * @param {string} name the setting: init_image, mask, ...
 * @returns {Overrides[]}
 */
export function overridesBesideAll(overrides, name) {
    return overrides.map(({ mask, ...box }) => {
        if (name === "mask" && box.init_image?.trim() && !mask) return { ...box, mask: " " };
        return mask && (name !== "init_image" || box.init_image) ? { ...box, mask } : box;
    });
}

/**
 * What a box, or all, is given with an input: a mask belongs to the start picture that was there.
 * @param {string} name
 * @param {string} input
 * @returns {Overrides}
 */
export function given(name, input) {
    return { [name]: input, ...(name === "init_image" ? { mask: "" } : {}) };
}

/**
 * The names of pictures with another behind them, of which the last `most` stay: so one takes the
 * place of one.
 * @param {string} names with spaces between
 * @param {string} name
 * @param {number} most
 */
export function withAnother(names, name, most) {
    return [...names.split(" ").filter(Boolean), name].slice(-most).join(" ");
}

/**
 * The settings of `names` move from one box to all: values for all, and the overrides that stay.
 * @param {Overrides[]} overrides
 * @param {number} index
 * @param {string[]} names
 */
export function movedToAll(overrides, index, names) {
    const from = overrides[index];
    return {
        settings: Object.fromEntries(
            names.filter((name) => from[name]).map((name) => [name, from[name].trim()]),
        ),
        overrides: overrides.map((box) =>
            Object.fromEntries(Object.entries(box).filter(([name]) => !names.includes(name))),
        ),
    };
}
