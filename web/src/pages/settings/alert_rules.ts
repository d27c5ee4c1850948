/** The form of the platform's alert rules: from what is stored to fields and back. Validating is the api's. */

import type { MetricDefinition } from "../../api/types";
import { BOUNDS, type Bound, type Bounds } from "../../charts/own_bands";

export const ACTIONS = ["on_warning", "on_critical", "on_story"] as const;

export type ActionName = (typeof ACTIONS)[number];
export type Alerts = Record<string, unknown>;
type StoredBand = Bounds | null;

/** A metric's rule: none, other bounds, or no alerts. Bounds are kept as typed; an empty one leaves its side open. */
export interface BandField {
  mode: "documented" | "own" | "off";
  bounds: Record<Bound, string>;
}

const storedBands = (alerts: Alerts): Record<string, StoredBand> => (alerts.bands ?? {}) as Record<string, StoredBand>;

const asText = (bounds: Bounds | null | undefined): Record<Bound, string> =>
  Object.fromEntries(BOUNDS.map((bound) => [bound, String(bounds?.[bound] ?? "")])) as Record<Bound, string>;

/** A field for every metric that has a band or a rule; the bounds of one without a rule begin as documented. */
export function bandFields(alerts: Alerts, registry: Map<string, MetricDefinition>): Record<string, BandField> {
  const stored = storedBands(alerts);
  const documented = [...registry.values()].filter((metric) => metric.band).map((metric) => metric.name);
  const names = [...new Set([...documented, ...Object.keys(stored)])];
  return Object.fromEntries(
    names.map((name) => {
      const rule = stored[name];
      const mode = rule === undefined ? "documented" : rule === null ? "off" : "own";
      return [name, { mode, bounds: asText(rule ?? registry.get(name)?.band) }];
    }),
  );
}

/** What to store; whatever the form does not show stays as it is. */
export function alertsOf(stored: Alerts, actions: Record<ActionName, string>, bands: Record<string, BandField>): Alerts {
  const rules: Record<string, unknown> = {};
  for (const [name, field] of Object.entries(bands)) {
    if (field.mode === "off") rules[name] = null;
    if (field.mode === "own") rules[name] = given(field.bounds);
  }
  const rest = Object.fromEntries(Object.entries(stored).filter(([name]) => name !== "bands" && !ACTIONS.includes(name as ActionName)));
  const said = Object.fromEntries(Object.entries(actions).filter(([, action]) => action));
  return { ...rest, ...said, ...(Object.keys(rules).length ? { bands: rules } : {}) };
}

/** What is no number is sent as it was typed: the api names it. */
function given(bounds: Record<Bound, string>): Record<string, number | string> {
  const typed = BOUNDS.map((bound) => [bound, bounds[bound].trim()] as const).filter(([, text]) => text);
  return Object.fromEntries(typed.map(([bound, text]) => [bound, Number.isFinite(Number(text)) ? Number(text) : text]));
}

/** The pointer of a metric's band in the api's faults. */
export const bandPointer = (name: string): string => `/alerts/bands/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`;
