import { afterEach, describe, expect, it, vi } from "vitest";

import { changeRun } from "../src/api/endpoints";
import type { RunLabels } from "../src/api/types";
import { changesOf } from "../src/pages/run/labels";

const SEEN: RunLabels = { name: "first", notes: null, priority: 0 };

describe("changes of a run's labels", () => {
  it("are the fields that differ; empty notes are none", () => {
    expect(changesOf(SEEN, { name: " first ", notes: "  ", priority: 0 })).toEqual({});
    expect(changesOf(SEEN, { name: "second", notes: "why", priority: -3 })).toEqual({ name: "second", notes: "why", priority: -3 });
    expect(changesOf({ ...SEEN, notes: "why" }, { name: "first", notes: "", priority: 0 })).toEqual({ notes: null });
    expect(changesOf(SEEN, { name: "", notes: "", priority: null })).toEqual({});
  });
});

describe("saving them", () => {
  afterEach(() => vi.unstubAllGlobals());

  /** An api whose run has these labels at each reading, and which refuses so many patches for their version. */
  function api(read: RunLabels[], refusals: number): Request[] {
    const patches: Request[] = [];
    let version = 0;
    vi.stubGlobal("fetch", async (path: string, init: RequestInit) => {
      if (init.method !== "PATCH") {
        version += 1;
        const body = read[Math.min(version, read.length) - 1];
        return new Response(JSON.stringify(body), { headers: { ETag: `"${version}"` } });
      }
      patches.push(new Request(`http://localhost${path}`, init));
      const refused = patches.length <= refusals;
      return new Response(JSON.stringify({ title: refused ? "moved on" : "ok" }), { status: refused ? 412 : 200 });
    });
    return patches;
  }

  it("is tried again with the new version when the run only moved on", async () => {
    const patches = api([SEEN], 2);
    await changeRun("r-1", SEEN, { notes: "why" });
    expect(patches.map((patch) => patch.headers.get("If-Match"))).toEqual(['"1"', '"2"', '"3"']);
    expect(await patches[2]?.json()).toEqual({ notes: "why" });
  });

  it("ends with the refusal when it never fits", async () => {
    api([SEEN], 99);
    await expect(changeRun("r-1", SEEN, { notes: "why" })).rejects.toThrow("moved on");
  });

  it("overwrites nothing that somebody else wrote, and minds only what is changed", async () => {
    const patches = api([{ ...SEEN, notes: "theirs" }], 0);
    await expect(changeRun("r-1", SEEN, { notes: "ours" })).rejects.toThrow('notes is "theirs" now');
    expect(patches).toEqual([]);
    await changeRun("r-1", SEEN, { priority: 4 });
    expect(patches).toHaveLength(1);
  });
});
