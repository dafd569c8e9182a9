// The full-screen view is zoomed at the pointer and panned: by wheel, + and -, Shift and arrows, space, middle
// button, fingers.

import { $, listen } from "./dom.js";

/** @typedef {{ scale: number, x: number, y: number }} Zoom how large, and how far off the middle */

const MOST = 16;
const LEAST = 0.25;
const STEP = 0.002; // of a wheel's pixel
const KEY = 1.25; // times as large by + as before
const PAN = 60; // pixels, by a key

/** @type {Zoom} */
const whole = { scale: 1, x: 0, y: 0 };
let zoom = { ...whole };

/** Fingers and the mouse on the view, by their number. @type {Map<number, { x: number, y: number }>} */
const pointers = new Map();
let space = false; // whether it is held
let panned = false; // whether it has panned since

/**
 * A zoom that is larger by a factor, with the point that lies at `x` and `y` from the view's middle
 * where it is.
 * @param {Zoom} from
 * @param {number} by
 * @param {{ x: number, y: number }} at
 * @returns {Zoom}
 */
export function zoomed(from, by, at) {
    const scale = Math.min(MOST, Math.max(LEAST, from.scale * by));
    const share = scale / from.scale;
    return { scale, x: at.x - (at.x - from.x) * share, y: at.y - (at.y - from.y) * share };
}

/** @param {Zoom} to */
function show(to) {
    zoom = to;
    const { style } = $("#viewer .pair");
    style.transform = `translate(${to.x}px, ${to.y}px) scale(${to.scale})`;
    style.setProperty("--zoom", String(to.scale));
}

/** Shows the picture whole, or with this share of the view. */
export const showWhole = (scale = 1) => show({ ...whole, scale });

/**
 * Shows the picture with room beside it, both as large as they go.
 * @param {number[]} room to the left, above, to the right and below, in widths and heights of it
 */
export function showRoom([left, top, right, bottom]) {
    const { offsetWidth: width, offsetHeight: height } = $("#viewer .pair");
    const { clientWidth, clientHeight } = $("#viewer .stage");
    const most = Math.min(
        clientWidth / (width * (1 + left + right)),
        clientHeight / (height * (1 + top + bottom)),
    );
    const scale = Math.min(1, 0.96 * most);
    show({
        scale,
        x: ((left - right) / 2) * width * scale,
        y: ((top - bottom) / 2) * height * scale,
    });
}

/** @param {number} scale */
export const zoomOutTo = (scale) => zoom.scale > scale && showWhole(scale);

/** Where a pointer is from the middle of the view. @param {{ clientX: number, clientY: number }} event */
function fromMiddle({ clientX, clientY }) {
    const { left, top, width, height } = $("#viewer .stage").getBoundingClientRect();
    return { x: clientX - left - width / 2, y: clientY - top - height / 2 };
}

/** The middle of two fingers and how far they are apart; of one, where it is. */
function hands() {
    const [one, other = one] = [...pointers.values()];
    return {
        x: (one.x + other.x) / 2,
        y: (one.y + other.y) / 2,
        apart: Math.hypot(one.x - other.x, one.y - other.y) || 1,
    };
}

document.addEventListener(
    "wheel",
    (event) => {
        const target = /** @type {Element} */ (event.target);
        if (!target.closest("#viewer .stage")) return;
        event.preventDefault();
        show(zoomed(zoom, Math.exp(-event.deltaY * STEP), fromMiddle(event)));
    },
    { passive: false },
);

listen("pointerdown", (target, event) => {
    if (!target.closest("#viewer .stage") || target.closest("[role=slider]")) return;
    const touch = event.pointerType === "touch";
    const pans = touch || space || event.button === 1 || (zoom.scale > 1 && event.button === 0);
    // The edge between before and after is moved by the first finger, or the left button.
    const slides = target.matches("[type=range]") && !space && event.button === 0;
    if (!pans || (slides && !pointers.size)) return;
    event.preventDefault();
    pointers.set(event.pointerId, fromMiddle(event));
});
listen("pointermove", (_, event) => {
    if (!event.buttons) pointers.delete(event.pointerId); // whose end was not heard of
    if (!pointers.has(event.pointerId)) return;
    const before = hands();
    pointers.set(event.pointerId, fromMiddle(event));
    const now = hands();
    const moved = { ...zoom, x: zoom.x + now.x - before.x, y: zoom.y + now.y - before.y };
    panned = true;
    show(pointers.size > 1 ? zoomed(moved, now.apart / before.apart, now) : moved);
});
for (const type of /** @type {const} */ (["pointerup", "pointercancel"])) {
    listen(type, (_, event) => pointers.delete(event.pointerId));
}
listen("dblclick", (target) => {
    if (target.closest("#viewer .stage")) showWhole();
});

listen("keydown", (target, event) => {
    if (!$("#viewer")?.open || target.matches("input:not([type=range])")) return;
    if (event.key === "0") showWhole();
    const by = { "+": KEY, "=": KEY, "-": 1 / KEY }[event.key];
    if (by) show(zoomed(zoom, by, { x: 0, y: 0 }));
    const way = { ArrowLeft: [1, 0], ArrowUp: [0, 1], ArrowRight: [-1, 0], ArrowDown: [0, -1] }[
        event.key
    ];
    if (way && event.shiftKey) {
        event.preventDefault(); // of a slider, which would move as well
        show({ ...zoom, x: zoom.x + PAN * way[0], y: zoom.y + PAN * way[1] });
    }
    if (event.key !== " ") return;
    if (!space) panned = false;
    space = true;
});
// Space that has panned presses no button.
listen(
    "keyup",
    (_, event) => {
        if (event.key !== " ") return;
        if (space && panned) event.preventDefault();
        space = false;
    },
    true,
);
