import "./browser.js";
import assert from "node:assert/strict";
import { test } from "node:test";
import { element } from "./browser.js";

const { duration, ready, showEstimates } = await import("../../sd_tpu/page/script/estimate.js");
const words = { seconds: "% s", minutes: "% min", ready: "ready %" };

test("a time is in whole seconds, at least one, and from a minute and a half on in minutes", () => {
    assert.deepEqual(
        [0, 0.2, 2.1, 89.9, 90, 250].map((seconds) => duration(seconds, words)),
        ["1 s", "1 s", "3 s", "90 s", "2 min", "4 min"],
    );
});

test("what takes long is ready at a time of day", () => {
    element("header[lang]").lang = "en-GB";
    const noon = new Date(2026, 0, 1, 12, 0).getTime();
    assert.match(ready(1800, words, noon), /^ready 12:30$/);
    assert.equal(ready(20, words, noon), "20 s");
});

test("the button says how many pictures it would draw, or nothing of any", () => {
    const button = element("#generate");
    Object.assign(button.dataset, words, { eight: "Draw eight", some: "Draw %", none: "Draw" });
    const said = (draw) => {
        showEstimates({ draw });
        return [element("#generate span").textContent, element("#generate small").textContent];
    };
    assert.deepEqual(said({ count: 8, seconds: 2.5 }), ["Draw eight", "3 s"]);
    assert.deepEqual(said({ count: 3, seconds: null }), ["Draw 3", ""]);
    assert.deepEqual(said({ count: 0, seconds: null }), ["Draw", ""]);
});
