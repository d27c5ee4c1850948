/** The registry as a run has it: with the bands that its spec gives in `alerts.bands` in place of the documented ones. */

import type { MetricDefinition } from "../api/types";
import { formatNumber } from "../format";
import { definitionOf } from "./families";

/** A band's bounds, from the lowest on. */
export const BOUNDS = ["red_low", "low", "high", "red_high"] as const;
export type Bound = (typeof BOUNDS)[number];
export type Bounds = Partial<Record<Bound, number | null>>;
type Band = NonNullable<MetricDefinition["band"]>;

export function withOwnBands(registry: Map<string, MetricDefinition>, spec: Record<string, unknown>): Map<string, MetricDefinition> {
  const bands = (spec.alerts as { bands?: Record<string, Bounds | null> } | undefined)?.bands ?? {};
  const own = Object.entries(bands).flatMap(([name, bounds]): [string, MetricDefinition][] => {
    const definition = definitionOf(registry, name);
    return definition ? [[name, { ...definition, band: bandOf(bounds, definition.band) }]] : [];
  });
  return own.length ? new Map([...registry, ...own]) : registry;
}

function bandOf(bounds: Bounds | null, documented: MetricDefinition["band"]): MetricDefinition["band"] {
  if (bounds === null) return documented && { ...documented, text: "This run raises no alert of it.", low: null, high: null, red_low: null, red_high: null };
  const base: Omit<Band, "text"> = documented ?? {
    low: null, high: null, red_low: null, red_high: null, relative_to: null, measure: "value", good_from: null, red_iterations: 1,
  };
  const found = Object.fromEntries(BOUNDS.map((name) => [name, bounds[name] ?? null])) as Record<Bound, number | null>;
  const words = BOUNDS.filter((name) => found[name] !== null).map((name) => `${name} ${formatNumber(found[name])}`);
  return { ...base, ...found, good_from: null, text: `This run's own: ${words.join(", ")}${measured(base)}.` };
}

function measured(band: Omit<Band, "text">): string {
  if (!band.relative_to) return "";
  const other = band.relative_to === "baseline" ? "its baseline" : "its value of 40 iterations before";
  return { value: "", factor: ` times ${other}`, difference: ` from ${other}`, mad: ` median deviations from ${other}` }[band.measure];
}
