/** Positions in runs' histories: `ID:SEQ,ID:SEQ`, the stream's query and the id of its messages. */

/** In the stream's query: the states of all runs. */
export const EVERY_RUN = "*";

export type Positions = Record<string, number>;

export function formatPositions(positions: Positions): string {
  return Object.keys(positions)
    .sort()
    .map((run) => `${run}:${positions[run]}`)
    .join(",");
}

/** Whether the run's next event was seen before, is the next one, or shows that some are missing. */
export function place(position: number, seq: number): "old" | "next" | "gap" {
  if (seq <= position) return "old";
  return seq === position + 1 ? "next" : "gap";
}

/** For each run the lowest of several positions: a stream from there misses nothing that any of them needs. */
export function lowest(all: Iterable<Positions>): Positions {
  const result: Positions = {};
  for (const positions of all) {
    for (const [run, seq] of Object.entries(positions)) {
      const known = result[run];
      result[run] = known === undefined ? seq : Math.min(known, seq);
    }
  }
  return result;
}
