/** Small texts: numbers, spans, log lines, events, routes, tokens of login links. */

import { describe, expect, it } from "vitest";
import { eventWords } from "../src/pages/run/event_words";
import { formatAgo, formatBytes, formatNumber, formatSpan, formatTick, plainText } from "../src/format";
import { tokenOf } from "../src/pages/login/token";
import { strengths, visible } from "../src/pages/run/tokens";
import { definitionOf } from "../src/charts/families";
import { outside } from "../src/pages/run/metric_rows";
import { secondsLeft } from "../src/pages/run/progress";
import { whyNoKill, whyNoStop } from "../src/run_states";
import type { MetricDefinition } from "../src/api/types";

describe("numbers", () => {
  it.each([
    [0, "0"],
    [-0, "0"],
    [0.41234, "0.412"],
    [13.1415, "13.14"],
    [-0.0123, "−0.012"],
    [123.456, "123.5"],
    [24601.4, "24\u202f601"],
    [64, "64"],
    [1e-4, "1.00e−4"],
    [5e-324, "4.94e−324"],
    [1e308, "1.00e308"],
    [null, "–"],
    [Infinity, "+∞"],
    [NaN, "NaN"],
  ])("formats %s as %s", (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it("names the three values that are not finite", () => {
    expect(["NaN", "Infinity", "-Infinity"].map((name) => formatNumber(null, name))).toEqual(["NaN", "+∞", "−∞"]);
  });

  it("keeps ticks short", () => {
    expect([0.30000000000000004, 1e-6, 2500, -0.01].map(formatTick)).toEqual(["0.3", "1e−6", "2500", "−0.01"]);
  });

  it("formats sizes and spans", () => {
    expect([0, 1536, 31_457_280, 5e12].map(formatBytes)).toEqual(["0 B", "1.5 KiB", "30 MiB", "4.5 TiB"]);
    expect([3, 60, 372, 22_320, 273_600].map(formatSpan)).toEqual(["3 s", "1 min", "6 min 12 s", "6 h 12 min", "3 d 4 h"]);
    expect(formatAgo("2026-01-01T00:00:00Z", Date.parse("2026-01-01T00:00:02Z"))).toBe("just now");
  });
});

describe("log text", () => {
  it("loses escape sequences and keeps the rest", () => {
    expect(plainText("\x1b[31mred\x1b[0m\tend\r\n\x1b]0;title\x07x\x00y")).toBe("red\tend\nx\ufffdy");
  });

  it("shows only the last state of a progress bar's line", () => {
    expect(plainText("10 %\r50 %\r100 %\nnext")).toBe("100 %\nnext");
  });
});

describe("events in words", () => {
  const event = (type: string, payload: Record<string, unknown>) =>
    eventWords({ seq: 1, segment: 1, type, iteration: 3, time: "", actor: null, payload });

  it("says moves, checkpoints and metrics", () => {
    expect(event("state", { from: "running", to: "failed", reason_code: "ratio", reason_detail: "1.034" })).toBe(
      "running → failed · ratio · 1.034",
    );
    expect(event("checkpoint", { iteration: 20, reason: "stop", bytes: 2048 })).toBe("iteration 20 · stop · 2.0 KiB");
    const removed = { iteration: 20, reason: "stop", bytes: 2048, change: "removed", status_detail: "deleted by ada" };
    expect(event("checkpoint", removed)).toBe("iteration 20 · removed · deleted by ada");
    expect(event("metrics", { "reward/score_mean": 0.5, "value/loss": null, nonfinite: { "value/loss": "NaN" } })).toBe(
      "iteration 3 · 2 metrics · score 0.500 · not finite: value/loss",
    );
  });

  it("shows what it does not know as it is", () => {
    expect(event("new-kind", { a: 1 })).toBe('{"a":1}');
  });
});

describe("login links", () => {
  it.each([
    ["#token=abc_DEF-123", "abc_DEF-123"],
    ["http://127.0.0.1:8600/login#token=abc123456", "abc123456"],
    ["  abcdefgh123 ", "abcdefgh123"],
    ["", null],
    ["#other=1", null],
    ["two words", null],
  ])("reads %s", (text, token) => {
    expect(tokenOf(text)).toBe(token);
  });
});

describe("tokens", () => {
  it("are coloured by their share of the largest", () => {
    expect(strengths([2, -4, null, 0])).toEqual([0.5, -1, 0, 0]);
    expect(strengths([0, 0])).toEqual([0, 0]);
  });

  it("show their white space", () => {
    expect([" word", "\n", " ", "", "<b>"].map(visible)).toEqual([" word", "⏎", "␣", "∅", "<b>"]);
  });
});

describe("runs", () => {
  it("say why they cannot be stopped", () => {
    expect(whyNoStop("running", true)).toBeNull();
    expect(whyNoStop("queued", true)).toBeNull();
    expect(whyNoStop("stopping", true)).toContain("already");
    expect(whyNoStop("failed", true)).toContain("ended");
    expect(whyNoStop("running", false)).toContain("role");
    expect(whyNoKill("stopping", true)).toBeNull();
    expect(whyNoKill("failed", true)).toContain("ended");
    expect(whyNoKill("running", false)).toContain("role");
  });

  it("estimate the time left from the last iterations", () => {
    const line = { x: [1, 2], y: [1, 3], low: [], high: [], bucket: 1, nonfinite: [] };
    expect(secondsLeft(line, 10)).toBe(20);
    expect(secondsLeft(undefined, 10)).toBeNull();
  });
});

describe("metric definitions", () => {
  const band = { text: "", low: 0.02, high: 0.25, red_low: null, red_high: 0.4, relative_to: null, measure: "value" };
  const definition = { name: "policy/clip_fraction/epoch_*", band } as unknown as MetricDefinition;
  const registry = new Map([[definition.name, definition]]);

  it("are found through families", () => {
    expect(definitionOf(registry, "policy/clip_fraction/epoch_3")).toBe(definition);
    expect(definitionOf(registry, "policy/clip_fraction")).toBeUndefined();
  });

  it("judge a value by its band", () => {
    expect([0.1, 0.3, 0.5, 0.01, null].map((value) => outside(definition, value))).toEqual([null, "warn", "red", "warn", null]);
  });
});
