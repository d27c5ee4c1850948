/** The lines of one run: asked for once they are to be seen, continued live, and looked at more closely on zooming in. */

import { asProblem } from "../api/client";
import { queryMetrics } from "../api/endpoints";
import type { Problem, HistoryEvent, SeriesData } from "../api/types";
import { addMetrics, extent, ghostsOf, linesOf, mostPoints, type Ghost, type Lines } from "./lines";
import { FIRST } from "./panels";

const MAX_POINTS = 500;
const RELOAD_ABOVE = 2 * MAX_POINTS;
const MOST_NAMES = 100; // as many as the api answers at once

export type Window = [number, number];

/** One answer of the api: the line that the run stands on, and what its roll backs left behind. */
interface Drawn {
  lines: Lines;
  ghosts: Ghost[];
}

interface Answer {
  series: SeriesData[];
  cursor: number;
  /** Events that came while it was read; some of them it has not seen. */
  since: HistoryEvent[];
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
  /** The metrics that are wanted, and up to which event each one's line is; -1 while it has none. */
  #upTo = new Map<string, number>(FIRST.map((name) => [name, -1]));
  /** Wanted since the last request. */
  #fresh: string[] = [];
  /** Counts the readings of everything; what was asked for before the last one is stale. */
  #reading = 0;
  #thinning = false;
  #sinces = new Set<HistoryEvent[]>();
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

