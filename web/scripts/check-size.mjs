// The JavaScript of each page's first screen, gzip: the entry, the page's own part, and all that they import.
// Fails above the limit.
import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const LIMIT_KB = 120;
const dist = new URL("../dist/", import.meta.url);
const read = (name) => readFileSync(new URL(name, dist), "utf8");

function withImports(name, seen = new Set()) {
  if (seen.has(name)) return seen;
  seen.add(name);
  for (const [, path] of read(name).matchAll(/(?:from|import)\s*["']\.\/([\w.-]+\.js)["']/g)) withImports(`assets/${path}`, seen);
  return seen;
}

const named = [...read("index.html").matchAll(/(?:src|href)="\/([\w./-]+\.js)"/g)].map(([, path]) => path);
const entry = new Set(named.flatMap((name) => [...withImports(name)]));
if (entry.size === 0) throw new Error("dist/index.html names no script");

const screens = { entry };
for (const name of entry) {
  for (const [, path] of read(name).matchAll(/import\(\s*[`"']\.\/([\w.-]+\.js)[`"']\s*\)/g)) {
    screens[path.split("-")[0]] = new Set([...entry, ...withImports(`assets/${path}`)]);
  }
}

let failed = false;
for (const [screen, files] of Object.entries(screens)) {
  const bytes = [...files].reduce((sum, name) => sum + gzipSync(read(name), { level: 9 }).length, 0);
  const over = bytes > LIMIT_KB * 1000;
  failed ||= over;
  console.log(`${screen.padEnd(12)} ${(bytes / 1000).toFixed(1).padStart(6)} kB gzip of ${LIMIT_KB} kB${over ? "  TOO MUCH" : ""}`);
}
if (failed) {
  console.error("too much JavaScript on a first screen: load the heavy part with a dynamic import");
  process.exit(1);
}
