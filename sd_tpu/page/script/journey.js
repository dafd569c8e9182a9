// Journeys: pictures on the way from one card's picture to another's. They fill a strip as they
// come, which is scrubbed, and are shown as one that moves at the end.

import { register } from "./actions.js";
import { $, $$, listen, make } from "./dom.js";
import { start } from "./run.js";
import { ask, request } from "./server.js";
import { state } from "./state.js";

const dialog = () => $("#journey");
const scrubber = () => $("#journey .strip input");

/** The pictures, as far as they have come, and the one that moves. @type {string[]} */
let way = [];
let moving = "";
let first = ""; // what is seen until one has come
let drawing = false; // whether one is drawn, even if it was stopped meanwhile
let asking = false; // whether the server is being asked for them

/** Offers journeys from a card's picture to another's. @param {string} index */
function plan(index) {
    const [from, to] = $$("select", dialog());
    const options = () =>
        $$("#cards figure.done").map(({ dataset }) => {
            const number = Number(dataset.index) + 1;
            const name = String(from.dataset.picture)
                .replace("%", String(number))
                .replace("§", String($(`#picture-${number} .words`).textContent));
            return new Option(name, dataset.index);
        });
    from.replaceChildren(...options());
    to.replaceChildren(to.options[0], ...options());
    from.value = index;
    dialog().showModal();
    showJourney();
}

/** Shows the journey that was drawn last, if there is one; returns its address. */
export async function showJourney() {
    if (drawing) return ""; // another is on its way
    const [{ view = "" }, { way: pictures = [] }] = await Promise.all([ask("movie"), ask("way")]);
    moving = view;
    first = "";
    $("#journey .files").hidden = !view;
    fillStrip(pictures);
    return view;
}

/** @param {string[]} pictures */
function fillStrip(pictures) {
    way = pictures;
    $("#journey .strip").hidden = !way.length;
    scrubber().max = String(Math.max(0, way.length - 1));
    const slots = way.map((address) => {
        const slot = make("span", {});
        if (address) slot.style.backgroundImage = `url("${address}")`;
        return slot;
    });
    $("#journey .strip div").replaceChildren(...slots);
    look();
}

/** Shows a picture of the strip, or what moves; while it comes, the latest. @param {number} [at] */
function look(at) {
    const next = way.indexOf("");
    const shown = at ?? (next < 0 ? way.length : next) - 1;
    const address = (at === undefined && moving) || way[shown] || first;
    if (address && $("#journey img").getAttribute("src") !== address) {
        $("#journey img").src = address;
    }
    $("#journey .stage").hidden = !address;
    for (const [index, slot] of $$("#journey .strip span").entries()) {
        slot.classList.toggle("at", index === at);
    }
}

/** @param {boolean} on whether a journey is drawn, or asked for */
function showButtons(on) {
    $("#journey .status").textContent = on ? "" : $("#line p").textContent;
    const focused = document.activeElement?.closest("#journey .bar");
    $("#journey [data-do=travel]").hidden = on;
    $("#journey .halt").hidden = !on;
    if (focused) $("#journey .bar button:not([hidden])").focus();
}

/** Call when the server has said how a run goes: shows what has come by then. */
export async function followJourney() {
    if (!drawing) return;
    $("#journey .status").textContent = $("#line p").textContent;
    if (asking || !dialog().open) return;
    asking = true;
    const { way: pictures = [] } = await ask("way");
    asking = false;
    if (drawing && pictures.length) fillStrip(pictures);
}

/** Call when no run goes on any more, whether it has `finished` or not. */
export async function endJourney(finished = true) {
    if (!drawing) return;
    state.journey = drawing = false;
    showButtons(false);
    if (finished && (await showJourney()) && !dialog().open) dialog().showModal();
}

async function travel() {
    const [index, to, count] = $$("#journey select").map(({ value }) => value);
    moving = "";
    first = $(".view img", $(`#picture-${Number(index) + 1}`)).src;
    fillStrip(Array(Number(count)).fill(""));
    $("#journey .files").hidden = true;
    showButtons(true);
    const asked = { index: Number(index), to: to === "" ? null : Number(to), count: Number(count) };
    // Another run may end before it is begun, which is not its end.
    state.journey = drawing = await start(request("journey", asked));
    if (drawing) return;
    fillStrip([]);
    showButtons(false);
}

listen("input", (target) => {
    if (target === scrubber()) look(Number(target.value));
});
// A mouse scrubs without being pressed; what moves is back where it leaves the strip.
listen("pointermove", (target, { clientX }) => {
    if (target !== scrubber()) return;
    const { left, width } = target.getBoundingClientRect();
    const share = Math.min(0.999, Math.max(0, (clientX - left) / width));
    target.value = String(Math.floor(share * way.length));
    look(Number(target.value));
});
listen("pointerout", (target) => {
    if (target === scrubber()) look();
});

register({
    journey: ({ index }) => plan(String(index)),
    travel,
    movie: ({ kind }) => ask("movie", { kind }),
});
