/** Settings that a roll back or a fork changes: what the reader typed as values, and values as the reader sees them. */

import type { Changeable, Problem } from "../../../api/types";
import type { SpecField } from "../../../spec/schema_fields";

export interface SettingRow {
  /** Dotted, as in `kl.coef`; empty while none is chosen. */
  path: string;
  text: string;
}

export const MEANING_OF: Record<Changeable, { word: string; why: string }> = {
  rollback: { word: "safe", why: "May change when a run goes on from a checkpoint." },
  fork: { word: "fork only", why: "Decides what the run's numbers mean, so only a new run may have another." },
  never: { word: "never", why: "A checkpoint fits no other value: submit a new run for it." },
};

/** What was typed: JSON where it is JSON, else text. In a field of text only, everything is text. */
export function valueOf(text: string, field: SpecField | undefined): unknown {
  const plain = text.trim();
  const kinds = field?.type.split(" or ") ?? [];
  if (kinds.includes("text") && !(plain === "null" && kinds.includes("null"))) return plain;
  try {
    return JSON.parse(plain) as unknown;
  } catch {
    return plain;
  }
}

/** A value in a cell or an input: text without its quotes, nothing as `null`. */
export function valueText(value: unknown): string {
  return typeof value === "string" ? value : value === undefined ? "–" : JSON.stringify(value);
}

/** What the request says: rows that name a field and a value; of two for one field, the later. */
export function settingsOf(rows: SettingRow[], fields: ReadonlyMap<string, SpecField>): Record<string, unknown> {
  return Object.fromEntries(
    rows
      .filter((row) => row.path.trim() && row.text.trim())
      .map((row) => [row.path.trim(), valueOf(row.text, fields.get(row.path.trim()))]),
  );
}

/** Faults that name one setting, by its path; the others are about the whole. */
export function faultsByPath(problem: Problem | null, rows: SettingRow[]): { own: Map<string, string>; rest: Problem | null } {
  const own = new Map<string, string>();
  const paths = new Set(rows.map((row) => row.path.trim()));
  const others = (problem?.errors ?? []).filter((fault) => {
    const path = pathOf(fault.pointer);
    if (path === null || !paths.has(path)) return true;
    own.set(path, [own.get(path), fault.message].filter(Boolean).join(" "));
    return false;
  });
  const rest = problem && (others.length > 0 || own.size === 0) ? { ...problem, errors: others } : null;
  return { own, rest };
}

/** `/set/kl.coef` and `/set/kl/coef` both mean `kl.coef`. */
function pathOf(pointer: string): string | null {
  const parts = pointer.split("/").slice(1).map((part) => part.replace(/~1/g, "/").replace(/~0/g, "~"));
  return parts[0] === "set" ? parts.slice(1).join(".") : null;
}

/** The value at a dotted path of a spec; undefined where there is none. */
export function atPath(spec: unknown, path: string): unknown {
  return path.split(".").reduce<unknown>(
    (node, name) => (typeof node === "object" && node !== null ? (node as Record<string, unknown>)[name] : undefined), spec,
  );
}
