/** What the states of a run look like, and what can be asked of a run in each. */

import type { RunState } from "./api/types";

export type Tone = "quiet" | "accent" | "good" | "warn" | "bad";

interface Look {
  tone: Tone;
  mark: "dot" | "ring" | "square" | "bars" | "check" | "cross";
  moving?: boolean;
}

export const STATE_LOOK: Record<RunState, Look> = {
  queued: { tone: "quiet", mark: "ring" },
  starting: { tone: "accent", mark: "ring", moving: true },
  running: { tone: "accent", mark: "dot", moving: true },
  pausing: { tone: "warn", mark: "bars", moving: true },
  paused: { tone: "quiet", mark: "bars" },
  stopping: { tone: "warn", mark: "square", moving: true },
  killing: { tone: "bad", mark: "square", moving: true },
  stopped: { tone: "quiet", mark: "square" },
  cancelled: { tone: "quiet", mark: "cross" },
  recovering: { tone: "warn", mark: "ring", moving: true },
  failed: { tone: "bad", mark: "cross" },
  succeeded: { tone: "good", mark: "check" },
};

export const STATES = Object.keys(STATE_LOOK) as RunState[];

const ENDED: ReadonlySet<RunState> = new Set(["stopped", "cancelled", "failed", "succeeded"]);
const STOPPABLE: ReadonlySet<RunState> = new Set(["queued", "starting", "running", "pausing", "paused", "recovering"]);

/** Requests that need no more than a click, by the states in which the api takes them. */
export type Request = "pause" | "resume" | "retry" | "checkpoint";
const REQUESTS: Partial<Record<RunState, Request[]>> = {
  running: ["pause", "checkpoint"],
  paused: ["resume"],
  stopped: ["resume"],
  failed: ["retry"],
  cancelled: ["retry"],
};

export function requestsOf(state: RunState): Request[] {
  return REQUESTS[state] ?? [];
}

/** Why the run cannot go back to a checkpoint; null when it can, as in all states of a run that nobody stops. */
export function whyNoWayBack(state: RunState, open: readonly string[], saved: boolean, canOperate: boolean): string | null {
  if (!saved) return "There is no good checkpoint to go back to.";
  if (state === "killing" || ["stop", "kill"].some((kind) => open.includes(kind))) return "The run is being stopped; wait until it has come to rest.";
  if (open.includes("rollback")) return "A roll back is under way.";
  return canOperate ? null : "Your role may look, not ask anything of runs.";
}

export function hasEnded(state: RunState): boolean {
  return ENDED.has(state);
}

/** Why Stop cannot be pressed; null when it can. */
export function whyNoStop(state: RunState, canOperate: boolean): string | null {
  if (hasEnded(state)) return `The run has ended: it is ${state}.`;
  if (!STOPPABLE.has(state)) return `The run is ${state} already.`;
  return canOperate ? null : "Your role may look, not stop runs.";
}

/** Why Kill cannot be pressed; null when it can. It goes on where a stop is under way: that is what it is for. */
export function whyNoKill(state: RunState, canOperate: boolean): string | null {
  if (hasEnded(state)) return `The run has ended: it is ${state}.`;
  return canOperate ? null : "Your role may look, not kill runs.";
}
