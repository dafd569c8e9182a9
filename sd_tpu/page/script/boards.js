// Boards of the history: made, renamed, and filled with pictures, by a list or by drag.

import { register } from "./actions.js";
import { $, $$, cards, listen } from "./dom.js";
import { showBoard, showHistory } from "./history.js";
import { state } from "./state.js";

/** @typedef {import("./types").Part} Part */
/** @typedef {import("./types").OfHistory} OfHistory */

const dialog = () => $("#boards");

/** The picture that the dialog is about, or the board that it renames. */
let about = { id: "", name: "" };

/** The pictures that are dragged. @type {string[]} */
let dragged = [];

/** Opens the dialog: for a picture, for a new board, or to rename one. */
async function open({ id = "", name = "" }) {
    about = { id, name };
    const act = name ? "rename" : "make";
    const title = $("b", dialog());
    title.textContent = id ? dialog().ariaLabel : String(title.dataset[act]);
    $("form button", dialog()).textContent = String($("form button", dialog()).dataset[act]);
    $("[name=name]", dialog()).value = name;
    $(".wrong", dialog()).textContent = "";
    $(".list", dialog()).replaceChildren();
    dialog().showModal();
    if (id) await change("boards", { ids: [id] });
    else $("[name=name]", dialog()).select();
    $(".list input", dialog())?.focus();
}

/**
 * Does something with boards, and shows in the dialog how they are then; returns whether it is done.
 * @param {OfHistory["act"]} act
 * @param {Partial<OfHistory>} more
 */
async function change(act, more) {
    const answer = await showHistory(act, more);
    const done = answer.boards !== undefined;
    const current = !more.ids || more.ids[0] === about.id; // else another was asked about since
    if (done && about.id && current) $(".list", dialog()).innerHTML = answer.boards ?? "";
    $(".wrong", dialog()).textContent = done ? "" : (answer.message ?? "");
    if (answer.board !== undefined) showBoard(answer.board);
    return done;
}

listen("submit", async (target, event) => {
    if (!target.closest("#boards")) return;
    event.preventDefault();
    const { id, name } = about;
    const written = $("[name=name]", dialog());
    const done = name
        ? await change("rename", { name, to: written.value })
        : await change("make", { name: written.value, ids: id ? [id] : [] });
    if (!done) return written.focus();
    written.value = "";
    if (!id) dialog().close();
});

listen("change", (target) => {
    const { name } = target.dataset;
    if (!name || !target.closest("#boards .list")) return;
    const act = target.checked ? "put" : "take_off";
    change(act, { name, ids: [about.id] }).then(() =>
        $$(".list input", dialog())
            .find((each) => each.dataset.name === name)
            ?.focus(),
    );
});

/** The name in the history of a figure's picture; none if it is not there. @param {Part} within */
const kept = (within) => $("[data-do=boards]", within)?.dataset.id;

/** The picture that is full screen. */
function viewed() {
    const { id, name } = /** @type {import("./types").Viewed} */ (state.viewed);
    return id ?? kept(cards()[Number(name)]);
}

// B, on a picture of the history or full screen; on a card it presses a button of its menu.
listen("keydown", (target, event) => {
    const { code, ctrlKey, metaKey, altKey } = /** @type {KeyboardEvent} */ (event);
    if (code !== "KeyB" || ctrlKey || metaKey || altKey || dialog()?.open) return;
    if (target.matches("input, textarea")) return;
    const picture = /** @type {Part | null} */ (target.closest("#history-panel li"));
    const id = $("#viewer").open ? viewed() : picture && kept(picture);
    if (!id) return;
    event.preventDefault(); // or the letter is written into the dialog
    open({ id });
});

listen("dragstart", (target) => {
    const from = /** @type {Part | null} */ (target.closest("#history-panel li, .card"));
    const all = from?.matches(".selected") ? $$("#cards > .selected") : [from];
    dragged = all.flatMap((each) => (each && kept(each)) ?? []);
});
listen("dragend", () => {
    dragged = [];
});
for (const type of /** @type {const} */ (["dragenter", "dragover", "dragleave", "drop"])) {
    listen(
        type,
        (target, event) => {
            const board = /** @type {Part | null} */ (target.closest?.("[data-drop]"));
            for (const each of $$(".dropping")) each.classList.remove("dropping");
            if (!board || !dragged.length) return;
            event.preventDefault();
            event.stopPropagation(); // the picture is not handed in
            if (type === "drop") showHistory("put", { name: board.dataset.name, ids: dragged });
            else if (type !== "dragleave") board.classList.add("dropping");
        },
        true,
    );
}

register({ boards: ({ id, name }) => open({ id, name }) });
