import { describe, expect, it } from "vitest";
import type { HistoryEvent, SeriesData } from "../src/api/types";
import { addMetrics, columns, extent, ghostsOf, hasValues, linesOf, spread, valueAt } from "../src/charts/lines";

function series(fields: Partial<SeriesData>): SeriesData {
  const y = fields.y ?? [];
  return { run: "r", name: "kl", segment: 1, active: true, bucket: 1, x: [], y, min: y, max: y, nonfinite: [], ...fields };
}

function metrics(iteration: number, payload: Record<string, unknown>): HistoryEvent {
  return { seq: iteration, segment: 1, type: "metrics", iteration, time: "", payload };
}

const wanted = (name: string): boolean => name === "kl";

describe("linesOf", () => {
  it("drops what an earlier segment has from a later one's start on", () => {
    const lines = linesOf([
      series({ segment: 2, x: [3, 4], y: [30, 40] }),
      series({ segment: 1, x: [1, 2, 3, 4], y: [1, 2, 3, 4], nonfinite: [3] }),
    ]);
    expect(lines.get("kl")).toMatchObject({ x: [1, 2, 3, 4], y: [1, 2, 30, 40], nonfinite: [] });
  });

  it("keeps where values were not finite", () => {
    expect(linesOf([series({ x: [5, 6], y: [null, 1], nonfinite: [0] })]).get("kl")?.nonfinite).toEqual([5]);
  });
});

describe("ghostsOf", () => {
  it("gives each abandoned segment its own lines, oldest first", () => {
    const ghosts = ghostsOf([
      series({ segment: 3, active: false, x: [3], y: [33] }),
      series({ segment: 1, active: false, x: [3, 4], y: [3, 4] }),
      series({ segment: 1, active: false, name: "loss", x: [3], y: [0.5] }),
    ]);
    expect(ghosts.map((ghost) => [ghost.segment, [...ghost.lines.keys()]])).toEqual([[1, ["kl", "loss"]], [3, ["kl"]]]);
    expect(ghosts[0]?.lines.get("kl")?.x).toEqual([3, 4]);
  });
});

describe("addMetrics", () => {
  it("adds an iteration once", () => {
    const lines = linesOf([series({ x: [1], y: [1] })]);
    addMetrics(lines, wanted, metrics(1, { kl: 9 }));
    addMetrics(lines, wanted, metrics(2, { kl: 2 }));
    addMetrics(lines, wanted, metrics(2, { kl: 9 }));
    expect(lines.get("kl")).toMatchObject({ x: [1, 2], y: [1, 2] });
  });

  it("tells undefined, NaN and infinite apart from a number", () => {
    const lines = linesOf([]);
    addMetrics(lines, wanted, metrics(1, { kl: null }));
    addMetrics(lines, wanted, metrics(2, { kl: null, nonfinite: { kl: "NaN" } }));
    expect(lines.get("kl")).toMatchObject({ x: [1, 2], y: [null, null], nonfinite: [2] });
  });

  it("takes no metric that is not charted", () => {
    const lines = linesOf([]);
    addMetrics(lines, wanted, metrics(1, { other: 1 }));
    expect(lines.size).toBe(0);
  });
});

describe("columns", () => {
  it("puts lines on one x, and tells a gap from no point", () => {
    const lines = linesOf([
      series({ name: "a", x: [1, 2, 3], y: [1, null, 3] }),
      series({ name: "b", x: [0, 3], y: [7, 8] }),
    ]);
    expect(columns([lines.get("a"), lines.get("b"), undefined])).toEqual([
      [0, 1, 2, 3],
      [undefined, 1, null, 3],
      [7, undefined, undefined, 8],
      [undefined, undefined, undefined, undefined],
    ]);
  });
});

describe("looking at lines", () => {
  const lines = linesOf([series({ bucket: 2, x: [0, 2, 4], y: [1, 2, 3], min: [0, 1, -9], max: [2, 50, 4] })]);
  const line = lines.get("kl");
  if (!line) throw new Error("no line");

  it("finds the spread within a window, spikes within buckets included", () => {
    expect(spread([line], 0, 3)).toEqual([0, 50]);
    expect(spread([line], 7, 9)).toBeNull();
  });

  it("gives the value at an x or the last one before", () => {
    expect(valueAt(line, 3)).toEqual({ x: 2, value: 2, nonfinite: false });
    expect(valueAt(line, -1)).toBeNull();
  });

  it("knows first and last x, and whether there is anything to draw", () => {
    expect(extent(lines)).toEqual([0, 4]);
    expect(hasValues(line)).toBe(true);
    expect(hasValues({ ...line, y: [null, null, null] })).toBe(false);
  });
});
