// The full-screen view of a picture of a card or of the history.

import { register } from "./actions.js";
import { drawSaid, showStrength } from "./change.js";
import { $, $$, link, listen } from "./dom.js";
import { useAgain } from "./history.js";
import { drawExtended, drawLarger } from "./remake.js";
import { again } from "./run.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { useAs, useFromHistory } from "./upload.js";
import { extension, offerExtension } from "./extend.js";
import { showWhole } from "./zoom.js";

/** @typedef {import("./types").Part} Part */
/** @typedef {import("./types").Viewed} Viewed */

/** The line that changes the picture. */
const form = () => $("#viewer form");

/** A figure is found again by its name: it may be made anew. @param {Part} figure */
const nameOf = ({ dataset }) => String(dataset.id ?? dataset.index);

/** Shows the next picture, or the one before. @param {number} by */
export function leaf(by) {
    const { all, name } = /** @type {Viewed} */ (state.viewed);
    const figures = $$(all);
    const next = figures.findIndex((figure) => nameOf(figure) === name) + by;
    const figure = figures.at(next % figures.length);
    if (figure) $(".view", figure)?.click();
}

/** @param {Part} figure */
async function open(figure) {
    const all = figure.closest("#history-panel") ? "#history-panel figure" : "#cards figure.done";
    const { id, index } = figure.dataset;
    const here = { name: nameOf(figure), all, id, which: id ? { id } : { index: Number(index) } };
    state.viewed = here;
    const viewer = $("#viewer");
    const image = $("img", figure);
    $("img", viewer).alt = image.alt;
    showBefore();
    showWhole();
    offerExtension();
    $("[data-do=larger_shown]", viewer).hidden = form().hidden = Boolean(id); // it is on no card
    if (!id) showStrength(form(), [Number(index)]);
    $(".words", viewer).textContent = image.alt;
    $(".facts", viewer).textContent = $(".seed, .remark", figure)?.textContent ?? "";
    show(image.src, $("a[download]", figure));
    const alone = $$(all).length < 2;
    for (const button of $$("[data-do=leaf]", viewer)) button.hidden = alone;
    if (!viewer.open) {
        viewer.showModal();
        $(".bar button:not([hidden])", viewer).focus(); // where arrows leaf
    }
    ask("before", here.which).then(({ before, unit }) => {
        if (state.viewed !== here) return;
        showBefore(before);
        offerExtension(unit);
    });
    if (!id) return;
    // The history's own files are asked for when they are looked at.
    const { view } = await ask("history", { act: "view", id });
    if (state.viewed !== here) return;
    if (view) show(view, link(view));
    else viewer.close();
}

/**
 * Shows the picture's start picture over it, as far as the slider says.
 * @param {string} [address]
 */
function showBefore(address) {
    const [, image] = $$("#viewer img");
    const slider = $("#viewer [type=range]");
    for (const each of [image, slider]) each.hidden = !address;
    image.src = address ?? "";
    slider.value = "50";
    slide(slider);
}

/** Moves the edge between the two pictures to where the slider is. @param {Part} slider */
export function slide(slider) {
    slider.parentElement?.style.setProperty("--at", `${slider.value}%`);
}

/** Gives the view the shape of a picture. @param {Part} image */
export function fit(image) {
    const { style } = /** @type {HTMLElement} */ (image.parentElement);
    image.decode().then(
        () => style.setProperty("--ratio", String(image.naturalWidth / image.naturalHeight)),
        () => {},
    );
}

/**
 * @param {string} address
 * @param {{ href: string, download: string }} file
 */
function show(address, file) {
    const download = $("#viewer a");
    const image = $("#viewer img");
    image.src = address;
    fit(image);
    if (document.activeElement === download && !file) $("#viewer [data-do=close]").focus();
    download.hidden = !file;
    if (file) Object.assign(download, { href: file.href, download: file.download });
}

/** Shows the picture of a card again once another has come in its place. */
export function refreshViewed() {
    const { id, name } = state.viewed ?? {};
    if (id || !$("#viewer").open) return;
    const figure = $(`#cards figure.done[data-index="${name}"]`);
    if (figure && $("img", figure).src !== $("#viewer img").src) open(figure);
}

/** Says in the view how a run goes. */
export function followViewed() {
    if ($("#viewer").open && !form().hidden) {
        $("#viewer .facts").textContent = $("#line p").textContent;
    }
}

listen("submit", (target, event) => {
    if (target !== form()) return;
    event.preventDefault();
    drawSaid(form(), [Number(/** @type {Viewed} */ (state.viewed).name)]);
});
// C goes to the line, as it does on a card.
listen("keydown", (target, event) => {
    const { code, ctrlKey, metaKey, altKey } = /** @type {KeyboardEvent} */ (event);
    if (code !== "KeyC" || ctrlKey || metaKey || altKey || target.name === "words") return;
    if (!$("#viewer")?.open || $("dialog[open]:not(#viewer)") || form().hidden) return;
    event.preventDefault();
    $("[name=words]", form()).focus();
});

/** Closes the view; returns the picture that was in it. */
function close() {
    $("#viewer").close();
    return /** @type {Viewed} */ (state.viewed);
}

register({
    view: (_, button) => open(/** @type {Part} */ (button.closest("figure"))),
    leaf: ({ step }) => leaf(Number(step)),
    use() {
        const { id, name } = close();
        if (id) useAgain(id);
        else again(Number(name));
    },
    begin_shown({ name: as }) {
        const { id, name } = close();
        if (id) useFromHistory(String(as), id);
        else useAs(String(as), Number(name));
    },
    extend() {
        const index = Number(close().name);
        drawExtended({ index, sides: extension() });
    },
    larger_shown: () => drawLarger(Number(close().name)),
    large: () => ask("large", /** @type {Viewed} */ (state.viewed).which),
});
