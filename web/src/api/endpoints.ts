/** The api's resources as functions. */

import { allPages, ApiError, asProblem, get, getTagged, patch, post, putTagged, remove, withQuery, type Query, type Tagged } from "./client";
import type {
  Alert, AlertDetail, AlertRules, Delivery, NewWebhook, Preflight, Webhook, WebhookEventType,
  Checkpoint, Command, DryRun, EventPage, ForkPreview, Gate, GcPreview, LatestMetrics, Lineage, LogFile, LogMatches, LogPart,
  MetricDefinition, MetricsQuery, Page, Preset, RollbackPreview, Run, RunDetail, RunLabels, Sample, Segment, SegmentDetail, SpecSchema,
  TokenRecord, Verification, Worker,
} from "./types";

const runPath = (id: string): string => `/v1/runs/${encodeURIComponent(id)}`;

export const listRuns = (query: Query): Promise<Page<Run>> => get("/v1/runs", query);
export const readRun = (id: string): Promise<RunDetail> => get(runPath(id));
export const readCommand = (run: string, id: string): Promise<Command> => get(`${runPath(run)}/commands/${encodeURIComponent(id)}`);
export const deleteRun = (seen: Run): Promise<void> => remove(runPath(seen.id), { "If-Match": `"${seen.version}"` });

const TRIES = 5;

/**
 * Changes fields that still are as they were seen. A live run's version moves on with its state, so a refusal for that
 * alone is tried again; what somebody else wrote meanwhile is not overwritten.
 */
export async function changeRun(id: string, seen: RunLabels, change: Partial<RunLabels>): Promise<void> {
  const fields = Object.keys(change) as (keyof RunLabels)[];
  for (let left = TRIES; ; left -= 1) {
    const { body: now, etag } = await getTagged<RunDetail>(runPath(id));
    const taken = fields.filter((field) => now[field] !== seen[field]);
    if (taken.length) {
      const words = taken.map((field) => `${field} is ${JSON.stringify(now[field])} now`).join(", ");
      throw new ApiError({
        title: "It was changed meanwhile", status: 412, detail: `Somebody else changed it: ${words}.`, hint: "Close this, look, and change it again.",
      });
    }
    try {
      await patch(runPath(id), change, { "If-Match": etag });
      return;
    } catch (error) {
      if (asProblem(error).status !== 412 || left <= 1) throw error;
    }
  }
}

export const stopRun = (id: string): Promise<Command> => post(`${runPath(id)}/stop`);
export const killRun = (id: string): Promise<Command> => post(`${runPath(id)}/kill`);

export const pauseRun = (id: string): Promise<Command> => post(`${runPath(id)}/pause`);
export const resumeRun = (id: string): Promise<Command> => post(`${runPath(id)}/resume`);
export const retryRun = (id: string): Promise<Command> => post(`${runPath(id)}/retry`);
export const saveCheckpoint = (id: string): Promise<Command> => post(`${runPath(id)}/checkpoint`);

/** Where to go back to, and which settings change; `name` is a fork's alone. */
export interface GoingBack {
  checkpoint: string;
  set: Record<string, unknown>;
  reason: string | null;
  name?: string | null;
}

/** The version that a roll back must name. */
export const runVersion = async (id: string): Promise<string> => (await getTagged<RunDetail>(runPath(id))).etag;
export const previewRollback = (id: string, body: GoingBack, signal?: AbortSignal): Promise<RollbackPreview> =>
  post(`${runPath(id)}/rollback?dry_run=true`, body, {}, signal);
export const rollBack = (id: string, body: GoingBack, idempotencyKey: string, version: string): Promise<Command> =>
  post(`${runPath(id)}/rollback`, body, { "Idempotency-Key": idempotencyKey, "If-Match": version });
export const previewFork = (id: string, body: GoingBack, signal?: AbortSignal): Promise<ForkPreview> =>
  post(`${runPath(id)}/forks?dry_run=true`, body, {}, signal);
export const fork = (id: string, body: GoingBack, idempotencyKey: string): Promise<Run> =>
  post(`${runPath(id)}/forks`, body, { "Idempotency-Key": idempotencyKey });

export const listSegments = (id: string): Promise<Segment[]> => allPages(`${runPath(id)}/segments`);
export const readSegment = (id: string, number: number): Promise<SegmentDetail> => get(`${runPath(id)}/segments/${number}`);
export const readLineage = (id: string): Promise<Lineage> => get(`${runPath(id)}/lineage`);

export async function listAlerts(id: string): Promise<Alert[]> {
  return (await get<Page<Alert>>(`${runPath(id)}/alerts`, { limit: 200 })).items;
}
const alertPath = (id: string): string => `/v1/alerts/${encodeURIComponent(id)}`;
export const readAlert = (id: string): Promise<AlertDetail> => get(alertPath(id));
export const acknowledgeAlert = (id: string): Promise<Alert> => post(`${alertPath(id)}/ack`);
export const snoozeAlert = (id: string, seconds: number): Promise<Alert> => post(`${alertPath(id)}/snooze`, { seconds });
export async function listGates(id: string): Promise<Gate[]> {
  return (await get<Page<Gate>>(`${runPath(id)}/gates`)).items;
}
export const readPreflight = (id: string): Promise<Preflight> => get(`${runPath(id)}/preflight`);

