/** Addresses: the server knows the same ones (tests/api/test_pages.py reads this list too). */

import { beforeAll, expect, it, vi } from "vitest";
import addresses from "./addresses.json";

let parseRoute: typeof import("../src/router.svelte").parseRoute;

beforeAll(async () => {
  vi.stubGlobal("location", { pathname: "/" });
  ({ parseRoute } = await import("../src/router.svelte"));
});

it.each(Object.entries(addresses.pages))("%s is the page %s", (path, page) => {
  expect(parseRoute(path).page).toBe(page);
});

it.each(addresses.missing)("%s is no page", (path) => {
  expect(parseRoute(path).page).toBe("missing");
});
