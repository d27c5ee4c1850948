/** Who is signed in, and what the role allows. */

import { get, onSignedOut, post, useCsrfToken } from "./client";
import type { Me } from "./types";

class Session {
  me = $state.raw<Me | null>(null);
  known = $state(false);

  get canOperate(): boolean {
    return this.me?.role === "operator" || this.me?.role === "admin";
  }

  async load(): Promise<void> {
    try {
      this.#set(await get<Me>("/v1/me"));
    } finally {
      this.known = true;
    }
  }

  async login(token: string): Promise<void> {
    await post("/v1/auth/login", { token });
    await this.load();
  }

  async logout(): Promise<void> {
    await post("/v1/auth/logout");
    this.#set(null);
  }

  /** The cookie is gone or no longer holds. */
  end(): void {
    this.#set(null);
  }

  #set(me: Me | null): void {
    this.me = me;
    useCsrfToken(me?.csrf_token ?? null);
  }
}

export const session = new Session();
onSignedOut(() => session.end());
