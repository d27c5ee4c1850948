/** The workers as they stand, read again every few seconds: their signs of life are no events of any run. */

import { asProblem } from "../../api/client";
import { drainWorker, enableWorker, listWorkers } from "../../api/endpoints";
import type { Problem, Worker } from "../../api/types";

const EVERY_MS = 3_000;

export class WorkerList {
  workers = $state.raw<Worker[]>([]);
  /** When they were read: ages count on from there. */
  readAt = $state(0);
  loaded = $state(false);
  problem = $state.raw<Problem | null>(null);
  /** Of the last thing that was asked of a worker. */
  refusal = $state.raw<Problem | null>(null);
  #timer: ReturnType<typeof setInterval>;
  #turn = 0;

  constructor() {
    this.#timer = setInterval(() => {
      if (!document.hidden) void this.load();
    }, EVERY_MS);
    void this.load();
  }

  stop(): void {
    this.#turn++;
    clearInterval(this.#timer);
  }

  async load(): Promise<void> {
    const turn = ++this.#turn;
    try {
      const workers = await listWorkers();
      if (turn !== this.#turn) return;
      this.workers = workers.sort((one, other) => one.id.localeCompare(other.id));
      this.readAt = Date.now();
      this.loaded = true;
      this.problem = null;
    } catch (error) {
      if (turn === this.#turn) this.problem = asProblem(error);
    }
  }

  async ask(what: "drain" | "enable", id: string): Promise<void> {
    this.refusal = null;
    try {
      await (what === "drain" ? drainWorker(id) : enableWorker(id));
    } catch (error) {
      this.refusal = asProblem(error);
    }
    await this.load();
  }
}
