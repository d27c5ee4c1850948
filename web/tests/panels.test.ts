/** Every metric of the registry has one place among the charts. `docs/metrics.md` is made by the registry. */

import { describe, expect, it } from "vitest";
import { definitionOf, expanded, isUsed, titleOf } from "../src/charts/families";
import { FIRST, FOLDS, metricsOf, PANELS, type Panel } from "../src/charts/panels";
import type { MetricDefinition } from "../src/api/types";
import page from "../../docs/metrics.md?raw";

const registered = [...page.matchAll(/^### `([^`]+)`$/gm)].map((found) => found[1] as string);
const all = [...PANELS, ...FOLDS.flatMap((fold) => fold.panels)];

describe("panels", () => {
  it("draw every metric of the registry once, and no other", () => {
    expect(registered.length).toBeGreaterThan(80);
    expect(all.flatMap(metricsOf).sort()).toEqual([...registered].sort());
  });

  it("have an id each", () => {
    const ids = [...all, ...FOLDS].map((one) => one.id);
    expect(new Set(ids).size).toBe(ids.length);
  });

  it("ask first for what the registry knows", () => {
    expect(FIRST.filter((name) => !registered.includes(name))).toEqual([]);
  });
});

describe("a family", () => {
  const panel: Panel = { id: "p", title: "P", left: ["kl/a", "kl/epoch_*"], right: ["bad/*"] };
  const family = { name: "kl/epoch_*", title: "KL in one epoch" } as MetricDefinition;

  it("is drawn by its members, in the order of their numbers", () => {
    const recorded = ["kl/epoch_10", "kl/epoch_2", "kl/epochs", "bad/nan", "kl/a"];
    expect(expanded(panel, recorded)).toMatchObject({ left: ["kl/a", "kl/epoch_2", "kl/epoch_10"], right: ["bad/nan"] });
  });

  it("leaves a panel without a family as it is", () => {
    const plain: Panel = { id: "p", title: "P", left: ["kl/a"] };
    expect(expanded(plain, ["kl/a"])).toBe(plain);
  });

  it("defines its members and names them by what tells them apart", () => {
    const registry = new Map([[family.name, family]]);
    expect(definitionOf(registry, "kl/epoch_2")).toBe(family);
    expect(definitionOf(registry, "kl/other")).toBeUndefined();
    expect(titleOf(family, "kl/epoch_2")).toBe("epoch 2");
    expect(titleOf({ ...family, name: "reward/source_mean/*" }, "reward/source_mean/0")).toBe("source mean 0");
    expect(titleOf({ ...family, name: "kl/a" }, "kl/a")).toBe("KL in one epoch");
    expect(titleOf(undefined, "kl/a")).toBe("kl/a");
  });

  it("shows a panel of its own only where it has a member", () => {
    const own: Panel = { id: "o", title: "O", left: ["bad/*"], ifUsed: true };
    expect(isUsed(own, ["kl/a"])).toBe(false);
    expect(isUsed(own, ["bad/nan"])).toBe(true);
    expect(isUsed(panel, [])).toBe(true);
  });
});
