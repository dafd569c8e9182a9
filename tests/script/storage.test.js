import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { FakeStorage } from "./browser.js";
import {
    bookmarks,
    earlierPrompts,
    local,
    readStored,
    rememberPrompts,
    store,
    toggleBookmark,
} from "../../sd_tpu/page/script/storage.js";

/** @param {FakeStorage} storage */
const use = (storage) =>
    Object.defineProperty(globalThis, "localStorage", { configurable: true, value: storage });
beforeEach(() => use(new FakeStorage()));

test("a bookmark is set in front, and taken away by the same button", () => {
    for (const text of ["cat", "dog"]) toggleBookmark(text);
    assert.deepEqual(bookmarks(), ["dog", "cat"]);
    toggleBookmark("cat");
    assert.deepEqual(bookmarks(), ["dog"]);
    toggleBookmark("");
    assert.deepEqual(bookmarks(), ["dog"], "an empty box has nothing to mark");
});

test("prompts are remembered once, the latest first, up to a hundred", () => {
    rememberPrompts([" cat ", "", "dog"]);
    rememberPrompts(["dog"]);
    assert.deepEqual(earlierPrompts(), ["dog", "cat"]);
    rememberPrompts(Array.from({ length: 120 }, (_, index) => `${index}`));
    assert.equal(earlierPrompts().length, 100);
});

test("a browser that stores nothing, or something else, does no harm", () => {
    assert.equal(readStored(local, "absent"), null);
    localStorage.setItem("broken", "{");
    assert.equal(readStored(local, "broken"), null);
    use(new FakeStorage(3));
    store(local, "key", "too long");
    assert.equal(readStored(local, "key"), null);
    const forbidden = () => {
        throw new Error("SecurityError");
    };
    store(forbidden, "key", 1);
    assert.equal(readStored(forbidden, "key"), null);
});
