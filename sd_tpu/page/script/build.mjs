// Bundles the script's modules into page.js, which the server sends: `make script`.
//
// The bundle's first line has a hash of the modules, by which a test without Node.js sees whether
// it is older than they are.

import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { build } from "esbuild";

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

if (import.meta.url === pathToFileURL(process.argv[1]).href) writeFileSync(BUNDLE, await bundle());
