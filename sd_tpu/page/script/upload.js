// Handing pictures in: as files, dropped, pasted, or one that was drawn.

import { register } from "./actions.js";
import { $, $$, boxes, cards, listen, overridesButton, settingField } from "./dom.js";
import { boxIndexOf, takesSeveral, uploadName, valueFor } from "./inputs.js";
import { tell } from "./line.js";
import { drawAllSoon, drawSoon } from "./live.js";
import { fold, panelButton, unfold } from "./panels.js";
import { given, movedToAll, overridesBesideAll, withAnother } from "./put.js";
import { ask, upload } from "./server.js";
import { state } from "./state.js";
import { replace } from "./undo.js";

/** @typedef {import("./types").Answer} Answer */
/** @typedef {import("./types").Part} Part */
/** @typedef {number | undefined} Index a box, or undefined for all */

/**
 * Asks something about a picture's file.
 * @param {File | undefined} file
 * @param {"read" | "take"} action
 * @param {Omit<import("./types").Fields<"take">, "file">} more
 * @returns {Promise<Answer>}
 */
async function send(file, action, more = {}) {
    const { large, max } = $("#read-panel .drop").dataset;
    if (!file) return {};
    if (file.size > Number(max)) {
        tell(String(large), "wrong", true);
        return {};
    }
    try {
        const { path } = await upload(file);
        return await ask(action, { file: path, ...more });
    } catch {
        tell(String($("#generate").dataset.failed), "wrong", true);
        return {};
    }
}

/** Fills in what a picture was drawn with. @param {File | undefined} file */
export async function read(file) {
    const { form } = await send(file, "read");
    if (form) fold();
}

/** The last removals of pictures, by where: what is on its way then stays away. */
const removals = new Map();

/**
 * Lets a box, or all, use a picture, or none.
 * @param {Index} index
 * @param {string} name
 * @param {string} input
 */
function put(index, name, input) {
    const settings = given(name, input);
    if (!input) removals.set(`${index} ${name}`, {});
    for (const each of Object.keys(settings)) delete state.incoming[`${index} ${each}`];
    if (index === undefined) {
        replace({ settings, overrides: overridesBesideAll(state.overrides, name) });
        return drawAllSoon();
    }
    for (const each of Object.keys(settings)) {
        // A space is none, though there is one for all.
        if (!settings[each] && settingField(each).value) settings[each] = " ";
    }
    replace({
        overrides: state.overrides.map((box, at) => (at === index ? { ...box, ...settings } : box)),
    });
    drawSoon(index);
}

/**
 * Lets a box, or all, use a picture once the server has it, unless something has been put there
 * since; returns whether it does.
 * @param {Promise<Answer>} taken
 * @param {Index} index
 * @param {string} name
 */
async function putWhen(taken, index, name) {
    const where = `${index} ${name}`;
    const before = removals.get(where);
    state.incoming[where] = taken;
    const { input } = await taken;
    // Several come one behind the other, and none in place of another that is on its way.
    const adds = takesSeveral(name) && state.references > 1;
    if (!input || removals.get(where) !== before) return false;
    if (!adds && state.incoming[where] !== taken) return false;
    const there = takesSeveral(name) ? valueFor(index, name) : "";
    put(index, name, withAnother(there, input, takesSeveral(name) ? state.references : 1));
    return true;
}

/**
 * Uses a picture of a card as a box's start, control or reference picture.
 * @param {string} name
 * @param {number} from the card
 */
export async function useAs(name, from, index = from) {
    if (await putWhen(ask("take", { index: from }), index, name)) {
        unfold(overridesButton(index), opened("overrides", name));
    }
}

/**
 * Uses a picture of the history for all boxes.
 * @param {string} name
 * @param {string} id
 */
export async function useFromHistory(name, id) {
    if (await putWhen(ask("take", { id }), undefined, name)) showForAll(name);
}

/**
 * Uses a file as a picture, or as a mask; dropped beside all cards it may be one to read.
 * @param {File | undefined} file
 * @param {Index} index
 */
export async function handIn(file, index, name = "init_image", more = {}) {
    const mask = name === "mask" ? { mask_of: valueFor(index, "init_image") } : {};
    const taken = send(file, "take", { ...mask, ...more }).then((answer) => {
        if (answer.form) fold();
        // Until the server has made it small.
        if (file && answer.input) state.inputs[answer.input] ??= URL.createObjectURL(file);
        return answer;
    });
    if ((await putWhen(taken, index, name)) && index === undefined) showForAll(name);
}

/** Shows the settings for all with such a picture. @param {string} name */
function showForAll(name) {
    unfold(panelButton("settings"), opened("settings", name));
}

/**
 * Opens the part of a panel that has a picture.
 * @param {string} panel
 * @param {string} name
 */
function opened(panel, name) {
    const there = /** @type {Part} */ ($(`#${panel}-panel [name=${name}]`).closest(".handed"));
    there.open = true;
    return there;
}

/**
 * Hands in files that were chosen for a field, or dropped there: the first, or all in their order.
 * @param {File[]} files
 * @param {Part} field
 */
export async function handInTo(files, field) {
    const [index, name] = [boxIndexOf(field), uploadName(field)];
    for (const file of takesSeveral(name) ? files : files.slice(0, 1)) {
        await handIn(file, index, name);
    }
}

listen("dragover", (_, event) => event.preventDefault());
listen("drop", (target, event) => {
    const { dataTransfer } = /** @type {DragEvent} */ (event);
    const files = [...(dataTransfer?.files ?? [])];
    const [file] = files;
    if (!file) return;
    event.preventDefault();
    if (!state.arrived) return;
    const index = cards().indexOf(/** @type {Part} */ (target.closest(".card")));
    if (target.closest("#read-panel")) read(file);
    else if (target.closest(".upload")) handInTo(files, target);
    else if (index >= 0) handIn(file, index);
    else handIn(file, undefined, "init_image", { or_read: true });
});
listen("paste", (target, event) => {
    const {
        types,
        files: [file],
    } = /** @type {DataTransfer} */ (event.clipboardData);
    const index = boxes().indexOf(target);
    if (!file || types.includes("text/plain")) return; // some programs add a picture to words
    if (state.arrived) handIn(file, index < 0 ? boxIndexOf(target) : index);
});

register({
    begin({ index }) {
        const uses = $("#overrides-panel .uses");
        if (uses) unfold(overridesButton(Number(index)), uses);
        else useAs("init_image", Number(index));
    },
    use_as: ({ index = state.panelIndex, name }) => useAs(String(name), Number(index)),
    for_all(_, button) {
        const names = $$("[name]", /** @type {Part} */ (button.closest(".handed"))).map(
            ({ name }) => name,
        );
        replace(movedToAll(state.overrides, state.panelIndex, names));
        drawAllSoon();
    },
    take_away: (_, button) => put(boxIndexOf(button), uploadName(button), ""),
});
