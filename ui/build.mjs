// Build the live page into frontend/live/built, or into the folder that is given. The same sources give the same bytes.

import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "frontend", "live", "built");
const MOST_BYTES = 150 * 1024;

/** Return a hash of all that the page is made of: a test compares it without node. */
function sourceHash() {
  const hash = createHash("sha256");
  const files = [...readdirSync(join(here, "src")).map((name) => `src/${name}`), "build.mjs", "package-lock.json", "tsconfig.json"];
  for (const name of files.sort()) hash.update(`${name}\n`).update(readFileSync(join(here, name))).update("\n");
  return hash.digest("hex");
}

const banner = `/* kvmesh, live page. Built from ui/, sources ${sourceHash()} */`;
const common = { absWorkingDir: here, bundle: true, minify: true, write: false, charset: "utf8", legalComments: "none", logLevel: "warning" };
const script = await build({ ...common, entryPoints: ["src/main.ts"], format: "esm", target: "es2022", banner: { js: banner } });
const style = await build({ ...common, entryPoints: ["src/app.css"], target: "es2022" });
const page = readFileSync(join(here, "src", "index.html"), "utf8").replace(/\n\s*/g, "\n");
const files = { "app.js": script.outputFiles[0].contents, "app.css": style.outputFiles[0].contents, "index.html": Buffer.from(page) };
mkdirSync(target, { recursive: true });
let total = 0;
for (const [name, content] of Object.entries(files)) {
  writeFileSync(join(target, name), content);
  total += content.length;
}
console.log(`${total} bytes in ${target}`);
if (total > MOST_BYTES) throw new Error(`the page has ${total} bytes, expected were at most ${MOST_BYTES}`);
