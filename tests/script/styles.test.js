import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { named } = await import("../../sd_tpu/page/script/styles.js");

test("styles are found by any part of their names, in small letters or large", () => {
    assert.deepEqual(named(["Ink", "Pink wash", "Oil"], " INK "), ["Ink", "Pink wash"]);
    assert.deepEqual(named(["Ink", "Oil"], ""), ["Ink", "Oil"]);
    assert.deepEqual(named(["Ink"], "water"), []);
});
