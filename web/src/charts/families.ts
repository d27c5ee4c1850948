/** Families of metrics, such as `policy/approx_kl/epoch_*`: their members are known only in the run. */

import type { MetricDefinition } from "../api/types";
import { metricsOf, type Panel } from "./panels";

/** A metric's definition by name, or that of its family. */
export function definitionOf(registry: Map<string, MetricDefinition>, name: string): MetricDefinition | undefined {
  const exact = registry.get(name);
  if (exact) return exact;
  for (const [pattern, definition] of registry) {
    if (isMember(name, pattern)) return definition;
  }
  return undefined;
}

/** What a metric is called beside its fellows: a member of a family by what tells it from the others. */
export function titleOf(definition: MetricDefinition | undefined, name: string): string {
  if (!definition) return name;
  if (!definition.name.endsWith("*")) return definition.title;
  const words = name.replaceAll("_", " ").split("/");
  return words.slice(/^\d+$/.test(words.at(-1) ?? "") ? -2 : -1).join(" ");
}

/** The panel with its families' members, as far as they are recorded, in place of the stars. */
export function expanded(panel: Panel, recorded: string[]): Panel {
  if (!metricsOf(panel).some((name) => name.endsWith("*"))) return panel;
  const known = [...recorded].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const members = (name: string): string[] => (name.endsWith("*") ? known.filter((one) => isMember(one, name)) : [name]);
  return { ...panel, left: panel.left.flatMap(members), ...(panel.right && { right: panel.right.flatMap(members) }) };
}

/** Whether a panel has something to show in this run, or may have it. */
export function isUsed(panel: Panel, recorded: string[]): boolean {
  return !panel.ifUsed || metricsOf(expanded(panel, recorded)).some((name) => recorded.includes(name));
}

function isMember(name: string, pattern: string): boolean {
  return pattern.endsWith("*") && name.startsWith(pattern.slice(0, -1)) && name !== pattern;
}
