import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { copied, followed } = await import("../../sd_tpu/page/script/move.js");

test("what is selected stays so where two cards change places", () => {
    assert.deepEqual(followed([0, 2, 5], 2, 7), [0, 7, 5]);
    assert.deepEqual(followed([2, 7], 7, 2), [7, 2]);
    assert.deepEqual(followed([], 0, 1), []);
});

test("a prompt is copied over another, and none is over none", () => {
    assert.deepEqual(copied(["a", "b", ""], 0, 1), ["a", "a", ""]);
    assert.deepEqual(copied(["a", "b", ""], 1, 2), ["a", "b", "b"]);
    assert.equal(copied(["a", "b", " "], 2, 0), null);
    assert.equal(copied(["a", "a"], 0, 1), null);
});
