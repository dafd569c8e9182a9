import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { continuation } = await import("../../sd_tpu/page/script/ghost.js");

const known = {
    bookmarks: ["a lake at dawn, mist"],
    earlier: ["a lamp", "A lake", "a red fox, evening light"],
    endings: ["watercolour, paper"],
};
const goesOn = (value, at = value.length, all = known) => continuation(value, at, all);

test("a prompt goes on as the first own one that begins so, in whatever letters", () => {
    assert.equal(goesOn("a la"), "ke at dawn, mist");
    assert.equal(goesOn("A LAM"), "p");
    assert.equal(goesOn("  a r"), "ed fox, evening light");
});

test("behind a comma it goes on as a part of one, or as a style ends", () => {
    assert.equal(goesOn("a hen, ev"), "ening light");
    assert.equal(goesOn("a hen,WATER"), "colour, paper");
});

test("nothing is said twice in a prompt", () => {
    assert.equal(goesOn("evening light, ev"), "");
});

test("nothing goes on before two letters, amid a text, or behind a whole one", () => {
    for (const value of ["", "a", "  ", "a hen, e", "a lamp", "owl"])
        assert.equal(goesOn(value), "");
    assert.equal(goesOn("a la", 3), "");
});
