import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { meaning } = await import("../../sd_tpu/page/script/change.js");

const does = (key, more = {}) =>
    meaning({ key, ctrlKey: false, metaKey: false, isComposing: false, ...more });

test("Escape closes the line, and Enter with Control draws the card alone", () => {
    assert.equal(does("Escape"), "close");
    assert.equal(does("Enter", { ctrlKey: true }), "draw");
    assert.equal(does("Enter", { metaKey: true }), "draw");
});

test("letters are letters, and Enter submits the form by itself", () => {
    for (const key of ["r", "c", "1", "?", "ArrowLeft", "Enter"]) assert.equal(does(key), "");
});

test("a word that is put together is neither drawn nor left", () => {
    for (const key of ["Escape", "Enter"]) {
        assert.equal(does(key, { ctrlKey: true, isComposing: true }), "");
    }
});
