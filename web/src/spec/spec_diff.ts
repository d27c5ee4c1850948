/** Two specs compared, setting by setting. */

export interface Difference {
  path: string;
  before: unknown;
  after: unknown;
}

/** Dotted paths whose values differ; a list counts as one value, and what only one spec has is undefined in the other. */
export function specDiff(before: unknown, after: unknown, path = ""): Difference[] {
  if (isGroup(before) || isGroup(after)) {
    if ((isGroup(before) || before === undefined || before === null) && (isGroup(after) || after === undefined || after === null)) {
      const left = isGroup(before) ? before : {};
      const right = isGroup(after) ? after : {};
      return [...new Set([...Object.keys(left), ...Object.keys(right)])].flatMap((name) =>
        specDiff(left[name], right[name], path ? `${path}.${name}` : name),
      );
    }
  }
  return JSON.stringify(before) === JSON.stringify(after) ? [] : [{ path, before, after }];
}

function isGroup(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
