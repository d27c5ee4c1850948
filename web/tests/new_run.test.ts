import { describe, expect, it } from "vitest";
import { Attempt } from "../src/api/attempt";
import { estimateRows } from "../src/spec/estimate_rows";
import { lineOf } from "../src/pages/new/fault_lines";
import { schemaFields, searchFields } from "../src/spec/schema_fields";

const SCHEMA = {
  $defs: {
    KL: { properties: { coef: { type: "number", default: 0.05, minimum: 0, exclusiveMaximum: 100, description: "Weight.", changeable: "rollback" } } },
    Source: { properties: { kind: { enum: ["a", "b"], description: "Which." } }, required: ["kind"] },
    Judge: { properties: { name: { anyOf: [{ type: "string" }, { type: "null" }], default: null } } },
  },
  properties: {
    name: { type: "string", description: "A label." },
    kl: { $ref: "#/$defs/KL" },
    sources: { type: "array", items: { $ref: "#/$defs/Source" } },
    judge: { anyOf: [{ $ref: "#/$defs/Judge" }, { type: "null" }], default: null },
  },
  required: ["name"],
};

describe("schemaFields", () => {
  const fields = schemaFields(SCHEMA);

  it("flattens groups, lists and optional groups to paths", () => {
    expect(fields.map((field) => field.path)).toEqual(["name", "kl.coef", "sources[].kind", "judge.name"]);
  });

  it("says type, bounds, default and when it may change", () => {
    expect(fields[1]).toMatchObject({ type: "number", bounds: "≥ 0, < 100", default: "0.05", required: false, changeable: "rollback" });
    expect(fields[2]).toMatchObject({ type: '"a" | "b"', required: true });
    expect(fields[3]).toMatchObject({ type: "text or null", default: "null" });
  });

  it("finds by every word of the search", () => {
    expect(searchFields(fields, "kl weight").map((field) => field.path)).toEqual(["kl.coef"]);
    expect(searchFields(fields, "kl label")).toEqual([]);
  });
});

describe("lineOf", () => {
  const yaml = "name: x\nkl:\n  coef: 1\nreward:\n  sources:\n    - kind: a\n      model: p\nupdate: {epochs: 2, coef: 3}\n";

  it.each([
    ["/name", 1],
    ["/kl/coef", 3],
    ["/reward/sources/0/model", 7],
    ["/update/coef", 8],
    ["/kl/missing", 2],
    ["/nothing", null],
    ["", null],
  ])("finds %s at line %s", (pointer, line) => {
    expect(lineOf(yaml, pointer)).toBe(line);
  });
});

describe("Attempt", () => {
  it("keeps its key for the same text and makes another for a changed one", () => {
    const attempt = new Attempt();
    const first = attempt.keyFor("a");
    expect(attempt.keyFor("a")).toBe(first);
    expect(attempt.keyFor("b")).not.toBe(first);
    expect(first).toMatch(/^[0-9a-f]{32}$/);
  });
});

describe("estimateRows", () => {
  it("turns names and numbers into words", () => {
    expect(
      estimateRows({ responses: 7680, memory: { peak_bytes: 1_073_741_824 }, reward_parameters: [10, null], disk_bytes: null, warnings: ["w"] }),
    ).toEqual([
      ["Responses", "7\u202f680"],
      ["Memory peak", "1.0 GiB"],
      ["Reward parameters", "10"],
    ]);
  });
});
