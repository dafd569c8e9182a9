// The edges of the picture that is full screen: dragged outward, or moved by keys, they make room
// beside it, which is drawn.

import { $, $$, listen } from "./dom.js";
import { showRoom, showWhole, zoomOutTo } from "./zoom.js";

/** @typedef {import("./types").Part} Part */

const ROOM = 0.5; // share of the view that a picture takes while there is room for as much beside it
const FAST = 4; // units of a key with Shift

/** Where each edge lies: its axis, and whether outward is forth on it. */
const OUTWARD = [
    { axis: "x", forth: -1, out: "ArrowLeft", back: "ArrowRight" },
    { axis: "y", forth: -1, out: "ArrowUp", back: "ArrowDown" },
    { axis: "x", forth: 1, out: "ArrowRight", back: "ArrowLeft" },
    { axis: "y", forth: 1, out: "ArrowDown", back: "ArrowUp" },
];

/** Pixels to the left, above, to the right and below; what they are multiples of. */
let sides = [0, 0, 0, 0];
let unit = 0;

/** The edge that is dragged: where that began, and how wide it was. */
/** @type {{ side: number, at: number, before: number } | null} */
let drag = null;

const edges = () => $$("#viewer .edge");
export const extension = () => [...sides];

/** The width of the picture for edges to the left and right, its height for the others. */
const length = (/** @type {number} */ side) => {
    const { naturalWidth, naturalHeight } = $("#viewer img");
    return OUTWARD[side].axis === "x" ? naturalWidth : naturalHeight;
};

/** Offers to extend a picture by multiples of some pixels, or not. */
export function offerExtension(by = 0) {
    unit = by;
    sides = [0, 0, 0, 0];
    for (const edge of edges()) edge.hidden = !unit;
    show();
}

/** The room on each side, as shares of the picture. */
const room = () => sides.map((pixels, side) => pixels / length(side) || 0);

function show() {
    const area = $("#viewer .extension");
    const { naturalWidth: width, naturalHeight: height } = $("#viewer img");
    const [left, top, right, bottom] = sides;
    const [before, above, after, below] = room().map((share) => `${-100 * share}%`);
    area.style.inset = `${above} ${after} ${below} ${before}`;
    const any = sides.some((side) => side > 0);
    const button = $("#viewer [data-do=extend]");
    area.hidden = button.hidden = !any;
    button.textContent = String(button.dataset.label)
        .replace("%", String(width + left + right))
        .replace("§", String(height + top + bottom));
    for (const [side, edge] of edges().entries()) {
        edge.ariaValueNow = String(sides[side]);
        edge.ariaValueMax = String(length(side) || 0);
    }
}

/**
 * Moves an edge outward, by whole units and at most as far as the picture is long.
 * @param {number} side
 * @param {number} pixels
 */
function move(side, pixels) {
    sides[side] = snapped(pixels, unit, length(side));
    if (!drag) showRoom(room());
    show();
}

/**
 * The multiple of a unit that is next to some pixels, none below zero or above the most.
 * @param {number} pixels
 * @param {number} by
 * @param {number} most
 */
export const snapped = (pixels, by, most) =>
    Math.max(0, Math.min(Math.round(pixels / by), Math.floor(most / by))) * by;

/** @param {PointerEvent} event @param {number} side */
const along = ({ clientX, clientY }, side) => (OUTWARD[side].axis === "x" ? clientX : clientY);

listen("pointerdown", (target, event) => {
    const side = edges().indexOf(target);
    if (side < 0 || event.button) return;
    target.setPointerCapture(event.pointerId);
    zoomOutTo(ROOM);
    drag = { side, at: along(event, side), before: sides[side] };
});
listen("pointermove", (_, event) => {
    if (!drag) return;
    const { side, at, before } = drag;
    const box = $("#viewer .pair").getBoundingClientRect();
    const shown = OUTWARD[side].axis === "x" ? box.width : box.height;
    const by = ((along(event, side) - at) * OUTWARD[side].forth * length(side)) / shown;
    move(side, before + by);
});
for (const type of /** @type {const} */ (["pointerup", "pointercancel"])) {
    listen(type, () => {
        if (drag && sides.some(Boolean)) showRoom(room());
        drag = null;
    });
}

// Before other keys: arrows leaf elsewhere, and Escape closes the view.
listen(
    "keydown",
    (target, event) => {
        const { key, shiftKey } = /** @type {KeyboardEvent} */ (event);
        const side = edges().indexOf(target);
        if (side < 0) return;
        const { out, back } = OUTWARD[side];
        const by = unit * (shiftKey ? FAST : 1);
        if (key === out) move(side, sides[side] + by);
        else if (key === back) move(side, sides[side] - by);
        else if (key === "Home") move(side, 0);
        else if (key === "Enter") $("#viewer [data-do=extend]:not([hidden])")?.click();
        else if (key === "Escape" && sides.some(Boolean)) {
            showWhole();
            offerExtension(unit);
        } else if (!key.startsWith("Arrow")) return;
        event.preventDefault();
        event.stopPropagation();
    },
    true,
);
