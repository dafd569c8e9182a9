import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { leafsBy } = await import("../../sd_tpu/page/script/keys.js");
const { neighbour } = await import("../../sd_tpu/page/script/cardkeys.js");

test("arrow keys leaf in the direction in which the page is read", () => {
    assert.equal(leafsBy("ArrowRight", false), 1);
    assert.equal(leafsBy("ArrowRight", true), -1);
    assert.equal(leafsBy("ArrowLeft", true), 1);
    for (const rightToLeft of [true, false]) {
        assert.equal(leafsBy("ArrowUp", rightToLeft), -1);
        assert.equal(leafsBy("ArrowDown", rightToLeft), 1);
    }
    assert.equal(leafsBy("Enter", false), undefined);
});

test("arrows go from card to card, and nowhere beyond the first and the last", () => {
    const to = (index, key, rightToLeft = false) => neighbour(index, key, 4, 8, rightToLeft);
    assert.deepEqual([to(0, "ArrowRight"), to(0, "ArrowDown"), to(5, "ArrowUp")], [1, 4, 1]);
    assert.deepEqual([to(0, "ArrowLeft"), to(7, "ArrowRight"), to(6, "ArrowDown")], [0, 7, 6]);
    assert.deepEqual([to(1, "ArrowLeft", true), to(1, "ArrowRight", true)], [2, 0]);
});
