import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { leafsBy } = await import("../../sd_tpu/page/script/keys.js");

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
