import assert from "node:assert/strict";
import { test } from "node:test";
import { moved, suggestions } from "../../sd_tpu/page/script/suggestions.js";

const words = ["castle", "cat", "Cathedral", "<lora:cartoon:1>", "__animal__"];
const known = { words, bookmarks: ["a lake at dawn"], earlier: ["a lamp", "a cat"] };
const texts = (value, at = value.length, all = known) =>
    suggestions(value, at, all).map(([, text]) => text);

test("words are completed from their second letter on, the shortest first", () => {
    assert.deepEqual(texts("a c"), ["a cat"], "one letter is too few for a word");
    assert.deepEqual(suggestions("red ca", 6, known), [
        [4, "cat"],
        [4, "castle"],
        [4, "Cathedral"],
        [4, "<lora:cartoon:1>"],
    ]);
});

test("nothing is offered to somebody who has written a whole word", () => {
    assert.deepEqual(texts("red cat"), []);
    assert.deepEqual(texts("red CAT"), []);
});

test("LoRAs and wildcards are found by their names and by their signs", () => {
    assert.deepEqual(texts("x cart"), ["<lora:cartoon:1>"]);
    assert.deepEqual(texts("x <lora:c"), ["<lora:cartoon:1>"]);
    assert.deepEqual(texts("x anim"), ["__animal__"]);
    assert.deepEqual(texts("x __an"), ["__animal__"]);
});

test("only the word before the cursor counts", () => {
    assert.deepEqual(suggestions("castl, dog", 5, known), [[0, "castle"]]);
    assert.deepEqual(texts("a lake", 3), [], "whole prompts only at the end");
});

test("an empty box offers bookmarks alone", () => {
    assert.deepEqual(texts(""), ["a lake at dawn"]);
    assert.deepEqual(texts("a"), ["a lake at dawn"]);
    assert.deepEqual(texts("a la"), ["a lake at dawn", "a lamp"]);
});

test("a prompt is offered once, whatever case it is written in, and not when it is there", () => {
    const twice = { words: [], bookmarks: ["a lamp"], earlier: ["a lamp"] };
    assert.deepEqual(suggestions(" A LA", 5, twice), [[0, "a lamp"]]);
    assert.deepEqual(texts("a lamp", 6, twice), []);
});

test("there are at most six prompts, and three beside words", () => {
    const earlier = Array.from({ length: 9 }, (_, index) => `camel ${index}`);
    assert.equal(texts("came", 4, { words: [], bookmarks: [], earlier }).length, 6);
    assert.equal(texts("came", 4, { words: ["camera"], bookmarks: [], earlier }).length, 4);
});

test("arrow keys go round", () => {
    assert.equal(moved(-1, 1, 3), 0);
    assert.equal(moved(-1, -1, 3), 2);
    assert.equal(moved(2, 1, 3), 0);
    assert.equal(moved(0, -1, 3), 2);
});
