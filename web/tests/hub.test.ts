import { beforeEach, describe, expect, it } from "vitest";
import type { StreamEvent } from "../src/api/types";
import { Hub, type HubMessage, type Outside, type SourceHandlers } from "../src/live/hub";

class FakeOutside implements Outside {
  opened: { url: string; handlers: SourceHandlers; closed: boolean }[] = [];
  timers: { at: number; callback: () => void; cancelled: boolean }[] = [];
  now = 0;
  someone = true;

  open(url: string, handlers: SourceHandlers): { close(): void } {
    const source = { url: decodeURIComponent(url), handlers, closed: false };
    this.opened.push(source);
    return { close: () => (source.closed = true) };
  }

  signedIn(): Promise<boolean> {
    return Promise.resolve(this.someone);
  }

  after(ms: number, callback: () => void): () => void {
    const timer = { at: this.now + ms, callback, cancelled: false };
    this.timers.push(timer);
    return () => (timer.cancelled = true);
  }

  pass(ms: number): void {
    const until = this.now + ms;
    for (;;) {
      const due = this.timers.filter((timer) => !timer.cancelled && timer.at <= until).sort((a, b) => a.at - b.at)[0];
      if (!due) break;
      this.now = due.at;
      due.cancelled = true;
      due.callback();
    }
    this.now = until;
  }

  get last(): { url: string; handlers: SourceHandlers; closed: boolean } {
    const source = this.opened.at(-1);
    if (!source) throw new Error("no stream was opened");
    return source;
  }
}

function event(run: string, seq: number, type = "metrics"): StreamEvent {
  return { run, seq, segment: 1, type, iteration: seq, time: "2026-01-01T00:00:00Z", payload: {} };
}

function listener(): { heard: HubMessage[]; seqs(): number[]; tell(message: HubMessage): void } {
  const heard: HubMessage[] = [];
  return {
    heard,
    tell: (message) => heard.push(message),
    seqs: () => heard.flatMap((message) => (message.kind === "event" ? [message.event.seq] : [])),
  };
}

describe("Hub", () => {
  let outside: FakeOutside;
  let hub: Hub;

  beforeEach(() => {
    outside = new FakeOutside();
    hub = new Hub(outside);
  });

  it("opens one stream for all watchers, from the earliest position of each run", () => {
    hub.join(() => undefined).watch({ positions: { a: 7, b: 2 }, allStates: false });
    hub.join(() => undefined).watch({ positions: { a: 5 }, allStates: true });
    outside.pass(100);
    expect(outside.opened.map((source) => source.url)).toEqual(["/v1/stream?runs=*,a:5,b:2"]);
  });

  it("gives each watcher every event after its own position once", () => {
    const early = listener();
    const late = listener();
    hub.join(early.tell).watch({ positions: { a: 1 }, allStates: false });
    hub.join(late.tell).watch({ positions: { a: 3 }, allStates: false });
    outside.pass(100);
    for (const seq of [2, 3, 3, 4]) outside.last.handlers.event(event("a", seq));
    expect(early.seqs()).toEqual([2, 3, 4]);
    expect(late.seqs()).toEqual([4]);
  });

  it("tells a watcher to load again when an event is missing", () => {
    const watcher = listener();
    hub.join(watcher.tell).watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.event(event("a", 4));
    expect(watcher.heard).toContainEqual({ kind: "resync", run: "a" });
    expect(watcher.seqs()).toEqual([]);
  });

  it("gives states of all runs to those who asked, and nothing else of runs they do not follow", () => {
    const list = listener();
    const page = listener();
    hub.join(list.tell).watch({ positions: {}, allStates: true });
    hub.join(page.tell).watch({ positions: { a: 0 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.event(event("a", 1, "metrics"));
    outside.last.handlers.event(event("b", 9, "state"));
    expect(list.seqs()).toEqual([9]);
    expect(page.seqs()).toEqual([1]);
  });

  it("keeps the stream when a watcher's new wish is served already", () => {
    const seat = hub.join(() => undefined);
    seat.watch({ positions: { a: 1 }, allStates: true });
    outside.pass(100);
    outside.last.handlers.event(event("a", 2));
    seat.watch({ positions: { a: 2 }, allStates: true });
    outside.pass(100);
    expect(outside.opened).toHaveLength(1);
  });

  it("opens the stream anew, from where it was, when somebody watches another run", () => {
    const seat = hub.join(() => undefined);
    seat.watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.event(event("a", 2));
    hub.join(() => undefined).watch({ positions: { b: 4 }, allStates: false });
    outside.pass(100);
    expect(outside.opened.map((source) => source.closed)).toEqual([true, false]);
    expect(outside.last.url).toBe("/v1/stream?runs=a:2,b:4");
  });

  it("closes the stream when the last watcher leaves", () => {
    const seat = hub.join(() => undefined);
    seat.watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    seat.leave();
    outside.pass(100);
    expect(outside.last.closed).toBe(true);
    expect(outside.opened).toHaveLength(1);
  });

  it("connects again after growing waits when the api refuses, and says that it is away", async () => {
    const watcher = listener();
    hub.join(watcher.tell).watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.failed(false);
    expect(watcher.heard).toContainEqual({ kind: "status", status: "away" });
    outside.pass(1_000);
    expect(outside.opened).toHaveLength(2);
    outside.last.handlers.failed(false);
    outside.pass(1_000);
    expect(outside.opened).toHaveLength(2);
    outside.pass(1_000);
    expect(outside.opened).toHaveLength(3);
    outside.last.handlers.opened();
    expect(watcher.heard.at(-1)).toEqual({ kind: "status", status: "live" });
  });

  it("leaves reconnecting to the browser when the browser does it", () => {
    hub.join(() => undefined).watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.failed(true);
    outside.pass(20_000);
    expect(outside.opened).toHaveLength(1);
  });

  it("takes silence for a dead connection", () => {
    hub.join(() => undefined).watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.ping();
    outside.pass(39_000);
    outside.last.handlers.ping();
    outside.pass(39_000);
    expect(outside.opened).toHaveLength(1);
    outside.pass(2_000);
    expect(outside.opened).toHaveLength(2);
  });

  it("says when nobody is signed in any more", async () => {
    const watcher = listener();
    outside.someone = false;
    hub.join(watcher.tell).watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.failed(false);
    await Promise.resolve();
    await Promise.resolve();
    expect(watcher.heard.at(-1)).toEqual({ kind: "status", status: "signed-out" });
  });

  it("goes on from the position that a resync names, without opening the stream anew", () => {
    const watcher = listener();
    const seat = hub.join(watcher.tell);
    seat.watch({ positions: { a: 1 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.resync("a", 5000);
    expect(watcher.heard).toContainEqual({ kind: "resync", run: "a" });
    seat.watch({ positions: { a: 5000 }, allStates: false });
    outside.pass(100);
    outside.last.handlers.event(event("a", 5001));
    expect(watcher.seqs()).toEqual([5001]);
    expect(outside.opened).toHaveLength(1);
  });
});
