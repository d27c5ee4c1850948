/** One log as it is read: its end first, what comes after it while the run lives, and what stands before on request. */

import { asProblem } from "../../api/client";
import { readLogs, searchLogs, type LogChoice } from "../../api/endpoints";
import type { LogMatch, Problem } from "../../api/types";

const TAIL = 64 * 1024;
const KEPT = 1_000_000; // characters on the page; older ones go, and can be loaded again
const MOST_MATCHES = 1000;

export class LogReader {
  text = $state("");
  /** Bytes of the file before the text that is shown. */
  first = $state(0);
  size = $state(0);
  loaded = $state(false);
  problem = $state.raw<Problem | null>(null);

  matches = $state.raw<LogMatch[]>([]);
  searched = $state("");
  searching = $state(false);
  more = $state(false);

  #next: number | null = null;
  #busy = false;
  #closed = false;
  #search = 0;

  constructor(
    readonly run: string,
    readonly of: LogChoice,
  ) {}

  close(): void {
    this.#closed = true;
  }

  /** What was written since; the end of the log at first. True when there was something. */
  async readOn(): Promise<boolean> {
    if (this.#busy) return false;
    this.#busy = true;
    try {
      const part = await readLogs(this.run, this.of, { offset: this.#next ?? -TAIL, limit: TAIL });
      if (this.#closed) return false;
      // A file that got shorter was begun anew.
      if (this.#next === null || part.offset !== this.#next) {
        this.text = "";
        this.first = part.offset;
      }
      this.text += part.text;
      this.#next = part.next_offset;
      this.size = part.size;
      this.loaded = true;
      this.problem = null;
      this.#cut();
      return part.text !== "";
    } catch (error) {
      if (!this.#closed) this.problem = asProblem(error);
      return false;
    } finally {
      this.#busy = false;
    }
  }

  /** What stands before the text that is shown, as much as one answer holds. */
  async readEarlier(): Promise<void> {
    if (this.#busy || this.first === 0) return;
    this.#busy = true;
    try {
      const offset = Math.max(0, this.first - TAIL);
      const part = await readLogs(this.run, this.of, { offset, limit: this.first - offset });
      if (this.#closed) return;
      this.text = part.text + this.text;
      this.first = part.offset;
    } catch (error) {
      if (!this.#closed) this.problem = asProblem(error);
    } finally {
      this.#busy = false;
    }
  }

  /** Lines that hold a text; a large log is searched part by part. */
  async search(text: string): Promise<void> {
    const mine = ++this.#search;
    this.matches = [];
    this.searched = text;
    this.more = false;
    if (text === "") return;
    this.searching = true;
    try {
      let offset = 0;
      let size = 1;
      while (offset < size && this.matches.length < MOST_MATCHES) {
        const found = await searchLogs(this.run, this.of, { search: text, offset, limit: 200 });
        if (this.#closed || mine !== this.#search) return;
        this.matches = [...this.matches, ...found.items];
        offset = found.next_offset;
        size = found.size;
      }
      this.more = offset < size;
    } catch (error) {
      if (!this.#closed) this.problem = asProblem(error);
    } finally {
      if (mine === this.#search) this.searching = false;
    }
  }

  #cut(): void {
    const extra = this.text.length - KEPT;
    if (extra <= 0) return;
    const cut = this.text.indexOf("\n", extra) + 1 || extra;
    this.first += new TextEncoder().encode(this.text.slice(0, cut)).length;
    this.text = this.text.slice(cut);
  }
}
