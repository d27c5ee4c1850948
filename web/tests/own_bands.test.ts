/** A run's own bands take the place of the documented ones, on charts and in explanations. */

import { describe, expect, it } from "vitest";
import { definitionOf } from "../src/charts/families";
import { withOwnBands } from "../src/charts/own_bands";
import type { MetricDefinition } from "../src/api/types";

const none = { low: null, high: null, red_low: null, red_high: null, good_from: null, red_iterations: 1 };
const registry = new Map(
  [
    { name: "response/eos_rate", band: { ...none, text: "At least 95 %.", low: -0.05, relative_to: "baseline", measure: "difference", good_from: 0.95 } },
    { name: "policy/approx_kl/epoch_*", band: { ...none, text: "Below 0.02.", high: 0.02, relative_to: null, measure: "value" } },
    { name: "policy/entropy", band: null },
  ].map((entry) => [entry.name, entry as MetricDefinition]),
);

describe("withOwnBands", () => {
  it("leaves the registry of a run without bands of its own as it is", () => {
    expect(withOwnBands(registry, { alerts: { bands: {} } })).toBe(registry);
    expect(withOwnBands(registry, {})).toBe(registry);
  });

  it("takes bounds, the way they are measured, and says whose they are", () => {
    const found = withOwnBands(registry, { alerts: { bands: { "response/eos_rate": { low: -0.1 }, "policy/entropy": { low: 2, high: null } } } });
    const rate = definitionOf(found, "response/eos_rate")?.band;
    expect(rate).toMatchObject({ low: -0.1, red_low: null, good_from: null, measure: "difference" });
    expect(rate?.text).toBe("This run's own: low −0.100 from its baseline.");
    expect(definitionOf(found, "policy/entropy")?.band).toMatchObject({ low: 2, high: null, measure: "value", text: "This run's own: low 2." });
  });

  it("gives one member of a family another band, and switches one off", () => {
    const found = withOwnBands(registry, { alerts: { bands: { "policy/approx_kl/epoch_2": { high: 0.1 }, "response/eos_rate": null } } });
    expect(definitionOf(found, "policy/approx_kl/epoch_2")?.band?.high).toBe(0.1);
    expect(definitionOf(found, "policy/approx_kl/epoch_1")?.band?.high).toBe(0.02);
    expect(definitionOf(found, "response/eos_rate")?.band).toMatchObject({ low: null, text: "This run raises no alert of it." });
    expect(definitionOf(found, "policy/entropy")?.band).toBeNull();
  });
});
