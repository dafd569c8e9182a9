import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { changedSettings, onlyTexts, parseSeed } = await import("../../sd_tpu/page/script/form.js");

test("a seed is a number from 0 on, and anything else draws a new one", () => {
    assert.equal(parseSeed("0"), 0);
    assert.equal(parseSeed(" 42 "), 42);
    for (const text of ["", "  ", "-1", "seven"]) assert.equal(parseSeed(text), null);
});

test("only the settings that are different have changed", () => {
    const form = (settings) => ({ prompts: [], seed: "", settings, overrides: [], keep: [] });
    assert.deepEqual(
        changedSettings(
            form({ steps: "20", size: "a" }),
            form({ steps: "30", size: "a", style: "b" }),
        ),
        { steps: "30", style: "b" },
    );
});

test("of stored overrides only texts are taken", () => {
    assert.deepEqual(onlyTexts({ steps: "4", guidance: 3, style: null }), { steps: "4" });
    assert.deepEqual(onlyTexts(undefined), {});
});
