/** Going back, as far as it is logic: ribbon and lineage layout, typed settings, differences of specs, words. */

import { describe, expect, it } from "vitest";
import type { Checkpoint, LineageRun, LineageSegment, Problem, Segment } from "../src/api/types";
import { suggested } from "../src/pages/run/back/going_back.svelte";
import { leftBehindWords } from "../src/pages/run/back/left_behind";
import { atPath, faultsByPath, settingsOf, valueOf, valueText } from "../src/pages/run/back/settings";
import { lineageLayout } from "../src/pages/run/lineage/lineage_layout";
import { bestOf, ribbonLayout } from "../src/pages/run/ribbon_layout";
import { parentOf, segmentSentence, segmentWords } from "../src/pages/run/segment_words";
import { requestsOf, whyNoWayBack } from "../src/run_states";
import type { SpecField } from "../src/spec/schema_fields";
import { schemaFields } from "../src/spec/schema_fields";
import { specDiff } from "../src/spec/spec_diff";

function segment(number: number, fields: Partial<Segment> = {}): Segment {
  return {
    number, kind: number === 1 ? "start" : "rollback", active: false, start_iteration: 0, last_iteration: 0,
    on_active_line: null, start_checkpoint: null, started_from: null, created_at: "", created_by: null, reason: null,
    changes: [], ...fields,
  };
}

function checkpoint(iteration: number, fields: Partial<Checkpoint> = {}): Checkpoint {
  return {
    id: `c-${fields.segment ?? 1}-${iteration}`, segment: 1, iteration, path: "", bytes: 1, manifest_sha256: "",
    reason: "schedule", status: "good", judge_score: null, pinned: false, label: null, created_at: "",
    status_detail: null, verified_at: null, protected: [], etag: "", ...fields,
  };
}

// Two roll backs to 5: segment 1 counts up to 5, segment 2 was given up whole, segment 3 goes on.
const TWICE = [
  segment(1, { last_iteration: 12, on_active_line: [0, 5] }),
  segment(2, { start_iteration: 5, last_iteration: 9, started_from: { run_id: "r", segment: 1, iteration: 5 } }),
  segment(3, { start_iteration: 5, last_iteration: 6, on_active_line: [6, 6], active: true, started_from: { run_id: "r", segment: 1, iteration: 5 } }),
];

describe("the ribbon", () => {
  it("has one lane while nothing was left behind", () => {
    const layout = ribbonLayout([segment(1, { active: true, last_iteration: 3, on_active_line: [0, 3] })], 7);
    expect(layout).toMatchObject({ lanes: 1, marks: [], stretches: [{ segment: 1, from: 0, to: 7, lane: 0 }] });
  });

  it("puts abandoned stretches below, each where it has room", () => {
    const layout = ribbonLayout(TWICE, 8);
    expect(layout.stretches).toEqual([
      { segment: 1, from: 0, to: 5, lane: 0 },
      { segment: 1, from: 5, to: 12, lane: 1 },
      { segment: 2, from: 5, to: 9, lane: 2 },
      { segment: 3, from: 5, to: 8, lane: 0 },
    ]);
    expect(layout.marks.map((mark) => [mark.segment.number, mark.lane])).toEqual([[2, 2], [3, 0]]);
  });

  it("puts a checkpoint on its own stretch, and the one that was gone back to on the history", () => {
    const { laneOf } = ribbonLayout(TWICE, 8);
    const lane = (of: number, iteration: number): number | null => laneOf({ segment: of, iteration });
    expect([lane(1, 5), lane(1, 10), lane(2, 9), lane(3, 8), lane(7, 1)]).toEqual([0, 1, 2, 0, null]);
  });

  it("uses a lane again once a stretch has ended, and names what finds none", () => {
    const apart = [
      segment(1, { last_iteration: 4, on_active_line: [0, 2] }),
      segment(2, { start_iteration: 2, last_iteration: 12, on_active_line: [3, 10] }),
      segment(3, { start_iteration: 10, last_iteration: 10, active: true, on_active_line: [11, 11] }),
    ];
    expect(ribbonLayout(apart, 10).lanes).toBe(2);
    const many = [1, 2, 3, 4, 5].map((number) => segment(number, { last_iteration: 9 }));
    expect(ribbonLayout(many, 0)).toMatchObject({ lanes: 4, unseen: [4, 5] });
  });

  it("stars the judge's favourite among the good ones", () => {
    const items = [checkpoint(1, { judge_score: 0.4 }), checkpoint(2, { judge_score: 0.9, status: "damaged" }), checkpoint(3)];
    expect(bestOf(items)?.iteration).toBe(1);
    expect(bestOf([checkpoint(3)])).toBeNull();
  });
});

