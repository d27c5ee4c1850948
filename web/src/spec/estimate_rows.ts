/** The dry run's estimate as rows of words: names without their units, numbers with them. */

import { formatBytes, formatCount, formatNumber, formatSpan } from "../format";

export type EstimateRow = [name: string, value: string];

/** Sentences are shown elsewhere; what is unknown is left out. */
export function estimateRows(estimate: Record<string, unknown>, prefix = ""): EstimateRow[] {
  return Object.entries(estimate).flatMap(([key, value]): EstimateRow[] => {
    if (key === "warnings" || key === "meaning" || value === null) return [];
    const name = prefix ? `${prefix} ${key}` : key;
    if (Array.isArray(value)) {
      const known = value.filter((item) => typeof item === "number");
      return known.length ? [[words(name), known.map((item) => formatValue(key, item)).join(", ")]] : [];
    }
    if (typeof value === "object") return estimateRows(value as Record<string, unknown>, name);
    return [[words(name), typeof value === "number" ? formatValue(key, value) : String(value)]];
  });
}

function words(key: string): string {
  const plain = key.replace(/_(bytes|gib|s)\b/g, "").replace(/_/g, " ");
  return plain.charAt(0).toUpperCase() + plain.slice(1);
}

function formatValue(key: string, value: number): string {
  if (key.endsWith("_bytes")) return formatBytes(value);
  if (key.endsWith("_gib")) return `${formatNumber(value)} GiB`;
  if (key.endsWith("_s")) return formatSpan(value);
  return Number.isInteger(value) ? formatCount(value) : formatNumber(value);
}
