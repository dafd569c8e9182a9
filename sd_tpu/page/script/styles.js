// The style board: styles as pictures, one of which is taken for all boxes or for selected ones.

import { neighbour } from "./cardkeys.js";
import { $, $$, isRightToLeft, listen, make, settingField } from "./dom.js";
import { tell } from "./line.js";
import { drawAllSoon, drawSoon } from "./live.js";
import { fold, panelButton, unfold } from "./panels.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { replace } from "./undo.js";

/** @typedef {import("./types").Part} Part */

const AGAIN = 1_000; // ms after which it is asked for pictures that are not drawn yet

/**
 * Names of styles, "" for none, and those of which there are pictures, of a model.
 * @type {{ model: string, names: string[], looks: Set<string> }}
 */
let known = { model: "", names: [], looks: new Set() };
let timer = 0;
/** What had the focus before the board. @type {Part | null} */
let before = null;

const field = () => $("#styles-panel input");
const isOpen = () => $("#styles-panel[data-open]") !== null;
const options = () => $$("#styles > :not([hidden])");

/**
 * Those of these names that have what is written.
 * @param {string[]} names
 * @param {string} text
 */
export const named = (names, text) =>
    names.filter((name) => name.toLowerCase().includes(text.trim().toLowerCase()));

function open() {
    const focused = document.activeElement;
    unfold(panelButton("styles"));
    before = /** @type {Part} */ (focused);
}

function leave() {
    fold();
    before?.focus();
}

/** Call when a panel is opened. */
export function showStyles() {
    if (!isOpen()) return;
    before = null;
    field().value = "";
    if (!matchMedia("(hover: none)").matches) field().focus(); // or half of a phone is its keyboard
    follow();
}

/** Asks which styles there are, and again while pictures are to come and the board is open. */
async function follow() {
    clearTimeout(timer);
    if (!isOpen()) return;
    const { value: model } = settingField("model");
    if (model !== known.model) known = { model, names: [], looks: new Set() };
    const answer = await ask("styles", { seen: [...known.looks] });
    const { styles = known.names, looks = {}, more } = answer;
    if (model !== known.model) return;
    if (String(styles) !== String(known.names)) build(styles);
    for (const [name, look] of Object.entries(looks)) {
        const index = known.names.indexOf(name);
        if (index >= 0) $("img", $(`#style-${index}`)).src = look;
        known.looks.add(name);
    }
    if (more) timer = setTimeout(follow, AGAIN);
}

/** @param {string[]} names */
function build(names) {
    known = { ...known, names, looks: new Set() };
    const { none } = $("#styles").dataset;
    $("#styles").replaceChildren(
        ...names.map((name, index) => {
            const option = make("div", { id: `style-${index}`, role: "option" });
            option.append(make("img", { alt: "" }), make("bdi", { textContent: name || none }));
            return option;
        }),
    );
    filter();
}

/** Shows the styles that are called as is written; at first the one that is set is chosen. */
function filter() {
    const all = $$("#styles > *");
    const found = named(
        all.map((option) => String(option.textContent)),
        field().value,
    );
    for (const option of all) option.hidden = !found.includes(String(option.textContent));
    $("#styles + .note").hidden = found.length > 0;
    const set = all[known.names.indexOf(settingField("style").value)];
    choose(field().value || !set ? options()[0] : set);
}

/** @param {Part | undefined} chosen */
function choose(chosen) {
    for (const option of $$("#styles > *")) option.ariaSelected = String(option === chosen);
    field().setAttribute("aria-activedescendant", chosen?.id ?? "");
    chosen?.scrollIntoView({ block: "nearest" });
}

const chosen = () => options().findIndex((option) => option.ariaSelected === "true");

/** @param {string} key */
function move(key) {
    const there = options();
    const columns = there.filter(({ offsetTop }) => offsetTop === there[0].offsetTop).length;
    choose(there[neighbour(chosen(), key, columns, there.length, isRightToLeft())]);
}

/** Takes a style for the selected boxes, or for all. @param {Part | undefined} option */
function take(option) {
    if (!option) return;
    const style = known.names[Number(option.id.split("-")[1])];
    const { indices } = state.selection;
    const { all, selected } = $("#styles").dataset;
    if (indices.length) {
        // What is empty on purpose is not what is left empty.
        const own = { style: style || " " };
        replace({
            overrides: state.overrides.map((box, index) =>
                indices.includes(index) ? { ...box, ...own } : box,
            ),
        });
        indices.forEach(drawSoon);
    } else {
        replace({ settings: { style } });
        drawAllSoon();
    }
    const told = String(indices.length ? selected : all).replace("%", String(option.textContent));
    leave();
    tell(told, "idle", true);
}

listen(
    "keydown",
    (target, event) => {
        const { key, isComposing, ctrlKey, metaKey } = /** @type {KeyboardEvent} */ (event);
        if (isComposing || ctrlKey || metaKey) return;
        if (target === field()) {
            if (key === "Escape") leave();
            else if (key === "Enter") take(options()[chosen()]);
            else if (key.startsWith("Arrow")) move(key);
            else return;
        } else if (key !== "/" || !field() || target.closest("input, textarea, select")) return;
        else if ($("dialog[open], .menu:popover-open")) return;
        else open();
        event.preventDefault();
        event.stopPropagation();
    },
    true,
);
listen("input", (target) => {
    if (target === field()) filter();
    else if (field() && target.closest("#selecting") && target.value === "/") {
        target.value = "";
        open();
    }
});
listen("mousedown", (target, event) => {
    if (target.closest("#styles")) event.preventDefault(); // the field keeps the focus
});
listen("click", (target) => take(/** @type {Part} */ (target.closest("#styles > *")) ?? undefined));
