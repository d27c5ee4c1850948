/** The shapes that pages use, by short names. They come from the api's own description: `npm run types`. */

import type { components } from "./schema";

type Schemas = components["schemas"];

export type Run = Schemas["Run"];
export type RunDetail = Schemas["RunDetail"];
/** What people may change of a run. */
export type RunLabels = Pick<RunDetail, "name" | "notes" | "priority">;
export type RunState = Run["state"];
export type Command = Schemas["Command"];
export type Checkpoint = Schemas["Checkpoint"];
export type Verification = Schemas["Verification"];
export type GcPreview = Schemas["GcPreview"];
export type Change = Schemas["Change"];
export type Changeable = Change["changeable"];
export type ForkPreview = Schemas["ForkPreview"];
export type RollbackPreview = Schemas["RollbackPreview"];
export type Segment = Schemas["Segment"];
export type SegmentDetail = Schemas["SegmentDetail"];
export type LineageSegment = Schemas["LineageSegment"];
export type LineageRun = Schemas["LineageRun"];
export type Lineage = Schemas["Lineage"];
export type Alert = Schemas["Alert"];
export type AlertDetail = Schemas["AlertDetail"];
export type Preflight = Schemas["Preflight"];
export type Gate = Schemas["Gate"];
export type GateWins = Schemas["GateWins"];
export type Webhook = Schemas["Webhook"];
export type NewWebhook = Schemas["NewWebhook"];
export type WebhookEventType = Webhook["events"][number];
export type Delivery = Schemas["Delivery"];
export type Sample = Schemas["Sample"];
export type TokenRecord = Schemas["SampleTokens"];
export type SeriesData = Schemas["Series"];
export type MetricsQuery = Schemas["MetricQuery"];
export type LatestMetric = Schemas["LatestMetric"];
export type LatestMetrics = Schemas["LatestMetrics"];
export type MetricDefinition = Schemas["Metric"];
export type RunEvent = Schemas["Event"];
export type EventPage = Schemas["EventPage"];
export type LogPart = Schemas["LogText"];
export type LogFile = Schemas["LogFile"];
export type LogMatch = Schemas["LogMatch"];
export type LogMatches = Schemas["LogMatches"];
export type Worker = Schemas["Worker"];
export type Slot = Schemas["Slot"];
export type Preset = Schemas["Preset"];
export type AlertRules = Schemas["AlertRules"];
export type DryRun = Schemas["DryRun"];
export type Me = Schemas["Me"];

/** An error as the api sends it, or as the page puts it when no answer came. */
export type Problem = Pick<Schemas["Problem"], "title" | "status"> &
  Partial<Schemas["Problem"]> & { hint?: string | null };

export interface Page<T> {
  items: T[];
  next: string | null;
}

/** What charts need of an event, from whichever way it came. */
export type HistoryEvent = Omit<RunEvent, "actor">;

/** An event as the stream sends it: with its run, without who caused it. */
export interface StreamEvent extends HistoryEvent {
  run: string;
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