export const readAlertRules = (): Promise<Tagged<AlertRules>> => getTagged("/v1/alert-rules");
export const replaceAlertRules = (alerts: Record<string, unknown>, seen: string): Promise<Tagged<AlertRules>> =>
  putTagged("/v1/alert-rules", { alerts }, { "If-Match": seen });

const webhookPath = (id: string): string => `/v1/webhooks/${encodeURIComponent(id)}`;
export async function listWebhooks(): Promise<Webhook[]> {
  return (await get<Page<Webhook>>("/v1/webhooks")).items;
}
export const createWebhook = (body: { name: string; url: string; events: WebhookEventType[] }): Promise<NewWebhook> =>
  post("/v1/webhooks", body);
export const switchWebhook = (id: string, enabled: boolean): Promise<Webhook> => patch(webhookPath(id), { enabled }, {});
export const rotateSecret = (id: string, overlap_s: number): Promise<NewWebhook> => post(`${webhookPath(id)}/rotate-secret`, { overlap_s });
export const deleteWebhook = (id: string): Promise<void> => remove(webhookPath(id), {});
export const testWebhook = (id: string): Promise<Delivery> => post(`${webhookPath(id)}/test`);
export async function listDeliveries(id: string): Promise<Delivery[]> {
  return (await get<Page<Delivery>>(`${webhookPath(id)}/deliveries`, { limit: 20 })).items;
}
export const redeliver = (id: string, delivery: string): Promise<Delivery> =>
  post(`${webhookPath(id)}/deliveries/${encodeURIComponent(delivery)}/redeliver`);

export const latestMetrics = (id: string): Promise<LatestMetrics> => get(`${runPath(id)}/metrics`);
export const queryMetrics = (query: Query, signal?: AbortSignal): Promise<MetricsQuery> =>
  get("/v1/metrics/query", query, signal);

export const listSamples = (id: string, query: Query): Promise<Page<Sample>> => get(`${runPath(id)}/samples`, query);
export const sampleTokens = (sample: number): Promise<TokenRecord> => get(`/v1/samples/${sample}/tokens`);
export const listCheckpoints = (id: string): Promise<Checkpoint[]> => allPages(`${runPath(id)}/checkpoints`);

const checkpointPath = (run: string, id: string): string => `${runPath(run)}/checkpoints/${encodeURIComponent(id)}`;

/** Against the version that the reader saw: a change of somebody else's in between is refused, not lost. */
export const changeCheckpoint = (
  run: string, seen: Checkpoint, change: { pinned?: boolean; label?: string | null },
): Promise<Checkpoint> => patch(checkpointPath(run, seen.id), change, { "If-Match": seen.etag });
export const deleteCheckpoint = (run: string, seen: Checkpoint): Promise<void> =>
  remove(checkpointPath(run, seen.id), { "If-Match": seen.etag });
export const verifyCheckpoint = (run: string, id: string): Promise<Verification> => post(`${checkpointPath(run, id)}/verify`);
export const checkpointDownload = (run: string, id: string, part: "all" | "policy"): string =>
  `${checkpointPath(run, id)}/download?part=${part}`;
export const previewRetention = (run: string, rules: Query): Promise<GcPreview> =>
  get(`${runPath(run)}/checkpoints:gc-preview`, rules);

export const listEvents = (id: string, query: Query): Promise<EventPage> => get(`${runPath(id)}/events`, query);

/** Which of a run's logs. */
export interface LogChoice {
  source: LogFile["source"];
  attempt: number | null;
  rank: number | null;
}

export async function listLogs(id: string): Promise<LogFile[]> {
  return (await get<Page<LogFile>>(`${runPath(id)}/logs/files`)).items;
}
export const readLogs = (id: string, of: LogChoice, query: Query): Promise<LogPart> =>
  get(`${runPath(id)}/logs`, { ...of, ...query });
export const searchLogs = (id: string, of: LogChoice, query: Query): Promise<LogMatches> =>
  get(`${runPath(id)}/logs/search`, { ...of, ...query });
export const logDownload = (id: string, of: LogChoice): string => withQuery(`${runPath(id)}/logs/download`, { ...of });

export async function listWorkers(): Promise<Worker[]> {
  return (await get<Page<Worker>>("/v1/workers")).items;
}
export const drainWorker = (id: string): Promise<Worker> => post(`/v1/workers/${encodeURIComponent(id)}/drain`);
export const enableWorker = (id: string): Promise<Worker> => post(`/v1/workers/${encodeURIComponent(id)}/enable`);

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
