/**
 * This page's seat at the hub. Several parts of a page may follow runs; their wishes go out as one. Where the browser
 * has no shared workers, the hub lives in the page.
 */

import type { StreamEvent } from "../api/types";
import { EVERY_RUN, type Positions } from "./cursor";
import { Hub, type HubMessage, type Seat, type StreamStatus, type Wish } from "./hub";
import { outside } from "./source";
import type { ToWorker } from "./worker";

export interface Follower {
  event(event: StreamEvent): void;
  /** Something was missed: load the state anew and call `Following.from` with the new positions. */
  resync(): void;
}

export interface Following {
  from(positions: Positions, allStates?: boolean): void;
  stop(): void;
}

class Live {
  status = $state<StreamStatus>("idle");
  #seat: Seat | null = null;
  #followers = new Map<Follower, Wish>();

  follow(follower: Follower): Following {
    this.#followers.set(follower, { positions: {}, allStates: false });
    return {
      from: (positions, allStates = false) => {
        this.#followers.set(follower, { positions: { ...positions }, allStates });
        this.#wish();
      },
      stop: () => {
        this.#followers.delete(follower);
        this.#wish();
      },
    };
  }

  /** A page shows one thing at a time, so the wishes of its followers are for different runs. */
  #wish(): void {
    const wishes = [...this.#followers.values()];
    this.#seat ??= takeSeat((message) => this.#hear(message));
    this.#seat.watch({
      positions: Object.assign({}, ...wishes.map((wish) => wish.positions)) as Positions,
      allStates: wishes.some((wish) => wish.allStates),
    });
  }

  #hear(message: HubMessage): void {
    if (message.kind === "status") {
      this.status = message.status;
      return;
    }
    for (const [follower, wish] of this.#followers) {
      if (message.kind === "resync") {
        if (message.run === EVERY_RUN ? wish.allStates : message.run in wish.positions) follower.resync();
      } else if (isNews(message.event, wish)) {
        if (message.event.run in wish.positions) wish.positions[message.event.run] = message.event.seq;
        follower.event(message.event);
      }
    }
  }
}

/** An event may cross a new wish on its way and then comes a second time. */
function isNews(event: StreamEvent, wish: Wish): boolean {
  const position = wish.positions[event.run];
  return position === undefined ? wish.allStates && event.type === "state" : event.seq > position;
}

function takeSeat(tell: (message: HubMessage) => void): Seat {
  if (typeof SharedWorker === "undefined") return new Hub(outside).join(tell);
  const worker = new SharedWorker(new URL("./worker.ts", import.meta.url), { type: "module", name: "ppo-control" });
  const say = (message: ToWorker): void => worker.port.postMessage(message);
  worker.port.onmessage = ({ data }: MessageEvent<HubMessage>) => tell(data);
  // A page that the browser keeps for "back" has left its seat, so it starts anew.
  addEventListener("pagehide", () => say({ kind: "leave" }));
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) location.reload();
  });
  return { watch: (wish) => say({ kind: "watch", wish }), leave: () => say({ kind: "leave" }) };
}

export const live = new Live();
