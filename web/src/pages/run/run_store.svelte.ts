/**
 * One run as its page shows it: how it stands, its commands and checkpoints. State and charts are loaded first and both
 * say up to which event they are; the stream goes on from the earlier one, and each takes only what it has not seen.
 */

import { ChartStore } from "../../charts/chart_store.svelte";
import { asProblem } from "../../api/client";
import { latestMetrics, listAlerts, listCheckpoints, listSegments, readCommand, readPreflight, readRun } from "../../api/endpoints";
import type { Alert, Checkpoint, Command, LatestMetric, Preflight, Problem, RunDetail, Segment, StreamEvent } from "../../api/types";
import type { Start } from "./back/start";
import { live, type Following } from "../../live/live.svelte";
import { hasEnded } from "../../run_states";

const REFRESH_MS = 4_000; // Phase and health change without an event.

export class RunStore {
  run = $state.raw<RunDetail | null>(null);
  problem = $state.raw<Problem | null>(null);
  checkpoints = $state.raw<Checkpoint[]>([]);
  segments = $state.raw<Segment[]>([]);
  /** The last raised first; those of abandoned segments too. */
  alerts = $state.raw<Alert[]>([]);
  preflight = $state.raw<Preflight | null>(null);
  commands = $state.raw<Command[]>([]);
  /** Kinds of what was asked and has no outcome yet. */
  openKinds = $derived(this.commands.filter((command) => !command.finished_at).map((command) => command.kind));
  latest = $state.raw<Map<string, LatestMetric>>(new Map());
  /** Why the last request was refused. */
  trouble = $state.raw<Problem | null>(null);
  /** The dialog of going back that is open, and what it begins with. */
  goingBack = $state.raw<({ kind: "rollback" | "fork" } & Start) | null>(null);
  /** The newest iteration with kept samples that the page has heard of. */
  samplesAt = $state<number | null>(null);
  /** The newest judge gate that the page has heard of. */
  gateAt = $state<number | null>(null);
  /** Rises with every event, for parts that read the history themselves. */
  seq = $state(0);
  readonly charts: ChartStore;
  #following: Following;
  #timer: ReturnType<typeof setInterval>;
  #soon: ReturnType<typeof setTimeout> | null = null;
  #closed = false;
  #loading = false;

  constructor(readonly id: string) {
    this.charts = new ChartStore(id);
    this.#following = live.follow({ event: (event) => this.#apply(event), resync: () => void this.load() });
    this.#timer = setInterval(() => {
      if (!document.hidden && this.run && !hasEnded(this.run.state)) void this.refresh();
    }, REFRESH_MS);
    void this.load();
  }

  close(): void {
    this.#closed = true;
    this.#following.stop();
    clearInterval(this.#timer);
    if (this.#soon) clearTimeout(this.#soon);
  }

  async load(): Promise<void> {
    this.#loading = true;
    try {
      const [run, checkpoints, segments, metrics, alerts, preflight] = await Promise.all([
        readRun(this.id), listCheckpoints(this.id), listSegments(this.id), latestMetrics(this.id), listAlerts(this.id),
        readPreflight(this.id), this.charts.load(),
      ]);
      if (this.#closed) return;
      this.run = run;
      this.charts.activeSegment = run.active_segment;
      this.seq = run.event_seq;
      void this.#readOutcomes(run.open_commands);
      this.checkpoints = checkpoints;
      this.segments = segments;
      this.alerts = alerts;
      this.preflight = preflight;
      this.latest = new Map(metrics.latest.map((metric) => [metric.name, metric]));
      this.problem = null;
      this.#following.from({ [this.id]: Math.min(run.event_seq, this.charts.cursor) });
    } catch (error) {
      this.problem = asProblem(error);
    } finally {
      this.#loading = false;
    }
  }

  /** Read how the run stands; an answer older than what the stream told already is dropped. */
  async refresh(): Promise<void> {
    try {
      const run = await readRun(this.id);
      if (this.#closed || run.event_seq < this.seq) return;
      if (run.active_segment !== this.run?.active_segment) return void this.load();
      this.run = run;
      void this.#readOutcomes(run.open_commands);
    } catch {
      // The bar at the top says that the connection is away; the next turn tries again.
    }
  }

  addCommand(command: Command): void {
    this.commands = merged(this.commands, [command]);
    this.#refreshSoon();
  }

  #apply(event: StreamEvent): void {
    this.charts.apply(event);
    if (event.seq <= this.seq || !this.run) return;
    this.seq = event.seq;
    if (event.type === "command") this.commands = merged(this.commands, [event.payload as unknown as Command]);
    // A segment began elsewhere than where the last one ended: another line, other checkpoints, other numbers.
    if (event.segment > this.run.active_segment) {
      if (!this.#loading) void this.load();
      return;
    }
    const payload = event.payload;
    if (event.type === "metrics") this.#metrics(event);
    else if (event.type === "samples") this.samplesAt = event.iteration;
    else if (event.type === "gate") this.gateAt = event.seq;
    else if (event.type === "checkpoint") void this.readCheckpoints();
    else if (event.type === "alert" || event.type === "preflight") void this.#readDiagnoses();
    else if (event.type === "state") {
      this.run = { ...this.run, state: payload.to as RunDetail["state"] };
    }
    if (event.type !== "metrics" && event.type !== "samples") this.#refreshSoon();
  }

  #metrics(event: StreamEvent): void {
    if (event.segment !== this.run?.active_segment) return;
    const { nonfinite, ...values } = event.payload;
    const marked = (nonfinite ?? {}) as Record<string, string>;
    const latest = new Map(this.latest);
    for (const [name, value] of Object.entries(values)) {
      latest.set(name, {
        name,
        value: typeof value === "number" ? value : null,
        nonfinite: (marked[name] ?? null) as LatestMetric["nonfinite"],
        iteration: event.iteration ?? 0,
        segment: event.segment,
      });
    }
    this.latest = latest;
    this.run = { ...this.run, iteration: Math.max(this.run.iteration, event.iteration ?? 0) };
  }

  /** Commands that are open, and what became of those that no longer are. */
  async #readOutcomes(open: Command[]): Promise<void> {
    this.commands = merged(this.commands, open);
    const ended = this.commands.filter((known) => !known.finished_at && !open.some((command) => command.id === known.id));
    try {
      this.commands = merged(this.commands, await Promise.all(ended.map((known) => readCommand(this.id, known.id))));
    } catch {
      // The next reading asks again.
    }
  }

  async readCheckpoints(): Promise<void> {
    try {
      this.checkpoints = await listCheckpoints(this.id);
    } catch {
      // Read again with the next one.
    }
  }

  /** An alert as the api has just told it. */
  putAlert(told: Alert): void {
    this.alerts = this.alerts.map((alert) => (alert.id === told.id ? told : alert));
  }

  async #readDiagnoses(): Promise<void> {
    try {
      [this.alerts, this.preflight] = await Promise.all([listAlerts(this.id), readPreflight(this.id)]);
    } catch {
      // Read again with the next one.
    }
  }

  #refreshSoon(): void {
    this.#soon ??= setTimeout(() => {
      this.#soon = null;
      void this.refresh();
    }, 100);
  }
}

/** Commands by id, the newer word about each. */
function merged(known: Command[], told: Command[]): Command[] {
  const all = new Map(known.map((command) => [command.id, command]));
  for (const command of told) {
    const before = all.get(command.id);
    if (!before?.finished_at || command.finished_at) all.set(command.id, command);
  }
  return [...all.values()].sort((a, b) => b.created_at.localeCompare(a.created_at));
}
