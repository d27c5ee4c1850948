/**
 * Where everything of a run lies on its ribbon: the history that counts on the first lane, abandoned stretches below
 * it, each on the first lane where it has room. Iterations, no pixels.
 */

import type { Checkpoint, Segment } from "../../api/types";

export interface Stretch {
  segment: number;
  from: number;
  to: number;
  lane: number;
}

export interface Mark {
  kind: "recovery" | "rollback" | "fork";
  segment: Segment;
  lane: number;
}

export interface RibbonLayout {
  lanes: number;
  stretches: Stretch[];
  marks: Mark[];
  /** Abandoned segments for which there was no lane left. */
  unseen: number[];
  /** The lane of a checkpoint; null when its stretch is not shown. */
  laneOf(checkpoint: { segment: number; iteration: number }): number | null;
}

const MOST_LANES = 4;

/** `iteration` is how far the active segment has come, which segments say only when they are read. */
export function ribbonLayout(segments: Segment[], iteration: number): RibbonLayout {
  const stretches: Stretch[] = [];
  const unseen: number[] = [];
  const ends: number[] = [];
  for (const segment of segments) {
    const line = segment.on_active_line;
    if (segment.active) {
      const to = Math.max(iteration, segment.start_iteration);
      stretches.push({ segment: segment.number, from: segment.start_iteration, to, lane: 0 });
    } else if (line) {
      stretches.push({ segment: segment.number, from: segment.start_iteration, to: line[1], lane: 0 });
    }
    const from = line ? line[1] : segment.start_iteration;
    if (segment.active || segment.last_iteration <= from) continue;
    let lane = ends.findIndex((end) => end <= from) + 1;
    if (lane === 0) lane = ends.length + 1;
    if (lane >= MOST_LANES) {
      unseen.push(segment.number);
      continue;
    }
    ends[lane - 1] = segment.last_iteration;
    stretches.push({ segment: segment.number, from, to: segment.last_iteration, lane });
  }
  const laneOf = ({ segment, iteration: at }: { segment: number; iteration: number }): number | null => {
    const own = stretches.filter((stretch) => stretch.segment === segment);
    const found = own.find((stretch) => at >= stretch.from && at <= stretch.to) ?? own.at(-1);
    return found?.lane ?? null;
  };
  const marks = segments.flatMap((segment): Mark[] => {
    const lane = laneOf({ segment: segment.number, iteration: segment.start_iteration });
    return segment.kind === "start" || lane === null ? [] : [{ kind: segment.kind, segment, lane }];
  });
  return { lanes: ends.length + 1, stretches, marks, unseen, laneOf };
}

/** The checkpoint that the judge likes best; null while none was judged. */
export function bestOf(checkpoints: Checkpoint[]): Checkpoint | null {
  const judged = checkpoints.filter((item) => item.status === "good" && item.judge_score !== null);
  return judged.reduce<Checkpoint | null>(
    (best, item) => (best === null || (item.judge_score ?? 0) > (best.judge_score ?? 0) ? item : best), null,
  );
}