describe("the checkpoint that is suggested", () => {
  const { laneOf } = ribbonLayout(TWICE, 8);

  it("is the newest good one of the present history behind the run", () => {
    const items = [checkpoint(5), checkpoint(10), checkpoint(7, { segment: 3, status: "damaged" }), checkpoint(8, { segment: 3 })];
    expect(suggested(items, laneOf, 8)).toBe("c-1-5");
    expect(suggested(items, laneOf, 9)).toBe("c-3-8");
  });

  it("is one that was left behind where the history has none", () => {
    expect(suggested([checkpoint(10)], laneOf, 8)).toBe("c-1-10");
    expect(suggested([checkpoint(5, { status: "removed" })], laneOf, 8)).toBeNull();
  });
});

describe("typed settings", () => {
  const fields = new Map<string, SpecField>(
    schemaFields({
      properties: {
        coef: { type: "number" },
        name: { type: "string" },
        mode: { enum: ["a", "b"] },
        stop: { anyOf: [{ type: "string" }, { type: "null" }] },
        on: { type: "boolean" },
      },
    }).map((field) => [field.path, field]),
  );

  it("reads JSON where it is JSON, text where the field holds text", () => {
    const read = (path: string, text: string): unknown => valueOf(text, fields.get(path));
    expect([read("coef", " 0.1 "), read("coef", "abc"), read("name", "1"), read("stop", "null"), read("stop", "1"), read("mode", "a"), read("new", "[1]")])
      .toEqual([0.1, "abc", "1", null, "1", "a", [1]]);
  });

  it("offers the values of a field that has few", () => {
    expect([fields.get("mode")?.choices, fields.get("on")?.choices, fields.get("coef")?.choices, fields.get("stop")?.choices])
      .toEqual([["a", "b"], [true, false], null, null]);
  });

  it("sends rows that are whole", () => {
    const rows = [{ path: "coef", text: "1" }, { path: " ", text: "2" }, { path: "name", text: "" }, { path: "coef", text: "3" }];
    expect(settingsOf(rows, fields)).toEqual({ coef: 3 });
  });

  it("puts a fault at its own row, and keeps the others together", () => {
    const problem: Problem = {
      title: "t", status: 422, errors: [
        { pointer: "/set/kl.coef", message: "too large" },
        { pointer: "/set/kl/coef", message: "truly" },
        { pointer: "/set/other", message: "no row" },
        { pointer: "/checkpoint", message: "gone" },
      ],
    };
    const { own, rest } = faultsByPath(problem, [{ path: "kl.coef", text: "9" }]);
    expect(own.get("kl.coef")).toBe("too large truly");
    expect(rest?.errors?.map((fault) => fault.pointer)).toEqual(["/set/other", "/checkpoint"]);
    expect(faultsByPath({ ...problem, errors: problem.errors?.slice(0, 1) ?? [] }, [{ path: "kl.coef", text: "9" }]).rest).toBeNull();
  });

  it("shows values as they would be typed", () => {
    expect([valueText("a"), valueText(null), valueText([1, "b"]), valueText(undefined)]).toEqual(["a", "null", '[1,"b"]', "–"]);
    expect([atPath({ kl: { coef: 2 } }, "kl.coef"), atPath({ kl: null }, "kl.coef")]).toEqual([2, undefined]);
  });
});

