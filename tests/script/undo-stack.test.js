import assert from "node:assert/strict";
import { test } from "node:test";
import { isSame, MOST, parseStacks, push, step } from "../../sd_tpu/page/script/undo-stack.js";

const form = (prompt) => ({ prompts: [prompt], seed: "-1", settings: {}, overrides: [], keep: [] });
const snapshot = (prompt, run = null, drawn = false) => ({ form: form(prompt), run, drawn });
const shows =
    (prompt, run = null) =>
    (each) =>
        isSame(each, form(prompt), run);
const words = (snapshots) => snapshots.map((each) => each.form.prompts[0]);
const nothing = { past: [], future: [] };

test("a snapshot of what is shown is the same, whatever its run", () => {
    assert.equal(isSame(snapshot("cat", "1"), form("cat"), "2"), true);
    assert.equal(isSame(snapshot("cat", "1"), form("dog"), "1"), false);
});

test("where only the pictures were replaced another run is not the same", () => {
    assert.equal(isSame(snapshot("cat", "1", true), form("cat"), "2"), false);
    assert.equal(isSame(snapshot("cat", "1", true), form("cat"), "1"), true);
});

test("what is remembered twice takes one step", () => {
    const once = push(nothing, snapshot("cat"), shows("cat"));
    assert.deepEqual(words(push(once, snapshot("cat"), shows("cat")).past), ["cat"]);
    assert.deepEqual(words(push(once, snapshot("dog"), shows("dog")).past), ["cat", "dog"]);
});

test("undo goes to the latest snapshot that differs, and redo back again", () => {
    const stacks = { past: [snapshot("owl"), snapshot("cat"), snapshot("dog")], future: [] };
    const undone = step(stacks, true, { form: form("dog"), run: "2" }, shows("dog"));
    assert.equal(undone.target.form.prompts[0], "cat");
    assert.deepEqual(words(undone.past), ["owl"]);
    assert.deepEqual(words(undone.future), ["dog"]);
    const redone = step(undone, false, { form: form("cat"), run: "1" }, shows("cat"));
    assert.deepEqual(redone.target, { ...snapshot("dog"), run: "2" });
    assert.deepEqual(words(redone.past), ["owl", "cat"]);
    assert.deepEqual(redone.future, []);
});

test("a step back from replaced pictures can be taken forth to them", () => {
    const stacks = { past: [snapshot("cat", "1", true)], future: [] };
    const { future } = step(stacks, true, { form: form("cat"), run: "2" }, shows("cat", "2"));
    assert.deepEqual(future, [snapshot("cat", "2", true)]);
});

test("there is no step where nothing differs", () => {
    const now = { form: form("cat"), run: null };
    assert.equal(step(nothing, true, now, shows("cat")), null);
    assert.equal(step({ past: [snapshot("cat")], future: [] }, true, now, shows("cat")), null);
});

test("the oldest snapshots go first", () => {
    let stacks = nothing;
    for (let index = 0; index < MOST + 5; index += 1) {
        stacks = push(stacks, snapshot(`${index}`), () => false);
    }
    assert.equal(stacks.past.length, MOST);
    assert.equal(words(stacks.past)[0], "5");
});

test("what a tab has stored is read as far as it can be", () => {
    const stored = JSON.parse(JSON.stringify([[snapshot("cat"), null, { form: {} }], "no list"]));
    assert.deepEqual(parseStacks(stored), { past: [snapshot("cat")], future: [] });
    for (const strange of [null, 1, "a", {}, []]) assert.deepEqual(parseStacks(strange), nothing);
});
