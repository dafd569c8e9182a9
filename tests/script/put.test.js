import assert from "node:assert/strict";
import { test } from "node:test";
import {
    given,
    movedToAll,
    overridesBesideAll,
    withAnother,
} from "../../sd_tpu/page/script/put.js";

test("another start picture drops the mask that was painted on the one before", () => {
    assert.deepEqual(given("init_image", "new"), { init_image: "new", mask: "" });
    assert.deepEqual(given("mask", "new"), { mask: "new" });
    assert.deepEqual(given("control_image", "new"), { control_image: "new" });
});

test("a mask for all is not one of a box's own start picture", () => {
    assert.deepEqual(
        overridesBesideAll([{ init_image: "mine" }, {}, { init_image: " " }], "mask"),
        [{ init_image: "mine", mask: " " }, {}, { init_image: " " }],
    );
    const own = [{ init_image: "mine", mask: "mine" }];
    assert.deepEqual(overridesBesideAll(own, "mask"), own);
});

test("a box's own mask goes with the start picture for all that it was painted on", () => {
    assert.deepEqual(overridesBesideAll([{ mask: "mine", steps: "3" }], "init_image"), [
        { steps: "3" },
    ]);
    const own = [{ init_image: "mine", mask: "mine" }];
    assert.deepEqual(overridesBesideAll(own, "init_image"), own);
});

test("what moves to all is no box's own any more", () => {
    const own = [{ init_image: " a ", strength: "", steps: "3" }, { strength: "0.5" }];
    assert.deepEqual(movedToAll(own, 0, ["init_image", "mask", "strength"]), {
        settings: { init_image: "a" },
        overrides: [{ steps: "3" }, {}],
    });
});

test("a picture comes behind those that are there, of which as many stay as a model takes", () => {
    assert.equal(withAnother("", "a", 1), "a");
    assert.equal(withAnother("a", "b", 1), "b");
    assert.equal(withAnother("a b", "a", 10), "a b a");
    assert.equal(withAnother("a b c", "d", 3), "b c d");
});
