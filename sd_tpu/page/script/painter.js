// The painter: a mask is painted on a start picture and handed in.

import { register } from "./actions.js";
import { $, listen, make } from "./dom.js";
import { boxIndexOf, valueFor } from "./inputs.js";
import { ask } from "./server.js";
import { state } from "./state.js";
import { handIn } from "./upload.js";

/** @typedef {import("./types").Part} Part */

const COLOUR = "#d8421b"; // which is seen on white as well
const painting = state.painter;

/** @param {number | undefined} index a box, or undefined for all */
async function open(index) {
    const input = valueFor(index, "init_image");
    const painter = $("#painter");
    const image = $("img", painter);
    const { view } = await ask("paint", { input });
    if (!view) return;
    image.src = view;
    await image.decode();
    const { naturalWidth: width, naturalHeight: height } = image;
    if (painting.input !== input) Object.assign(painting, { strokes: [], inverted: false });
    Object.assign(painting, { index, input });
    Object.assign($("canvas", painter), { width, height });
    painter.showModal();
    show();
}

/** Draws all strokes anew. */
function show() {
    const canvas = $("#painter canvas");
    const brush = canvas.getContext("2d");
    const { width, height } = canvas;
    brush.globalCompositeOperation = "source-over";
    brush.clearRect(0, 0, width, height);
    Object.assign(brush, {
        strokeStyle: COLOUR,
        fillStyle: COLOUR,
        lineCap: "round",
        lineJoin: "round",
    });
    for (const { size, points } of painting.strokes) {
        brush.lineWidth = size;
        brush.beginPath();
        for (const [x, y] of [points[0], ...points]) brush.lineTo(x, y);
        brush.stroke();
    }
    if (painting.inverted) {
        brush.globalCompositeOperation = "xor";
        brush.fillRect(0, 0, width, height);
    }
    $("[data-do=unpaint]").disabled = !painting.strokes.length;
    $("[data-do=painted]").disabled = !painting.strokes.length && !painting.inverted;
    $("[data-do=invert]").ariaPressed = String(painting.inverted);
}

/**
 * Where on the canvas a finger or a mouse is.
 * @param {Part} canvas
 * @param {PointerEvent} event
 * @returns {[number, number]}
 */
function spot(canvas, { clientX, clientY }) {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    return [((clientX - left) / width) * canvas.width, ((clientY - top) / height) * canvas.height];
}

/** Hands the painted parts in, white on black. */
function handInMask() {
    const canvas = $("#painter canvas");
    const { width, height } = canvas;
    const mask = make("canvas", { width, height });
    const onto = /** @type {CanvasRenderingContext2D} */ (mask.getContext("2d"));
    onto.drawImage(/** @type {any} */ (canvas), 0, 0);
    for (const [how, colour] of [
        ["source-in", "white"],
        ["destination-over", "black"],
    ]) {
        Object.assign(onto, { globalCompositeOperation: how, fillStyle: colour });
        onto.fillRect(0, 0, width, height);
    }
    $("#painter").close();
    mask.toBlob((blob) =>
        handIn(new File([/** @type {Blob} */ (blob)], "mask.png"), painting.index, "mask"),
    );
}

listen("pointerdown", (target, event) => {
    if (!target.matches("#painter canvas") || event.button || !event.isPrimary) return;
    target.setPointerCapture(event.pointerId);
    const share = Number($("#painter [type=range]").value) / 100;
    const size = share * Math.max(target.width, target.height);
    painting.strokes.push({ size, points: [spot(target, event)] });
    show();
});
listen("pointermove", (target, event) => {
    if (!target.matches?.("#painter canvas")) return;
    if (!target.hasPointerCapture(event.pointerId)) return;
    painting.strokes[painting.strokes.length - 1].points.push(spot(target, event));
    show();
});

register({
    paint: (_, button) => open(boxIndexOf(button)),
    unpaint() {
        painting.strokes.pop();
        show();
    },
    invert() {
        painting.inverted = !painting.inverted;
        show();
    },
    painted: handInMask,
});
