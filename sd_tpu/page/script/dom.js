// Short names for elements of the page and for listening to them.

/** @typedef {import("./types").Part} Part */

/**
 * The first element that a selector finds. It is typed as if there were always one: where there
 * may be none, callers use `?.`.
 * @param {string} selector
 * @param {ParentNode} within
 * @returns {Part}
 */
export const $ = (selector, within = document) =>
    /** @type {Part} */ (within.querySelector(selector));

/**
 * @param {string} selector
 * @param {ParentNode} within
 * @returns {Part[]}
 */
export const $$ = (selector, within = document) =>
    /** @type {Part[]} */ ([...within.querySelectorAll(selector)]);

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} properties
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export const make = (tag, properties) => Object.assign(document.createElement(tag), properties);

/**
 * Listens on the whole document, whose elements Gradio may replace at any time.
 * @template {keyof DocumentEventMap} Type
 * @param {Type} type
 * @param {(target: Part, event: DocumentEventMap[Type]) => void} act
 * @param {boolean} capture
 */
export function listen(type, act, capture = false) {
    document.addEventListener(
        type,
        (event) => act(/** @type {Part} */ (event.target), event),
        capture,
    );
}

/** @param {string} file */
export const link = (file) => make("a", { href: file, download: "" });

export const boxes = () => $$(".prompt textarea");
export const cards = () => $$("#cards > .card");
export const seedBox = () => $("#seed input");
export const title = () => String($("header[lang]").dataset.title);

/** The settings for all boxes. */
export const settingFields = () => $$("#settings-panel [name]");
/** @param {string} name */
export const settingField = (name) => $(`#settings-panel [name="${CSS.escape(name)}"]`);

/** The button that opens the overrides of a box. @param {number | string} index */
export const overridesButton = (index) => $(`.below .fold[data-index="${index}"]`);

/** Whether the page is read from right to left. */
export const isRightToLeft = () => document.documentElement.dir === "rtl";
