// The history: pictures that this browser has made, a page at a time, searched and filtered.

import { register } from "./actions.js";
import { $, $$ } from "./dom.js";
import { fold } from "./panels.js";
import { ask } from "./server.js";
import { state } from "./state.js";

/** @typedef {import("./types").OfHistory} OfHistory */
/** @typedef {import("./types").Part} Part */

const DELAY = 150; // ms without a key after which is searched
const NOTICE = 350; // ms until a pointer's aim is at what has moved to where it points
const shown = state.history;

/**
 * Does something with the history, and shows it if its panel is open.
 * @param {OfHistory["act"]} act
 * @param {Partial<OfHistory>} more
 * @returns {Promise<import("./types").Answer>}
 */
export async function showHistory(act = "show", more = {}) {
    const panel = $("#history-panel[data-open]");
    if (!panel && act === "show") return {};
    const number = ++shown.number;
    // What is known already is seen, but no click takes it: another may be there in a moment.
    if (panel) $(".found", panel).ariaBusy = "true";
    const answer = await ask("history", { act, ...shown.filter, ...more });
    if (!panel || number !== shown.number) return answer;
    const moved = answer.history !== undefined && showFound(panel, answer.history);
    setTimeout(
        () => {
            if (number === shown.number) $(".found", panel).ariaBusy = "false";
        },
        moved ? NOTICE : 0,
    );
    return answer;
}

/**
 * Shows what was found; returns whether anything that was there before is elsewhere.
 * @param {Part} panel
 * @param {string} html
 */
function showFound(panel, html) {
    const order = () => $$("figure[data-id]", panel).map(({ dataset }) => dataset.id);
    const before = order();
    $(".found", panel).innerHTML = html;
    $$("time", panel).forEach(showTime);
    const after = order();
    return before.some((id, at) => after[at] !== id);
}

/** Puts a picture of the history back into the form. @param {string} id */
export async function useAgain(id) {
    const { form } = await ask("again", { id });
    if (form) closeForForm();
}

function closeForForm() {
    fold();
    $("#generate").focus();
}

/** @param {Partial<OfHistory>} data */
async function change({ act, id, to, name }) {
    if (act === "board") showBoard(name ?? "");
    if (act === "more") shown.filter.pages += 1;
    if (act === "only") {
        limit({ favourites: !shown.filter.favourites });
        $("#history-panel [data-act=only]").ariaPressed = String(shown.filter.favourites);
    }
    const answer = await showHistory(act, { id, to, name });
    if (answer.board !== undefined) showBoard(answer.board);
    if (answer.form) closeForForm();
    if (answer.kind === "wrong" || answer.history === undefined) return;
    for (const star of $$(`#cards [data-do=star][data-id="${id}"]`)) star.ariaPressed = String(to);
    const undo = $("#history-panel .undo");
    if (act === "restore") undo.hidden = true;
    if (act !== "delete" && act !== "clear" && act !== "unmake") return;
    undo.hidden = false;
    $("span", undo).textContent = answer.news ?? "";
    // A board is taken back by being made again, with the pictures that were on it.
    shown.deleted = act === "unmake" ? { name: String(name), ids: answer.gone ?? [] } : null;
    $("button", undo).focus();
}

async function restore() {
    if (!shown.deleted) return change({ act: "restore" });
    const { boards } = await showHistory("make", shown.deleted);
    if (boards !== undefined) $("#history-panel .undo").hidden = true; // else it can be tried again
}

/** Shows only some of it. @param {Partial<typeof shown.filter>} filter */
function limit(filter) {
    Object.assign(shown.filter, { pages: 1, ...filter });
    // Not all of what would be cleared is seen.
    $("#history-panel [data-act=clear]").hidden =
        shown.filter.favourites || shown.filter.words !== "" || shown.filter.board !== "";
}

/** Shows one board, or all pictures where it has no name. @param {string} board */
export function showBoard(board) {
    if (board !== shown.filter.board) limit({ board });
}

/** @param {string} words */
export function search(words) {
    limit({ words });
    clearTimeout(shown.timer);
    shown.timer = setTimeout(showHistory, DELAY);
}

/**
 * Writes a time as people do here: the server knows neither where nor how.
 * @param {Part} time
 */
function showTime(time) {
    time.textContent = new Date(time.dateTime).toLocaleString(document.documentElement.lang, {
        dateStyle: "medium",
        timeStyle: "short",
    });
}

register({
    history(data) {
        if (data.act === "again") return useAgain(String(data.id));
        return data.act === "restore" ? restore() : change(data);
    },
    star: ({ id }, button) =>
        change({ act: "favourite", id, to: String(button.ariaPressed !== "true") }),
});
