/** Lines of charts as data: put together from the api's columns, and continued by the stream's events. No drawing. */

import type { HistoryEvent, SeriesData } from "../api/types";

export interface Line {
  x: number[];
  /** Null: undefined there, or not finite. */
  y: (number | null)[];
  /** Lowest and highest of each bucket; the same as `y` where a point is one iteration. */
  low: (number | null)[];
  high: (number | null)[];
  /** Iterations a point, the coarsest of the line. */
  bucket: number;
  /** Where the value was NaN or infinite. */
  nonfinite: number[];
}

export type Lines = Map<string, Line>;

/** What a roll back left behind of one segment: its lines from where the run went on elsewhere. */
export interface Ghost {
  segment: number;
  lines: Lines;
}

export function emptyLine(): Line {
  return { x: [], y: [], low: [], high: [], bucket: 1, nonfinite: [] };
}

/** A line per metric. Where a later segment begins, what an earlier one has from there on was left behind. */
export function linesOf(series: SeriesData[]): Lines {
  const lines: Lines = new Map();
  for (const part of [...series].sort((a, b) => a.segment - b.segment)) {
    const line = lines.get(part.name) ?? emptyLine();
    lines.set(part.name, line);
    if (part.x[0] !== undefined) cutFrom(line, part.x[0]);
    line.bucket = Math.max(line.bucket, part.bucket);
    part.x.forEach((x, index) => {
      line.x.push(x);
      line.y.push(part.y[index] ?? null);
      line.low.push(part.min[index] ?? null);
      line.high.push(part.max[index] ?? null);
    });
    for (const index of part.nonfinite) {
      const x = part.x[index];
      if (x !== undefined) line.nonfinite.push(x);
    }
  }
  return lines;
}

/** The abandoned parts, one a segment, oldest first. */
export function ghostsOf(series: SeriesData[]): Ghost[] {
  const segments = [...new Set(series.map((part) => part.segment))].sort((a, b) => a - b);
  return segments.map((segment) => ({ segment, lines: linesOf(series.filter((part) => part.segment === segment)) }));
}

function cutFrom(line: Line, start: number): void {
  const keep = line.x.findIndex((x) => x >= start);
  if (keep < 0) return;
  for (const column of [line.x, line.y, line.low, line.high]) column.length = keep;
  line.nonfinite = line.nonfinite.filter((x) => x < start);
}

/** Add one iteration's metrics, as far as they are wanted. An iteration that a line already has is left as it is. */
export function addMetrics(lines: Lines, wanted: (name: string) => boolean, event: HistoryEvent): void {
  const iteration = event.iteration;
  if (iteration === null) return;
  const { nonfinite, ...values } = event.payload;
  const marked = (nonfinite ?? {}) as Record<string, string>;
  for (const [name, value] of Object.entries(values)) {
    if (!wanted(name)) continue;
    const line = lines.get(name) ?? emptyLine();
    lines.set(name, line);
    if (iteration <= (line.x.at(-1) ?? -Infinity)) continue;
    const number = typeof value === "number" ? value : null;
    line.x.push(iteration);
    line.y.push(number);
    line.low.push(number);
    line.high.push(number);
    if (name in marked) line.nonfinite.push(iteration);
  }
}

/** Whether there is anything to draw of it. */
export function hasValues(line: Line): boolean {
  return line.nonfinite.length > 0 || line.y.some((value) => value !== null);
}

/** Points of the longest line. */
export function mostPoints(lines: Lines): number {
  return Math.max(0, ...[...lines.values()].map((line) => line.x.length));
}

/** First and last x over all lines. */
export function extent(lines: Lines): [number, number] | null {
  const firsts = [...lines.values()].flatMap((line) => line.x[0] ?? []);
  const lasts = [...lines.values()].flatMap((line) => line.x.at(-1) ?? []);
  return firsts.length ? [Math.min(...firsts), Math.max(...lasts)] : null;
}

/** Lowest and highest value of some lines within a window of x. */
export function spread(lines: Line[], from: number, to: number): [number, number] | null {
  let low = Infinity;
  let high = -Infinity;
  for (const line of lines) {
    line.x.forEach((x, index) => {
      if (x < from || x > to) return;
      low = Math.min(low, line.low[index] ?? line.y[index] ?? Infinity);
      high = Math.max(high, line.high[index] ?? line.y[index] ?? -Infinity);
    });
  }
  return low <= high ? [low, high] : null;
}

/** The value at an x, or the last one before it; `nonfinite` when that value was NaN or infinite. */
export function valueAt(line: Line, x: number): { x: number; value: number | null; nonfinite: boolean } | null {
  for (let index = line.x.length - 1; index >= 0; index--) {
    const at = line.x[index];
    if (at === undefined || at > x) continue;
    return { x: at, value: line.y[index] ?? null, nonfinite: line.nonfinite.includes(at) };
  }
  return null;
}

/**
 * Columns that share one x: all x of the lines, and each line's values on it. `undefined` where a line has no point
 * (drawn through), null where it has one without a value (a gap).
 */
export function columns(lines: (Line | undefined)[]): [number[], ...(number | null | undefined)[][]] {
  const xs = [...new Set(lines.flatMap((line) => line?.x ?? []))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [
    xs,
    ...lines.map((line) => {
      const column = new Array<number | null | undefined>(xs.length).fill(undefined);
      line?.x.forEach((x, index) => (column[place.get(x) as number] = line.y[index] ?? null));
      return column;
    }),
  ];
}
