import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { HistoryEvent, SeriesData } from "../src/api/types";
import { ChartStore } from "../src/charts/chart_store.svelte";

const NAME = "reward/score_mean";

function answer(cursor: number, x: number[]): Response {
  const series: SeriesData = {
    run: "r", name: NAME, segment: 1, active: true, bucket: 1, x, y: x, min: x, max: x, nonfinite: [],
  };
  return Response.json({ series: [series], cursors: { r: cursor } });
}

function metrics(seq: number, iteration = seq): HistoryEvent {
  return { seq, segment: 1, type: "metrics", iteration, time: "", payload: { [NAME]: iteration } };
}

function upTo(last: number): number[] {
  return Array.from({ length: last }, (_, index) => index + 1);
}

describe("ChartStore", () => {
  let frames: (() => void)[];
  const fetched = vi.fn<() => Promise<Response>>();

  beforeEach(() => {
    frames = [];
    vi.stubGlobal("fetch", fetched);
    vi.stubGlobal("requestAnimationFrame", (callback: () => void) => frames.push(callback));
  });

  afterEach(() => {
    vi.unstubAllGlobals();
    fetched.mockReset();
  });

  function drawn(store: ChartStore): number[] {
    return store.lines.get(NAME)?.x ?? [];
  }

  it("goes on from where its answer ended: no gap, no double", async () => {
    fetched.mockResolvedValue(answer(3, [1, 2, 3]));
    const store = new ChartStore("r");
    await store.load();
    for (const seq of [2, 3, 4, 4, 5]) store.apply(metrics(seq));
    expect(drawn(store)).toEqual([1, 2, 3, 4, 5]);
    expect(store.cursor).toBe(5);
  });

  it("asks for fewer points when it has too many, and loses none of those that come meanwhile", async () => {
    fetched.mockResolvedValueOnce(answer(1000, upTo(1000)));
    const store = new ChartStore("r");
    await store.load();
    let arrive: (response: Response) => void = () => undefined;
    fetched.mockReturnValueOnce(new Promise((resolve) => (arrive = resolve)));
    store.apply(metrics(1001));
    frames.shift()?.();
    store.apply(metrics(1002));
    store.apply(metrics(1003));
    arrive(answer(1002, [500, 1002]));
    await vi.waitFor(() => expect(drawn(store)).toEqual([500, 1002, 1003]));
  });

  it("keeps what a roll back left behind apart from the line, and what still comes of it", async () => {
    const behind: SeriesData = {
      run: "r", name: NAME, segment: 1, active: false, bucket: 1, x: [3, 4], y: [3, 4], min: [3, 4], max: [3, 4], nonfinite: [],
    };
    const line = { ...behind, active: true, x: [1, 2], y: [1, 2], min: [1, 2], max: [1, 2] };
    fetched.mockResolvedValue(Response.json({ series: [line, behind], cursors: { r: 9 } }));
    const store = new ChartStore("r");
    await store.load();
    store.activeSegment = 2;
    store.apply({ ...metrics(10, 5), segment: 1 });
    store.apply({ ...metrics(11, 3), segment: 2 });
    expect(drawn(store)).toEqual([1, 2, 3]);
    expect(store.ghosts.map((ghost) => [ghost.segment, ghost.lines.get(NAME)?.x])).toEqual([[1, [3, 4, 5]]]);
    expect(store.window).toEqual([1, 6]);
    store.ghostsShown = false;
    expect(store.ghosts).toEqual([]);
    expect(store.abandoned).toEqual([1]);
  });

  it("leaves a segment that it does not know yet to the next reading", async () => {
    fetched.mockResolvedValue(answer(3, [1, 2, 3]));
    const store = new ChartStore("r");
    await store.load();
    store.apply({ ...metrics(4, 2), segment: 2 });
    expect(drawn(store)).toEqual([1, 2, 3]);
    expect(store.ghosts).toEqual([]);
  });

  it("looks closer only where a point stands for several iterations", async () => {
    fetched.mockResolvedValue(answer(3, [1, 2, 3]));
    const store = new ChartStore("r");
    await store.load();
    store.setZoom([1, 2]);
    expect(store.window).toEqual([1, 2]);
    expect(fetched).toHaveBeenCalledTimes(1);
    store.setZoom(null);
    expect(store.window).toEqual([1, 6]);
  });
});
