// Requests to the server, through Gradio, and what is done with every answer.

import { link, settingField, $ } from "./dom.js";
import { changedSettings, fill, readForm } from "./form.js";
import { hooks } from "./hooks.js";
import { news, tell } from "./line.js";
import { state } from "./state.js";
import { remember } from "./undo.js";

/** @typedef {import("./types").Answer} Answer */
/** @typedef {import("./types").Asked} Asked */
/**
 * @template A
 * @typedef {import("./types").More<A>} More
 */
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
 * A message, with the form as it is now.
 * @template {Asked["do"]} A
 * @param {A} action
 * @param {More<A>} more
 */
export function request(action, ...more) {
    return /** @type {Asked} */ ({
        do: action,
        lang: $("header[lang]").lang,
        browser: state.browser,
        run: state.run.name,
        form: readForm(),
        ...more[0],
    });
}

/**
 * Asks the server and shows its answer; the answer is empty where the server is gone.
 * @template {Asked["do"]} A
 * @param {A} action
 * @param {More<A>} more
 */
export const ask = (action, ...more) => send(request(action, ...more));

/**
 * Sends a message, as `ask` does.
 * @param {Asked} asked
 * @returns {Promise<Answer>}
 */
export async function send(asked) {
    try {
        const answer = await hub.answer(asked);
        // By now another model may have been chosen.
        if (asked.do === "model" && asked.model !== settingField("model").value) return {};
        if (answer.form) {
            if (asked.do === "model") {
                Object.assign(answer.form.settings ?? {}, changedSettings(asked.form, readForm()));
            } else remember(readForm(), Boolean(answer.run));
            fill(answer.form);
            if (answer.run) hooks.showRun(answer.run, true);
        }
        if (answer.message) tell(answer.message, answer.kind ?? "idle", true);
        if (answer.news) news(answer.news);
        if (answer.file) link(answer.file).click();
        return answer;
    } catch {
        hooks.unreachable();
        return { unreachable: true };
    }
}
