/** The list of runs: the newest ones by state, kept up to date by the stream. */

import { asProblem } from "../../api/client";
import { listRuns } from "../../api/endpoints";
import type { Problem, Run, RunState, StreamEvent } from "../../api/types";
import { live, type Following } from "../../live/live.svelte";
import { hasEnded } from "../../run_states";

const PAGE_SIZE = 50;
const FOLLOWED = 40; // The stream takes 64 runs, and other tabs want some too.
const HEALTH_EVERY_MS = 10_000; // Health depends on the time that passes without an event, so no event tells it.

export class RunList {
  runs = $state.raw<Run[]>([]);
  next = $state.raw<string | null>(null);
  loaded = $state(false);
  problem = $state.raw<Problem | null>(null);
  state: RunState | "" = "";
  #following: Following;
  #reload: ReturnType<typeof setTimeout> | null = null;
  #timer: ReturnType<typeof setInterval>;
  #turn = 0;

  constructor() {
    this.#following = live.follow({ event: (event) => this.#apply(event), resync: () => this.#soon() });
    this.#timer = setInterval(() => {
      if (!document.hidden && this.runs.some((run) => !hasEnded(run.state))) void this.load();
    }, HEALTH_EVERY_MS);
  }

  stop(): void {
    this.#turn++;
    this.#following.stop();
    clearInterval(this.#timer);
    if (this.#reload) clearTimeout(this.#reload);
  }

  async show(state: RunState | ""): Promise<void> {
    this.state = state;
    this.runs = [];
    this.loaded = false;
    await this.load();
  }

  async load(): Promise<void> {
    const turn = ++this.#turn;
    const shown = Math.max(PAGE_SIZE, this.runs.length);
    try {
      const page = await listRuns({ state: this.state, limit: Math.min(shown, 200) });
      if (turn !== this.#turn) return;
      const known = new Map(this.runs.map((run) => [run.id, run]));
      this.runs = page.items.map((run) => newer(run, known.get(run.id)));
      this.next = page.next;
      this.problem = null;
      this.loaded = true;
      this.#follow();
    } catch (error) {
      if (turn === this.#turn) this.problem = asProblem(error);
    }
  }

  async more(): Promise<void> {
    const turn = ++this.#turn;
    try {
      const page = await listRuns({ state: this.state, limit: PAGE_SIZE, cursor: this.next });
      if (turn !== this.#turn) return;
      const known = new Set(this.runs.map((run) => run.id));
      this.runs = [...this.runs, ...page.items.filter((run) => !known.has(run.id))];
      this.next = page.next;
      this.#follow();
    } catch (error) {
      if (turn === this.#turn) this.problem = asProblem(error);
    }
  }

  /** Every run's states, and all events of those that move. */
  #follow(): void {
    const moving = this.runs.filter((run) => !hasEnded(run.state)).slice(0, FOLLOWED);
    this.#following.from(Object.fromEntries(moving.map((run) => [run.id, run.event_seq])), true);
  }

  #apply(event: StreamEvent): void {
    const index = this.runs.findIndex((run) => run.id === event.run);
    const run = this.runs[index];
    if (event.type === "state" || event.type === "alert" || !run) {
      this.#soon();
      return;
    }
    if (event.seq <= run.event_seq) return;
    const changed: Run = { ...run, event_seq: event.seq };
    if (event.type === "metrics") {
      changed.iteration = Math.max(run.iteration, event.iteration ?? 0);
      const { nonfinite: _, ...values } = event.payload;
      changed.latest = { ...run.latest, ...(values as Record<string, number | null>) };
    }
    this.runs = this.runs.with(index, changed);
  }

  #soon(): void {
    this.#reload ??= setTimeout(() => {
      this.#reload = null;
      void this.load();
    }, 150);
  }
}

/** The stream may be ahead of an answer; going back to the answer's position would start the stream anew each time. */
function newer(read: Run, known: Run | undefined): Run {
  if (!known || known.event_seq <= read.event_seq) return read;
  return { ...read, event_seq: known.event_seq, iteration: known.iteration, latest: known.latest };
}
