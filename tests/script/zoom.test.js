import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { zoomed } = await import("../../sd_tpu/page/script/zoom.js");
const { snapped } = await import("../../sd_tpu/page/script/extend.js");

test("what lies under the pointer stays there when it is zoomed", () => {
    const at = { x: 120, y: -40 };
    const before = { scale: 1.5, x: 10, y: 20 };
    const after = zoomed(before, 2, at);
    assert.equal(after.scale, 3);
    for (const axis of /** @type {const} */ (["x", "y"])) {
        const spot = (at[axis] - before[axis]) / before.scale;
        assert.ok(Math.abs((at[axis] - after[axis]) / after.scale - spot) < 1e-9);
    }
});

test("zooming ends at a least and a most", () => {
    assert.equal(zoomed({ scale: 1, x: 0, y: 0 }, 1e9, { x: 1, y: 1 }).scale, 16);
    assert.equal(zoomed({ scale: 1, x: 0, y: 0 }, 1e-9, { x: 1, y: 1 }).scale, 0.25);
});

test("an edge moves by whole units, not inward, and at most by the picture's length", () => {
    assert.deepEqual(
        [-50, 31, 33, 90, 1000].map((pixels) => snapped(pixels, 64, 300)),
        [0, 0, 64, 64, 256],
    );
});
