/** Where in the YAML a fault lies, guessed from the names in its pointer: the page has no YAML reader of its own. */

/** The line (from 1) of the last name of a JSON pointer that is found; null when none is. */
export function lineOf(text: string, pointer: string): number | null {
  const lines = text.split("\n");
  const names = pointer.split("/").slice(1).map((part) => part.replace(/~1/g, "/").replace(/~0/g, "~"));
  let found: number | null = null;
  let from = 0;
  let column = 0;
  for (const name of names) {
    if (/^\d+$/.test(name)) continue;
    const key = new RegExp(`(^|[\\s{,\\-"'])${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}["']?\\s*:`);
    const at = lines.findIndex((line, index) => index >= from && key.test(index === from ? line.slice(column) : line));
    if (at < 0) break;
    const line = lines[at] ?? "";
    const offset = at === from ? column : 0;
    column = offset + line.slice(offset).search(key) + name.length + 1;
    from = at;
    found = at + 1;
  }
  return found;
}
