/** Which alert stands first, and which marks on the ribbon are one. */

import { expect, test } from "vitest";
import type { Alert } from "../src/api/types";
import { clusters, standing, worstFirst } from "../src/pages/run/alerts/alert_order";

const alert = (id: string, fields: Partial<Alert> = {}): Alert =>
  ({ id, iteration: 10, kind: "band", severity: "warning", status: "open", snoozed: false, acknowledged_by: null, cleared_iteration: null, ...fields }) as Alert;

test("critical comes before warning, a story before what it explains, the newer before the older", () => {
  const alerts = [
    alert("old"), alert("new", { iteration: 20 }), alert("story", { kind: "story" }), alert("red", { severity: "critical" }),
  ];
  expect(worstFirst(alerts).map(({ id }) => id)).toEqual(["red", "story", "new", "old"]);
});

test("marks that lie too close to be pressed apart are one, as bad as its worst", () => {
  const found = clusters([alert("c", { iteration: 90 }), alert("b", { iteration: 13, severity: "critical" }), alert("a")], 140);
  expect(found.map(({ iteration, critical, alerts }) => [iteration, critical, alerts.length])).toEqual([[10, true, 2], [90, false, 1]]);
});

test("how an alert stands is said whole", () => {
  expect(standing(alert("a", { acknowledged_by: "ada", snoozed: true }))).toBe("open · acknowledged by ada · snoozed");
  expect(standing(alert("a", { status: "cleared", cleared_iteration: 30 }))).toBe("cleared at iteration 30");
});
