/**
 * One stream for all who watch. Each watcher says where it stands in each run and gets every later event once; the hub
 * opens the one stream that serves them all, and opens it again when it breaks. It knows neither pages nor the browser.
 */

import type { StreamEvent } from "../api/types";
import { EVERY_RUN, formatPositions, lowest, place, type Positions } from "./cursor";

/** `idle`: nobody watches anything. */
export type StreamStatus = "idle" | "connecting" | "live" | "away" | "signed-out";

/** What a watcher is told. `resync`: it missed something of this run (`*`: states) and has to load its state again. */
export type HubMessage =
  | { kind: "event"; event: StreamEvent }
  | { kind: "resync"; run: string }
  | { kind: "status"; status: StreamStatus };

/** What a watcher asks for: runs with its position in each, and whether it wants the states of all runs. */
export interface Wish {
  positions: Positions;
  allStates: boolean;
}

export interface SourceHandlers {
  opened(): void;
  event(event: StreamEvent): void;
  ping(): void;
  /** The stream cannot go on from where it was asked to, but goes on from `seq`. */
  resync(run: string, seq: number | null): void;
  bye(): void;
  /** `retrying`: the browser connects again by itself. */
  failed(retrying: boolean): void;
}

export interface Outside {
  open(url: string, handlers: SourceHandlers): { close(): void };
  signedIn(): Promise<boolean>;
  after(ms: number, callback: () => void): () => void;
}

const SETTLE_MS = 30;
const SILENCE_MS = 40_000; // The api pings every 15 s.
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 15_000;

interface Watcher {
  tell: (message: HubMessage) => void;
  wish: Wish;
}

export interface Seat {
  watch(wish: Wish): void;
  leave(): void;
}

export class Hub {
  #watchers = new Set<Watcher>();
  #source: { close(): void } | null = null;
  #open: { runs: Positions; allStates: boolean } | null = null;
  #status: StreamStatus = "idle";
  #wait = FIRST_WAIT_MS;
  #cancelSettle: (() => void) | null = null;
  #cancelRetry: (() => void) | null = null;
  #cancelSilence: (() => void) | null = null;

  constructor(private readonly outside: Outside) {}

  join(tell: (message: HubMessage) => void): Seat {
    const watcher: Watcher = { tell, wish: { positions: {}, allStates: false } };
    this.#watchers.add(watcher);
    tell({ kind: "status", status: this.#status });
    return {
      watch: (wish) => {
        watcher.wish = { positions: { ...wish.positions }, allStates: wish.allStates };
        this.#settle();
      },
      leave: () => {
        this.#watchers.delete(watcher);
        this.#settle();
      },
    };
  }

  /** Wishes come in bursts while a page opens; look at them once they are all there. */
  #settle(): void {
    this.#cancelSettle?.();
    this.#cancelSettle = this.outside.after(SETTLE_MS, () => {
      this.#cancelSettle = null;
      if (!this.#serves()) this.#connect();
    });
  }

  #wanted(): { runs: Positions; allStates: boolean } {
    const watchers = [...this.#watchers];
    return {
      runs: lowest(watchers.map((watcher) => watcher.wish.positions)),
      allStates: watchers.some((watcher) => watcher.wish.allStates),
    };
  }

  /** Whether the open stream gives all that is wanted, and not much more. */
  #serves(): boolean {
    const { runs, allStates } = this.#wanted();
    if (!this.#open || !this.#source) return Object.keys(runs).length === 0 && !allStates;
    const open = this.#open;
    return (
      open.allStates === allStates &&
      Object.keys(open.runs).length === Object.keys(runs).length &&
      Object.entries(runs).every(([run, seq]) => (open.runs[run] ?? Infinity) <= seq)
    );
  }

  #connect(): void {
    this.#drop();
    const { runs, allStates } = this.#wanted();
    const names = [allStates ? EVERY_RUN : "", formatPositions(runs)].filter(Boolean).join(",");
    if (!names) {
      this.#setStatus("idle");
      return;
    }
    if (this.#status === "idle") this.#setStatus("connecting");
    this.#open = { runs, allStates };
    const source = this.outside.open(`/v1/stream?runs=${encodeURIComponent(names)}`, {
      opened: () => this.#alive("live"),
      ping: () => this.#alive("live"),
      event: (event) => {
        this.#alive("live");
        this.#deliver(event);
      },
      resync: (run, seq) => this.#resync(run, seq),
      bye: () => this.#setStatus("away"),
      failed: (retrying) => void this.#failed(retrying),
    });
    this.#source = source;
    this.#listenForSilence();
  }

  #drop(): void {
    this.#cancelRetry?.();
    this.#cancelSilence?.();
    this.#source?.close();
    this.#cancelRetry = this.#cancelSilence = this.#source = this.#open = null;
  }

  #alive(status: StreamStatus): void {
    this.#wait = FIRST_WAIT_MS;
    this.#setStatus(status);
    this.#listenForSilence();
  }

  /** A connection can die without a word; then the pings stop. */
  #listenForSilence(): void {
    this.#cancelSilence?.();
    this.#cancelSilence = this.outside.after(SILENCE_MS, () => {
      this.#setStatus("away");
      this.#connect();
    });
  }

  async #failed(retrying: boolean): Promise<void> {
    this.#setStatus("away");
    if (retrying) return;
    this.#drop();
    const wait = this.#wait;
    this.#wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    this.#cancelRetry = this.outside.after(wait, () => this.#connect());
    if (!(await this.outside.signedIn())) this.#setStatus("signed-out");
  }

  #deliver(event: StreamEvent): void {
    if (this.#open && event.run in this.#open.runs) this.#open.runs[event.run] = event.seq;
    for (const watcher of this.#watchers) {
      const position = watcher.wish.positions[event.run];
      if (position === undefined) {
        if (watcher.wish.allStates && event.type === "state") watcher.tell({ kind: "event", event });
        continue;
      }
      const where = place(position, event.seq);
      if (where === "next") {
        watcher.wish.positions[event.run] = event.seq;
        watcher.tell({ kind: "event", event });
      } else if (where === "gap") {
        watcher.wish.positions[event.run] = event.seq;
        watcher.tell({ kind: "resync", run: event.run });
      }
    }
  }

  #resync(run: string, seq: number | null): void {
    this.#alive("live");
    if (run !== EVERY_RUN && this.#open && run in this.#open.runs) this.#open.runs[run] = seq ?? 0;
    for (const watcher of this.#watchers) {
      const concerned = run === EVERY_RUN ? watcher.wish.allStates : run in watcher.wish.positions;
      if (!concerned) continue;
      if (run !== EVERY_RUN) watcher.wish.positions[run] = seq ?? 0;
      watcher.tell({ kind: "resync", run });
    }
  }

  #setStatus(status: StreamStatus): void {
    if (this.#status === status) return;
    this.#status = status;
    for (const watcher of this.#watchers) watcher.tell({ kind: "status", status });
  }
}
