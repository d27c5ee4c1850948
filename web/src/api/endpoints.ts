/** The api's resources as functions. */

import { get, post, type Query } from "./client";
import type {
  Checkpoint, Command, DryRun, EventPage, LatestMetrics, LogPart, MetricDefinition, MetricsQuery, Page, Preset, Run,
  RunDetail, Sample, SpecSchema, TokenRecord,
} from "./types";

const runPath = (id: string): string => `/v1/runs/${encodeURIComponent(id)}`;

export const listRuns = (query: Query): Promise<Page<Run>> => get("/v1/runs", query);
export const readRun = (id: string): Promise<RunDetail> => get(runPath(id));
export const stopRun = (id: string): Promise<Command> => post(`${runPath(id)}/stop`);

export const latestMetrics = (id: string): Promise<LatestMetrics> => get(`${runPath(id)}/metrics`);
export const queryMetrics = (query: Query, signal?: AbortSignal): Promise<MetricsQuery> =>
  get("/v1/metrics/query", query, signal);

export const listSamples = (id: string, query: Query): Promise<Page<Sample>> => get(`${runPath(id)}/samples`, query);
export const sampleTokens = (sample: number): Promise<TokenRecord> => get(`/v1/samples/${sample}/tokens`);
export const listCheckpoints = (id: string): Promise<Page<Checkpoint>> => get(`${runPath(id)}/checkpoints`);
export const listEvents = (id: string, query: Query): Promise<EventPage> => get(`${runPath(id)}/events`, query);
export const readLogs = (id: string, query: Query): Promise<LogPart> => get(`${runPath(id)}/logs`, query);

export const specSchema = (): Promise<SpecSchema> => get("/v1/spec/schema");
export const checkSpec = (text: string): Promise<DryRun> => post("/v1/runs?dry_run=true", { spec_yaml: text });
export const submitSpec = (text: string, idempotencyKey: string): Promise<Run> =>
  post("/v1/runs", { spec_yaml: text }, { "Idempotency-Key": idempotencyKey });

export async function presets(): Promise<Preset[]> {
  return (await get<Page<Preset>>("/v1/spec/presets")).items;
}

let registry: Promise<Map<string, MetricDefinition>> | null = null;

/** Every metric's definition, read once. */
export function metricRegistry(): Promise<Map<string, MetricDefinition>> {
  registry ??= get<{ items: MetricDefinition[] }>("/v1/metrics/registry").then(
    (answer) => new Map(answer.items.map((metric) => [metric.name, metric])),
    (error: unknown) => {
      registry = null;
      throw error;
    },
  );
  return registry;
}
