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

  describe("of metrics that come into sight later", () => {
    const OTHER = "response/empty";
    const line = (name: string, x: number[], segment = 1, active = true): SeriesData => ({
      run: "r", name, segment, active, bucket: 1, x, y: x, min: x, max: x, nonfinite: [],
    });
    const asked = (call: number): string[] => {
      const address = String((fetched.mock.calls as unknown[][])[call]?.[0]);
      return new URL(address, "http://host").searchParams.get("names")?.split(",") ?? [];
    };

    async function loaded(): Promise<ChartStore> {
      fetched.mockResolvedValueOnce(answer(3, [1, 2, 3]));
      const store = new ChartStore("r");
      await store.load();
      return store;
    }

    it("asks once for those that panels want together, and only for new ones", async () => {
      const store = await loaded();
      expect(asked(0)).not.toContain(OTHER);
      fetched.mockResolvedValueOnce(Response.json({ series: [line(OTHER, [1, 2, 3])], cursors: { r: 3 } }));
      store.want([NAME, OTHER]);
      store.want(["data/response_tokens"]);
      store.want([OTHER]);
      expect(store.has(OTHER)).toBe(false);
      await vi.waitFor(() => expect(store.has(OTHER)).toBe(true));
      expect(asked(1)).toEqual([OTHER, "data/response_tokens"]);
      expect(fetched).toHaveBeenCalledTimes(2);
      expect(store.lines.get(OTHER)?.x).toEqual([1, 2, 3]);
      expect(drawn(store)).toEqual([1, 2, 3]);
    });

    it("neither loses nor doubles what comes while they are read", async () => {
      const store = await loaded();
      let arrive: (response: Response) => void = () => undefined;
      fetched.mockReturnValueOnce(new Promise((resolve) => (arrive = resolve)));
      store.want([OTHER]);
      await vi.waitFor(() => expect(fetched).toHaveBeenCalledTimes(2));
      const both = (seq: number): HistoryEvent => ({ ...metrics(seq), payload: { [NAME]: seq, [OTHER]: seq } });
      store.apply(both(4));
      store.apply(both(5));
      // The answer has seen one event more than the stream's first, and one that the stream brings later.
      arrive(Response.json({ series: [line(OTHER, [2, 4])], cursors: { r: 4 } }));
      await vi.waitFor(() => expect(store.has(OTHER)).toBe(true));
      store.apply(both(6));
      expect(store.lines.get(OTHER)?.x).toEqual([2, 4, 5, 6]);
      expect(drawn(store)).toEqual([1, 2, 3, 4, 5, 6]);
    });

    it("does not take a point twice that an answer's bucket already holds", async () => {
      const store = await loaded();
      fetched.mockResolvedValueOnce(Response.json({ series: [line(OTHER, [1])], cursors: { r: 5 } }));
      store.want([OTHER]);
      await vi.waitFor(() => expect(store.has(OTHER)).toBe(true));
      store.apply({ ...metrics(5, 2), payload: { [OTHER]: 2 } });
      store.apply({ ...metrics(6, 3), payload: { [OTHER]: 3 } });
      expect(store.lines.get(OTHER)?.x).toEqual([1, 3]);
    });

    it("reads them again with all others, and what came into sight meanwhile", async () => {
      const store = await loaded();
      let arrive: (response: Response) => void = () => undefined;
      fetched.mockReturnValueOnce(new Promise((resolve) => (arrive = resolve)));
      const loading = store.load();
      fetched.mockResolvedValueOnce(Response.json({ series: [line(OTHER, [1])], cursors: { r: 3 } }));
      store.want([OTHER]);
      await vi.waitFor(() => expect(store.has(OTHER)).toBe(true));
      fetched.mockResolvedValueOnce(
        Response.json({ series: [line(OTHER, [1, 2], 2), line(OTHER, [3], 1, false)], cursors: { r: 9 } }),
      );
      arrive(answer(8, [1, 2]));
      await loading;
      expect(drawn(store)).toEqual([1, 2]);
      expect(store.lines.get(OTHER)?.x).toEqual([1, 2]);
      expect(store.ghosts.map((ghost) => [ghost.segment, ghost.lines.get(OTHER)?.x])).toEqual([[1, [3]]]);
    });

    it("asks in parts where there are more than the api answers at once", async () => {
      const store = await loaded();
      fetched.mockImplementation(() => Promise.resolve(Response.json({ series: [], cursors: { r: 3 } })));
      const many = Array.from({ length: 130 }, (_, index) => `reward/source_mean/${index}`);
      store.want(many);
      await vi.waitFor(() => expect(store.has("reward/source_mean/129")).toBe(true));
      expect([asked(1).length, asked(2).length]).toEqual([100, 30]);
    });
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
