/** The shared worker: one hub, so one stream, for all tabs of this browser. A tab that closes says so. */

import { Hub, type Wish } from "./hub";
import { outside } from "./source";

export type ToWorker = { kind: "watch"; wish: Wish } | { kind: "leave" };

const hub = new Hub(outside);

addEventListener("connect", (event) => {
  const port = (event as MessageEvent).ports[0];
  if (!port) return;
  const seat = hub.join((message) => port.postMessage(message));
  port.onmessage = ({ data }: MessageEvent<ToWorker>) => {
    if (data.kind === "watch") seat.watch(data.wish);
    else seat.leave();
  };
});
