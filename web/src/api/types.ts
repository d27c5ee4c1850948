/** The shapes that pages use, by short names. */

export type RunState =
  | "queued" | "starting" | "running" | "pausing" | "paused" | "stopping" | "killing" | "stopped" | "cancelled"
  | "recovering" | "failed" | "succeeded";

export type Health = "ok" | "late" | "unreachable" | "degraded";

export interface Command {
  id: string;
  run_id: string;
  kind: string;
  status: "pending" | "delivered" | "acked" | "done" | "failed" | "superseded" | "timed_out";
  detail: string | null;
  requested_by: string | null;
  created_at: string;
  deadline_at: string;
  delivered_at: string | null;
  acked_at: string | null;
  finished_at: string | null;
}

export interface Run {
  id: string;
  name: string;
  state: RunState;
  health: Health;
  phase: string | null;
  reason_code: string | null;
  reason_detail: string | null;
  hint: string | null;
  iteration: number;
  num_iterations: number;
  active_segment: number;
  priority: number;
  gpus: number;
  created_by: string | null;
  created_at: string;
  queued_at: string;
  started_at: string | null;
  ended_at: string | null;
  attempt: number;
  version: number;
  event_seq: number;
  waiting_reason: string | null;
  has_judge: boolean;
  latest: Record<string, number | null>;
}

export interface RunDetail extends Run {
  spec: Record<string, unknown>;
  spec_yaml: string;
  open_commands: Command[];
}

export interface Page<T> {
  items: T[];
  next: string | null;
}

export interface LatestMetric {
  name: string;
  value: number | null;
  nonfinite: string | null;
  iteration: number;
  segment: number;
}

export interface SeriesData {
  run: string;
  name: string;
  segment: number;
  active: boolean;
  bucket: number;
  x: number[];
  y: (number | null)[];
  min: (number | null)[];
  max: (number | null)[];
  nonfinite: number[];
}

export interface MetricsQuery {
  series: SeriesData[];
  cursors: Record<string, number>;
}

export interface Sample {
  id: number;
  segment: number;
  iteration: number;
  kind: "train" | "held_out";
  index: number;
  prompt: string;
  response: string;
  score: number | null;
  length: number;
  finish_reason: string;
}

export interface TokenRecord {
  ids: number[];
  texts: string[];
  logprobs?: number[];
  ref_logprobs?: number[];
  kl?: number[];
  rewards?: number[];
  values?: number[];
  advantages?: number[];
  returns?: number[];
}

export interface Checkpoint {
  id: string;
  segment: number;
  iteration: number;
  path: string;
  bytes: number;
  manifest_sha256: string;
  reason: string;
  status: "good" | "damaged" | "removed";
  judge_score: number | null;
  pinned: boolean;
  label: string | null;
  created_at: string;
}

/** An event of a run's history, as the long poll gives it; the stream adds the run's id. */
export interface RunEvent {
  seq: number;
  segment: number;
  type: string;
  iteration: number | null;
  time: string;
  actor?: string | null;
  payload: Record<string, unknown>;
}

export interface StreamEvent extends RunEvent {
  run: string;
}

export interface LogPart {
  text: string;
  offset: number;
  next_offset: number;
  size: number;
}

export interface Preset {
  name: string;
  title: string;
  description: string;
  spec_yaml: string;
}

export interface DryRun {
  spec: Record<string, unknown>;
  spec_yaml: string;
  warnings: string[];
  estimate: Record<string, unknown>;
  meaning: string[];
}

export interface Me {
  role: "viewer" | "operator" | "admin";
  name: string;
  csrf_token: string | null;
}

export interface Fault {
  pointer: string;
  message: string;
}

export interface Problem {
  title: string;
  status: number;
  detail?: string | null;
  hint?: string | null;
  code?: string;
  request_id?: string;
  errors?: Fault[];
  allowed?: string[];
}

export interface EventPage {
  items: RunEvent[];
  cursor: number;
}

export interface LatestMetrics {
  cursor: number;
  latest: LatestMetric[];
}

export interface Band {
  text: string;
  low: number | null;
  high: number | null;
  red_low: number | null;
  red_high: number | null;
  relative_to: string | null;
  measure: string;
}

export interface MetricDefinition {
  name: string;
  title: string;
  panel: string;
  formula: string;
  unit: string;
  weighting: string;
  meaning: string;
  remedy: string;
  band: Band | null;
  direction: string;
  when: string;
}

/** A JSON schema, as far as the page reads it. */
export interface SpecSchema {
  $defs?: Record<string, SpecSchema>;
  $ref?: string;
  type?: string;
  title?: string;
  description?: string;
  default?: unknown;
  const?: unknown;
  enum?: unknown[];
  anyOf?: SpecSchema[];
  items?: SpecSchema;
  properties?: Record<string, SpecSchema>;
  required?: string[];
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  minLength?: number;
  maxLength?: number;
  changeable?: string;
}