describe("specDiff", () => {
  it("names every setting that differs, groups that only one has included", () => {
    const before = { seed: 1, kl: { coef: 0.1, target: null }, lists: [1, 2], gate: null };
    const after = { seed: 1, kl: { coef: 0.2, target: null }, lists: [1], gate: { judge: { model: "m" } } };
    expect(specDiff(before, after)).toEqual([
      { path: "kl.coef", before: 0.1, after: 0.2 },
      { path: "lists", before: [1, 2], after: [1] },
      { path: "gate.judge.model", before: undefined, after: "m" },
    ]);
    expect(specDiff(after, after)).toEqual([]);
  });
});

describe("the lineage", () => {
  const bare = (one: Segment): LineageSegment => one;
  const child: LineageRun = {
    id: "f", name: "fork", state: "running",
    segments: [segment(1, { kind: "fork", active: true, start_iteration: 5, last_iteration: 8, on_active_line: [6, 8], started_from: { run_id: "r", segment: 1, iteration: 5 } })],
  };
  const parent: LineageRun = { id: "r", name: "root", state: "stopped", segments: TWICE.map(bare) };

  it("puts forks below the run that they come from, each segment in a row", () => {
    const layout = lineageLayout([child, parent]);
    expect(layout.blocks.map(({ run, row, depth }) => [run.id, row, depth])).toEqual([["r", 0, 0], ["f", 4, 1]]);
    expect(layout).toMatchObject({ rows: 6, lastIteration: 12 });
    expect(layout.edges).toEqual([
      { at: 5, fromRow: 1, toRow: 2, between: "segments" },
      { at: 5, fromRow: 1, toRow: 3, between: "segments" },
      { at: 5, fromRow: 1, toRow: 5, between: "runs" },
    ]);
  });

  it("tells what counts from what was left behind", () => {
    expect(lineageLayout([parent]).bars.map((bar) => [bar.from, bar.keptTo, bar.to])).toEqual([[0, 5, 12], [5, 5, 9], [5, 6, 6]]);
  });

  it("says it in words", () => {
    expect(segmentWords(segment(2, { start_iteration: 5, active: true }))).toBe("2 · roll back to 5 · active");
    const sentence = segmentSentence(child.segments[0] as LineageSegment, "f", () => "root");
    expect(sentence).toBe("Segment 1: forked at iteration 5 of segment 1 of root, came to iteration 8, active.");
    expect(segmentSentence(TWICE[1] as Segment, "r", String)).toContain("left behind whole");
  });

  it("compares a segment with the one it started from", () => {
    expect([parentOf(TWICE, 3), parentOf(TWICE, 2), parentOf(TWICE, 1), parentOf(child.segments, 1)]).toEqual([1, 1, 1, 1]);
  });
});

describe("what can be asked", () => {
  it("follows the state", () => {
    expect([requestsOf("running"), requestsOf("paused"), requestsOf("failed"), requestsOf("queued")])
      .toEqual([["pause", "checkpoint"], ["resume"], ["retry"], []]);
  });

  it("says why there is no way back", () => {
    for (const state of ["running", "recovering", "stopping", "failed"] as const) {
      expect(whyNoWayBack(state, ["pause", "checkpoint"], true, true)).toBeNull();
    }
    expect(whyNoWayBack("running", [], false, true)).toContain("no good checkpoint");
    expect(whyNoWayBack("stopping", ["stop"], true, true)).toContain("being stopped");
    expect(whyNoWayBack("killing", [], true, true)).toContain("being stopped");
    expect(whyNoWayBack("succeeded", ["rollback"], true, true)).toContain("under way");
    expect(whyNoWayBack("failed", [], true, false)).toContain("role");
  });

  it("says what is left behind", () => {
    expect(leftBehindWords({ segment: 1, from_iteration: 6, to_iteration: 9, checkpoints: 2 })).toContain("Iterations 6 to 9 of segment 1 and 2 checkpoints.");
    expect(leftBehindWords({ segment: 1, from_iteration: 6, to_iteration: 5, checkpoints: 0 })).toContain("Nothing");
    expect(leftBehindWords(null)).toContain("Nothing");
  });
});
