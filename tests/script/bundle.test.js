import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { BUNDLE, bundle } from "../../sd_tpu/page/script/build.mjs";

test("the committed bundle is what `make script` writes", async () => {
    assert.ok(readFileSync(BUNDLE, "utf8") === (await bundle()), "make script");
});
