/** The lines of one run: loaded, continued live, and looked at more closely where the reader zooms in. */

import { asProblem } from "../api/client";
import { queryMetrics } from "../api/endpoints";
import type { Problem, HistoryEvent } from "../api/types";
import { addMetrics, extent, linesOf, mostPoints, type Lines } from "./lines";
import { CHARTED } from "./panels";

const MAX_POINTS = 500;
const RELOAD_ABOVE = 2 * MAX_POINTS;

export type Window = [number, number];

export class ChartStore {
  /** Rises with every change of the lines, at most once a frame. */
  version = $state(0);
  loaded = $state(false);
  problem = $state.raw<Problem | null>(null);
  zoom = $state.raw<Window | null>(null);
  cursor = 0;
  #lines: Lines = new Map();
  #detail: Lines | null = null;
  #frame = 0;
  /** Events that came while the lines are read anew; some of them the answer has not seen. */
  #missed: HistoryEvent[] | null = null;
  #query: AbortController | null = null;

  constructor(private readonly run: string) {}

  /** What to draw: the closer look where there is one. */
  get lines(): Lines {
    void this.version;
    return this.#detail ?? this.#lines;
  }

  /** The whole run, also while zoomed in. */
  get whole(): Lines {
    void this.version;
    return this.#lines;
  }

  get window(): Window {
    return this.zoom ?? widen(extent(this.whole));
  }

  async load(): Promise<void> {
    try {
      const answer = await queryMetrics(this.#ask(null));
      this.#lines = linesOf(answer.series);
      this.cursor = answer.cursors[this.run] ?? 0;
      this.problem = null;
      this.loaded = true;
      this.version++;
      if (this.zoom) await this.#lookCloser(this.zoom);
    } catch (error) {
      this.problem = asProblem(error);
    }
  }

  apply(event: HistoryEvent): void {
    this.#missed?.push(event);
    if (event.seq <= this.cursor) return;
    this.cursor = event.seq;
    if (event.type !== "metrics") return;
    addMetrics(this.#lines, CHARTED, event);
    if (this.#detail && this.zoom && (event.iteration ?? 0) <= this.zoom[1]) addMetrics(this.#detail, CHARTED, event);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.version++;
      if (mostPoints(this.#lines) > RELOAD_ABOVE) void this.#thinOut();
    });
  }

  setZoom(zoom: Window | null): void {
    this.zoom = zoom;
    this.#detail = null;
    this.version++;
    if (zoom) void this.#lookCloser(zoom);
  }

  /** So many live points that drawing them costs: ask for fewer. */
  async #thinOut(): Promise<void> {
    if (this.#missed) return;
    this.#missed = [];
    await this.load();
    const missed = this.#missed;
    this.#missed = null;
    missed.forEach((event) => this.apply(event));
  }

  /** Where a point stands for several iterations, a window may show more. */
  async #lookCloser(zoom: Window): Promise<void> {
    this.#query?.abort();
    if (![...this.#lines.values()].some((line) => line.bucket > 1)) return;
    this.#query = new AbortController();
    try {
      const answer = await queryMetrics(this.#ask(zoom), this.#query.signal);
      if (this.zoom !== zoom) return;
      this.#detail = linesOf(answer.series);
      this.version++;
    } catch (error) {
      if (!(error instanceof DOMException)) this.problem = asProblem(error);
    }
  }

  #ask(zoom: Window | null): Record<string, string | number | null> {
    return {
      runs: this.run,
      names: [...CHARTED].join(","),
      x: "iteration",
      segments: "active",
      max_points: MAX_POINTS,
      from: zoom && Math.floor(zoom[0]),
      to: zoom && Math.ceil(zoom[1]),
    };
  }
}

/** A window wide enough to draw in. */
function widen(range: Window | null): Window {
  if (!range) return [0, 10];
  return [range[0], Math.max(range[1], range[0] + 5)];
}
