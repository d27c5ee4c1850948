/** Whether a value lies outside the healthy band. */

import type { MetricDefinition } from "../../api/types";

/** Only bands on the value itself can be judged by one value; the others need the run's history. */
export function outside(definition: MetricDefinition | undefined, value: number | null): "warn" | "red" | null {
  const band = definition?.band;
  if (!band || band.measure !== "value" || value === null) return null;
  if ((band.red_low !== null && value < band.red_low) || (band.red_high !== null && value > band.red_high)) return "red";
  if ((band.low !== null && value < band.low) || (band.high !== null && value > band.high)) return "warn";
  return null;
}