  /** Whether a metric has been read, be it that nothing is recorded of it. */
  has(name: string): boolean {
    void this.version;
    return (this.#upTo.get(name) ?? -1) >= 0;
  }

  /** These metrics are to be seen: read those that nobody has asked for yet. Panels that come together ask together. */
  want(names: string[]): void {
    const fresh = names.filter((name) => !this.#upTo.has(name));
    if (fresh.length === 0) return;
    fresh.forEach((name) => this.#upTo.set(name, -1));
    // Not a microtask: the panels' observers are told one after the other, with microtasks in between.
    if (this.#fresh.push(...fresh) === fresh.length) setTimeout(() => void this.#readFresh());
  }

  /** Read all that is wanted anew. */
  async load(): Promise<void> {
    if (await this.#readAll()) await this.#complete();
  }

  apply(event: HistoryEvent): void {
    this.#sinces.forEach((since) => since.push(event));
    if (event.seq <= this.cursor) return;
    this.cursor = event.seq;
    if (event.type !== "metrics") return;
    // A later segment's first metrics are read with it: the run's page loads anew when a segment begins.
    if (event.segment > this.activeSegment) return;
    this.#add(this.#drawn, event);
    if (this.#detail && this.zoom && (event.iteration ?? 0) <= this.zoom[1]) this.#add(this.#detail, event);
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

  /** The answer that is drawn now; null where there is none, or a later reading began. */
  async #readAll(): Promise<Answer | null> {
    const reading = ++this.#reading;
    const names = [...this.#upTo.keys()];
    this.#fresh = [];
    try {
      const answer = await this.#ask(names, null);
      if (reading !== this.#reading) return null;
      this.#drawn = drawnOf(answer.series);
      this.cursor = answer.cursor;
      for (const name of this.#upTo.keys()) this.#upTo.set(name, names.includes(name) ? answer.cursor : -1);
      this.#fresh = [...this.#upTo.keys()].filter((name) => !names.includes(name));
      this.problem = null;
      this.loaded = true;
      this.version++;
      return answer;
    } catch (error) {
      this.problem = asProblem(error);
      return null;
    }
  }

  /** What was wanted while all was read, and the closer look. */
  async #complete(): Promise<void> {
    await this.#readFresh();
    if (this.zoom) await this.#lookCloser(this.zoom);
  }

  async #readFresh(): Promise<void> {
    const reading = this.#reading;
    const names = this.#fresh;
    this.#fresh = [];
    if (names.length === 0) return;
    try {
      const answer = await this.#ask(names, null);
      if (reading !== this.#reading) return; // All is read anew, these with it.
      const { lines, ghosts } = drawnOf(answer.series);
      names.forEach((name) => {
        this.#upTo.set(name, answer.cursor);
        this.#drawn.lines.delete(name);
      });
      lines.forEach((line, name) => this.#drawn.lines.set(name, line));
      for (const ghost of ghosts) {
        const known = ghostOf(this.#drawn, ghost.segment);
        ghost.lines.forEach((line, name) => known.lines.set(name, line));
      }
      for (const event of answer.since) {
        if (event.type === "metrics" && event.segment <= this.activeSegment) this.#add(this.#drawn, event);
      }
      this.version++;
      if (this.zoom) await this.#lookCloser(this.zoom);
    } catch (error) {
      this.problem = asProblem(error);
    }
  }

  /** So many live points that drawing them costs: ask for fewer. */
  async #thinOut(): Promise<void> {
    if (this.#thinning) return;
    this.#thinning = true;
    const answer = await this.#readAll();
    this.#thinning = false;
    if (!answer) return;
    answer.since.forEach((event) => this.apply(event));
    await this.#complete();
  }

  /** Where a point stands for several iterations, a window may show more. */
  async #lookCloser(zoom: Window): Promise<void> {
    this.#query?.abort();
    const all = [this.#drawn.lines, ...this.#drawn.ghosts.map((ghost) => ghost.lines)];
    if (!all.some((lines) => [...lines.values()].some((line) => line.bucket > 1))) return;
    this.#query = new AbortController();
    try {
      const answer = await this.#ask([...this.#upTo.keys()], zoom, this.#query.signal);
      if (this.zoom !== zoom) return;
      this.#detail = drawnOf(answer.series);
      this.version++;
    } catch (error) {
      if (!(error instanceof DOMException)) this.problem = asProblem(error);
    }
  }

  async #ask(names: string[], zoom: Window | null, signal?: AbortSignal): Promise<Answer> {
    const since: HistoryEvent[] = [];
    this.#sinces.add(since);
    try {
      const parts = Array.from({ length: Math.ceil(names.length / MOST_NAMES) }, (_, index) =>
        names.slice(index * MOST_NAMES, (index + 1) * MOST_NAMES),
      );
      const answers = await Promise.all(parts.map((part) => queryMetrics(this.#asked(part, zoom), signal)));
      const series = answers.flatMap((answer) => answer.series);
      return { series, cursor: Math.min(...answers.map((answer) => answer.cursors[this.run] ?? 0)), since };
    } finally {
      this.#sinces.delete(since);
    }
  }

  #asked(names: string[], zoom: Window | null): Record<string, string | number | null> {
    return {
      runs: this.run,
      names: names.join(","),
      x: "iteration",
      segments: "all",
      max_points: MAX_POINTS,
      from: zoom && Math.floor(zoom[0]),
      to: zoom && Math.ceil(zoom[1]),
    };
  }

  #add(drawn: Drawn, event: HistoryEvent): void {
    const lines = event.segment === this.activeSegment ? drawn.lines : ghostOf(drawn, event.segment).lines;
    addMetrics(lines, (name) => this.has(name) && (this.#upTo.get(name) as number) < event.seq, event);
  }
}

function drawnOf(series: SeriesData[]): Drawn {
  return { lines: linesOf(series.filter((part) => part.active)), ghosts: ghostsOf(series.filter((part) => !part.active)) };
}

/** The lines of an abandoned segment, empty where it has none yet. */
function ghostOf(drawn: Drawn, segment: number): Ghost {
  let ghost = drawn.ghosts.find((candidate) => candidate.segment === segment);
  if (!ghost) {
    drawn.ghosts.push((ghost = { segment, lines: new Map() }));
    drawn.ghosts.sort((a, b) => a.segment - b.segment);
  }
  return ghost;
}

/** A window wide enough to draw in. */
function widen(range: Window | null): Window {
  if (!range) return [0, 10];
  return [range[0], Math.max(range[1], range[0] + 5)];
}
