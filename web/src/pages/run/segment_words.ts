/** Segments in words. */

import type { LineageSegment } from "../../api/types";

const KIND: Record<LineageSegment["kind"], string> = {
  start: "from the beginning", rollback: "roll back", recovery: "recovery", fork: "fork",
};

const DONE = { start: "started at", rollback: "rolled back to", recovery: "recovered to", fork: "forked at" };

/** `2 · roll back to 5 · active`. */
export function segmentWords(segment: LineageSegment): string {
  const from = segment.kind === "start" ? KIND.start : `${KIND[segment.kind]} ${segment.kind === "fork" ? "at" : "to"} ${segment.start_iteration}`;
  return [`${segment.number}`, from, segment.active ? "active" : ""].filter(Boolean).join(" · ");
}

/** One sentence for those who do not see the graph. `nameOf` gives another run's name. */
export function segmentSentence(segment: LineageSegment, run: string, nameOf: (run: string) => string): string {
  const from = segment.started_from;
  const origin =
    from === null
      ? "starts from the beginning"
      : `${DONE[segment.kind]} iteration ${from.iteration} of segment ${from.segment}${from.run_id === run ? "" : ` of ${nameOf(from.run_id)}`}`;
  const line = segment.on_active_line;
  const counts =
    segment.active ? "active"
    : line === null ? "left behind whole"
    : line[1] >= segment.last_iteration ? "all of it counts"
    : `counts up to iteration ${line[1]}, left behind after it`;
  return `Segment ${segment.number}: ${origin}, came to iteration ${segment.last_iteration}, ${counts}.`;
}

/** The segment that one started from, as far as it lies in the same run; the one before it otherwise. */
export function parentOf(segments: LineageSegment[], number: number): number {
  const segment = segments.find((candidate) => candidate.number === number);
  const parent = segments.find((candidate) => candidate.number === segment?.started_from?.segment);
  const own = segment?.kind !== "fork" && parent;
  return own ? parent.number : Math.max(1, number - 1);
}
