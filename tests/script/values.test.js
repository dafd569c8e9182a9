import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { register } = await import("../../sd_tpu/page/script/actions.js");
const { successive } = await import("../../sd_tpu/page/script/compare.js");
const { lines } = await import("../../sd_tpu/page/script/prompts.js");

test("compared seeds follow one another, and 0 the largest", () => {
    assert.deepEqual(successive(5, 3, 2 ** 32), [5, 6, 7]);
    assert.deepEqual(successive(2 ** 32 - 2, 4, 2 ** 32), [2 ** 32 - 2, 2 ** 32 - 1, 0, 1]);
});

test("a pasted list has a prompt a line, without blanks", () => {
    assert.deepEqual(lines(" a cat \r\n\n\tdog\n "), ["a cat", "dog"]);
});

test("a list loses the marks that most of its lines have", () => {
    assert.deepEqual(lines("1. a cat\n2) a dog\n3. 2 owls"), ["a cat", "a dog", "2 owls"]);
    assert.deepEqual(lines("- a cat\n* a dog\n• an owl"), ["a cat", "a dog", "an owl"]);
    assert.deepEqual(lines("3 cats\n- a dog"), ["3 cats", "- a dog"]);
    assert.deepEqual(lines("2. place\na cat\nan owl"), ["2. place", "a cat", "an owl"]);
});

test("no two modules own an action", () => {
    assert.throws(() => register({ compare() {} }), /two modules register the action compare/);
});
