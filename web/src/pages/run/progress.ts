/** How long a run still takes, by the iterations behind it. */

import type { Line } from "../../charts/lines";

const RECENT = 20;

/** Seconds for the iterations that remain, at the mean of the last ones; null when none is known. */
export function secondsLeft(iterationSeconds: Line | undefined, iterations: number): number | null {
  const recent = (iterationSeconds?.y ?? []).filter((value): value is number => value !== null).slice(-RECENT);
  if (recent.length === 0 || iterations < 0) return null;
  return (recent.reduce((sum, value) => sum + value, 0) / recent.length) * iterations;
}
