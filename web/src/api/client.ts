/** HTTP to the api: JSON in and out, the CSRF header on mutations, problem+json as an error. Knows no resource. */

import type { Page, Problem } from "./types";

export class ApiError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail ?? problem.title);
    this.name = "ApiError";
  }
}

let csrfToken: string | null = null;
let whenSignedOut: () => void = () => undefined;

export function useCsrfToken(token: string | null): void {
  csrfToken = token;
}

/** Called whenever the api says that nobody is signed in. */
export function onSignedOut(callback: () => void): void {
  whenSignedOut = callback;
}

export type Query = Record<string, string | number | boolean | null | undefined>;

export function withQuery(path: string, query: Query = {}): string {
  const parts = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([key, value]) => `${key}=${encodeURIComponent(String(value))}`);
  return parts.length ? `${path}?${parts.join("&")}` : path;
}

export async function get<T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> {
  return send<T>("GET", withQuery(path, query), undefined, {}, signal);
}

/** The items of a list that comes in pages. */
export async function allPages<T>(path: string): Promise<T[]> {
  const items: T[] = [];
  let cursor: string | null = null;
  do {
    const page: Page<T> = await get<Page<T>>(path, { cursor, limit: 1000 });
    items.push(...page.items);
    cursor = page.next;
  } while (cursor !== null);
  return items;
}

/** What was read, and the mark of this version, which a change of it must name. */
export interface Tagged<T> {
  body: T;
  etag: string;
}

export async function getTagged<T>(path: string): Promise<Tagged<T>> {
  const response = await ask("GET", path, undefined, {});
  return { body: (await response.json()) as T, etag: response.headers.get("ETag") ?? "" };
}

export async function post<T>(path: string, body?: unknown, headers: Record<string, string> = {}, signal?: AbortSignal): Promise<T> {
  return send<T>("POST", path, body, guarded(headers), signal);
}

export async function patch<T>(path: string, body: unknown, headers: Record<string, string>): Promise<T> {
  return send<T>("PATCH", path, body, guarded(headers));
}

/** Puts something in the place of what was there; the answer has the mark of the new version. */
export async function putTagged<T>(path: string, body: unknown, headers: Record<string, string>): Promise<Tagged<T>> {
  const response = await ask("PUT", path, body, guarded(headers));
  return { body: (await response.json()) as T, etag: response.headers.get("ETag") ?? "" };
}

export async function remove(path: string, headers: Record<string, string>): Promise<void> {
  return send("DELETE", path, undefined, guarded(headers));
}

function guarded(headers: Record<string, string>): Record<string, string> {
  return csrfToken ? { ...headers, "X-CSRF-Token": csrfToken } : headers;
}

async function send<T>(
  method: string, path: string, body: unknown, headers: Record<string, string>, signal?: AbortSignal,
): Promise<T> {
  const response = await ask(method, path, body, headers, signal);
  return (response.status === 204 ? undefined : await response.json()) as T;
}

async function ask(
  method: string, path: string, body: unknown, headers: Record<string, string>, signal?: AbortSignal,
): Promise<Response> {
  const request: RequestInit = { method, headers: { Accept: "application/json", ...headers }, credentials: "same-origin" };
  if (signal) request.signal = signal;
  if (body !== undefined) {
    request.body = JSON.stringify(body);
    request.headers = { ...request.headers, "Content-Type": "application/json" };
  }
  let response: Response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError({
      title: "The server cannot be reached",
      status: 0,
      detail: "The request got no answer.",
      hint: "Check that the platform is still running and that this machine is connected; then try again.",
    });
  }
  if (response.ok) return response;
  const problem = await readProblem(response);
  if (response.status === 401 && !path.startsWith("/v1/auth/")) whenSignedOut();
  throw new ApiError(problem);
}

async function readProblem(response: Response): Promise<Problem> {
  const fallback: Problem = { title: `The server answered ${response.status}`, status: response.status };
  try {
    const body: unknown = await response.json();
    return typeof body === "object" && body !== null ? { ...fallback, ...body } : fallback;
  } catch {
    return fallback;
  }
}

/** Any caught value as a problem that can be shown. */
export function asProblem(error: unknown): Problem {
  if (error instanceof ApiError) return error.problem;
  return { title: "The page met a fault", status: 0, detail: error instanceof Error ? error.message : String(error) };
}
