// Bundles the script's modules into page.js, which the server sends, and writes the types of the
// messages that the server takes: `make script`.
//
// The first lines have a hash of what each is made of, by which a test without Node.js sees whether
// it is older than that.

import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { build } from "esbuild";
import { compile } from "json-schema-to-typescript";

const FOLDER = import.meta.dirname;
export const BUNDLE = `${FOLDER}/../page.js`;

/** The hash of all modules, by name and content, as tests/unit/test_script.py computes it. */
function hashModules() {
    const hash = createHash("sha256");
    for (const name of readdirSync(FOLDER)
        .filter((name) => name.endsWith(".js"))
        .sort()) {
        hash.update(`${name}\0`)
            .update(readFileSync(`${FOLDER}/${name}`))
            .update("\0");
    }
    return hash.digest("hex").slice(0, 16);
}

/** The text of the bundle. Names are kept, for whoever looks at errors; comments are not. */
export async function bundle() {
    const {
        outputFiles: [{ text }],
    } = await build({
        entryPoints: [`${FOLDER}/main.js`],
        bundle: true,
        write: false,
        format: "iife",
        charset: "utf8",
        minifyWhitespace: true,
        minifySyntax: true,
        lineLimit: 200,
        logLevel: "warning",
    });
    return `// Made of the modules in script/ by \`make script\`: ${hashModules()}\n${text}`;
}

/** The types of the messages, from the schema of sd_tpu/page/schema.py. */
async function messageTypes() {
    const print = "from sd_tpu.page.schema import json_schema; print(json_schema())";
    const schema = execFileSync("python", ["-c", print], { encoding: "utf8" }).trim();
    const hash = createHash("sha256").update(schema).digest("hex").slice(0, 16);
    return compile(JSON.parse(schema), "Asked", {
        additionalProperties: false,
        ignoreMinAndMaxItems: true, // or lists would be unions of tuples
        bannerComment: `// Made of sd_tpu/page/schema.py by \`make script\`: ${hash}`,
        style: { tabWidth: 4, printWidth: 100 },
    });
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
    writeFileSync(BUNDLE, await bundle());
    writeFileSync(`${FOLDER}/messages.d.ts`, await messageTypes());
}
