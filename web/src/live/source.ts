/** The hub's outside in a browser: EventSource, timers, and a look at whether anybody is signed in. */

import type { StreamEvent } from "../api/types";
import type { Outside, SourceHandlers } from "./hub";

function open(url: string, handlers: SourceHandlers): { close(): void } {
  const source = new EventSource(url); // After a break it sends Last-Event-ID by itself.
  source.onopen = () => handlers.opened();
  source.onerror = () => handlers.failed(source.readyState === EventSource.CONNECTING);
  source.addEventListener("run", (message: MessageEvent<string>) => {
    handlers.event(JSON.parse(message.data) as StreamEvent);
  });
  source.addEventListener("ping", () => handlers.ping());
  source.addEventListener("resync", (message: MessageEvent<string>) => {
    const { run, seq } = JSON.parse(message.data) as { run: string; seq?: number | null };
    handlers.resync(run, seq ?? null);
  });
  source.addEventListener("bye", () => handlers.bye());
  return source;
}

async function signedIn(): Promise<boolean> {
  try {
    return (await fetch("/v1/me", { credentials: "same-origin" })).status !== 401;
  } catch {
    return true; // The server is away, which says nothing about us.
  }
}

function after(ms: number, callback: () => void): () => void {
  const timer = setTimeout(callback, ms);
  return () => clearTimeout(timer);
}

export const outside: Outside = { open, signedIn, after };
