/** The lines of one run: loaded, continued live, and looked at more closely where the reader zooms in. */

import { asProblem } from "../api/client";
import { queryMetrics } from "../api/endpoints";
import type { Problem, HistoryEvent, SeriesData } from "../api/types";
import { addMetrics, extent, ghostsOf, linesOf, mostPoints, type Ghost, type Lines } from "./lines";
import { CHARTED } from "./panels";

const MAX_POINTS = 500;
const RELOAD_ABOVE = 2 * MAX_POINTS;

export type Window = [number, number];

/** One answer of the api: the line that the run stands on, and what its roll backs left behind. */
interface Drawn {
  lines: Lines;
  ghosts: Ghost[];
}

export class ChartStore {
  /** Rises with every change of the lines, at most once a frame. */
  version = $state(0);
  loaded = $state(false);
  problem = $state.raw<Problem | null>(null);
  zoom = $state.raw<Window | null>(null);
  /** Whether abandoned segments are drawn. */
  ghostsShown = $state(true);
  cursor = 0;
  /** Metrics of an earlier segment that still come belong to what was left behind. */
  activeSegment = 1;
  #drawn: Drawn = { lines: new Map(), ghosts: [] };
  #detail: Drawn | null = null;
  #frame = 0;
  /** Events that came while the lines are read anew; some of them the answer has not seen. */
  #missed: HistoryEvent[] | null = null;
  #query: AbortController | null = null;

  constructor(private readonly run: string) {}

  /** What to draw: the closer look where there is one. */
  get lines(): Lines {
    void this.version;
    return (this.#detail ?? this.#drawn).lines;
  }

  /** Abandoned segments to draw, oldest first. */
  get ghosts(): Ghost[] {
    void this.version;
    return this.ghostsShown ? (this.#detail ?? this.#drawn).ghosts : [];
  }

  /** Segments of which something was left behind, drawn or not. */
  get abandoned(): number[] {
    void this.version;
    return this.#drawn.ghosts.map((ghost) => ghost.segment);
  }

  /** The whole run, also while zoomed in. */
  get whole(): Lines {
    void this.version;
    return this.#drawn.lines;
  }

  get window(): Window {
    if (this.zoom) return this.zoom;
    void this.version;
    const ghosts = this.ghostsShown ? this.#drawn.ghosts : [];
    const ranges = [this.#drawn.lines, ...ghosts.map((ghost) => ghost.lines)].flatMap((lines) => extent(lines) ?? []);
    return widen(ranges.length ? [Math.min(...ranges), Math.max(...ranges)] : null);
  }

  async load(): Promise<void> {
    try {
      const answer = await queryMetrics(this.#ask(null));
      this.#drawn = drawnOf(answer.series);
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
    // A later segment's first metrics are read with it: the run's page loads anew when a segment begins.
    if (event.segment > this.activeSegment) return;
    add(this.#drawn, event, this.activeSegment);
    if (this.#detail && this.zoom && (event.iteration ?? 0) <= this.zoom[1]) add(this.#detail, event, this.activeSegment);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.version++;
      if (mostPoints(this.#drawn.lines) > RELOAD_ABOVE) void this.#thinOut();
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
    const all = [this.#drawn.lines, ...this.#drawn.ghosts.map((ghost) => ghost.lines)];
    if (!all.some((lines) => [...lines.values()].some((line) => line.bucket > 1))) return;
    this.#query = new AbortController();
    try {
      const answer = await queryMetrics(this.#ask(zoom), this.#query.signal);
      if (this.zoom !== zoom) return;
      this.#detail = drawnOf(answer.series);
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
      segments: "all",
      max_points: MAX_POINTS,
      from: zoom && Math.floor(zoom[0]),
      to: zoom && Math.ceil(zoom[1]),
    };
  }
}

function drawnOf(series: SeriesData[]): Drawn {
  return { lines: linesOf(series.filter((part) => part.active)), ghosts: ghostsOf(series.filter((part) => !part.active)) };
}

function add(drawn: Drawn, event: HistoryEvent, active: number): void {
  if (event.segment === active) return addMetrics(drawn.lines, CHARTED, event);
  let ghost = drawn.ghosts.find((candidate) => candidate.segment === event.segment);
  if (!ghost) drawn.ghosts.push((ghost = { segment: event.segment, lines: new Map() }));
  addMetrics(ghost.lines, CHARTED, event);
}

/** A window wide enough to draw in. */
function widen(range: Window | null): Window {
  if (!range) return [0, 10];
  return [range[0], Math.max(range[1], range[0] + 5)];
}
