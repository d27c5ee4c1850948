/** An event of a run's history in one line of words. */

import type { RunEvent } from "../../api/types";
import { formatBytes, formatNumber } from "../../format";

function text(value: unknown): string {
  return value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

export function eventWords(event: RunEvent): string {
  const { payload } = event;
  switch (event.type) {
    case "state": {
      const move = payload.from ? `${text(payload.from)} → ${text(payload.to)}` : text(payload.to);
      return [move, text(payload.reason_code), text(payload.reason_detail)].filter(Boolean).join(" · ");
    }
    case "command":
      return [text(payload.kind), text(payload.status), text(payload.detail)].filter(Boolean).join(" · ");
    case "checkpoint": {
      if (payload.change) {
        const words = [`iteration ${text(payload.iteration)}`, text(payload.change), text(payload.status_detail)];
        return words.filter(Boolean).join(" · ");
      }
      const size = typeof payload.bytes === "number" ? formatBytes(payload.bytes) : "";
      return [`iteration ${text(payload.iteration ?? event.iteration)}`, text(payload.reason), size].filter(Boolean).join(" · ");
    }
    case "metrics": {
      const score = payload["reward/score_mean"];
      const count = Object.keys(payload).filter((key) => key !== "nonfinite").length;
      const words = [`iteration ${text(event.iteration)}`, `${count} metrics`];
      if (typeof score === "number") words.push(`score ${formatNumber(score)}`);
      if (payload.nonfinite) words.push(`not finite: ${Object.keys(payload.nonfinite).join(", ")}`);
      return words.join(" · ");
    }
    case "samples":
      return `iteration ${text(payload.iteration ?? event.iteration)} · ${text(payload.num)} kept`;
    case "alert":
      return [text(payload.status), text(payload.severity), text(payload.title)].filter(Boolean).join(" · ");
    case "gate":
      return `iteration ${text(event.iteration)} · ${text(payload.explanation)}`;
    case "preflight": {
      const findings = Array.isArray(payload.findings) ? (payload.findings as { status?: string }[]) : [];
      const bad = findings.filter((finding) => finding.status !== "ok").length;
      return `${findings.length} checks · ${bad ? `${bad} not well` : "all well"}`;
    }
    case "note":
      return [payload.level === "warning" ? "warning" : "", text(payload.message)].filter(Boolean).join(": ");
    case "started":
      return [`attempt ${text(payload.attempt)}`, `first iteration ${text(payload.first_iteration)}`, payload.resumed_from ? `from ${text(payload.resumed_from)}` : ""]
        .filter(Boolean).join(" · ");
    case "end": {
      const error = payload.error as { message?: string } | null | undefined;
      return [`code ${text(payload.code)}`, text(payload.reason), text(error?.message)].filter(Boolean).join(" · ");
    }
    default:
      return JSON.stringify(payload);
  }
}
