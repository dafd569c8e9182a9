import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { picked } = await import("../../sd_tpu/page/script/selection.js");
const { between, touches } = await import("../../sd_tpu/page/script/lasso.js");

test("a card is picked alone, and once more to end that", () => {
    assert.deepEqual(picked([], 0, 3, "alone"), [3]);
    assert.deepEqual(picked([1, 3], 0, 3, "alone"), [3]);
    assert.deepEqual(picked([3], 3, 3, "alone"), []);
});

test("a card is added and taken out", () => {
    assert.deepEqual(picked([1], 1, 3, "toggle"), [1, 3]);
    assert.deepEqual(picked([1, 3], 1, 1, "toggle"), [3]);
});

test("a range goes either way", () => {
    assert.deepEqual(picked([5], 5, 2, "range"), [2, 3, 4, 5]);
    assert.deepEqual(picked([0, 5], 5, 7, "range"), [5, 6, 7]);
});

test("a rectangle is dragged in any direction, and touches what it overlaps", () => {
    const box = between({ x: 9, y: 2 }, { x: 3, y: 8 });
    assert.deepEqual(box, { left: 3, top: 2, right: 9, bottom: 8 });
    assert.ok(touches(box, { left: 8, top: 7, right: 20, bottom: 20 }));
    assert.ok(!touches(box, { left: 9, top: 2, right: 20, bottom: 8 }));
    assert.ok(!touches(box, { left: 3, top: 8, right: 9, bottom: 20 }));
});

const { after } = await import("../../sd_tpu/page/script/best.js");

test("the better picture stays where it is, and the next one comes beside it", () => {
    const first = { pair: [0, 1], rest: [2, 3] };
    assert.deepEqual(after(first, 0), { pair: [0, 2], rest: [3] });
    assert.deepEqual(after(first, 1), { pair: [2, 1], rest: [3] });
});
