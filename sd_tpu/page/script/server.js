// Requests to the server, through Gradio, and what is done with every answer.

import { link, settingField, $ } from "./dom.js";
import { changedSettings, fill, readForm } from "./form.js";
import { hooks } from "./hooks.js";
import { news, tell } from "./line.js";
import { state } from "./state.js";
import { remember } from "./undo.js";

/** @typedef {import("./types").Answer} Answer */
/** @typedef {import("./types").Asked} Asked */
/** @typedef {import("./types").Hub} Hub */

/** @type {Hub} */
let hub;
/** @type {() => void} */
let connect;
/** When Gradio has said how the server is reached. @type {Promise<void>} */
export const connected = new Promise((resolve) => {
    connect = resolve;
});

/** @param {Hub} reached */
export function connectTo(reached) {
    hub = reached;
    connect();
}

/** Follows a run: the server sends its cards and its line. @param {Asked} asked */
export const stream = (asked) => hub.stream(asked);
/** @param {File} file */
export const upload = (file) => hub.upload(file);

/**
 * A request, with the form as it is now.
 * @param {string} action
 * @param {Record<string, unknown>} more
 * @returns {Asked}
 */
export function request(action, more = {}) {
    return {
        do: action,
        lang: $("header[lang]").lang,
        browser: state.browser,
        run: state.run.name,
        form: readForm(),
        ...more,
    };
}

/**
 * Asks the server and shows its answer; the answer is empty where the server is gone.
 * @param {string} action
 * @param {Record<string, unknown>} more
 * @returns {Promise<Answer>}
 */
export async function ask(action, more = {}) {
    try {
        const asked = request(action, more);
        const answer = await hub.answer(asked);
        // By now another model may have been chosen.
        if (action === "model" && more.model !== settingField("model").value) return {};
        if (answer.form) {
            if (action === "model") {
                Object.assign(answer.form.settings ?? {}, changedSettings(asked.form, readForm()));
            } else remember();
            fill(answer.form);
            if (answer.run) hooks.showRun(answer.run, true);
        }
        if (answer.told) tell(answer.told, answer.kind ?? "idle", true);
        if (answer.news) news(answer.news);
        if (answer.file) link(answer.file).click();
        return answer;
    } catch {
        return {};
    }
}
