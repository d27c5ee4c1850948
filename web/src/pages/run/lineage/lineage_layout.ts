/**
 * The family of a run as a picture: each run a block of rows, a row a segment, iterations along x, and an edge from the
 * checkpoint that a segment started from. Shares of the width and rows, no pixels.
 */

import type { LineageRun, LineageSegment } from "../../../api/types";

export interface Bar {
  run: string;
  segment: LineageSegment;
  row: number;
  /** Iterations that the bar covers. */
  from: number;
  to: number;
  /** Up to here it belongs to the run's present history; `from` where nothing does. */
  keptTo: number;
}

export interface Edge {
  at: number;
  fromRow: number;
  toRow: number;
  between: "runs" | "segments";
}

export interface LineageLayout {
  rows: number;
  lastIteration: number;
  blocks: { run: LineageRun; row: number; depth: number }[];
  bars: Bar[];
  edges: Edge[];
}

export function lineageLayout(runs: LineageRun[]): LineageLayout {
  const ordered = inFamilyOrder(runs);
  const blocks: LineageLayout["blocks"] = [];
  const bars: Bar[] = [];
  let row = 0;
  for (const { run, depth } of ordered) {
    blocks.push({ run, row, depth });
    row++; // The run's name has a row of its own.
    for (const segment of run.segments) {
      const to = Math.max(segment.start_iteration, segment.last_iteration);
      const line = segment.on_active_line;
      const keptTo = segment.active ? to : line ? Math.min(to, line[1]) : segment.start_iteration;
      bars.push({ run: run.id, segment, row, from: segment.start_iteration, to, keptTo });
      row++;
    }
  }
  const rowOf = new Map(bars.map((bar) => [`${bar.run} ${bar.segment.number}`, bar.row]));
  const edges = bars.flatMap((bar): Edge[] => {
    const from = bar.segment.started_from;
    const fromRow = from && rowOf.get(`${from.run_id} ${from.segment}`);
    if (!from || fromRow == null) return [];
    return [{ at: from.iteration, fromRow, toRow: bar.row, between: from.run_id === bar.run ? "segments" : "runs" }];
  });
  return { rows: row, lastIteration: Math.max(1, ...bars.map((bar) => bar.to)), blocks, bars, edges };
}

/** Every run below the one that it was forked from. */
function inFamilyOrder(runs: LineageRun[]): { run: LineageRun; depth: number }[] {
  const known = new Set(runs.map((run) => run.id));
  const parentOf = (run: LineageRun): string | null => {
    const parent = run.segments.find((segment) => segment.kind === "fork")?.started_from?.run_id ?? null;
    return parent !== null && known.has(parent) && parent !== run.id ? parent : null;
  };
  const placed = new Set<string>();
  const below = (parent: string | null, depth: number): { run: LineageRun; depth: number }[] =>
    runs
      .filter((run) => parentOf(run) === parent && !placed.has(run.id))
      .flatMap((run) => {
        placed.add(run.id);
        return [{ run, depth }, ...below(run.id, depth + 1)];
      });
  return below(null, 0);
}
