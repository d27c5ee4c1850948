/** A metric's definition by name, families included, and whether a value lies outside the healthy band. */

import type { MetricDefinition } from "../../api/types";

/** `policy/approx_kl/epoch_2` is defined by `policy/approx_kl/epoch_*`. */
export function definitionOf(registry: Map<string, MetricDefinition>, name: string): MetricDefinition | undefined {
  const exact = registry.get(name);
  if (exact) return exact;
  for (const [pattern, definition] of registry) {
    if (pattern.endsWith("*") && name.startsWith(pattern.slice(0, -1))) return definition;
  }
  return undefined;
}

/** Only bands on the value itself can be judged by one value; the others need the run's history. */
export function outside(definition: MetricDefinition | undefined, value: number | null): "warn" | "red" | null {
  const band = definition?.band;
  if (!band || band.measure !== "value" || value === null) return null;
  if ((band.red_low !== null && value < band.red_low) || (band.red_high !== null && value > band.red_high)) return "red";
  if ((band.low !== null && value < band.low) || (band.high !== null && value > band.high)) return "warn";
  return null;
}
