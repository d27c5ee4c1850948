/** Alerts as the page orders and groups them. */

import type { Alert } from "../../../api/types";

const WEIGHT = { critical: 0, warning: 1 };

/** The worst first; a story, which explains the others, before a single metric; then the newest. */
export function worstFirst(alerts: Alert[]): Alert[] {
  return [...alerts].sort(
    (a, b) =>
      WEIGHT[a.severity] - WEIGHT[b.severity] ||
      Number(b.kind === "story") - Number(a.kind === "story") ||
      b.iteration - a.iteration,
  );
}

export interface Cluster {
  iteration: number;
  critical: boolean;
  alerts: Alert[];
}

/** Alerts along the run, those that lie too close to be pressed apart together: open ones first, the worst of them. */
export function clusters(alerts: Alert[], total: number): Cluster[] {
  const found: Cluster[] = [];
  for (const alert of [...alerts].sort((a, b) => a.iteration - b.iteration)) {
    const last = found.at(-1);
    if (last && alert.iteration - last.iteration < total / 14) {
      last.alerts.push(alert);
      last.critical ||= alert.severity === "critical";
    } else {
      found.push({ iteration: alert.iteration, critical: alert.severity === "critical", alerts: [alert] });
    }
  }
  const isOpen = (alert: Alert): boolean => alert.status === "open";
  return found.map((cluster) => ({
    ...cluster,
    alerts: [...worstFirst(cluster.alerts.filter(isOpen)), ...cluster.alerts.filter((alert) => !isOpen(alert))],
  }));
}

export function standing(alert: Alert): string {
  const words = [{ open: "open", cleared: `cleared at iteration ${alert.cleared_iteration}`, left: "left behind by a roll back" }[alert.status]];
  if (alert.acknowledged_by) words.push(`acknowledged by ${alert.acknowledged_by}`);
  if (alert.snoozed) words.push("snoozed");
  return words.join(" · ");
}
