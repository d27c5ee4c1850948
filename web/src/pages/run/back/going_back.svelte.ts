/**
 * A roll back or a fork while it is put together: the checkpoint, the settings that change, and what the api says would
 * come of it. Each change asks anew, a moment after the last keystroke; only the newest answer counts.
 */

import { asProblem } from "../../../api/client";
import { specSchema, type GoingBack } from "../../../api/endpoints";
import type { Checkpoint, ForkPreview, Problem } from "../../../api/types";
import { schemaFields, type SpecField } from "../../../spec/schema_fields";
import { settingsOf, type SettingRow } from "./settings";

const PAUSE_MS = 250;

export class Draft<P extends ForkPreview> {
  checkpoint = $state<string | null>(null);
  rows = $state<SettingRow[]>([]);
  reason = $state("");
  preview = $state.raw<P | null>(null);
  problem = $state.raw<Problem | null>(null);
  /** The body that preview or problem are about. */
  judged = $state<string | null>(null);
  fields = $state.raw<ReadonlyMap<string, SpecField>>(new Map());
  #timer: ReturnType<typeof setTimeout> | null = null;
  #query: AbortController | null = null;

  constructor(private readonly ask: (body: GoingBack, signal: AbortSignal) => Promise<P>) {
    specSchema().then(
      (schema) => (this.fields = new Map(schemaFields(schema).filter(settable).map((field) => [field.path, field]))),
      () => undefined, // Paths can be typed without help.
    );
    // What the numbers depend on; a reason changes none of them.
    $effect(() => {
      const body = this.body;
      void JSON.stringify([body.checkpoint, body.set]);
      this.#later();
      return () => this.#stop();
    });
  }

  get body(): GoingBack {
    return {
      checkpoint: this.checkpoint ?? "",
      set: settingsOf(this.rows, this.fields),
      reason: this.reason.trim() || null,
    };
  }

  get key(): string {
    return JSON.stringify([this.checkpoint, settingsOf(this.rows, this.fields)]);
  }

  /** Whether what stands there was judged, and found possible. */
  get ready(): boolean {
    return this.preview !== null && this.judged === this.key;
  }

  get checking(): boolean {
    return this.checkpoint !== null && this.judged !== this.key;
  }

  set(path: string, text: string): void {
    const row = this.rows.find((candidate) => candidate.path.trim() === path);
    if (row) row.text = text;
    else this.rows.push({ path, text });
  }

  unset(path: string): void {
    this.rows = this.rows.filter((row) => row.path.trim() !== path);
  }

  has(path: string): boolean {
    return this.rows.some((row) => row.path.trim() === path);
  }

  /** Ask once more, since the run has moved. */
  again(): void {
    this.judged = null;
    this.#later();
  }

  #stop(): void {
    if (this.#timer) clearTimeout(this.#timer);
    this.#query?.abort();
  }

  #later(): void {
    this.#stop();
    if (this.checkpoint === null) return;
    this.#timer = setTimeout(() => void this.#check(), PAUSE_MS);
  }

  async #check(): Promise<void> {
    const query = new AbortController();
    this.#query = query;
    const key = this.key;
    try {
      const preview = await this.ask(this.body, query.signal);
      if (query.signal.aborted) return;
      this.preview = preview;
      this.problem = null;
      this.judged = key;
    } catch (error) {
      if (query.signal.aborted) return;
      this.preview = null;
      this.problem = asProblem(error);
      this.judged = key;
    }
  }
}

/** Entries of lists are set with the whole list. */
function settable(field: SpecField): boolean {
  return !field.path.includes("[]");
}

/** The checkpoint to begin with: the newest good one of the present history that lies behind the run. */
export function suggested(checkpoints: Checkpoint[], laneOf: (item: Checkpoint) => number | null, iteration: number): string | null {
  const good = checkpoints
    .filter((item) => item.status === "good")
    .sort((a, b) => b.iteration - a.iteration || b.segment - a.segment);
  const line = good.filter((item) => laneOf(item) === 0);
  return (line.find((item) => item.iteration < iteration) ?? line[0] ?? good[0])?.id ?? null;
}
